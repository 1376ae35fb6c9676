"""A search for barriers on the training rows of prepared data, and the label spec it leaves behind.

    processed/{SYMBOL}/searched/h20-v1.json       the barriers found, the search, and the rows it saw; never overwritten
                                trials-{run}.json   every trial of a finished search, whose checkpoints are given back
    results/{SYMBOL}/barriers-h20-…/search.json   an attempt at a search: what decides it

Other barriers prove other labels at the end of the bars, which moves the chronological split by a few rows. A search
sees the training rows of the earliest such split, so that what it finds is never refused by the split it leads to.
"""

import importlib.metadata
import logging
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd

from ml_factory.data.resample import Frame
from ml_factory.data.sampling import base_and_fine
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.sources import load_bars
from ml_factory.datasets.store import Store
from ml_factory.errors import SettingsError, WorkspaceError
from ml_factory.evaluation import figures
from ml_factory.experiment import DataSpec, Run, machine_with, newest_attempt, open_checkpoints
from ml_factory.progress import phase
from ml_factory.provenance import source_hash
from ml_factory.runs.checkpoints import PhaseCheckpoints
from ml_factory.runs.keepsake import Keepsake
from ml_factory.runs.mirror import mirror_mode
from ml_factory.runs.ownership import exclusive
from ml_factory.runs.recovery import recover_quietly
from ml_factory.runs.storage import (
    fingerprint,
    is_file,
    names_in,
    read_file,
    read_json,
    write_bytes_atomic,
    write_json,
)
from ml_factory.runs.workspace import Workspace
from ml_factory.targets.barrier_search import fingerprint_of_bars, search_barriers
from ml_factory.targets.forward import forward_return
from ml_factory.targets.search_spec import SearchedLabels, SearchSpec
from ml_factory.targets.splits import SplitSpec, holdout
from ml_factory.units.keeping import Kept
from ml_factory.units.proving import settings_of
from ml_factory.units.restoring import recorded
from ml_factory.units.results import Result, marks_of

_log = logging.getLogger("ml_factory")
Named = str | Path | SearchedLabels
Frames = tuple[Frame, Frame | None, MarketSpec]


@dataclass(frozen=True)
class SearchResult(Result):
    """labels : the label spec found.  seen_rows : what the search saw, as `SeenRows`.  trials : a row a trial.

    run_id : of the attempt.  resumed_from : trials that an interrupted search had done.  reused : the spec was there
    before.
    """

    run_id: str
    symbol: str
    horizon: int
    name: str
    labels: dict
    seen_rows: dict
    best: dict
    trials: pd.DataFrame
    resumed_from: int | None
    exact: bool
    inexact_because: list[str]
    reused: bool
    path: Path

    def summary(self) -> str:
        how = "found as searched before" if self.reused else f"{len(self.trials)} trials"
        resumed = f", resumed after {self.resumed_from}" if self.resumed_from and not self.reused else ""
        shares = ", ".join(f"{name} {self.best[name]:.1%}" for name in ("short", "neutral", "long"))
        seen = self.seen_rows
        told = (
            f"{self.symbol}, horizon {self.horizon}: barriers {self.name}, {how}{resumed}, {self.seconds:.1f} s\n"
            f"  k_up {self.labels['k_up']:.3f}, k_down {self.labels['k_down']:.3f}, volatility over "
            f"{self.labels['sigma_span']} bars: {shares}\n"
            f"  rows it saw: {seen['count']:,} training rows, {seen['first']} to {seen['last']}, "
            f"bars until {seen['until']}"
        )
        return "\n".join([told, *marks_of(self), f"  {self.path}"])


