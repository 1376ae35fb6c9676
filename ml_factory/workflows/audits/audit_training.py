"""Audit of small runs: a fold, a training with its predictions and metrics, and the baselines.

Each runs twice through the functions that users call: on the data, and on data whose forbidden rows are disturbed. The
first result passes through `tamper` and is compared with the second, and with references built from the allowed rows.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ml_factory.datasets.fitted_transforms import TransformFitSample
from ml_factory.datasets.preprocessing import fit_preprocessing_steps
from ml_factory.errors import SettingsError
from ml_factory.evaluation.baselines import ClockBaseline, baseline_session_clock
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.leakage.artifact_comparison import (
    Tamper,
    apply_tamper,
    artifact_leak,
    compare_artifact_frames,
    compare_artifact_positions,
    compare_artifact_states,
    find_unequal_rows,
)
from ml_factory.leakage.independent_baselines import (
    independent_last_move_shares,
    independent_log_loss,
    independent_prior_shares,
    independent_restrict_to_classes,
)
from ml_factory.leakage.pipeline_under_test import SplitUnderTest
from ml_factory.leakage.split_and_fit_check import find_purge_violations
from ml_factory.leakage.timed_tables import Leak, one_per_column
from ml_factory.runs import open_run
from ml_factory.settings import RunSettings, make_run_settings
from ml_factory.storage.scratch_folder import scratch_folder
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.label_table import usable_label_rows
from ml_factory.targets.splits import SplitSpec, chronological_split
from ml_factory.workflows.audits.audit_artifacts import AuditFindings
from ml_factory.workflows.cross_validate import UNCALIBRATED, score_folds
from ml_factory.workflows.evaluation import evaluate_artifacts, prepared_dataset_baselines
from ml_factory.workflows.folds import FoldModel, FoldPlan, FoldSchemeSpec, fit_folds, plan_folds
from ml_factory.workflows.predictions import predictions_path, read_prediction_frame
from ml_factory.workflows.prepared_dataset import PreparedDataset
from ml_factory.workflows.train import train_with_holdout

ROWS = 3_000  # labelled rows of a small run
FOLDS, AUDITED_FOLD = 3, 1  # a middle fold has training rows on both sides
BLIND = "that of a run whose other rows were disturbed"
SETTINGS = {"rounds": 20, "threads": 1}


# ---- small data ------------------------------------------------------------------------------------------------------


def audit_training_subsample(data: PreparedDataset, rows: int = ROWS) -> PreparedDataset:
    """Return the first labelled rows and their features as a data set with its own split and scaler.

    Takes more than `rows` where these cannot be split, or where a split would hold a single class.
    """
    there = usable_label_rows(data.labels)
    there = there[data.row[there] >= 0]
    some = audit_training_row_count(data.y[there], rows)
    some, rows = there[:some], some
    labels = data.labels.iloc[some]
    embargo = int(data.settings["data"]["splits"]["embargo_bars"])
    try:
        splits = chronological_split(labels, SplitSpec(train=0.6, validation=0.2, embargo_bars=embargo))
    except SettingsError:
        if len(some) == len(there):
            raise
        return audit_training_subsample(data, 2 * rows)
    kept = slice(int(data.row[some[0]]), int(data.row[some[-1]]) + 1)
    part = replace(
        data, features=data.features.iloc[kept], segment=data.segment[kept], close=data.close[kept], labels=labels,
        splits=splits,
    )  # fmt: skip
    return replace(part, scaler=_steps_on(part, splits["train"]))


def audit_training_row_count(y_N: np.ndarray, rows: int) -> int:
    """Return how many of the first labels to take: `rows`, doubled until each fifth of them holds two classes or more.

    Each part of a .6/.2/.2 split then holds two classes, and so do the training rows of its folds. All labels where no
    number is enough.
    """
    rows = min(rows, len(y_N))
    while rows < len(y_N) and any(len(np.unique(fifth)) < 2 for fifth in np.array_split(y_N[:rows], 5)):
        rows = min(2 * rows, len(y_N))
    return rows


def _steps_on(data: PreparedDataset, rows: np.ndarray):
    """Fit the preprocessing steps on these rows: the reference for what a fold or a training fits."""
    sample = TransformFitSample(data.x_NF, tuple(data.features.columns), data.row[rows], data.labels.iloc[rows])
    return fit_preprocessing_steps(data.settings["data"]["preprocess"], sample)


def disturb_audit_training_labels(data: PreparedDataset, rows: np.ndarray) -> PreparedDataset:
    """Return the data set with other outcomes in these rows: each class becomes the next one, returns change sign and
    size.
    """
    labels, classes = data.labels.copy(), sorted(data.classes.values())
    following = dict(zip(classes, [*classes[1:], classes[0]], strict=True))
    changed = {"label": labels["label"].map(following).astype(labels["label"].dtype), "ret": -5.0 * labels["ret"]}
    for name, column in changed.items():
        labels.iloc[rows, labels.columns.get_loc(name)] = column.iloc[rows].to_numpy()
    return replace(data, labels=labels)


def _disturb_dataset_features(data: PreparedDataset, rows: np.ndarray) -> PreparedDataset:
    """The data set with other inputs in the feature rows of these labels."""
    values = data.x_NF.copy()
    values[data.row[rows]] = -3.0 * values[data.row[rows]] + 7.0
    return replace(data, features=pd.DataFrame(values, index=data.features.index, columns=data.features.columns))


@contextmanager
def temporary_audit_workspace() -> Iterator[Workspace]:
    """A workspace that is gone afterwards."""
    with scratch_folder("audit-") as folder:
        yield Workspace(folder)


def audit_training_spec(data: PreparedDataset, model: str, task: str) -> RunSettings:
    """The run of a small model."""
    settings = SETTINGS if model != "linear" else {"threads": 1}
    return make_run_settings(
        data.symbol, data.horizon, model, task=task, seed=0, quick=False, data=data.fingerprint, settings=settings
    )


# ---- a fold ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RecordedModel(FoldModel):
    """A fold's model of which it is written down what it was fitted on and given."""

    record: dict = field(default_factory=dict)

    def build(self, data: PreparedDataset, fold: int):
        return _Recorder(super().build(data, fold), self.record)

    def fit_scaler(self, data: PreparedDataset, rows: np.ndarray):
        fitted = super().fit_scaler(data, rows)
        self.record.update(train=np.array(rows), scaler=fitted)
        return fitted


