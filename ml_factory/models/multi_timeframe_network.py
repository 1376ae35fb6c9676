"""Multi-scale networks: each frame of coarse bars is read at its own stride, by a network of its own.

B batch, T rows of the window, L steps of a frame in it, F features, X width of a frame's code, C classes.

A row carries its coarse columns as they were last complete (`rsi_14@60m`), so in a window of 5-minute rows an hourly
column repeats each value twelve times. Its frame is read at every twelfth row, once an hour; the columns of the base
bars at every row. No information of the window is lost, and a coarse frame needs fewer steps.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ml_factory.errors import SettingsError
from ml_factory.models.heads import Task, VectorHead

CODE = 32  # width of the code of a frame's network
Strides = tuple[tuple[int, int], ...]


def frame_strides(columns: Sequence[str], base_minutes: int) -> Strides:
    """Return ((stride, count), …) of columns as `FeatureSpec` orders them: `@60m` on 5-minute rows has stride 12.

    Frames of hours and days (`@4h`, `@1d`), longer than a window may be, keep stride 1.
    """
    runs: list[list[int]] = []
    for column in columns:
        minutes = re.search(r"@(\d+)m$", column)
        stride = int(minutes.group(1)) // base_minutes if minutes else 1
        if runs and runs[-1][0] == stride:
            runs[-1][1] += 1
        else:
            runs.append([stride, 1])
    return tuple((stride, count) for stride, count in runs)


class TimeframeSplitter(nn.Module):
    """x_BTF of base rows -> one x_BLF a frame, the finest first: its columns at every `stride`-th row, up to the last.

    L = (T - 1) // stride + 1 of each frame in `steps`, its columns counted in `widths`.
    """

    def __init__(self, strides: Strides, features: int, lookback: int):
        super().__init__()
        if sum(count for _, count in strides) != features or min(stride for stride, _ in strides) < 1:
            raise SettingsError(
                "These frames are not those of the columns", where="frames", got=strides,
                wanted=f"(stride >= 1, columns) pairs for {features} columns",
            )  # fmt: skip
        longest = max(stride for stride, _ in strides)
        if lookback <= longest:
            raise SettingsError(
                "The window holds one bar of a frame", where="lookback", got=lookback,
                wanted=f"more than {longest} rows", next_step="a longer lookback, or data without this frame",
            )  # fmt: skip
        stride_F = torch.tensor([stride for stride, count in strides for _ in range(count)])
        self.strides = tuple(sorted({stride for stride, _ in strides}))
        self.widths = [int((stride_F == stride).sum()) for stride in self.strides]
        self.steps = [(lookback - 1) // stride + 1 for stride in self.strides]
        for stride, steps in zip(self.strides, self.steps, strict=True):
            self.register_buffer(f"columns{stride}_F", (stride_F == stride).nonzero()[:, 0], persistent=False)
            rows_L = lookback - 1 - stride * torch.arange(steps - 1, -1, -1)
            self.register_buffer(f"rows{stride}_L", rows_L, persistent=False)

    def forward(self, x_BTF: Tensor) -> list[Tensor]:
        return [
            x_BTF.index_select(2, getattr(self, f"columns{stride}_F")).index_select(1, getattr(self, f"rows{stride}_L"))
            for stride in self.strides
        ]


def multi_timeframe_network_class(network: type[nn.Module], strides: Strides) -> type[nn.Module]:
    """Return a network class with one network per frame, same settings, and one head that reads all their codes.

    Settings that count steps are cut to the steps of a frame where the network's Spec defines `within`: in a window of
    32 rows an hourly column has 3 steps, and a PatchTST's patch of 16 becomes one of 3. `build_model("lstm",
    frames=frame_strides(columns, 5))` builds it; `lookback` counts base rows.
    """

    class SeveralFrames(nn.Module):
        Spec = network.Spec
        features = sum(count for _, count in strides)

        def __init__(self, features: int, lookback: int, task: Task, spec):
            super().__init__()
            self.frames = TimeframeSplitter(strides, features, lookback)
            parts = zip(self.frames.strides, self.frames.widths, self.frames.steps, strict=True)
            within = getattr(spec, "within", lambda steps: spec)
            self.each = nn.ModuleDict(
                {f"every{by}": network(width, steps, CODE, within(steps)) for by, width, steps in parts}
            )
            self.head = VectorHead(CODE * len(self.each), features, task)

        def forward(self, x_BTF: Tensor) -> Tensor:
            codes = [read(x_BLF) for read, x_BLF in zip(self.each.values(), self.frames(x_BTF), strict=True)]
            return self.head(functional.gelu(torch.cat(codes, dim=1)))

    return SeveralFrames


def parse_timeframe_strides(given: object) -> Strides:
    """Return the pairs of a setting, also of one read from JSON. Raises SettingsError."""
    try:
        pairs = tuple((int(stride), int(count)) for stride, count in given)
    except (TypeError, ValueError):
        pairs = ()
    if not pairs or min(min(pair) for pair in pairs) < 1:
        raise SettingsError(
            "Not a setting of frames", where="frames", got=repr(given), wanted="pairs (stride, columns) >= 1",
            next_step="frames=True where the data names the columns (train), else frame_strides(columns, base_minutes)",
        )  # fmt: skip
    return pairs
