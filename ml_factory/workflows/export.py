"""Export a finished model: one bundle that predicts raw bars, or files for other programs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_factory.argument_checks import check_horizon
from ml_factory.errors import SettingsError
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import find_model_spec
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.files import files
from ml_factory.storage.stored_paths import stored_path
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows import predictions
from ml_factory.workflows.build_bundle import build_bundle
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.results import Result

FORMATS = ("bundle", "pth")
PTH = "model_tpu.pth"
state_dict = LazyModule("ml_factory.training.export_state_dict")  # torch comes with the networks only


@dataclass(frozen=True)
class ExportResult(Result):
    """Exported files of a model.

    paths : format -> file; "card" is the bundle's model card.
    python : lines of Python that use the files elsewhere.
    """

    symbol: str
    horizon: int
    model: str
    run_id: str
    paths: dict[str, Path]
    python: list[str]

    def summary(self) -> str:
        written = [f"  {name}: {path}" for name, path in self.paths.items()]
        lines = ["  to use it:", *(f"    {line}" for line in self.python)]
        return "\n".join([f"{self.model} on {self.symbol}, from run {self.run_id}", *written, *lines])


def export(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, formats: Sequence[str] = ("bundle",), *,
    run: str = "", out: str | Path | None = None,
) -> ExportResult:  # fmt: skip
    """Write the newest finished model or stack for use without the workspace, by default below results/SYMBOL/RUN/.

    formats : "bundle", all it takes to predict raw bars, and its model card in a second file; "pth", a network's state
        dict for `torch.load(..., weights_only=True)`.
    run : run id of the model; "" for the newest.
    out : folder to write to.

    Nothing is written unless everything can be. Raises SettingsError for another format or a model without a state
    dict, NotPreparedError where none is finished or its prepared data is gone.
    """
    started, workspace, symbol = time.perf_counter(), Workspace(workspace), check_symbol(symbol)
    _check_formats(formats, model)
    artifact = predictions.find_artifact_to_predict(workspace, symbol, check_horizon(horizon), model, run)
    run_id, name = artifact.facts["run_id"], f"{symbol}-h{horizon}-{model}"
    content: dict[str, tuple[str, bytes]] = {}
    python = []
    if "bundle" in formats:
        bundle = build_bundle(workspace, load_dataset(workspace, symbol, horizon), artifact, f"{name}.bundle")
        content["bundle"] = (f"{name}.bundle", bundle.to_bytes())
        content["card"] = (f"{name}.md", bundle.card.encode())
    if "pth" in formats:
        content["pth"] = (PTH, b"")
    paths = {kind: _path(workspace, artifact, file, out) for kind, (file, _) in content.items()}
    if "bundle" in paths:
        python += ["from ml_factory import Bundle", f"frame = Bundle.load({str(paths['bundle'])!r}).predict(bars)"]
    if "pth" in paths:
        data, lines = _state_dict(artifact, paths["pth"])
        content["pth"], python = (PTH, data), python + lines
    for kind, path in paths.items():
        files.write(path, content[kind][1])
    return ExportResult(
        symbol=symbol, horizon=horizon, model=model, run_id=run_id, paths=paths, python=python,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def _path(workspace: Workspace, artifact: Artifact, file: str, out: str | Path | None) -> Path:
    if out:
        return Path(out) / file
    return stored_path(workspace.results / artifact.symbol, artifact.facts["run_id"], file, inside=workspace.results)


def _check_formats(formats: Sequence[str], model: str) -> None:
    """Raise SettingsError for a format that is unknown, or that this kind of model does not have."""
    for name in formats:
        if name not in FORMATS:
            raise SettingsError("Unknown export format", where="formats", got=name, wanted=", ".join(FORMATS))
    if "pth" in formats and (model == predictions.STACK or not find_model_spec(model).windowed):
        raise SettingsError(
            "Only a network has a state dict", where="model", got=model, wanted="a network",
            next_step=f"export {model} as a bundle",
        )  # fmt: skip


def _state_dict(artifact: Artifact, path: Path) -> tuple[bytes, list[str]]:
    """Return a network's state dict as `torch.save` writes it, and the Python that loads it."""
    fitted = TrainedModel.from_state(artifact.load_state()).estimator
    return state_dict.export_state_dict_bytes(fitted), [
        "# pth: input: scaled windows (the scaler is in the model's artifact); output: logits",
        "import torch", state_dict.state_dict_module_source(fitted),
        f"module.load_state_dict(torch.load({str(path)!r}, map_location='cpu', weights_only=True)); module.eval()",
    ]  # fmt: skip
