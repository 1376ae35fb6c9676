"""A search for barriers on the training rows of prepared data, and the label spec it leaves behind.

    processed/{SYMBOL}/searched/h20-v1.json       the barriers found, the search, and the rows it saw; never overwritten

Other barriers prove other labels at the end of the bars, which moves the chronological split by a few rows. A search
sees the training rows of the earliest such split, so that what it finds is never refused by the split it leads to.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from ml_factory.data.io import load_bars
from ml_factory.data.resample import ResampledBars, resample_bars, resample_minute_bars_for_labels
from ml_factory.data.sessions import MarketSpec
from ml_factory.datasets.store import DatasetStore
from ml_factory.lazy_module import LazyModule
from ml_factory.progress import progress_phase
from ml_factory.result import Result
from ml_factory.storage.files import files
from ml_factory.storage.locks import file_lock
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit
from ml_factory.targets.barrier_search import search_barriers_on_training_rows
from ml_factory.targets.barrier_search_spec import BarrierSearchSpec, SearchedLabelSpec
from ml_factory.targets.make_labels import label_lives_to_the_vertical
from ml_factory.targets.splits import SplitSpec, chronological_split
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.prove import stored_data_settings

plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


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
    store = DatasetStore.current(workspace.processed(symbol))
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
        lines, figure=lambda: plots.plot_barrier_grid(grid), symbol=symbol, horizon=horizon, name=path.stem,
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
