"""Audit of finished models: their scaler equals the stored one, and stored predictions equal those of the model."""

import numpy as np
import pandas as pd

from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.predict import predict_features
from ml_factory.leakage.artifact_comparison import Tamper, apply_tamper, compare_states, difference
from ml_factory.leakage.tables import ROWS, Leak
from ml_factory.models.registry import spec_of
from ml_factory.progress import phase
from ml_factory.storage.artifact_registry import Artifact, Registry
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.audit_artifacts import Findings
from ml_factory.workflows.dataset import SPLITS, Dataset
from ml_factory.workflows.predict import STACK, is_prediction_of, predictions_path, read_frame

NETWORK_ROWS = 1_000  # newest rows of each split: a network is slow on all of them
CLOSE = {"tabular": 1e-6, "network": 1e-3}  # a network may have been trained on another device
SHIFT = 1e-4  # mean change of the probability of the outcome


def check_finished(workspace: Workspace, data: Dataset, tamper: Tamper | None, findings: Findings) -> None:
    """Predict the stored forecasts of every finished model of this data set again from its bundle."""
    for artifact in Registry(workspace.models).list(data.symbol):
        facts = artifact.facts
        if artifact.kind == STACK or (facts.get("data"), facts.get("horizon")) != (data.fingerprint, data.horizon):
            continue
        path = predictions_path(workspace, artifact)
        if not artifact.is_intact() or not is_prediction_of(path, artifact):
            continue  # torn files and files without a checksum are rebuilt before use
        part = f"predictions of {facts['run_id']}"
        state, frame = artifact.load_state(), read_frame(path)
        leaks = compare_states(part, "scaler", state["scaler"], data.scaler, "the stored one")
        given = apply_tamper(tamper, "predictions", frame.copy())
        with phase(f"re-predicting {facts['model']}", len(frame)):
            rows, found = _differences_from_bundle(data, artifact, Bundle.from_state(state), given, part)
        findings.take(part, rows, leaks + found)


def _differences_from_bundle(
    data: Dataset, artifact: Artifact, bundle: Bundle, frame: pd.DataFrame, part: str
) -> tuple[int, list[Leak]]:
    """Return (rows compared, leaks) of stored probabilities against those that the bundle predicts now."""
    at = data.labels.index.get_indexer(frame.index)
    if not len(at) or (at < 0).any() or not (np.diff(at) > 0).all():
        return 0, [difference(part, ROWS, max(1, int((at < 0).sum())), "the first", "the rows of the labels")]
    tabular = spec_of(artifact.facts["model"]).family == "tabular"
    split = data.split_of()[at]
    newest = [np.flatnonzero(split == name)[-NETWORK_ROWS:] for name in SPLITS]
    kept = np.arange(len(at)) if tabular else np.concatenate(newest)
    predicted = predict_features(
        bundle, data.features, segment=data.segment, rows=data.row[at[kept]], close=data.close
    )[PROBABILITIES].reindex(frame.index[kept])  # fmt: skip
    moved = frame[PROBABILITIES].to_numpy()[kept] - predicted.to_numpy()
    wrong = np.flatnonzero(~(np.abs(moved).max(axis=1) <= CLOSE["tabular" if tabular else "network"]))
    found, reference = [], "the predictions of its bundle"
    if len(wrong):
        found.append(difference(part, "probabilities", len(wrong), frame.index[kept[wrong[0]]], reference))
    elif abs(moved[np.arange(len(kept)), data.y[at[kept]] + 1].mean()) > SHIFT:
        found.append(difference(part, "probability of the outcome", len(kept), frame.index[kept[0]], reference))
    for name, wanted in (("label", data.y[at]), ("split", split)):
        if name in frame and len(wrong := np.flatnonzero(frame[name].to_numpy() != wanted)):
            found.append(difference(part, name, len(wrong), frame.index[wrong[0]], "the data set"))
    return len(kept), found
