"""A fitted network as a graph for other programs: ONNX, and a program of `torch.export`."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ml_factory.errors import SettingsError
from ml_factory.inference.graph_model import INPUT, OUTPUT
from ml_factory.training.estimator import NeuralClassifier
from ml_factory.training.export_state_dict import network_with_offset

OPSET = 20
_ROWS = 3  # of the example that is traced; the batch is dynamic


def network_to_onnx(model: NeuralClassifier) -> Any:
    """Return the network as an `onnx.ModelProto`: scaled windows x_BTF -> logits, without its clock offset."""

    def export() -> Any:
        return torch.onnx.export(
            model.network.eval(), (_example(model),), dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},),
            opset_version=OPSET, input_names=[INPUT], output_names=[OUTPUT], verbose=False,
        ).model_proto  # fmt: skip

    return _exported(model, export)


def network_to_pt2(model: NeuralClassifier) -> bytes:
    """Return the file of `torch.export.save`: scaled windows x_BTF -> logits, with its clock offset."""

    def export() -> bytes:
        module = network_with_offset(model).eval()
        program = torch.export.export(module, (_example(model),), dynamic_shapes=({0: torch.export.Dim("batch")},))
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        return buffer.getvalue()

    return _exported(model, export)


def _example(model: NeuralClassifier) -> torch.Tensor:
    return torch.zeros(_ROWS, model.lookback, model.features)


def _exported(model: NeuralClassifier, export: Callable[[], Any]) -> Any:
    """Run an export. Raises SettingsError where the network cannot be traced."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # notes of the exporter on operators that no network here has
        try:
            return export()
        except (RuntimeError, torch._dynamo.exc.UserError) as error:
            raise SettingsError(
                "This network cannot be exported as a graph", where=model.name, got=str(error).strip()[:200],
                next_step="export the bundle alone",
            ) from error  # fmt: skip
