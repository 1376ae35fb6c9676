"""Compare the prepared files with references: what training reads equals, bit for bit, what the code computes from the
bars.

Each check first passes the value through `tamper`, so that a caller can test the check itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from ml_factory.data.bar_files import read_bars_table
from ml_factory.data.bar_report import hash_bars
from ml_factory.data.io import load_bars
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.validation import RawBarSpec
from ml_factory.datasets.fitted_transforms import TransformFitSample
from ml_factory.datasets.preprocessing import fit_preprocessing_steps
from ml_factory.datasets.scaling import SCALERS
from ml_factory.datasets.store import DatasetStore
from ml_factory.features import custom
from ml_factory.leakage.blind import Split, find_unpurged_rows
from ml_factory.leakage.tables import (
    ROWS,
    Findings,
    compare,
    compare_states,
    mismatch,
)
from ml_factory.progress import progress_phase
from ml_factory.seeding import seeded_generator
from ml_factory.storage.workspace import Workspace, require_raw_bars
from ml_factory.targets.splits import chronological_split
from ml_factory.workflows.build import build
from ml_factory.workflows.load_prepared import load_certified_dataset, load_dataset_of_store
from ml_factory.workflows.prepared_dataset import SPLITS, PreparedDataset
from ml_factory.workflows.prove import stored_data_settings

STAGES = ("bars", "features", "labels", "splits", "scaler", "dataset", "fold", "predictions", "baseline")
QUICK_COLUMNS = 12  # of a stored scaler, refitted at the end of `prepare`; an audit refits all of them
PRICES = ["open", "high", "low", "close"]
Tamper = Callable[[str, object], object]


def apply_tamper(tamper: Tamper | None, stage: str, value: object) -> object:
    """Return `tamper(stage, value)`; the value itself where `tamper` is None or returns None."""
    given = tamper(stage, value) if tamper else None
    return value if given is None else given


def audit_prepared_files(
    workspace: Workspace, store: DatasetStore, bars: pd.DataFrame, horizons: Sequence[int], tamper: Tamper | None = None
) -> Findings:
    """Compare all that is stored and read by training with its reference: bars, rows, splits, scalers, data sets."""
    found = Findings()
    _audit_bars(workspace, store, bars, tamper, found)
    _audit_rows(store, bars, horizons, tamper, found)
    for horizon in horizons:
        _audit_scaler(store, horizon, tamper, found)
        data = load_certified_dataset(workspace, store.facts["symbol"], horizon, uncertified=True)  # as trainings do
        _audit_dataset(data, store, tamper, found)
    return found


def quick_audit_of_files(store: DatasetStore, horizons: Sequence[int]) -> Findings:
    """Run the last check of `prepare`: refit some columns of each stored scaler, compare data sets with their files."""
    found = Findings()
    for horizon in horizons:
        _audit_scaler(store, horizon, None, found, columns=QUICK_COLUMNS)
        _audit_dataset(load_dataset_of_store(store, horizon), store, None, found)
    return found


def _audit_bars(workspace: Workspace, store: DatasetStore, bars: pd.DataFrame, tamper, found: Findings) -> None:
    """Compare the bars that the pipeline reads with a second reading, the rows of the raw file, and the stored hash."""
    given = apply_tamper(tamper, "bars", bars.copy() if tamper else bars)
    settings, symbol = stored_data_settings(store).bars, store.facts["symbol"]
    again, _ = load_bars(workspace, symbol, settings)
    found.count("bars", len(again))
    found.add(compare("bars", given, again, "the raw file's checked bars"))
    if not found.leaks and hash_bars(again) != store.facts["raw"]["bars"]:
        found.add([mismatch("bars", ROWS, len(again), again.index[0], "the bars that the data set was made of")])
    if replace(settings, strict=False, minutes=None) != RawBarSpec():
        return
    raw = read_bars_table(require_raw_bars(workspace, symbol))
    if {"timestamp", *PRICES} <= set(raw.columns) and isinstance(raw["timestamp"].dtype, pd.DatetimeTZDtype):
        raw = raw.set_index("timestamp")[PRICES]
        raw = raw[~raw.index.duplicated(keep="last")].reindex(again.index)
        if not raw["close"].isna().any():  # end-stamped bars cannot be joined by start time
            reference = "the raw file's rows of the same minute"
            found.add(compare("bars", again[PRICES], raw.astype(np.float64), reference))


def _audit_rows(store: DatasetStore, bars: pd.DataFrame, horizons: Sequence[int], tamper, found: Findings) -> None:
    """Compare stored features and labels with those rebuilt from the bars, and splits with their rule, on every row."""
    settings = stored_data_settings(store)
    with custom.stateless_custom_features():
        built = build(bars, MarketSpec.from_dict(store.facts["market"]), settings, horizons)
    wanted, stored = built.features.to_frame(), store.load_features()
    given = apply_tamper(tamper, "features", stored.copy() if tamper else stored)
    found.count("stored features", wanted.size)
    found.add(compare("features", given, wanted, "the features rebuilt from the bars"))
    for horizon, made in built.labels.items():
        made, labels = made[made["entry_bar"] >= store.facts["first"]], store.load_labels(horizon)
        labels.attrs["horizon"] = horizon
        given = apply_tamper(tamper, "labels", labels.copy())
        found.count(f"stored labels h{horizon}", len(made))
        reference = "the labels rebuilt from the bars"
        found.add(compare(f"labels h{horizon}", given, made, reference, extra=True))
        _audit_splits(labels, store.load_splits(horizon), settings.splits, horizon, tamper, found)


def _audit_splits(labels: pd.DataFrame, splits: Mapping, spec, horizon: int, tamper, found: Findings) -> None:
    """Compare stored splits with the rule of purge and embargo, and with a new split of the stored labels."""
    given = apply_tamper(tamper, "splits", {name: rows.copy() for name, rows in splits.items()})
    part = f"splits h{horizon}"
    found.count(part, len(labels))
    if isinstance(given, Mapping) and set(given) == set(SPLITS) and all(map(len, given.values())):
        roles = {name: np.asarray(rows) for name, rows in given.items()}
        if all(rows.min() >= 0 and rows.max() < len(labels) for rows in roles.values()):
            found.add(find_unpurged_rows(labels, Split("stored", roles, spec.embargo_bars), f"split h{horizon}"))
    found.add(compare_states(part, "split", given, chronological_split(labels, spec), "the rule of the split"))


def _audit_scaler(store: DatasetStore, horizon: int, tamper, found: Findings, *, columns: int | None = None) -> None:
    """Refit the stored scaler, and the steps before it, on the stored training rows and compare.

    columns : number of columns of a lone scaler to compare, drawn at random; None: all.
    """
    steps, labels = stored_data_settings(store).preprocess, store.load_labels(horizon)
    train = store.load_splits(horizon)["train"]
    rows = store.known_at.get_indexer(labels.index)[train]
    values, names = store.values, tuple(store.feature_names)
    given = apply_tamper(tamper, "scaler", store.load_scaler(horizon))
    given = given.to_dict() if hasattr(given, "to_dict") else given
    if columns and len(steps) == 1 and steps[0] in SCALERS and len(names) > columns:
        some = np.sort(seeded_generator("scaler columns", horizon).choice(len(names), columns, replace=False))
        values, names = np.ascontiguousarray(values[:, some]), tuple(names[k] for k in some)
        numbers = [name for name in ("center", "scale", "knots") if name in given]
        given = {**given, **{name: np.asarray(given[name])[some].tolist() for name in numbers}}
    with progress_phase(f"refitting scaler {horizon}", len(rows)):
        wanted = fit_preprocessing_steps(steps, TransformFitSample(values, names, rows, labels.iloc[train]))
    part = f"scaler h{horizon}"
    found.count(part, len(rows))
    found.add(compare_states(part, "scaler", given, wanted, "the steps refitted on the training rows"))


def _audit_dataset(data: PreparedDataset, store: DatasetStore, tamper, found: Findings) -> None:
    """Compare the data set that training gets with the stored files."""
    if tamper:
        data = replace(data, features=data.features.copy(), labels=data.labels.copy(), splits=dict(data.splits))
    given, part = apply_tamper(tamper, "dataset", data), f"dataset h{data.horizon}"
    wanted = load_dataset_of_store(store, data.horizon)
    found.count(part, wanted.features.size)
    if not isinstance(given, PreparedDataset):
        return found.add([mismatch(part, "(type)", 1, "the first", f"a Dataset: {type(given).__name__}")])
    frame = partial(compare, reference="the stored one")
    found.add(frame(f"{part}, features", given.features, wanted.features))
    found.add(frame(f"{part}, labels", given.labels, wanted.labels))
    for name in ("splits", "scaler", "segment", "close", "symbol", "horizon", "fingerprint", "settings"):
        found.add(compare_states(part, name, getattr(given, name), getattr(wanted, name), "the stored one"))