def search_labels(
    workspace: Workspace, symbol: str, horizon: int, spec: SearchSpec | None, fresh: bool, named: str = "",
    mirror: str = "off",
) -> SearchResult:  # fmt: skip
    """Search, or go on with a search that was interrupted, and write its label spec; arguments checked before.

    named : the very attempt to go on with. Raises SettingsError where it is none of this search.
    """
    started = time.perf_counter()
    store = Store.current(workspace.processed(symbol))
    settings = settings_of(store)
    spec = SearchSpec(replace(settings.labels, horizon=horizon)) if spec is None else spec
    spec = replace(spec, labels=replace(spec.labels, horizon=horizon))
    base, fine, market = frames_for(workspace, store)
    train, judged = rows_to_search(base, spec, market, settings.splits, store.facts["first"])
    folder = store.folder.parent / "searched"
    run = _open(workspace.results / symbol, store, spec, fresh, named)
    keep, decided = folder / f"trials-{run.run_id}.json", _decided(store, spec)
    with open_checkpoints(workspace.checkpoints, run) as manager, phase("barriers", spec.trials) as done:
        keepsake = Keepsake(run.run_id, str(manager.home_folder), (run.run_id,), ((str(folder), keep.name),))
        begun = is_file(keep) or manager.phase("trials").glance()
        if not begun and not fresh and mirror_mode(mirror) == "online":
            recover_quietly(manager, keepsake)
        with recorded(manager, run, decided, keepsake, mirror, owned="trials") as finish:
            found, record, resumed, elsewhere = kept_search(
                manager.phase("trials"), (base, fine, market), train, judged, spec, keep=keep, done=done
            )
            finish(found.best)
    path, reused = _write(folder, found, fresh)
    trials = trial_table(spec, record["trials"])
    return SearchResult(
        run_id=run.run_id, symbol=symbol, horizon=horizon, name=path.stem, labels=asdict(found.labels),
        seen_rows=asdict(found.seen_rows), best=found.best, trials=trials, resumed_from=resumed or None,
        exact=not elsewhere, inexact_because=elsewhere, reused=reused, path=path,
        seconds=time.perf_counter() - started, draw=lambda: figures.barrier_trials(trials),
    )  # fmt: skip


def kept_search(
    checkpoints: PhaseCheckpoints, frames: Frames, train: pd.DatetimeIndex, judged: pd.DatetimeIndex, spec: SearchSpec,
    *, keep: Path, done: Callable[[int], None] = lambda count: None,
) -> tuple[SearchedLabels, dict, int, list[str]]:  # fmt: skip
    """`search_barriers` with its record in a phase of checkpoints: what it found, the record, trials found done, and
    how machines that did some of them differ from this one.

    keep : the file in which the record of a finished search stays, and is found again; the checkpoints' slots are given
    back then.
    """
    if is_file(keep):
        told = read_json(keep)
        record, count = told["record"], len(told["record"]["trials"])
        done(count)
        return search_barriers(*frames, train, spec, judged=judged, record=record), record, count, told["elsewhere"]
    here = machine_with(("optuna",), 1)
    kept = Kept(checkpoints, here, lambda record: trial_of(len(record["trials"]), spec))
    with checkpoints.claimed():
        before = (kept.load() or {"state": None})["state"]
        keeper = _Keeper(kept, before, done)
        try:
            found = search_barriers(*frames, train, spec, judged=judged, record=before, save=keeper.save)
        finally:
            keeper.keep()  # a balance that cannot be kept is not searched for twice either
            if keeper.record is not None and len(keeper.record["trials"]) == spec.trials:
                _give_back(checkpoints, keep, {"record": keeper.record, "elsewhere": kept.elsewhere})
    return found, keeper.record, len(before["trials"]) if before else 0, kept.elsewhere


def trial_of(done: int, spec: SearchSpec) -> str:
    """How far a search is, in words."""
    return f"trial {done} of {spec.trials}"


def _give_back(checkpoints: PhaseCheckpoints, keep: Path, told: dict) -> None:
    """The search is over: its record stays in a file, its slots serve others."""
    try:
        write_json(keep, told)
    except WorkspaceError as error:
        _log.warning("The trials of this search stay in its checkpoints: %s", error)
        return
    checkpoints.finish()


