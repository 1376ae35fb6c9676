"""Gather the bundle of a finished model: its states, and the facts that a bundle describes."""

import logging
from dataclasses import replace
from hashlib import sha256

import ml_factory
from ml_factory.code_fingerprint import source_hash
from ml_factory.data.io import load_bars
from ml_factory.datasets.store import open_current_store
from ml_factory.errors import BarsError, FactoryError, NotPreparedError
from ml_factory.inference.bundle import Bundle, custom_feature_modules, make_example
from ml_factory.inference.guard_reference import FinishedRows, fit_guard_reference
from ml_factory.inference.predict import FittedModels, PredictionSpec, TrainedModel, installed_library_versions
from ml_factory.lazy_module import LazyModule
from ml_factory.leakage.certificate import certificate_path, read_certificate
from ml_factory.models.registry import registered_source_hash
from ml_factory.settings import DATA_PACKAGES
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.json_values import to_json_value
from ml_factory.storage.serialization import serialize_state
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.evaluation import evaluate_artifacts
from ml_factory.workflows.predictions import (
    load_fitted_models,
    load_or_make_predictions,
)
from ml_factory.workflows.prepared_dataset import PreparedDataset

onnx_export = LazyModule("ml_factory.inference.onnx")  # onnx comes with an extra
_log = logging.getLogger("ml_factory")
_FACTS = ("symbol", "horizon", "model", "run_id", "data", "split_times", "limited", "inexact")
_METRICS = (
    "split", "name", "log_loss", "accuracy", "gain_best", "gain_best_low", "gain_best_high", "best_baseline",
    "direction_gain", "direction_low", "rows", "effective_rows",
)  # fmt: skip


def build_bundle(
    workspace: Workspace, data: PreparedDataset, artifact: Artifact, file: str, *, with_onnx: bool
) -> Bundle:
    """Return the bundle of a registered model or stack.

    data : the prepared data it was trained on.
    file : name of the file it will be written to, for the card.
    with_onnx : also the ONNX graph of each model, which has passed the comparison on rows of the prepared data.
    Raises NotPreparedError where the prepared data is not that of the model, or other code made it; SettingsError and
    FactoryError for a model whose graph cannot be built, or fails the comparison.
    """
    if (data.fingerprint, source_hash(DATA_PACKAGES)) != (artifact.facts["data"], _sources(workspace, artifact)):
        raise NotPreparedError(
            "The prepared data is not the one this model was trained on", where=artifact.path,
            got=f"data {data.fingerprint[:12]}", wanted=f"data {artifact.facts['data'][:12]} and the code of then",
            next_step=f"python -m ml_factory prepare --symbol {data.symbol}, and train it again",
        )  # fmt: skip
    fitted = load_fitted_models(workspace, artifact)
    models = {name: serialize_state(model.to_state()) for name, model in fitted.models.items()}
    hashes = {name: sha256(one).hexdigest() for name, one in models.items()}
    description = to_json_value(_describe(workspace, data, artifact, fitted) | {"file": file, "models": hashes})
    graphs = {name: _checked_graph(data, name, model) for name, model in fitted.models.items()} if with_onnx else {}
    bundle = Bundle(description, models, graphs, _guard_reference(workspace, data, artifact))
    try:
        return replace(bundle, example=make_example(bundle))
    except FactoryError as error:
        _log.warning("The bundle has no example, its predictions are not checked when it is loaded: %s", error)
        return bundle


def _checked_graph(data: PreparedDataset, name: str, model: TrainedModel) -> bytes:
    """Return the ONNX graph of a model after the comparison with it."""
    graph = onnx_export.model_to_onnx(model)
    difference = onnx_export.check_onnx_graph(graph, model, data.features, segment=data.segment)
    _log.info("ONNX graph of %s: its probabilities differ by at most %.1e", name, difference)
    return graph


def _guard_reference(workspace: Workspace, data: PreparedDataset, artifact: Artifact) -> bytes:
    """Return the bytes of the guard's reference; b"" with a line in the log where there can be none."""
    spec, clear = PredictionSpec.from_stored(data.settings), data.unambiguous_mask
    predictions = load_or_make_predictions(workspace, data, artifact)
    rows = FinishedRows(data.features, predictions, data.labels["label"][clear])
    try:
        bars, _ = load_bars(workspace, data.symbol, spec.bars, market=spec.market)
        return fit_guard_reference(bars, spec.market, rows, artifact.facts["split_times"]).to_bytes()
    except (BarsError, NotPreparedError) as error:
        _log.warning("The bundle has no reference, its guard will check no drift: %s", error)
        return b""


def _sources(workspace: Workspace, artifact: Artifact) -> str:
    return artifact.load_state()["spec"]["sources"]


def _describe(workspace: Workspace, data: PreparedDataset, artifact: Artifact, fitted: FittedModels) -> dict:
    spec = PredictionSpec.from_stored(data.settings)
    evaluation = evaluate_artifacts(workspace, data, {artifact.facts["model"]: artifact})
    store = open_current_store(workspace, data.symbol)
    certificate = read_certificate(certificate_path(workspace.processed(data.symbol), data.fingerprint, data.horizon))
    report, metrics = store.facts["bars"], evaluation.metrics
    off_tick = sum(found["count"] for found in report["findings"] if found["kind"] == "off_tick")
    networks = {name: source for name in fitted.models if (source := registered_source_hash(name))}
    return {name: artifact.facts[name] for name in _FACTS} | {
        "classes": list(data.classes.values()), "spec": data.settings, "stack": _stack_state(fitted),
        "feature_names": list(data.features.columns),
        "lookback": fitted.lookback, "warmup_bars": spec.features.warmup_bars + fitted.lookback,
        "custom": custom_feature_modules(spec), "networks": networks,
        "raw": {name: store.facts["raw"][name] for name in ("hash", "rows", "bars")}
        | {name: report[name] for name in ("first", "last")},
        "off_tick": off_tick / max(report["rows"], 1),
        "certificate": certificate and certificate.to_dict(),
        "certified": certificate.describe() if certificate else "none: uncertified",
        "metrics": metrics[[name for name in _METRICS if name in metrics]].to_dict("records"),
        "verdict": evaluation.verdict.sentence,
        "versions": installed_library_versions() | {"ml_factory": ml_factory.__version__},
    }  # fmt: skip


def _stack_state(fitted: FittedModels) -> dict | None:
    """Return what a stack predicts with, as JSON values; None for a single model."""
    return None if fitted.stack is None else {name: fitted.stack[name] for name in ("stack", "calibration", "spec")}