class _Recorder:
    """A model that records the inputs of its fit and of its last forecast."""

    def __init__(self, model, record: dict):
        self._model, self._record = model, record

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def fit(self, x, y, *given, validation=None, **options):
        self._record.update(inputs_train=np.array(x), y=np.array(y))
        return self._model.fit(x, y, *given, validation=validation, **options)

    def predict_proba(self, x, *given, **options):
        self._record["inputs_test"] = np.array(x)
        return self._model.predict_proba(x, *given, **options)


def record_fold_training(data: PreparedDataset, plan: FoldPlan, model: str) -> dict:
    """Return the inputs, scaler, rows and forecasts of a fold of a cross-validation; see docs/guide.md, "An audit with
    a tamper".
    """
    spec = audit_training_spec(data, model, "folds")
    one = replace(plan, folds=[plan.folds[AUDITED_FOLD]], labels=data.labels.iloc[plan.rows])
    tracked = _RecordedModel(spec.seed, model, dict(spec.settings))
    with temporary_audit_workspace() as workspace, open_run(workspace, spec) as run:
        outcome = fit_folds(run, data, one, tracked)
    (evaluated,), seen = score_folds(data, outcome, model), tracked.record
    _, validation = one.fit_and_held_out(0)
    return {
        "labels": data.labels, "features": data.features.iloc[data.row], "embargo": plan.embargo,
        "train": seen["train"], "validation": plan.rows[validation], "test": evaluated.rows, "scaler": seen["scaler"],
        "y": seen["y"], "inputs_train": seen["inputs_train"], "inputs_test": seen["inputs_test"],
        "forecasts": evaluated.forecasts[model + UNCALIBRATED], "calibrated": evaluated.forecasts[model],
    }  # fmt: skip


