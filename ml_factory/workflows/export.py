"""Export a finished model: one bundle that predicts raw bars, or files for other programs."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import ml_factory
from ml_factory.argument_checks import check_horizon
from ml_factory.code_fingerprint import source_hash
from ml_factory.data.io import load_bars
from ml_factory.datasets.store import DatasetStore, open_current_store
from ml_factory.errors import BarsError, FactoryError, NotPreparedError, SettingsError, check_known
from ml_factory.inference.bundle import Bundle, custom_feature_modules, make_example
from ml_factory.inference.guard_reference import GuardReference, fit_guard_reference
from ml_factory.inference.predict import FittedModels, PredictionSpec, TrainedModel
from ml_factory.lazy_module import LazyModule
from ml_factory.leakage.certificate import Certificate, stored_certificate
from ml_factory.models.base import installed_library_versions
from ml_factory.models.registry import find_model_spec, registered_source_hash
from ml_factory.result import Result
from ml_factory.settings import DATA_PACKAGES
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.files import files, stored_path
from ml_factory.storage.json_values import to_json_value
from ml_factory.storage.serialization import serialize_state
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit
from ml_factory.workflows import predictions
from ml_factory.workflows.evaluation import evaluate_artifacts
from ml_factory.workflows.prepared_dataset import PreparedDataset, load_dataset
from ml_factory.workflows.prove import describe_proof_of_store

FORMATS = ("bundle", "onnx", "pth")
PTH, _ENDINGS = "model_tpu.pth", {"bundle": "bundle", "card": "md"}
onnx_export = LazyModule("ml_factory.inference.onnx")  # onnx comes with an extra
estimator_module = LazyModule("ml_factory.training.estimator")  # torch comes with the networks only
_log = logging.getLogger("ml_factory")
_FACTS = ("symbol", "horizon", "model", "run_id", "data", "split_times", "limited", "inexact")
_METRICS = (
    "split", "name", "log_loss", "accuracy", "gain_best", "gain_best_low", "gain_best_high", "best_baseline",
    "direction_gain", "direction_low", "rows", "effective_rows",
)  # fmt: skip


@push_workspace_on_exit
def export(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, formats: Sequence[str] | None = None, *,
    run: str = "", out: str | Path | None = None,
) -> Result:  # fmt: skip
    """Write the newest finished model or stack for use without the workspace, by default below results/SYMBOL/RUN/.

    formats : "bundle", all it takes to predict raw bars, and its model card in a second file; "onnx", a graph from
        preprocessed rows to class scores, of a stack one for each base model, which a bundle exported with it holds
        too; "pth", the state dict of a network for `torch.load(..., weights_only=True)`. None: bundle and onnx, the
        bundle alone where the model has no graph or the packages of the extra onnx are not installed.
    run : run id of the model; "" for the newest.
    out : folder to write to.

    Nothing is written unless everything can be, and each graph predicts as its model does. Raises SettingsError for
    another format or a model that does not have it, NotPreparedError where none is finished or its prepared data is
    gone, FactoryError naming the worst row of a graph that predicts otherwise.

    The result has `paths`, format -> file ("card" is the model card); `python`, lines that use the files elsewhere;
    `choice`, why this run's model was taken; `no_onnx`, why there is no graph although none was ruled out.
    """
    started, workspace, symbol = time.perf_counter(), Workspace(workspace), check_symbol(symbol)
    optional = formats is None
    formats = ("bundle", "onnx") if formats is None else tuple(formats)
    _check_formats(formats, model)
    artifact = predictions.find_artifact_to_predict(workspace, symbol, check_horizon(horizon), model, run)
    run_id, name = artifact.facts["run_id"], f"{symbol}-h{horizon}-{model}"
    files_of = {kind: f"{name}.{end}" for kind, end in _ENDINGS.items()} | {"pth": PTH}
    content: dict[str, bytes] = {}
    no_onnx = ""
    if {"bundle", "onnx"} & set(formats):  # pth needs no data
        data, store = load_dataset(workspace, symbol, horizon), open_current_store(workspace, symbol)
        _check_data_of_model(data, artifact)
        certificate = stored_certificate(store, horizon)
        if certificate and not certificate.passed:
            raise FactoryError(
                "The certificate of this data reports a look-ahead", where=artifact.path, got=certificate.describe(),
                next_step="correct it, audit and train again",
            )  # fmt: skip
        fitted, graphs = predictions.load_fitted_models(workspace, artifact), dict[str, bytes]()
        try:
            if "onnx" in formats:
                graphs = {name: _checked_graph(data, name, one) for name, one in fitted.models.items()}
        except FactoryError as error:
            if not optional:
                raise
            no_onnx = str(error)
        if "bundle" in formats:
            reference = _guard_reference(workspace, data, artifact)
            about = _describe(workspace, data, store, artifact, fitted, certificate, reference)
            bundle = _build_bundle(fitted, graphs, about | {"file": files_of["bundle"]}, reference)
            content |= {"bundle": bundle.to_bytes(), "card": bundle.card.encode()}
        for base, graph in graphs.items():
            kind, file = ("onnx", name) if base == model else (f"onnx {base}", f"{name}-{base}")
            content[kind], files_of[kind] = graph, f"{file}.onnx"
    if "pth" in formats:
        content["pth"] = estimator_module.export_state_dict_bytes(
            TrainedModel.from_state(artifact.load_state()).estimator
        )
    paths = {kind: _path(workspace, artifact, files_of[kind], out) for kind in content}
    python = [line for kind, path in paths.items() for line in _python_lines(kind, path, artifact)]
    for kind, path in paths.items():
        files.write(path, content[kind])
    choice = predictions.describe_run_choice(workspace, artifact, run)
    lines = [
        f"{model} on {symbol}, from run {run_id} ({choice})", *(f"  {kind}: {path}" for kind, path in paths.items()),
        *([f"  no onnx: {no_onnx}"] if no_onnx else []), "  to use it:", *(f"    {line}" for line in python),
    ]  # fmt: skip
    return Result(
        lines, symbol=symbol, horizon=horizon, model=model, run_id=run_id, choice=choice, paths=paths, python=python,
        no_onnx=no_onnx, seconds=time.perf_counter() - started,
    )  # fmt: skip


def _path(workspace: Workspace, artifact: Artifact, file: str, out: str | Path | None) -> Path:
    if out:
        return Path(out) / file
    return stored_path(workspace.results / artifact.symbol, artifact.facts["run_id"], file, inside=workspace.results)


def _check_formats(formats: Sequence[str], model: str) -> None:
    """Raise SettingsError for a format that is unknown, or that this kind of model does not have."""
    for name in formats:
        check_known("Unknown export format", "formats", name, FORMATS)
    if "pth" in formats and (model == predictions.STACK or not find_model_spec(model).windowed):
        raise SettingsError(
            "Only a network has a state dict", where="model", got=model, wanted="a network",
            next_step=f"export {model} as bundle or onnx",
        )  # fmt: skip


def _python_lines(kind: str, path: Path, artifact: Artifact) -> list[str]:
    """Return lines of Python that use the file elsewhere."""
    if kind == "bundle":
        return ["from ml_factory import Bundle", f"frame = Bundle.load({str(path)!r}).predict(bars)"]
    if kind.startswith("onnx"):
        return [
            f"import onnxruntime  # {kind}: input: preprocessed float32 rows (N, F), or windows of them (N, T, F); "
            "output: class scores, without clock and calibration, which the bundle adds",
            f"scores = onnxruntime.InferenceSession({str(path)!r}).run(None, {{'rows': x}})[0]",
        ]
    if kind == "pth":
        fitted = TrainedModel.from_state(artifact.load_state()).estimator
        return [
            "import torch  # pth: input: scaled windows (the scaler is in the model's artifact); output: logits",
            estimator_module.state_dict_module_source(fitted),
            f"module.load_state_dict(torch.load({str(path)!r}, map_location='cpu', weights_only=True)); module.eval()",
        ]
    return []


# ---- the bundle ----------------------------------------------------------------------------------------------------


def _check_data_of_model(data: PreparedDataset, artifact: Artifact) -> None:
    """Raise NotPreparedError where the prepared data is not that of the model or stack, or other code made it."""
    if (data.fingerprint, source_hash(DATA_PACKAGES)) != (
        artifact.facts["data"],
        artifact.load_state()["spec"]["sources"],
    ):
        raise NotPreparedError(
            "The prepared data is not the one this model was trained on", where=artifact.path,
            got=f"data {data.fingerprint[:12]}", wanted=f"data {artifact.facts['data'][:12]} and the code of then",
            next_step=f"python -m ml_factory prepare --symbol {data.symbol}, and train it again",
        )  # fmt: skip


def _build_bundle(
    fitted: FittedModels, graphs: dict[str, bytes], description: dict, reference: GuardReference | None
) -> Bundle:
    """Return the bundle of a registered model or stack with these graphs."""
    models = {name: serialize_state(model.to_state()) for name, model in fitted.models.items()}
    hashes = {name: sha256(one).hexdigest() for name, one in models.items()}
    description = to_json_value(description | {"models": hashes})
    bundle = Bundle(description, models, graphs, reference)
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


def _guard_reference(workspace: Workspace, data: PreparedDataset, artifact: Artifact) -> GuardReference | None:
    """Return the guard's reference; None with a line in the log where there can be none."""
    spec, clear = PredictionSpec.from_stored(data.settings), data.unambiguous_mask
    forecasts = predictions.load_or_make_predictions(workspace, data, artifact)
    rows = data.features, forecasts, data.labels["label"][clear]
    try:
        bars, _ = load_bars(workspace, data.symbol, spec.bars, market=spec.market)
        return fit_guard_reference(bars, spec.market, *rows, artifact.facts["split_times"])
    except (BarsError, NotPreparedError) as error:
        _log.warning("The bundle has no reference, its guard will check no drift: %s", error)
        return None


