"""Number format of a step, by the hardware's fast formats. Weights, moments and evaluation stay float32."""

from collections.abc import Mapping

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE, LEAST_SCALE, STEPS_TO_GROW = 2.0**16, 1.0, 2000


def native_precision(kind: str) -> str:
    """Return the fast format: bf16 (XLA devices, CUDA from Ampere on, CPUs with AMX), fp16 (older CUDA with tensor
    cores), else fp32. Emulated formats do not count.
    """
    if kind == "xla":
        return "bf16"
    if kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        return "fp16" if torch.cuda.get_device_capability() >= (7, 0) else "fp32"
    return "bf16" if torch.cpu._is_amx_tile_supported() else "fp32"


class LossScaler:
    """Loss scaling that keeps small fp16 gradients above 0 (Micikevicius et al. 2018), decided on the device.

    Halved, and the step skipped, when a gradient overflows; doubled after 2,000 steps without. As torch's GradScaler,
    which waits for the device at every step.
    """

    def __init__(self, place):
        self.scale, self.good = place(torch.tensor(FIRST_SCALE)), place(torch.tensor(0, dtype=torch.int32))

    def adapt(self, ok: Tensor) -> None:
        """Adapt the scale after a step whose gradients were finite (`ok`) or not."""
        good = torch.where(ok, self.good + 1, 0)
        grow = good >= STEPS_TO_GROW
        grown = torch.where(grow, self.scale * 2, self.scale)
        self.scale = torch.where(ok, grown, (self.scale * 0.5).clamp_min(LEAST_SCALE))
        self.good = torch.where(grow, 0, good)

    def is_at_minimum(self) -> Tensor:
        """Return True where no smaller scale is left: then an overflow is the network's own."""
        return self.scale <= LEAST_SCALE

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale.cpu(), "good": self.good.cpu()}

    def load(self, state: Mapping[str, Tensor], place) -> None:
        self.scale, self.good = place(state["scale"].clone()), place(state["good"].clone())