class _Keeper:
    """The record of the trials in a phase of checkpoints, saved as often as any training."""

    def __init__(self, checkpoints: Kept, record: dict | None, done: Callable[[int], None]):
        self.record, self._saved = record, record
        self._checkpoints, self._done = checkpoints, done
        done(len(record["trials"]) if record else 0)

    def save(self, record: dict) -> None:
        self.record = record
        self._done(1)
        if self._checkpoints.save(record):
            self._saved = record

    def keep(self) -> None:
        """What the timer left unsaved."""
        if self.record is not self._saved:
            self._checkpoints.save(self.record, force=True)


def rows_to_search(
    base: Frame, spec: SearchSpec, market: MarketSpec, splits: SplitSpec, first: int
) -> tuple[pd.DatetimeIndex, pd.DatetimeIndex]:
    """known_at of the training rows, and of all rows from the first validation row on; base bars before `first` have
    no features. Labels here end at the vertical barrier, so fewest are proven at the end of the bars, and the split is
    the earliest that any trial's labels can have."""
    labels = forward_return(base, spec.labels, market)
    labels = labels[labels["entry_bar"] >= first]
    parts = holdout(labels, splits)
    return labels.index[parts["train"]], labels.index[parts["validation"][0] :]


def frames_for(workspace: Workspace, store: Store) -> Frames:
    """The base frame, the 1-minute frame (None where that is the base) and the market a data set was prepared with."""
    settings, market = settings_of(store), MarketSpec.from_dict(store.facts["market"])
    bars, _ = load_bars(workspace, store.facts["symbol"], settings.bars, market=market)
    return *base_and_fine(bars, market, settings.features.base), market


def trial_table(spec: SearchSpec, trials: Sequence[dict]) -> pd.DataFrame:
    """A row a trial: barriers, span, value (bits a training row), rows, shares, and whether it kept the balance."""
    rows = []
    for trial in trials:
        labels = spec.labels_of(trial["params"])
        barriers = {name: getattr(labels, name) for name in ("k_up", "k_down", "sigma_span")}
        told = {name: trial.get(name) for name in ("value", "rows", "short", "neutral", "long")}
        rows.append({"trial": trial["number"], **barriers, **told, "kept": max(trial["broken"].values()) <= 0})
    return pd.DataFrame(rows)


# ---- using what was found ------------------------------------------------------------------------------------------


def with_searched(
    settings: DataSpec, processed: Path, searched: Named | Sequence[Named], horizons: Sequence[int]
) -> DataSpec:
    """The settings with these searched label specs: each a name such as "h20-v1", a file, or the spec itself.

    Raises SettingsError for a file that is not there and for a spec of a horizon that is not asked for.
    """
    given = [searched] if isinstance(searched, Named) else list(searched)
    settings = replace(settings, searched=(*settings.searched, *(read_searched(processed, one) for one in given)))
    others = [one.labels.horizon for one in settings.searched if one.labels.horizon not in horizons]
    if others:
        raise SettingsError(
            "A searched label spec is of a horizon that is not prepared", where="searched",
            got=f"a spec for {others[0]} bars", wanted=f"one of {list(horizons)}",
            next_step=f"ask for horizon {others[0]} too, or leave the spec out",
        )  # fmt: skip
    if not settings.features.spans and any(one.labels.session_end == "span" for one in settings.searched):
        _log.warning("The searched labels span session ends, windows do not: prepare with --span for both")
    return settings


