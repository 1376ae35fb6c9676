"""Barriers found by a search: read by name, and refused where the search saw validation or test rows."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import SettingsError
from ml_factory.settings import DataSpec
from ml_factory.storage.files import files
from ml_factory.targets.barrier_search import SearchedLabelSpec, fingerprint_searched_bars

_log = logging.getLogger("ml_factory")
SearchedLabelsRef = str | Path | SearchedLabelSpec


def add_found_barriers(
    settings: DataSpec,
    processed: Path,
    searched: SearchedLabelsRef | Sequence[SearchedLabelsRef],
    horizons: Sequence[int],
) -> DataSpec:
    """Return the settings with these searched label specs: each a name such as "h20-v1", a file, or the spec itself.

    Raises SettingsError for a missing file and for a spec of a horizon that is not requested.
    """
    given = [searched] if isinstance(searched, SearchedLabelsRef) else list(searched)
    settings = replace(
        settings, searched=(*settings.searched, *(_read_found_barriers(processed, one) for one in given))
    )
    others = [one.labels.horizon for one in settings.searched if one.labels.horizon not in horizons]
    if others:
        raise SettingsError(
            "A searched label spec is of a horizon that is not prepared", where="searched",
            got=f"a spec for {others[0]} bars", wanted=f"one of {list(horizons)}",
            next_step=f"add horizon {others[0]}, or leave the spec out",
        )  # fmt: skip
    if not settings.features.spans and any(one.labels.session_end == "span" for one in settings.searched):
        _log.warning("The searched labels span session ends, windows do not: prepare with --span for both")
    return settings


def found_barriers_names(processed: Path) -> list[str]:
    """Return the names of all that searches have found, such as "h20-v1"."""
    names = files.names(processed / "searched")
    return [name.removesuffix(".json") for name in names if re.fullmatch(r"h\d+-v\d+\.json", name)]


def _read_found_barriers(processed: Path, reference: SearchedLabelsRef) -> SearchedLabelSpec:
    """Return a searched label spec by its name, by its file, or unchanged. Raises SettingsError where there is none."""
    if isinstance(reference, SearchedLabelSpec):
        return reference
    folder = processed / "searched"
    places = [Path(reference), folder / f"{reference}.json"]
    path = next((place for place in places if files.is_file(place)), None)
    if path is None:
        existing = found_barriers_names(processed)
        raise SettingsError(
            "No such searched label spec", where=places[1], got=str(reference),
            wanted=f"a file, or one of: {', '.join(existing) or 'none'}",
            next_step="search first: pipeline.search_barriers(workspace, symbol, horizon)",
        )  # fmt: skip
    text = files.read(path)
    try:
        return SearchedLabelSpec.from_json(text.decode())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            "Not a searched label spec", where=path, got=f"{type(error).__name__}: {error}",
            next_step="search again; the file was changed by hand or is another one",
        ) from None  # fmt: skip


def check_found_barriers_bars(
    found: SearchedLabelSpec, base: ResampledBars, minute_bars: ResampledBars | None, market: MarketSpec
) -> None:
    """Raise SettingsError unless the bars that the search saw are the first of these, to the bit."""
    seen = found.seen_rows
    now = fingerprint_searched_bars(base, minute_bars, market, pd.Timestamp(seen.until).value)
    if now != seen.fingerprint:
        raise SettingsError(
            "The bars changed since these barriers were searched",
            where=f"the searched label spec for {found.labels.horizon} bars",
            got=f"bars until {seen.until} with the fingerprint {now[:10]}",
            wanted=f"{seen.fingerprint[:10]}, that of the {seen.count:,} rows it saw from {seen.first} on",
            next_step="search again on these bars (prepare --search), or prepare without `searched`",
        )


def check_found_barriers_rows(found: SearchedLabelSpec, labels: pd.DataFrame, splits: dict) -> None:
    """Raise SettingsError unless all that the search saw was known before the first validation row of these labels."""
    first = labels.index[splits["validation"][0]]
    if not pd.Timestamp(found.seen_rows.until) < first:
        raise SettingsError(
            "The search for these barriers saw rows that are now validation or test rows",
            where=f"the searched label spec for {found.labels.horizon} bars",
            got=f"bars until {found.seen_rows.until}",
            wanted=f"all of it before {first.isoformat()}, the first validation row",
            next_step="search again on this split, or prepare without `searched`",
        )
