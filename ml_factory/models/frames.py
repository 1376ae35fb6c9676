"""Several frames at once: columns of coarse bars read at their own pace, farther back.

B batch, T rows of the window, L steps kept of it, F features.

A row carries its coarse columns as they were last complete (`rsi_14@60m`), so in a window of 5-minute rows an hourly
column says the same thing twelve times. Read at every twelfth row it says twelve times as many hours instead.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ml_factory.errors import SettingsError
from ml_factory.models.heads import Task

Strides = tuple[tuple[int, int], ...]


def strides_of(columns: Sequence[str], base_minutes: int | str) -> Strides:
    """((stride, count), …) of columns as `FeatureSpec` orders them: `@60m` on 5-minute rows has stride 12.

    Frames of hours and days (`@4h`, `@1d`), longer than a window may be, keep stride 1.
    base_minutes : `FeatureSpec.base`; SettingsError for bars by activity, of which no number makes an hour.
    """
    if not isinstance(base_minutes, int):
        raise SettingsError(
            "Bars by activity have no pace that frames could be read at", where="base_minutes", got=base_minutes,
            wanted="bars of so many minutes", next_step="give the network the columns as they are, without frames",
        )  # fmt: skip
    runs: list[list[int]] = []
    for column in columns:
        minutes = re.search(r"@(\d+)m$", column)
        stride = int(minutes.group(1)) // base_minutes if minutes else 1
        if runs and runs[-1][0] == stride:
            runs[-1][1] += 1
        else:
            runs.append([stride, 1])
    return tuple((stride, count) for stride, count in runs)


class Frames(nn.Module):
    """x_BTF of base rows -> x_BLF, column by column every `stride`-th row, all ending at the window's last.

    L = (T - 1) // (largest stride) + 1 steps, the same for all columns, so that any network can read them side by side.
    """

    def __init__(self, strides: Strides, features: int, lookback: int):
        super().__init__()
        if sum(count for _, count in strides) != features or min(stride for stride, _ in strides) < 1:
            raise SettingsError(
                "These frames are not those of the columns", where="strides", got=strides,
                wanted=f"(stride >= 1, columns) pairs for {features} columns",
            )  # fmt: skip
        self.steps = (lookback - 1) // max(stride for stride, _ in strides) + 1
        back_L = torch.arange(self.steps - 1, -1, -1)
        self.counts = [count for _, count in strides]
        for number, (stride, _) in enumerate(strides):
            self.register_buffer(f"rows{number}_L", lookback - 1 - stride * back_L, persistent=False)

    def forward(self, x_BTF: Tensor) -> Tensor:
        parts = x_BTF.split(self.counts, dim=2)
        return torch.cat([part.index_select(1, getattr(self, f"rows{i}_L")) for i, part in enumerate(parts)], dim=2)


def several_frames(network: type[nn.Module], strides: Strides) -> type[nn.Module]:
    """The network behind a `Frames` stage, with the same settings; `lookback` then counts base rows.

    register_model("lstm_frames", several_frames(LSTM, strides_of(columns, 5))) makes it a model like the others.
    """

    class SeveralFrames(nn.Module):
        Spec = network.Spec

        def __init__(self, features: int, lookback: int, task: Task, spec):
            super().__init__()
            self.frames = Frames(strides, features, lookback)
            self.network = network(features, self.frames.steps, task, spec)

        def forward(self, x_BTF: Tensor, **more: Tensor) -> Tensor:
            return self.network(self.frames(x_BTF), **more)

    return SeveralFrames
