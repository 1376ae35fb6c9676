"""A search for barriers on the training rows of prepared data, and the label spec it leaves behind.

    processed/{SYMBOL}/searched/h20-v1.json       the barriers found, the search, and the rows it saw; never overwritten

Other barriers prove other labels at the end of the bars, which moves the chronological split by a few rows. A search
sees the training rows of the earliest such split, so that what it finds is never refused by the split it leads to.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from ml_factory.data.io import load_bars
from ml_factory.data.resample import ResampledBars, resample_bars, resample_minute_bars_for_labels
from ml_factory.data.sessions import MarketSpec
from ml_factory.datasets.store import open_current_store
from ml_factory.errors import SettingsError
from ml_factory.progress import progress_phase
from ml_factory.result import Result
from ml_factory.settings import DataSpec
from ml_factory.storage.files import files
from ml_factory.storage.locks import file_lock
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit
from ml_factory.targets.barrier_search import (
    BarrierSearchSpec,
    SearchedLabelSpec,
    fingerprint_searched_bars,
    search_barriers_on_training_rows,
)
from ml_factory.targets.make_labels import label_lives_to_the_vertical
from ml_factory.targets.splits import SplitSpec, chronological_split
from ml_factory.workflows.prepared_dataset import load_dataset, stored_data_settings

_log = logging.getLogger("ml_factory")
SearchedLabelsRef = str | Path | SearchedLabelSpec


@push_workspace_on_exit
def search_barriers(
    workspace: Workspace | str | Path, symbol: str, horizon: int, spec: BarrierSearchSpec | None = None
) -> Result:
    """Search barriers whose labels are the most informative on the training rows, within a balance of classes.

    Reads only training rows of the chronological split, and of their labels those proven before the first validation
    row. Writes a label spec that names the rows it saw, `processed/{SYMBOL}/searched/h{H}-v{N}.json`, unless the same
    is there; `prepare(..., searched="h20-v1")` makes labels with it.

    spec : grid and constraints; its labels take their horizon from the call.

    The result has `labels`, the label spec found (`reused` where it existed before); `seen_rows`, as
    `BarrierSearchRows`; `best`; and `grid`, a row per point: k, sigma_span, value (bits a training row), rows, class
    shares, and whether it kept the balance.

    Raises SettingsError when no barriers of the grid keep the balance, and NotPreparedError.
    """
    started, workspace, symbol = time.perf_counter(), Workspace(workspace), check_symbol(symbol)
    load_dataset(workspace, symbol, horizon)  # refuses bars or code that changed since they were prepared
    store = open_current_store(workspace, symbol)
    settings, market = stored_data_settings(store), MarketSpec.from_dict(store.facts["market"])
    spec = BarrierSearchSpec(settings.labels) if spec is None else spec
    spec = replace(spec, labels=replace(spec.labels, horizon=horizon))
    bars, _ = load_bars(workspace, symbol, settings.bars, market=market)
    minutes = settings.features.base_minutes
    base, minute_bars = resample_bars(bars, market, minutes), resample_minute_bars_for_labels(bars, market, minutes)
    train, evaluated = barrier_search_rows(base, spec, market, settings.splits, store.facts["first"])
    with progress_phase("barriers", len(spec.grid())) as done:
        found, grid = search_barriers_on_training_rows(
            base, minute_bars, market, train, spec, evaluated=evaluated, done=done
        )
    path, reused = _write_spec(store.folder.parent / "searched", found)
    labels, seen, seconds = asdict(found.labels), asdict(found.seen_rows), time.perf_counter() - started
    how = "found before" if reused else f"the best of {len(grid)}"
    shares = ", ".join(f"{name} {found.best[name]:.1%}" for name in ("short", "neutral", "long"))
    lines = [
        f"{symbol}, horizon {horizon}: barriers {path.stem}, {how}, {seconds:.1f} s",
        f"  k_up {labels['k_up']:.3f}, k_down {labels['k_down']:.3f}, volatility over {labels['sigma_span']} bars: "
        f"{shares}",
        f"  rows it saw: {seen['count']:,} training rows, {seen['first']} to {seen['last']}, "
        f"bars until {seen['until']}",
        f"  {path}",
    ]
    return Result(
        lines, symbol=symbol, horizon=horizon, name=path.stem,
        labels=labels, seen_rows=seen, best=found.best, grid=grid, reused=reused, path=path, seconds=seconds,
    )  # fmt: skip


def barrier_search_rows(
    base: ResampledBars, spec: BarrierSearchSpec, market: MarketSpec, splits: SplitSpec, first: int
) -> tuple[pd.DatetimeIndex, pd.DatetimeIndex]:
    """Return known_at of the training rows, and of all rows from the first validation row on.

    Base bars before `first` have no features. The labels here end at the vertical barrier, which proves the fewest
    labels at the end of the bars, so the split is the earliest that any labels of the grid can have.
    """
    labels = label_lives_to_the_vertical(base, spec.labels, market)
    labels = labels[labels["entry_bar"] >= first]
    parts = chronological_split(labels, splits)
    return labels.index[parts["train"]], labels.index[parts["validation"][0] :]


def _write_spec(folder: Path, found: SearchedLabelSpec) -> tuple[Path, bool]:
    """Write the spec to the next free version, unless an equal version exists; return (path, True where it existed)."""
    horizon, text = found.labels.horizon, found.to_json().encode()
    with file_lock(folder / "write.lock"):
        number = 1
        while files.is_file(path := folder / f"h{horizon}-v{number}.json"):
            if files.read(path) == text:
                return path, True
            number += 1
        files.write(path, text)
    return path, False


# ---- what was found, read by `prepare` ------------------------------------------------------------------------------


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


def _read_found_barriers(processed: Path, reference: SearchedLabelsRef) -> SearchedLabelSpec:
    """Return a searched label spec by its name, by its file, or unchanged. Raises SettingsError where there is none."""
    if isinstance(reference, SearchedLabelSpec):
        return reference
    folder = processed / "searched"
    places = [Path(reference), folder / f"{reference}.json"]
    path = next((place for place in places if files.is_file(place)), None)
    if path is None:
        existing = [name.removesuffix(".json") for name in files.names(folder) if name.endswith(".json")]
        raise SettingsError(
            "No such searched label spec", where=places[1], got=str(reference),
            wanted=f"a file, or one of: {', '.join(existing) or 'none'}",
            next_step="search first: pipeline.search_barriers(workspace, symbol, horizon)",
        )  # fmt: skip
    return SearchedLabelSpec.from_json(files.read(path), path)


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
