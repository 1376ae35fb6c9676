"""Audit of finished models, of a stack and of `predict`: stored forecasts are the model's, without any later data."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.io import write_bars
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.predict import predict_features
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.leakage.artifact_comparison import (
    Tamper,
    apply_tamper,
    artifact_leak,
    compare_artifact_frames,
    compare_artifact_states,
)
from ml_factory.leakage.timed_tables import ROWS, Leak, one_per_column
from ml_factory.models.registry import find_model_spec
from ml_factory.progress import progress_phase
from ml_factory.runs import open_run
from ml_factory.settings import make_run_settings
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.audits.audit_artifacts import AuditFindings
from ml_factory.workflows.audits.audit_training import (
    BLIND,
    audit_training_spec,
    disturb_audit_training_labels,
    temporary_audit_workspace,
)
from ml_factory.workflows.predictions import (
    STACK,
    is_prediction_of_artifact,
    load_or_make_predictions,
    predict_bars,
    predictions_path,
    read_prediction_frame,
)
from ml_factory.workflows.prepared_dataset import SPLITS, PreparedDataset
from ml_factory.workflows.stack import fit_stack, stack_run_settings
from ml_factory.workflows.train import train_with_holdout

NETWORK_ROWS = 1_000  # newest rows of each split: a network is slow on all of them
CLOSE = {"tabular": 1e-6, "network": 1e-3}  # a network may have been trained on another device
SHIFT = 1e-4  # mean change of the probability of the outcome


def audit_finished_models(
    workspace: Workspace, data: PreparedDataset, tamper: Tamper | None, findings: AuditFindings
) -> None:
    """Predict the stored forecasts of every finished model of this data set again from its bundle."""
    for artifact in ArtifactRegistry(workspace.models).list(data.symbol):
        facts = artifact.facts
        if artifact.kind == STACK or (facts.get("data"), facts.get("horizon")) != (data.fingerprint, data.horizon):
            continue
        path = predictions_path(workspace, artifact)
        if not artifact.is_intact() or not is_prediction_of_artifact(path, artifact):
            continue  # torn files and files without a checksum are rebuilt before use
        part = f"predictions of {facts['run_id']}"
        state, frame = artifact.load_state(), read_prediction_frame(path)
        leaks = compare_artifact_states(part, "scaler", state["scaler"], data.scaler, "the stored one")
        given = apply_tamper(tamper, "predictions", frame.copy())
        with progress_phase(f"re-predicting {facts['model']}", len(frame)):
            rows, found = _differences_from_bundle(data, artifact, TrainedModel.from_state(state), given, part)
        findings.take(part, rows, leaks + found)


def _differences_from_bundle(
    data: PreparedDataset, artifact: Artifact, bundle: TrainedModel, frame: pd.DataFrame, part: str
) -> tuple[int, list[Leak]]:
    """Return (rows compared, leaks) of stored probabilities against those that the bundle predicts now."""
    at = data.labels.index.get_indexer(frame.index)
    if not len(at) or (at < 0).any() or not (np.diff(at) > 0).all():
        return 0, [artifact_leak(part, ROWS, max(1, int((at < 0).sum())), "the first", "the rows of the labels")]
    tabular = find_model_spec(artifact.facts["model"]).family == "tabular"
    split = data.split_names()[at]
    newest = [np.flatnonzero(split == name)[-NETWORK_ROWS:] for name in SPLITS]
    kept = np.arange(len(at)) if tabular else np.concatenate(newest)
    predicted = predict_features(
        bundle, data.features, segment=data.segment, rows=data.row[at[kept]]
    )[PROBABILITIES].reindex(frame.index[kept])  # fmt: skip
    moved = frame[PROBABILITIES].to_numpy()[kept] - predicted.to_numpy()
    wrong = np.flatnonzero(~(np.abs(moved).max(axis=1) <= CLOSE["tabular" if tabular else "network"]))
    found, reference = [], "the predictions of its bundle"
    if len(wrong):
        found.append(artifact_leak(part, "probabilities", len(wrong), frame.index[kept[wrong[0]]], reference))
    elif abs(moved[np.arange(len(kept)), data.y[at[kept]] + 1].mean()) > SHIFT:
        found.append(artifact_leak(part, "probability of the outcome", len(kept), frame.index[kept[0]], reference))
    for name, wanted in (("label", data.y[at]), ("split", split)):
        if name in frame and len(wrong := np.flatnonzero(frame[name].to_numpy() != wanted)):
            found.append(artifact_leak(part, name, len(wrong), frame.index[wrong[0]], "the data set"))
    return len(kept), found


MODELS, FOLDS = ("linear", "xgboost"), 2
BARS = 60_000  # newest bars, on which `predict` is checked
CUTS = (1, 777, 2_345)  # minutes before the end at which the file is shortened, by one bar at least


def audit_stack_model(data: PreparedDataset, findings: AuditFindings) -> None:
    """Check that weights, calibration and forecasts of a stack do not change with the test labels."""
    clean, blind = _stacked(data), _stacked(disturb_audit_training_labels(data, data.splits["test"]))
    leaks = compare_artifact_states("stack", "its weights and calibration", clean[0], blind[0], BLIND)
    leaks += compare_artifact_frames("stack", clean[1], blind[1], BLIND)
    findings.take("stack", len(clean[1]), one_per_column(leaks))


def _stacked(data: PreparedDataset) -> tuple[dict, pd.DataFrame]:
    """Return (state of the fitted stack, its probabilities of every row)."""
    with temporary_audit_workspace() as workspace:
        hashes = []
        for model in MODELS:
            spec = make_run_settings(
                data.symbol, data.horizon, model, task="train", seed=0, quick=True, data=data.fingerprint, settings=None
            )
            with open_run(workspace, spec) as run:
                hashes.append(train_with_holdout(data, run).hash)
        with open_run(workspace, stack_run_settings(data, MODELS, hashes, FOLDS, 0, True)) as run:
            artifact = fit_stack(data, run, FOLDS)
        learnt = {name: value for name, value in artifact.load_state().items() if name not in ("bases", "run_id")}
        return learnt, load_or_make_predictions(workspace, data, artifact)[PROBABILITIES]


def audit_model_predictions(
    data: PreparedDataset, bars: pd.DataFrame, findings: AuditFindings, cuts: Sequence[int] = CUTS
) -> None:
    """Check that `predict` gives the same probabilities for a moment whether the file of bars ends there or later."""
    bars = bars.iloc[-BARS:]
    with temporary_audit_workspace() as workspace:
        spec = audit_training_spec(data, MODELS[0], "train")
        with open_run(workspace, spec) as run:
            artifact = train_with_holdout(data, run)

        def predicted_until(stop: int) -> pd.DataFrame:
            path = Path(workspace.root) / f"bars-{stop}.parquet"
            write_bars(path, bars.iloc[:stop])
            return predict_bars(workspace, artifact, path)[0]

        whole, leaks, compared = predicted_until(len(bars)), [], 0
        minutes = data.settings["market"]["bar_minutes"]
        for cut in cuts:
            stop = len(bars) - max(1, cut // minutes)
            known = bars.index[stop - 1] + pd.Timedelta(minutes=minutes)
            leaks += _differences(predicted_until(stop), whole[whole.index <= known])
            compared += int(np.count_nonzero(whole.index <= known))
    findings.take("predict", compared, one_per_column(leaks))


def _differences(short: pd.DataFrame, whole: pd.DataFrame) -> list[Leak]:
    if not len(whole):
        return [artifact_leak("predict", ROWS, 1, "the first", "any row: the bars are too few")]
    # Matrix products round by their number of rows, so the last bits are not compared.
    reference = "the prediction with later bars"
    return compare_artifact_frames("predict", short, whole, reference, rounded=PROBABILITIES)
