"""Export a finished model: one bundle that predicts raw bars, or files for other programs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ml_factory.argument_checks import check_horizon
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.predict import TrainedModel
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import find_model_spec
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.files import files
from ml_factory.storage.stored_paths import stored_path
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows import predictions
from ml_factory.workflows.build_bundle import build_bundle
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.results.base import Result

FORMATS = ("bundle", "onnx", "pt2", "pth")
PTH, _ENDINGS = "model_tpu.pth", {"bundle": "bundle", "card": "md", "pt2": "pt2"}
network_graph = LazyModule("ml_factory.inference.onnx")
state_dict = LazyModule("ml_factory.training.export_state_dict")  # torch comes with the networks only


@dataclass(frozen=True)
class ExportResult(Result):
    """Exported files of a model.

    paths : format -> file; "card" is the bundle's model card.
    python : lines of Python that use the files elsewhere.
    choice : why this run's model was taken, in words.
    no_onnx : why there is no ONNX graph although none was ruled out; "" otherwise.
    """

    symbol: str
    horizon: int
    model: str
    run_id: str
    choice: str
    paths: dict[str, Path]
    python: list[str]
    no_onnx: str = ""

    def summary(self) -> str:
        written = [f"  {name}: {path}" for name, path in self.paths.items()]
        without = [f"  no onnx: {self.no_onnx}"] if self.no_onnx else []
        lines = ["  to use it:", *(f"    {line}" for line in self.python)]
        first = f"{self.model} on {self.symbol}, from run {self.run_id} ({self.choice})"
        return "\n".join([first, *written, *without, *lines])


def export(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, formats: Sequence[str] | None = None, *,
    run: str = "", out: str | Path | None = None,
) -> ExportResult:  # fmt: skip
    """Write the newest finished model or stack for use without the workspace, by default below results/SYMBOL/RUN/.

    formats : "bundle", all it takes to predict raw bars, and its model card in a second file; "onnx", a graph from
        preprocessed rows to class scores, of a stack one for each base model, which a bundle exported with it holds
        too; "pt2", a network as a program of `torch.export`; "pth", its state dict for
        `torch.load(..., weights_only=True)`. None: bundle and onnx, the bundle alone where the model has no graph or
        the packages of the extra onnx are not installed.
    run : run id of the model; "" for the newest.
    out : folder to write to.

    Nothing is written unless everything can be, and each graph predicts as its model does. Raises SettingsError for
    another format or a model that does not have it, NotPreparedError where none is finished or its prepared data is
    gone, FactoryError naming the worst row of a graph that predicts otherwise.
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
    if {"bundle", "onnx"} & set(formats):
        data = load_dataset(workspace, symbol, horizon)
        bundle, no_onnx = _build(
            partial(build_bundle, workspace, data, artifact, files_of["bundle"]), formats, optional
        )
        if "bundle" in formats:
            content |= {"bundle": bundle.to_bytes(), "card": bundle.card.encode()}
        for base, graph in bundle.graphs.items():
            kind, file = ("onnx", name) if base == model else (f"onnx {base}", f"{name}-{base}")
            content[kind], files_of[kind] = graph, f"{file}.onnx"
    if {"pt2", "pth"} & set(formats):
        content |= _network_files(artifact, set(formats))
    paths = {kind: _path(workspace, artifact, files_of[kind], out) for kind in content}
    python = [line for kind, path in paths.items() for line in _python_lines(kind, path, artifact)]
    for kind, path in paths.items():
        files.write(path, content[kind])
    return ExportResult(
        symbol=symbol, horizon=horizon, model=model, run_id=run_id, paths=paths, python=python, no_onnx=no_onnx,
        choice=predictions.describe_run_choice(workspace, artifact, run), seconds=time.perf_counter() - started,
    )  # fmt: skip


def _build(build: Callable[..., Bundle], formats: Sequence[str], optional: bool) -> tuple[Bundle, str]:
    """Return the bundle, and why it has no ONNX graph where it should, which is an error unless that is `optional`."""
    try:
        return build(with_onnx="onnx" in formats), ""
    except FactoryError as error:
        if not optional:
            raise
        return build(with_onnx=False), str(error)


def _path(workspace: Workspace, artifact: Artifact, file: str, out: str | Path | None) -> Path:
    if out:
        return Path(out) / file
    return stored_path(workspace.results / artifact.symbol, artifact.facts["run_id"], file, inside=workspace.results)


def _check_formats(formats: Sequence[str], model: str) -> None:
    """Raise SettingsError for a format that is unknown, or that this kind of model does not have."""
    for name in formats:
        if name not in FORMATS:
            raise SettingsError("Unknown export format", where="formats", got=name, wanted=", ".join(FORMATS))
    if {"pt2", "pth"} & set(formats) and (model == predictions.STACK or not find_model_spec(model).windowed):
        raise SettingsError(
            "Only a network has a state dict or a torch program", where="model", got=model, wanted="a network",
            next_step=f"export {model} as bundle or onnx",
        )  # fmt: skip


def _network_files(artifact: Artifact, formats: set[str]) -> dict[str, bytes]:
    """Return the torch files of a network: its state dict, its program."""
    fitted = TrainedModel.from_state(artifact.load_state()).estimator
    makers = {"pth": state_dict.export_state_dict_bytes, "pt2": network_graph.network_to_pt2}
    return {name: make(fitted) for name, make in makers.items() if name in formats}


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
    if kind == "pt2":
        return [
            "import torch  # pt2: input: scaled windows; output: logits",
            f"logits = torch.export.load({str(path)!r}).module()(x)",
        ]
    if kind == "pth":
        fitted = TrainedModel.from_state(artifact.load_state()).estimator
        return [
            "import torch  # pth: input: scaled windows (the scaler is in the model's artifact); output: logits",
            state_dict.state_dict_module_source(fitted),
            f"module.load_state_dict(torch.load({str(path)!r}, map_location='cpu', weights_only=True)); module.eval()",
        ]
    return []
