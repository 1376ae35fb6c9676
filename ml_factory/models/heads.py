"""Tasks and output heads of networks, and the clock offset of their logits.

B batch, F features (channels), S steps ahead, C classes, or channels that are forecast, Q quantiles, X width of a code.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ml_factory.errors import SettingsError
from ml_factory.models.session_clock_offset import PROGRESS_CELLS, SessionClockOffset


@dataclass(frozen=True)
class ForecastTask:
    """The next `steps` values of the first `channels` features (None: of all of them), in the inputs' own units.

    quantiles : levels in (0, 1), rising; a network then answers y_BSCQ, without them y_BSC.
    """

    steps: int
    channels: int | None = None
    quantiles: tuple[float, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "quantiles", tuple(self.quantiles))
        for name, value in (("steps", self.steps), ("channels", self.channels or 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError("Cannot forecast this", where=name, got=repr(value), wanted="an integer >= 1")
        levels = (0, *self.quantiles, 1)
        if any(low >= high for low, high in pairwise(levels)):
            raise SettingsError(
                "Cannot forecast this", where="quantiles", got=self.quantiles, wanted="rising, in (0, 1)"
            )

    def channel_count(self, features: int) -> int:
        """C for inputs of that many features."""
        if self.channels is not None and self.channels > features:
            raise SettingsError("Cannot forecast this", where="channels", got=self.channels, wanted=f"<= {features}")
        return self.channels or features

    @property
    def values_per_step(self) -> int:
        """Numbers a step and a channel: Q, or 1."""
        return len(self.quantiles) or 1


# A number of classes, or a forecast.
Task = int | ForecastTask


class VectorHead(nn.Module):
    """One code for all channels, code_BX -> logits_BC or y_BSC (y_BSCQ): every step and channel read off it at once."""

    def __init__(self, width: int, features: int, task: Task):
        super().__init__()
        self.shape = (task,)
        if isinstance(task, ForecastTask):
            values = (task.values_per_step,) if task.quantiles else ()
            self.shape = (task.steps, task.channel_count(features), *values)
        self.linear = nn.Linear(width, torch.Size(self.shape).numel())

    def forward(self, code_BX: Tensor) -> Tensor:
        return self.linear(code_BX).unflatten(-1, self.shape)


class ChannelHead(nn.Module):
    """Output head with a code for each channel, code_BFX.

    A forecast reads each channel's code alone, through the same weights; classes read all codes, and the levels that
    instance norm removed, where given.

    read : width of a map, shared by all channels, from each code to the class logits' input (None: the whole code). The
        whole code has weights of its own per channel, more than overlapping labels can fit.
    """

    def __init__(self, width: int, features: int, task: Task, levels: bool, read: int | None = None):
        super().__init__()
        self.task, self.levels = task, levels
        if isinstance(task, ForecastTask):
            self.channels = task.channel_count(features)
            self.linear = nn.Linear(width, task.steps * task.values_per_step)
        else:
            width += 2 * levels
            self.read = nn.Identity() if read is None else nn.Linear(width, read)
            self.linear = nn.Linear(features * (width if read is None else read), task)

    def forward(self, code_BFX: Tensor, level_BF2: Tensor | None) -> Tensor:
        if isinstance(self.task, ForecastTask):
            shape = (self.task.steps, self.task.values_per_step)
            y_BCSQ = self.linear(code_BFX[:, : self.channels]).unflatten(-1, shape)
            y_BSCQ = y_BCSQ.transpose(1, 2)
            return y_BSCQ if self.task.quantiles else y_BSCQ.squeeze(-1)
        code_BFX = torch.cat([code_BFX, level_BF2], dim=-1) if self.levels else code_BFX
        return self.linear(self.read(code_BFX).flatten(1))


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

    def forward(self, x_BTF: Tensor, **covariates: Tensor) -> Tensor:
        logits_BC = self.network(x_BTF, **covariates)
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
