"""Export of a fitted network for other programs: its state dict as of `torch.save`, and the Python that builds the
module.

Written and never read by this library: tensors only, for `torch.load(..., weights_only=True)`.
"""

from dataclasses import asdict
from io import BytesIO

import torch
from torch import nn

from ml_factory.errors import FactoryError
from ml_factory.models.heads import NetworkWithClockOffset
from ml_factory.training.estimator import NeuralClassifier


def export_state_dict_bytes(model: NeuralClassifier) -> bytes:
    """Return the state dict, tensors on the CPU, as bytes. Raises FactoryError before the model is fitted."""
    if model.network is None:
        raise FactoryError("The model is not fitted", where=model.name, next_step="train it first")
    buffer = BytesIO()
    state = network_with_offset(model).state_dict()
    torch.save({name: value.detach().cpu().clone() for name, value in state.items()}, buffer)
    return buffer.getvalue()


def network_with_offset(model: NeuralClassifier) -> nn.Module:
    """Return the network, with its clock offset where it has one."""
    if model.offset is None:
        return model.network
    return NetworkWithClockOffset(model.network, model.offset.column, model.offset.ending, model.offset)


def state_dict_module_source(model: NeuralClassifier) -> str:
    """Return Python that builds the `nn.Module` of the state dict; C = 3 logits of short, neutral, long."""
    kind, spec = model.kind, model.network_spec
    settings = ", ".join(
        f"{name}={value!r}" for name, value in asdict(spec).items() if value != getattr(kind.Spec(), name)
    )
    made, imports = kind.__name__, [f"from {kind.__module__} import {kind.__name__}"]
    made = f"{made}({model.features}, {model.lookback}, 3, {kind.__name__}.Spec({settings}))"
    if model.offset is not None:
        imports.append("from ml_factory.models.heads import NetworkWithClockOffset")
        made = f"NetworkWithClockOffset({made}, {model.offset.column}, {model.offset.ending})"
    return "; ".join([*imports, f"module = {made}"])