def _describe(
    workspace: Workspace, data: PreparedDataset, store: DatasetStore, artifact: Artifact, fitted: FittedModels,
    certificate: Certificate | None, reference: GuardReference | None,
) -> dict:  # fmt: skip
    spec = PredictionSpec.from_stored(data.settings)
    evaluation = evaluate_artifacts(workspace, data, {artifact.facts["model"]: artifact})
    report, metrics = store.facts["bars"], evaluation.metrics
    off_tick = sum(found["count"] for found in report["findings"] if found["kind"] == "off_tick")
    stack = fitted.stack and {name: fitted.stack[name] for name in ("stack", "calibration", "spec")}
    return {name: artifact.facts[name] for name in _FACTS} | {
        "classes": list(data.classes.values()), "spec": data.settings, "stack": stack,
        "feature_names": list(data.features.columns),
        "lookback": fitted.lookback, "warmup_bars": spec.features.warmup_bars + fitted.lookback,
        "custom": custom_feature_modules(spec),
        "networks": {name: source for name in fitted.models if (source := registered_source_hash(name))},
        "raw": {name: store.facts["raw"][name] for name in ("hash", "rows", "bars")}
        | {name: report[name] for name in ("first", "last")},
        "off_tick": reference.limits["off_tick"] if reference else off_tick / max(report["rows"], 1),
        "certificate": certificate and certificate.to_dict(),
        "certified": describe_proof_of_store(store, data.horizon),
        "metrics": metrics[[name for name in _METRICS if name in metrics]].to_dict("records"),
        "verdict": evaluation.verdict.sentence,
        "versions": installed_library_versions() | {"ml_factory": ml_factory.__version__},
    }  # fmt: skip
