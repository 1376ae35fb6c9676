"""Export a finished model as files for other programs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_factory.errors import SettingsError
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import build_model_from_state, find_model_spec
from ml_factory.storage.files import files
from ml_factory.storage.stored_paths import stored_path
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows import predictions
from ml_factory.workflows.results import Result

FORMATS = ("pth",)
PTH = "model_tpu.pth"
state_dict = LazyModule("ml_factory.training.export_state_dict")  # torch comes with the networks only


@dataclass(frozen=True)
class ExportResult(Result):
    """Exported files of a model.

    paths : format -> file.
    python : lines of Python that load the file elsewhere.
    """

    symbol: str
    horizon: int
    model: str
    run_id: str
    paths: dict[str, Path]
    python: list[str]

    def summary(self) -> str:
        files = [f"  {name}: {path}" for name, path in self.paths.items()]
        usage = ["  input: scaled windows (the scaler is in the model's artifact); output: logits; to load it:"]
        lines = [f"    {line}" for line in self.python]
        return "\n".join([f"{self.model} on {self.symbol}, from run {self.run_id}", *files, *usage, *lines])


def export(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, formats: Sequence[str] = ("pth",), *,
    run: str = "", out: str | Path | None = None,
) -> ExportResult:  # fmt: skip
    """Write the newest finished model for other programs, by default below results/SYMBOL/RUN/.

    formats : "pth", a network's state dict for `torch.load(..., weights_only=True)`.
    run : run id of the model; "" for the newest.
    out : folder to write to.

    Raises SettingsError for another format or a model without a state dict, NotPreparedError where none is finished.
    """
    started, workspace, symbol = time.perf_counter(), Workspace(workspace), check_symbol(symbol)
    for name in formats:
        if name not in FORMATS:
            raise SettingsError("Unknown export format", where="formats", got=name, wanted=", ".join(FORMATS))
    if not find_model_spec(model).windowed:
        raise SettingsError(
            "Only a network has a state dict", where="model", got=model, wanted="a network",
            next_step=f"for the probabilities of {model} use predict",
        )  # fmt: skip
    artifact = predictions.find_artifact_to_predict(workspace, symbol, horizon, model, run)
    fitted = build_model_from_state(TrainedModel.from_state(artifact.load_state()).model_state)
    run_id = artifact.facts["run_id"]
    path = Path(out) / PTH if out else stored_path(workspace.results / symbol, run_id, PTH, inside=workspace.results)
    files.write(path, state_dict.export_state_dict_bytes(fitted))
    python = [
        "import torch", state_dict.state_dict_module_source(fitted),
        f"module.load_state_dict(torch.load({str(path)!r}, map_location='cpu', weights_only=True)); module.eval()",
    ]  # fmt: skip
    return ExportResult(
        symbol=symbol, horizon=horizon, model=model, run_id=run_id, paths={"pth": path}, python=python,
        seconds=time.perf_counter() - started,
    )  # fmt: skip
