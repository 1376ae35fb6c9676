"""Build the pipeline on prefixes of the bars before it has seen later bars.

A pipeline that caches what it has seen can hide its look ahead from every cut that is built after the whole file: it
returns cached values. So some prefixes are built first, the shortest of all first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from ml_factory.errors import BarsError
from ml_factory.leakage.pipeline_under_test import PipelineUnderTest, run_pipeline_under_test
from ml_factory.leakage.timed_tables import TimedTable

EARLIER = (0.35, 0.55, 0.8)  # shares of the bars in prefixes built before a data set is prepared
UNSEEN = (0.3, 0.5, 0.85)  # other shares in a proof: values cached from the first prefixes would repeat there


@dataclass(frozen=True)
class PrefixBuild:
    """Result of the pipeline on a prefix of the bars.

    stop : number of bars
    tables : the tables, None after an exception
    error : the exception
    """

    stop: int
    tables: Mapping[str, TimedTable] | None
    error: str = ""


def build_pipeline_on_prefixes(
    pipeline: PipelineUnderTest, bars: pd.DataFrame, facts: dict | None = None, most: int | None = None,
    shares: tuple[float, ...] = UNSEEN,
) -> list[PrefixBuild]:  # fmt: skip
    """Build shares of the first `most` bars, shortest first; a prefix too short for a row is left out.

    facts : facts of the market; None: taken from the pipeline for each prefix
    """
    seen = []
    for stop in (int(share * len(bars.iloc[:most])) for share in shares):
        head = bars.iloc[:stop]
        if not stop:
            continue
        try:
            if facts is None and pipeline.count_head_bars(head) > stop:
                continue  # too short for the facts of the market
            tables = run_pipeline_under_test(pipeline, head, pipeline.market_facts(head) if facts is None else facts)
            seen.append(PrefixBuild(stop, tables))
        except BarsError:
            continue  # too short; where all of them are, the build of the whole file raises
        except Exception as error:  # noqa: BLE001 - fails closed: what cannot be built is not proven
            seen.append(PrefixBuild(stop, None, f"{type(error).__name__}: {error}"))
    return seen
