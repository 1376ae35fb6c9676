"""Compare the prepared files with references: what training reads equals, bit for bit, what the code computes from the
bars.

Each check first passes the value through `tamper`, so that a caller can test the check itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pandas as pd

from ml_factory.data.bar_files import read_bars_table
from ml_factory.data.io import load_bars
from ml_factory.data.prefix_hash import hash_bars
from ml_factory.data.validation import RawBarSpec
from ml_factory.datasets.fitted_transforms import TransformFitSample
from ml_factory.datasets.preprocessing import fit_preprocessing_steps
from ml_factory.datasets.scaling import SCALERS
from ml_factory.datasets.store import DatasetStore
from ml_factory.features import custom
from ml_factory.leakage.artifact_comparison import (
    Tamper,
    apply_tamper,
    artifact_leak,
    compare_artifact_frames,
    compare_artifact_positions,
    compare_artifact_states,
    find_unequal_rows,
)
from ml_factory.leakage.pipeline_under_test import SplitUnderTest
from ml_factory.leakage.split_and_fit_check import check_splits_are_purged
from ml_factory.leakage.timed_tables import ROWS, Leak
from ml_factory.progress import progress_phase
from ml_factory.seeding import seeded_generator
from ml_factory.storage.json_values import to_json_value
from ml_factory.storage.workspace import Workspace, require_raw_bars
from ml_factory.targets.splits import chronological_split
from ml_factory.workflows.load_prepared import load_dataset_of_store
from ml_factory.workflows.prepared_dataset import SPLITS, PreparedDataset
from ml_factory.workflows.prove import pipeline_to_prove, stored_data_settings

QUICK_COLUMNS = 12  # of a stored scaler, refitted at the end of `prepare`; an audit refits all of them


@dataclass
class AuditFindings:
    """Leaks and counts of an audit.

    leaks : the leaks found.
    compared : part -> number of rows or values compared.
    """

    leaks: list[Leak] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)

    def take(self, part: str, count: int, leaks: Sequence[Leak]) -> None:
        """Add the leaks of one comparison of `count` rows or values."""
        self.compared[part] = self.compared.get(part, 0) + int(count)
        self.leaks += leaks


# ---- bars ------------------------------------------------------------------------------------------------------------


def audit_bars_artifact(
    workspace: Workspace, store: DatasetStore, bars: pd.DataFrame, tamper: Tamper | None, findings: AuditFindings
):
    """Compare the bars that the pipeline reads with a second reading, the rows of the raw file, and the stored hash."""
    given = apply_tamper(tamper, "bars", bars.copy() if tamper else bars)
    settings, symbol = stored_data_settings(store), store.facts["symbol"]
    again, _ = load_bars(workspace, symbol, settings.bars)
    leaks = compare_artifact_frames("bars", given, again, "the raw file's checked bars")
    if not leaks and hash_bars(again) != store.facts["raw"]["bars"]:
        leaks = [artifact_leak("bars", ROWS, len(again), again.index[0], "the bars that the data set was made of")]
    if replace(settings.bars, strict=False, minutes=None) == RawBarSpec():
        leaks += _differences_from_raw_file(read_bars_table(require_raw_bars(workspace, symbol)), again)
    findings.take("bars", len(again), leaks)


def _differences_from_raw_file(table: pd.DataFrame, bars: pd.DataFrame) -> list[Leak]:
    """Return leaks for prices that differ from the raw row of the same minute, where the file has the contract's
    columns.
    """
    names = ["open", "high", "low", "close"]
    if not {"timestamp", *names} <= set(table.columns) or not isinstance(table["timestamp"].dtype, pd.DatetimeTZDtype):
        return []
    raw = table.set_index("timestamp")[names]
    raw = raw[~raw.index.duplicated(keep="last")].reindex(bars.index)
    if raw["close"].isna().any():  # end-stamped bars cannot be joined by start time
        return []
    return compare_artifact_frames(
        "bars", bars[names], raw.astype(np.float64), "the raw file's rows of the same minute"
    )


# ---- features, labels, splits ----------------------------------------------------------------------------------------


def audit_row_artifacts(
    store: DatasetStore, bars: pd.DataFrame, horizons: Sequence[int], tamper: Tamper | None, findings: AuditFindings
) -> None:
    """Compare stored features and labels with those rebuilt from the bars, joined by time, on every row."""
    settings, facts = stored_data_settings(store), store.facts["market"]
    pipeline = pipeline_to_prove(store.facts["symbol"], settings, horizons, folds=0)
    with custom.stateless_custom_features():
        known_at, values, names = pipeline.features(bars, facts)
        labels = pipeline.labels(bars, facts)
    index = pd.DatetimeIndex(known_at.astype("M8[ns]"), tz="UTC", name="known_at")
    wanted = pd.DataFrame(values, index=index, columns=names, copy=False)
    stored = store.load_features()
    given = apply_tamper(tamper, "features", stored.copy() if tamper else stored)
    reference = "the features rebuilt from the bars"
    findings.take("stored features", wanted.size, compare_artifact_frames("features", given, wanted, reference))
    for horizon in horizons:
        made = labels[f"h{horizon}"]
        made = made[made["entry_bar"] >= store.facts["first"]]
        stored = store.load_labels(horizon)
        given = apply_tamper(tamper, "labels", _marked(stored.copy(), horizon) if tamper else stored)
        reference = "the labels rebuilt from the bars"
        leaks = compare_artifact_frames(f"labels h{horizon}", given, made, reference, extra=True)
        findings.take(f"stored labels h{horizon}", len(made), leaks)
        _audit_split_artifacts(store, horizon, tamper, findings)


def _marked(labels: pd.DataFrame, horizon: int) -> pd.DataFrame:
    labels.attrs["horizon"] = horizon
    return labels


def _audit_split_artifacts(store: DatasetStore, horizon: int, tamper: Tamper | None, findings: AuditFindings) -> None:
    """Compare stored splits with the rule of purge and embargo, and with a new split of the stored labels."""
    settings, labels, splits = stored_data_settings(store), store.load_labels(horizon), store.load_splits(horizon)
    given = apply_tamper(tamper, "splits", {name: rows.copy() for name, rows in splits.items()})
    part = f"splits h{horizon}"
    leaks = compare_artifact_positions(
        part, given, chronological_split(labels, settings.splits), "the rule of the split"
    )
    if isinstance(given, Mapping) and set(given) == set(SPLITS) and all(map(len, given.values())):
        rows = {name: np.asarray(positions) for name, positions in given.items()}
        if all(one.min() >= 0 and one.max() < len(labels) for one in rows.values()):
            split = SplitUnderTest("stored", rows, settings.splits.embargo_bars)
            leaks = [*check_splits_are_purged(labels, [split], f"h{horizon}"), *leaks]
    findings.take(part, len(labels), leaks)


# ---- scaler and data set ---------------------------------------------------------------------------------------------


def audit_scaler_artifact(
    store: DatasetStore, horizon: int, tamper: Tamper | None, findings: AuditFindings, *, columns: int | None = None
) -> None:
    """Refit the stored scaler, and the steps before it, on the stored training rows and compare.

    columns : number of columns of a lone scaler to compare, drawn at random; None: all.
    """
    steps, labels = stored_data_settings(store).preprocess, store.load_labels(horizon)
    train = store.load_splits(horizon)["train"]
    rows = store.known_at.get_indexer(labels.index)[train]
    values, names, stored = store.values, tuple(store.feature_names), store.load_scaler(horizon)
    given = apply_tamper(tamper, "scaler", stored)
    given = given.to_dict() if hasattr(given, "to_dict") else given
    if columns and len(steps) == 1 and steps[0] in SCALERS and len(names) > columns:
        some = np.sort(seeded_generator("scaler columns", horizon).choice(len(names), columns, replace=False))
        values, names, given = (
            np.ascontiguousarray(values[:, some]),
            tuple(names[k] for k in some),
            _select_columns(given, some),
        )
    with progress_phase(f"refitting scaler {horizon}", len(rows)):
        wanted = fit_preprocessing_steps(steps, TransformFitSample(values, names, rows, labels.iloc[train]))
    reference = "the steps refitted on the training rows"
    leaks = compare_artifact_states(f"scaler h{horizon}", "scaler", given, wanted, reference)
    findings.take(f"scaler h{horizon}", len(rows), leaks)


def _select_columns(scaler: Mapping, some: np.ndarray) -> dict:
    """Return the stored scaler restricted to these columns."""
    kept = {name: np.asarray(scaler[name])[some].tolist() for name in ("center", "scale", "knots") if name in scaler}
    return {**scaler, **kept}


def audit_dataset_artifact(
    data: PreparedDataset, store: DatasetStore, findings: AuditFindings, tamper: Tamper | None = None
) -> None:
    """Compare what `load_dataset` returns with the stored files, and its derived arrays with its fields."""
    if tamper:
        data = replace(data, features=data.features.copy(), labels=data.labels.copy(), splits=dict(data.splits))
    given = apply_tamper(tamper, "dataset", data)
    wanted, part = _reload_audited_dataset(store, data.horizon), f"dataset h{data.horizon}"
    if not isinstance(given, PreparedDataset):
        return findings.take(
            part, 1, [artifact_leak(part, "(type)", 1, "the first", f"a Dataset: {type(given).__name__}")]
        )
    frame = partial(compare_artifact_frames, reference="the stored one")
    leaks = frame(f"{part}, features", given.features, wanted.features)
    leaks += frame(f"{part}, labels", given.labels, wanted.labels)
    leaks += compare_artifact_positions(f"{part}, splits", given.splits, wanted.splits, "the stored ones")
    leaks += compare_artifact_states(part, "scaler", given.scaler, wanted.scaler, "the stored one")
    for name in ("symbol", "horizon", "fingerprint", "settings"):
        if to_json_value(getattr(given, name)) != to_json_value(getattr(wanted, name)):
            leaks.append(artifact_leak(part, name, 1, "the first", "the stored one"))
    if not leaks:
        leaks = _derived(part, given, wanted)
    findings.take(part, wanted.features.size, leaks)


def _derived(part: str, given: PreparedDataset, wanted: PreparedDataset) -> list[Leak]:
    """Compare the arrays that training derives from a data set; cached ones may differ from its fields."""
    leaks, names = [], ("segment", "close", "x_NF", "row", "y", "last_move", "volatility", "unambiguous_mask")
    read = {name: lambda one, name=name: getattr(one, name) for name in names}
    read |= {"clock": lambda one: np.stack([one.clock.progress, one.clock.minutes_left], axis=1)}
    read |= {"full_window_mask": lambda one: one.full_window_mask(16)}
    read |= {"split_of": lambda one: one.split_names().astype(str)}
    read |= {"development": lambda one: one.development_rows(), "classes": lambda one: list(one.classes.values())}
    for name, of in read.items():
        one, two = of(given), of(wanted)
        if len(unequal := find_unequal_rows(np.asarray(one), np.asarray(two))):
            leaks.append(artifact_leak(part, name, len(unequal), f"row {unequal[0]}", "what the stored files give"))
    return leaks


def _reload_audited_dataset(store: DatasetStore, horizon: int) -> PreparedDataset:
    """Return the data set with all rows read from the files again, as the reference."""
    rows = store.load_row_facts()
    return replace(
        load_dataset_of_store(store, horizon), features=store.load_features(), segment=rows["segment"].to_numpy(),
        close=rows["close"].to_numpy(), labels=store.load_labels(horizon), splits=store.load_splits(horizon),
        scaler=store.load_scaler(horizon),
    )  # fmt: skip


# ---- all of it -------------------------------------------------------------------------------------------------------


def quick_artifact_audit(store: DatasetStore, horizons: Sequence[int]) -> AuditFindings:
    """Run the last check of `prepare`: refit some columns of each stored scaler, compare the data set with its
    files.
    """
    found = AuditFindings()
    for horizon in horizons:
        audit_scaler_artifact(store, horizon, None, found, columns=QUICK_COLUMNS)
        audit_dataset_artifact(load_dataset_of_store(store, horizon), store, found)
    return found
