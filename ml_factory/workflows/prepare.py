"""`prepare`, phases 1 to 5: raw bars to features, labels, splits and scalers on disk, found again by fingerprint."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import DEFAULT_HORIZONS, DEMOS, check_horizons
from ml_factory.data.bar_report import BarFinding
from ml_factory.data.io import import_bars, load_bars, previous_bars_path, raw_bar_minutes
from ml_factory.data.rolls import RollSpec
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.data.validation import RawBarSpec
from ml_factory.datasets.preprocessing import fit_preprocessing_steps
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.evaluation.intervals import WEEKS, count_interval_weeks, interval_week_numbers
from ml_factory.features.build import FeatureSpec, build_features, feature_column_names
from ml_factory.leakage.proof import QUICK
from ml_factory.progress import ProgressPhase, progress_phase, record_progress
from ml_factory.result import Result
from ml_factory.settings import DataSpec
from ml_factory.storage.files import files
from ml_factory.storage.locks import file_lock
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit, require_raw_bars
from ml_factory.targets.label_table import usable_label_rows
from ml_factory.targets.labels import (
    LabelSpec,
    check_class_sufficiency,
    check_horizon_fits_session,
    expected_label_classes,
    label_classes,
    longest_session_bars,
)
from ml_factory.targets.splits import chronological_split
from ml_factory.targets.weights import effective_sample_size
from ml_factory.workflows.build import Built, DataUnderProof, build, resolve_market_facts
from ml_factory.workflows.inspect_data import bar_findings_table, label_balance_table, split_figure
from ml_factory.workflows.prepared_dataset import SPLITS, prepared_data_fingerprint, stored_data_settings
from ml_factory.workflows.prove import (
    describe_proof_of_store,
    find_certificates,
    prove_store,
    quick_audit_of_files,
)
from ml_factory.workflows.search_barriers import (
    SearchedLabelsRef,
    add_found_barriers,
    check_found_barriers_bars,
    check_found_barriers_rows,
)

FACTS_BYTES, LABEL_BYTES = 20, 70  # bytes of a feature row without its columns, and of a label

_log = logging.getLogger("ml_factory")


@push_workspace_on_exit
def prepare(
    workspace: Workspace | str | Path,
    symbol: str,
    horizons: int | Sequence[int] = DEFAULT_HORIZONS,
    *,
    data: str | Path | None = None,
    settings: DataSpec | None = None,
    roll: RollSpec | None = None,
    searched: SearchedLabelsRef | Sequence[SearchedLabelsRef] = (),
    bar_minutes: int | None = None,
) -> Result:
    """Check the raw bars and write features, labels, splits and scalers of a symbol; existing data sets are reused.

    Parameters
    ----------
    horizons : bars of the base frame until the vertical barrier, one set of labels each.
    data : a file to bring into `data/raw` first.
    settings : everything that decides what is written; None: the labels of the last call (but for searched ones). A
        calendar or tick given once for this symbol holds until another is given.
    roll : how the contracts in `data` become one series, where it holds several.
    searched : label specs of `pipeline.search_barriers` that replace the given barriers: "h20-v1", a file, or the spec
        itself; one a horizon. Refused when the search saw a row that is now a validation or test row.
    bar_minutes : length of the raw bars, as `settings.bars.minutes`; None: that of the file.

    Returns
    -------
    A result with folder, fingerprint, market, rows, features, horizons, label_balance, split_table; `test_weeks`, weeks
    that the test rows of the last horizon span, as a verdict counts them; `staleness`, frame -> minutes of age of the
    frame's newest visible bar (mean, max); `bar_findings`, a row per finding; `proof`, the certificate in words (where
    it FAILED, leaks were logged and training refuses the data); `phases` of this call; `reused`; `resumed_from`,
    horizons that were found with the features, where only the rest was prepared.

    Raises
    ------
    BarsError for bars that break the contract, NotPreparedError where there are no raw bars, SettingsError;
    FactoryError for a horizon longer than a session, training rows that lack a class, and validation or test rows of a
    single one. What was prepared before stays.
    """
    started, workspace = time.perf_counter(), Workspace(workspace)
    symbol, horizons = check_symbol(symbol), check_horizons(horizons)
    processed = workspace.processed(symbol)
    put_back = nullcontext() if data is None else _raw_bars_put_back(workspace, symbol)
    # A second process waits before it replaces the raw bars, and then finds what the first one made.
    with record_progress() as phases, file_lock(processed / "prepare.lock"), put_back:
        settings = settings_after_previous(settings, processed)
        if bar_minutes is not None:
            settings = replace(settings, bars=replace(settings.bars, minutes=bar_minutes))
        settings = add_found_barriers(settings, processed, searched, horizons)
        settings = _import_raw_bars(workspace, symbol, data, settings, roll)
        with progress_phase("hashing"):
            raw = files.sha256(require_raw_bars(workspace, symbol))
            key = prepared_data_fingerprint(raw, settings.to_dict())
        with progress_phase("looking for prepared data"):
            store = DatasetStore.find(processed, key)
        stored = None if store is None else list(store.horizons)
        missing = [horizon for horizon in horizons if stored is None or horizon not in stored]
        store = store or DatasetStore.begin(processed, key)
        built = _write(store, workspace, symbol, settings, missing, raw) if missing else ()
        _certify(store, workspace, horizons, *built)
        store.make_current()
    seconds = time.perf_counter() - started
    return _result(store, symbol, horizons, phases, found=stored, reused=not missing, seconds=seconds)


def settings_after_previous(given: DataSpec | None, processed: Path) -> DataSpec:
    """Return the given settings, or without any the labels (but for searched ones) and `spans` of the current data set;
    with calendar and tick as given before, where none is given now.
    """
    try:
        facts = DatasetStore.current(processed).facts
    except NotPreparedError:
        return given or DataSpec()
    before, market = facts["settings"], facts["market"]
    if given is None:
        labels = LabelSpec() if before.get("searched") else LabelSpec(**before["labels"])
        given = DataSpec(features=FeatureSpec(spans=before["features"].get("spans", False)), labels=labels)
    kept = {name for name in ("calendar", "tick") if market["source"].get(name) == "given"}
    return replace(given, **{name: market[name] for name in kept if getattr(given, name) is None})


@contextmanager
def _raw_bars_put_back(workspace: Workspace, symbol: str) -> Iterator[None]:
    """Put the raw bars back where the block fails or is interrupted: what was prepared before belongs to them."""
    raw = workspace.raw_bars(symbol)
    before = {path: files.read(path) for path in (raw, previous_bars_path(raw)) if files.is_file(path)}
    try:
        yield
    except BaseException:
        for path, content in before.items():
            if files.read(path) != content:
                files.write(path, content)
        if raw in before and previous_bars_path(raw) not in before:
            files.remove(previous_bars_path(raw))
        raise


def _import_raw_bars(
    workspace: Workspace, symbol: str, data: str | Path | None, settings: DataSpec, roll: RollSpec | None
) -> DataSpec:
    """Import the raw bars into `data/raw`; return the settings for the file that is there now."""
    if data is not None:
        if symbol in DEMOS:
            step = "name the market of these bars: --symbol MES, or SYMBOL=MES"
            raise SettingsError(f"{symbol} is the made-up market", where="symbol", got=f"{data} for it", next_step=step)
        with progress_phase("importing") as done:
            facts = {"calendar": settings.calendar, "tick": settings.tick}
            imported = import_bars(data, workspace, symbol, settings.bars, roll=roll, **facts)
            done(imported.rows)
        _warn_findings(symbol, imported.findings, "mapped")
        # The file in data/raw is in the contract's form now: nothing is shifted or translated again.
        return replace(settings, bars=RawBarSpec(imported.minutes, strict=settings.bars.strict))
    if roll is not None:
        raise SettingsError("There is nothing to roll", where="roll", next_step="name the file: --data FILE")
    if symbol in DEMOS:
        ensure_synthetic_demo_market(workspace, symbol)
    minutes = raw_bar_minutes(workspace, symbol, settings.bars.minutes)
    return replace(settings, bars=replace(settings.bars, minutes=minutes))


def _certify(
    store: DatasetStore, workspace: Workspace, horizons: Sequence[int], bars: pd.DataFrame | None = None,
    built: Built | None = None,
) -> None:  # fmt: skip
    """Run the quick proof, unless each of the horizons has a certificate of this code; log each leak at once."""
    if not find_certificates(store, horizons, "quick"):
        if bars is None:
            bars = load_bars(workspace, store.facts["symbol"], stored_data_settings(store).bars)[0]
        found = quick_audit_of_files(store, horizons)
        prove_store(store, bars, horizons, found, QUICK, built)
        for leak in found.leaks:
            _log.warning("%s: %s", store.facts["symbol"], leak.sentence())


def _warn_findings(symbol: str, findings: Iterable[BarFinding], severity: str) -> None:
    """Log the findings of this severity at once, even where the run stops later."""
    for finding in findings:
        if finding.severity == severity:
            _log.warning("%s: %s", symbol, finding.message)


# ---- writing -----------------------------------------------------------------------------------------------------


def _write(
    store: DatasetStore,
    workspace: Workspace,
    symbol: str,
    settings: DataSpec,
    horizons: list[int],
    raw_hash: str,
) -> tuple[pd.DataFrame, Built]:
    """Write features unless they are there, and the parts of these horizons; return for the proof the bars, and what
    they gave but for the features.
    """
    bars, report = load_bars(
        workspace, symbol, settings.bars, calendar=settings.calendar, tick=settings.tick, quality=True
    )
    with progress_phase("market facts", len(bars)):
        market = resolve_market_facts(symbol, bars, settings)
    _warn_findings(symbol, report.findings, "reported")
    for note in market.inferred_fact_warnings():
        _log.warning("%s: %s", symbol, note)
    longest = longest_session_bars(bars.index.as_unit("ns").asi8, market.calendar, settings.features.base_minutes)
    for horizon in horizons:  # before features are computed
        check_horizon_fits_session(horizon, settings.label_spec_for(horizon).session_end, longest)
    needed = estimate_prepared_bytes(len(bars), market, settings, len(horizons), features=not store.committed)
    files.require_space(store.folder, needed, f"the features and labels of {symbol}")
    feed = base = None
    if not store.committed:
        if not settings.features.custom:
            with progress_phase("choosing stretches", len(bars)):
                subject = DataUnderProof(symbol, settings, tuple(horizons), folds=0)
                feed = subject.feed_plan(bars, market.to_dict(), QUICK)
        states = feed.states if feed else None
        features = store.write_features(
            lambda keep: build_features(bars, market, settings.features, states=states, keep=keep)
        )
        made = {
            "symbol": symbol,
            "raw": {"hash": raw_hash, "rows": len(bars), "bars": report.fingerprint},
            "settings": settings.to_dict(),
            "market": market.to_dict(),
            "bars": report.to_dict(),
            "first": features.first,
            "staleness": features.frame_staleness,
        }
        store.commit(made)  # a killed prepare continues with what is missing
        base = features.base
        del features
    built = replace(build(bars, market, settings, horizons, features=False, base=base), feed=feed)
    for horizon in horizons:
        facts = _write_horizon(store, built, settings, market, horizon)
        store.commit({"horizons": {str(horizon): facts}})
    return bars, built


def estimate_prepared_bytes(bars: int, market: MarketSpec, settings: DataSpec, horizons: int, *, features: bool) -> int:
    """Estimate the size of a data set: float32 features and facts of their rows unless they are there, and labels."""
    per_row = 4 * len(feature_column_names(market, settings.features)) + FACTS_BYTES
    rows = bars // (settings.features.base_minutes // market.bar_minutes)
    return rows * (per_row * features + horizons * LABEL_BYTES)


def _write_horizon(store: DatasetStore, built: Built, settings: DataSpec, market: MarketSpec, horizon: int) -> dict:
    """Write labels, splits and the scaler of one horizon; return the facts of the data set about them."""
    if found := settings.searched_label_spec_for(horizon):
        check_found_barriers_bars(found, built.base, built.minute_bars, market)
    labels, first = built.labels[horizon], store.facts["first"]
    with progress_phase(f"split {horizon}", len(labels)):
        labels = labels[labels["entry_bar"] >= first]
        splits = chronological_split(labels, settings.splits)
        check_class_sufficiency(labels, splits, expected_label_classes(settings.labels.kind))
    if found:
        check_found_barriers_rows(found, labels, splits)
    train_rows = labels["entry_bar"].to_numpy()[splits["train"]] - first
    with progress_phase(f"scaler {horizon}", len(train_rows)):
        scaler = fit_preprocessing_steps(settings.preprocess, store.values, train_rows)
    with progress_phase(f"storing {horizon}", len(labels)):
        store.write_horizon(horizon, labels, splits, scaler)
        return _horizon_facts(labels, splits, settings.labels.kind)


def _horizon_facts(labels: pd.DataFrame, splits: Mapping[str, np.ndarray], kind: str) -> dict:
    """Return class balance, extent of the parts, and the numbers of rows in none."""
    clear = labels["barrier"] != "ambiguous"
    classes = label_classes(kind)
    balance = {name: int(((labels["label"] == label) & clear).sum()) for name, label in classes.items()}
    parts = {
        name: {
            "rows": len(part),
            "effective_rows": round(effective_sample_size(labels.iloc[part]), 1),
            "first": str(labels.index[part[0]]),
            "last": str(labels.index[part[-1]]),
        }
        for name, part in splits.items()
    }
    usable = len(usable_label_rows(labels))
    outside = {"purged": usable - sum(map(len, splits.values())), "inferred": len(labels) - usable}
    return {"balance": balance | {"ambiguous": int((~clear).sum())}, "parts": parts, **outside}


# ---- handing back ------------------------------------------------------------------------------------------------


def _result(
    store: DatasetStore, symbol: str, horizons: tuple[int, ...], phases: Sequence[ProgressPhase], *,
    found: list[int] | None,
    reused: bool, seconds: float,
) -> Result:  # fmt: skip
    stored = {horizon: store.facts["horizons"][str(horizon)] for horizon in horizons}
    parts = {(horizon, part): stored[horizon]["parts"][part] for horizon in horizons for part in SPLITS}
    last = horizons[-1]
    weeks = interval_week_numbers(store.load_label_moments(last)[store.load_splits(last)["test"]])
    spanned, proof = count_interval_weeks(weeks), describe_proof_of_store(store, last)
    how, resumed = "found as prepared before" if reused else "prepared now", None if reused else found
    if resumed is not None:
        how = f"features{f' and horizons {resumed}' if resumed else ''} found there, the rest prepared now"
    lines = [
        f"{symbol}: {store.rows:,} rows x {len(store.feature_names)} features, horizons {list(horizons)}, "
        f"{how} in {seconds:.1f} s",
        f"  test rows span {spanned:.1f} weeks, a verdict needs {WEEKS}",
        f"  proof that nothing looks ahead: {proof}", f"  {store.folder}",
    ]  # fmt: skip
    return Result(
        lines, figure=lambda: split_figure(store, last), symbol=symbol, fingerprint=store.fingerprint,
        folder=store.folder, market=store.facts["market"], rows=store.rows, features=store.feature_names,
        horizons=list(horizons), label_balance=label_balance_table(store, horizons),
        split_table=pd.DataFrame(parts).T.rename_axis(["horizon", "split"]), test_weeks=spanned,
        staleness=store.facts["staleness"], bar_findings=bar_findings_table(store), proof=proof, reused=reused,
        phases=_phase_table(phases), resumed_from=resumed, seconds=seconds,
    )  # fmt: skip


def _phase_table(phases: Sequence[ProgressPhase]) -> pd.DataFrame:
    """Return a row per phase: rows, seconds, rows a second, and the seconds of compiling kernels, once per machine."""
    rows = [(one.name, one.done, one.seconds, one.rate, one.compiled) for one in phases]
    table = pd.DataFrame(rows, columns=["phase", "rows", "seconds", "rows_per_second", "compiling"])
    return table.set_index("phase").round({"seconds": 3, "rows_per_second": 0, "compiling": 3})
