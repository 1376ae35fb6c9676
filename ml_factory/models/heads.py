"""Output heads of networks, and the clock offset of their logits.

B batch, T time steps, F features, C classes.
"""

import torch
from torch import Tensor, nn

from ml_factory.models.session_clock_offset import PROGRESS_CELLS, SessionClockOffset


def zero_output_head(network: nn.Module, outputs: int) -> None:
    """Set the last linear layer with so many outputs to 0, so that an untrained network gives logits of 0.

    A network without such a layer, which may be a user's, keeps its initial weights.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear) and layer.out_features == outputs]
    for parameter in layers[-1].parameters() if layers else ():
        nn.init.zeros_(parameter)


class NetworkWithClockOffset(nn.Module):
    """A network and the `SessionClockOffset` added to its logits, as one module for export.

    column, ending : those of the offset. Its tables are buffers, so that a state dict holds all.
    """

    def __init__(self, network: nn.Module, column: int, ending: int, offset: SessionClockOffset | None = None):
        super().__init__()
        self.network, self.column, self.ending = network, column, ending
        bounds_3, shares_C3 = torch.zeros(3, dtype=torch.float64), torch.zeros(PROGRESS_CELLS + ending, 3).double()
        if offset is not None:
            bounds_3 = torch.tensor([offset.low, offset.high, offset.step], dtype=torch.float64)
            shares_C3 = torch.from_numpy(offset.log_shares_C3)
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
        progress_B = (share_B * PROGRESS_CELLS).long().clamp(max=PROGRESS_CELLS - 1)
        left_B = ((high - value_B) / torch.where(step > 0, step, one)).round().long()
        return torch.where((step > 0) & (left_B < self.ending), PROGRESS_CELLS + left_B, progress_B)