def audit_fold_training(data: PreparedDataset, model: str, tamper: Tamper | None, findings: AuditFindings) -> None:
    """Check that a fold separates training from test rows, and that nothing fitted in it depends on its test rows."""
    plan = plan_folds(data, data.development_rows(), FoldSchemeSpec(folds=FOLDS), 1, False)
    clean = record_fold_training(data, plan, model)
    given = apply_tamper(tamper, "fold", dict(clean))
    test = np.asarray(plan.rows[plan.folds[AUDITED_FOLD][1]])
    labels_blind = record_fold_training(disturb_audit_training_labels(data, test), plan, model)
    features_blind = record_fold_training(_disturb_dataset_features(data, test), plan, model)
    part, leaks = "fold", []
    rows = {name: np.asarray(given[name], np.int64) for name in ("train", "validation", "test")}
    leaks += _purge_violations(data, rows, plan.embargo)
    wanted = {name: labels_blind[name] for name in rows}
    leaks += compare_artifact_positions(part, rows, wanted, "the purged fold")
    wanted_steps = _steps_on(data, clean["train"])
    leaks += compare_artifact_states(
        part, "scaler", given["scaler"], wanted_steps, "the steps refitted on its train rows"
    )
    leaks += compare_artifact_states(part, "scaler", clean["scaler"], features_blind["scaler"], BLIND)
    scaled = wanted_steps.transform(data.x_NF)
    for name, of in (("inputs_train", clean["train"]), ("inputs_test", clean["test"])):
        leaks += _unequal(part, name, given[name], scaled[data.row[of]], "the rows scaled by the refitted steps")
    leaks += _unequal(part, "y", given["y"], data.y[clean["train"]], "the labels of its train rows")
    for name in ("forecasts", "calibrated"):
        leaks += _unequal(part, name, given[name], labels_blind[name], BLIND)
    findings.take("fold", len(plan.rows), one_per_column(leaks))


def _purge_violations(data: PreparedDataset, rows: Mapping[str, np.ndarray], embargo: int) -> list[Leak]:
    """Training rows that violate purge or embargo with respect to the test rows."""
    both = np.union1d(rows["train"], rows["validation"])
    found = []
    for roles, kept_away in (({"train": both, "test": rows["test"]}, embargo),
                             ({"train": rows["train"], "validation": rows["validation"]}, 0)):  # fmt: skip
        if not all(map(len, roles.values())) or max(map(np.max, roles.values())) >= len(data.labels):
            continue
        for who, wrong in find_purge_violations(data.labels, SplitUnderTest("fold", roles, kept_away)):
            first = data.labels.index[wrong.min()]
            found.append(artifact_leak("fold", who, len(wrong), first, "the rule of purge and embargo"))
    return found


