"""What a pipeline makes of the first bars before it was ever shown a later one.

A pipeline that keeps what it has seen from one call to the next can hide its look ahead from every cut that is built
after the whole file: it answers the cut from memory. So some cuts are built first, the shortest of all first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from ml_factory.errors import BarsError
from ml_factory.leakage.pipeline_under_test import Pipeline, tables_of
from ml_factory.leakage.tables import Table

EARLIER = (0.35, 0.55, 0.8)  # shares of the bars shown first where a data set is about to be made of all
UNSEEN = (0.3, 0.5, 0.85)  # and others in a proof: what keeps its first answers would give the same ones there


@dataclass(frozen=True)
class PrefixBuild:
    """stop : how many bars were shown.  tables : what was made of them.  error : what was raised instead."""

    stop: int
    tables: Mapping[str, Table] | None
    error: str = ""


def build_on_prefixes(
    pipeline: Pipeline, bars: pd.DataFrame, facts: dict | None = None, most: int | None = None,
    shares: tuple[float, ...] = UNSEEN,
) -> list[PrefixBuild]:  # fmt: skip
    """The tables of shares of the first `most` bars, shortest first; one too short for a row is left out.

    facts : what holds for the market, where it is given; else the pipeline is asked, of the bars shown.
    """
    seen = []
    for stop in (int(share * len(bars.iloc[:most])) for share in shares):
        head = bars.iloc[:stop]
        if not stop:
            continue
        try:
            if facts is None and pipeline.head(head) > stop:
                continue  # nothing can be known of the market yet
            tables = tables_of(pipeline, head, pipeline.facts(head) if facts is None else facts)
            seen.append(PrefixBuild(stop, tables))
        except BarsError:
            continue  # a longer one may do; where all of them are too short the whole file says so
        except Exception as error:  # noqa: BLE001 - fails closed: what cannot be built is not proven
            seen.append(PrefixBuild(stop, None, f"{type(error).__name__}: {error}"))
    return seen