def read_searched(processed: Path, named: Named) -> SearchedLabels:
    """A searched label spec by its name, its file, or as it is. Raises SettingsError where there is none."""
    if isinstance(named, SearchedLabels):
        return named
    folder = processed / "searched"
    places = [Path(named), folder / f"{named}.json"]
    path = next((place for place in places if is_file(place)), None)
    if path is None:
        there = [name.removesuffix(".json") for name in names_in(folder) if re.fullmatch(r"h\d+-v\d+\.json", name)]
        raise SettingsError(
            "No such searched label spec", where=places[1], got=str(named),
            wanted=f"a file, or one of: {', '.join(there) or 'none'}",
            next_step="search first: pipeline.search_barriers(workspace, symbol, horizon)",
        )  # fmt: skip
    text = read_file(path)
    try:
        return SearchedLabels.from_json(text.decode())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            "This is no searched label spec", where=path, got=f"{type(error).__name__}: {error}",
            next_step="search again; the file was changed by hand or is another one",
        ) from None  # fmt: skip


def check_same_bars(found: SearchedLabels, base: Frame, fine: Frame | None, market: MarketSpec) -> None:
    """SettingsError unless the bars that the search saw are the first of these, to the bit."""
    seen = found.seen_rows
    now = fingerprint_of_bars(base, fine, market, pd.Timestamp(seen.until).value)
    if now != seen.fingerprint:
        raise SettingsError(
            "The bars are no longer those that these barriers were searched on",
            where=f"the searched label spec for {found.labels.horizon} bars",
            got=f"bars until {seen.until} with the fingerprint {now[:10]}",
            wanted=f"{seen.fingerprint[:10]}, that of the {seen.count:,} rows it saw from {seen.first} on",
            next_step="search again on these bars (prepare --search), or prepare without `searched`",
        )


def check_saw_training_rows(found: SearchedLabels, labels: pd.DataFrame, splits: dict) -> None:
    """SettingsError unless all that the search saw was known before the first validation row of these labels."""
    first = labels.index[splits["validation"][0]]
    if not pd.Timestamp(found.seen_rows.until) < first:
        raise SettingsError(
            "The search for these barriers saw rows that would now judge",
            where=f"the searched label spec for {found.labels.horizon} bars",
            got=f"bars until {found.seen_rows.until}",
            wanted=f"all of it before {first.isoformat()}, the first validation row",
            next_step="search again on this split, or prepare without `searched`",
        )


def _open(parent: Path, store: Store, spec: SearchSpec, fresh: bool, named: str) -> Run:
    """The newest attempt at this search, with `fresh` a new one beside it, or the one that was named."""
    decided = _decided(store, spec)
    base = f"barriers-h{spec.labels.horizon}-s{spec.seed}-{fingerprint(decided)[:10]}"
    run = Run(named, parent / named) if named else newest_attempt(parent, base, fresh)
    record = run.folder / "search.json"
    if named and not (f"{named}-".startswith(f"{base}-") and is_file(record)):
        there = ", ".join(name for name in names_in(parent) if name.startswith("barriers-")) or "none"
        raise SettingsError(
            "This is no attempt at this search", where="run", got=repr(named), wanted=f"one of {base}; there: {there}",
            next_step="leave the name out: the newest attempt is found, or a new one begins",
        )  # fmt: skip
    if not is_file(record):
        write_json(record, {"run_id": run.run_id, **decided})
    return run


def _decided(store: Store, spec: SearchSpec) -> dict:
    """Data, search, sources and the library that proposes: a search with another of these is another search."""
    decided = {"data": store.fingerprint, "search": asdict(spec), "sources": source_hash(("seeding.py",))}
    with suppress(importlib.metadata.PackageNotFoundError):
        decided["optuna"] = importlib.metadata.version("optuna")
    return decided


def _write(folder: Path, found: SearchedLabels, fresh: bool) -> tuple[Path, bool]:
    """The file of this spec, and whether it was there: the next free version, unless an earlier one says the same."""
    horizon, text = found.labels.horizon, found.to_json().encode()
    with exclusive(folder / "write.lock"):
        number = 1
        while is_file(path := folder / f"h{horizon}-v{number}.json"):
            if not fresh and read_file(path) == text:
                return path, True
            number += 1
        write_bytes_atomic(path, text)
    return path, False