# ---- a training, its predictions and its verdict ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    """Result of a small training.

    state : state of the artifact.
    predictions : as on disk.
    metrics : a row per split and forecast.
    """

    state: dict
    predictions: pd.DataFrame
    metrics: pd.DataFrame


def _trained(data: PreparedDataset, model: str) -> _Outcome:
    spec = audit_training_spec(data, model, "train")
    with temporary_audit_workspace() as workspace:
        with open_run(workspace, spec) as run:
            artifact = train_with_holdout(data, run)
        verdict = evaluate_artifacts(workspace, data, {model: artifact})
        state = {name: value for name, value in artifact.load_state().items() if name not in ("facts", "versions")}
        return _Outcome(state, read_prediction_frame(predictions_path(workspace, artifact)), verdict.metrics)


def audit_training_predictions(
    data: PreparedDataset, model: str, tamper: Tamper | None, findings: AuditFindings
) -> None:
    """Check that model, forecasts of test rows and baselines of the verdict do not change with the test labels."""
    clean, blind = _trained(data, model), _trained(disturb_audit_training_labels(data, data.splits["test"]), model)
    given = apply_tamper(tamper, "predictions", clean.predictions.copy())
    part = "predictions"
    leaks = compare_artifact_states(part, "the model's state", clean.state, blind.state, BLIND)
    forecast = blind.predictions[PROBABILITIES]
    found = compare_artifact_frames(part, given, forecast, BLIND, extra=True)
    if not found:
        at = data.labels.index.get_indexer(given.index)
        about = pd.DataFrame({"split": data.split_names()[at], "label": data.y[at]}, index=given.index)
        found = compare_artifact_frames(part, given, about, "the data set", extra=True)
    leaks += found or _leaks_of_verdict(data, model, given, clean.metrics)
    findings.take(part, len(forecast), one_per_column(leaks))


def _leaks_of_verdict(
    data: PreparedDataset, model: str, predictions: pd.DataFrame, metrics: pd.DataFrame
) -> list[Leak]:
    """Return leaks for log losses that differ from those of the forecasts, or of baselines counted again."""
    at = data.labels.index.get_indexer(predictions.index)
    split = predictions["split"].to_numpy()
    leaks = []
    for name in ("validation", "test"):
        rows = at[split == name]
        forecasts = {model: predictions.loc[split == name, PROBABILITIES].to_numpy()}
        forecasts |= _recount_baselines(data, at[split == "train"], rows)
        table = metrics[metrics["split"] == name].set_index("name")["log_loss"]
        for who, p_N3 in forecasts.items():
            wanted = independent_log_loss(p_N3, data.y[rows], data.unambiguous_mask[rows])
            if who in table.index and not np.isclose(table[who], wanted, rtol=0.0, atol=1e-9):
                numbers = f"{wanted:.6f} by a recount, {table[who]:.6f} in the table"
                leaks.append(artifact_leak("baseline", f"{who}, log loss of {name} rows", len(rows), at[0], numbers))
    return leaks


# ---- baselines -------------------------------------------------------------------------------------------------------


def _recount_baselines(data: PreparedDataset, train_rows: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return reference baselines of `rows`, counted from the unambiguous training rows alone: name -> (N, 3)."""
    train = np.sort(train_rows[data.unambiguous_mask[train_rows]])
    y = data.y[train]
    calendar, at = data.settings["market"]["calendar"], data.labels.index.as_unit("ns").asi8
    minutes = np.diff(at[train]) / 60e9 / np.diff(data.row[train]) if len(train) > 1 else np.ones(1)
    clock = ClockBaseline.fit(
        baseline_session_clock(at[train], calendar), y, horizon=data.horizon, bar_minutes=float(np.median(minutes)),
        volatility=data.volatility[train],
    )  # fmt: skip
    clock_now = baseline_session_clock(at[rows], calendar)
    found = {
        "prior": np.tile(independent_prior_shares(y), (len(rows), 1)),
        "last_move": independent_last_move_shares(data.last_move[train], y, data.last_move[rows]),
        "clock": clock.predict(clock_now),
        "clock_volatility": clock.predict(clock_now, data.volatility[rows]),
    }
    return {name: independent_restrict_to_classes(p_N3, tuple(data.classes.values())) for name, p_N3 in found.items()}


def audit_training_baselines(data: PreparedDataset, tamper: Tamper | None, findings: AuditFindings) -> None:
    """Check that baselines of the test rows depend on the training rows' labels alone."""
    train, rows = data.splits["train"], data.splits["test"]
    index = data.labels.index[rows]
    used = {
        name: pd.DataFrame(p, index=index, columns=PROBABILITIES)
        for name, p in prepared_dataset_baselines(data, train, rows).items()
    }
    given = apply_tamper(tamper, "baseline", {name: frame.copy() for name, frame in used.items()})
    blind = prepared_dataset_baselines(
        disturb_audit_training_labels(data, np.setdiff1d(np.arange(len(data.labels)), train)), train, rows
    )
    again, leaks = _recount_baselines(data, train, rows), []
    for name, frame in used.items():
        one = given.get(name)
        values = np.asarray(one[PROBABILITIES] if isinstance(one, pd.DataFrame) else one, np.float64)
        leaks += _unequal("baseline", name, values, blind[name], BLIND)
        if name in again and (values.shape != again[name].shape or not np.allclose(values, again[name], 0.0, 1e-9)):
            leaks.append(artifact_leak("baseline", name, len(frame), index[0], "a recount of the training rows"))
    findings.take("baseline", len(rows) * len(used), one_per_column(leaks))


# ---- shared by the checks -------------------------------------------------------------------------------------------


def _unequal(part: str, name: str, got: object, wanted: np.ndarray, reference: str) -> list[Leak]:
    unequal = find_unequal_rows(np.asarray(got), np.asarray(wanted))
    return [artifact_leak(part, name, len(unequal), f"row {unequal[0]}", reference)] if len(unequal) else []
