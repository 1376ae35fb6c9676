"""Export of a fitted network for other programs: its state dict as of `torch.save`, and the Python that builds the
module.

Written and never read by this library: tensors only, for `torch.load(..., weights_only=True)`.
"""

from dataclasses import asdict
from io import BytesIO

import torch
from torch import Tensor, nn

from ml_factory.models.session_clock import PROGRESS_BINS, SessionClockOffset, session_end_cells
from ml_factory.training.estimator import NeuralClassifier


class NetworkWithClockOffset(nn.Module):
    """A network and the `SessionClockOffset` added to its logits, as one module for export.

    column, horizon : those of the offset and its clock. Its tables are buffers, so that a state dict holds all.
    """

    def __init__(self, network: nn.Module, column: int, horizon: int, offset: SessionClockOffset | None = None):
        super().__init__()
        self.network, self.column, self.horizon, self.ending = network, column, horizon, session_end_cells(horizon)
        bounds_3, shares_C3 = torch.zeros(3).double(), torch.zeros(PROGRESS_BINS + self.ending, 3).double()
        if offset is not None:
            bounds_3 = torch.tensor([offset.low, offset.high, offset.step], dtype=torch.float64)
            shares_C3 = torch.from_numpy(offset.clock.shares_C3).log()
        self.register_buffer("low_high_step_3", bounds_3)
        self.register_buffer("log_shares_C3", shares_C3)

    def forward(self, x_BTF: Tensor) -> Tensor:
        logits_BC = self.network(x_BTF)
        return logits_BC + self.log_shares_C3[self._cells(x_BTF[:, -1, self.column].double())].to(logits_BC.dtype)

    def _cells(self, value_B: Tensor) -> Tensor:
        """int64 (B,), as of `SessionClockOffset`."""
        low, high, step = self.low_high_step_3.unbind()
        value_B = torch.minimum(torch.maximum(torch.where(value_B.isnan(), low, value_B), low), high)
        span, one = high - low, torch.ones_like(low)
        share_B = (value_B - low) / torch.where(span > 0, span, one)
        progress_B = (share_B * PROGRESS_BINS).long().clamp(max=PROGRESS_BINS - 1)
        left_B = ((high - value_B) / torch.where(step > 0, step, one)).round().clamp(max=self.horizon).long()
        ending_B = PROGRESS_BINS + left_B * self.ending // max(self.horizon, 1)
        return torch.where((step > 0) & (left_B < self.horizon), ending_B, progress_B)


def export_state_dict_bytes(model: NeuralClassifier) -> bytes:
    """Return the state dict of a fitted model, tensors on the CPU, as bytes."""
    buffer = BytesIO()
    state = _network_with_offset(model).state_dict()
    torch.save({name: value.detach().cpu().clone() for name, value in state.items()}, buffer)
    return buffer.getvalue()


def _network_with_offset(model: NeuralClassifier) -> nn.Module:
    """Return the network, with its clock offset where it has one."""
    if model.offset is None:
        return model.network
    return NetworkWithClockOffset(model.network, model.offset.column, model.offset.clock.horizon, model.offset)


def state_dict_module_source(model: NeuralClassifier) -> str:
    """Return Python that builds the `nn.Module` of the state dict; C = 3 logits of short, neutral, long."""
    kind, spec = model.kind, model.network_spec
    settings = ", ".join(
        f"{name}={value!r}" for name, value in asdict(spec).items() if value != getattr(kind.Spec(), name)
    )
    made, imports = kind.__name__, [f"from {kind.__module__} import {kind.__name__}"]
    made = f"{made}({model.n_features}, {model.lookback}, 3, {kind.__name__}.Spec({settings}))"
    if model.offset is not None:
        imports.append("from ml_factory.training.export_state_dict import NetworkWithClockOffset")
        made = f"NetworkWithClockOffset({made}, {model.offset.column}, {model.offset.clock.horizon})"
    return "; ".join([*imports, f"module = {made}"])
