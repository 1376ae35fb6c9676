"""AdamW in two groups, a learning rate that is a pure function of the step, and the scale of a loss in fp16.

The first two keep no counter: on resume the step alone gives the rate and the bias corrections. All numbers that change
from step to step reach the device as one vector, since a compiler that reads them as constants builds a new program
where one of them becomes 0 or 1 (the end of a cosine, a double's correction after 36,300 steps).
"""

import math
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

from ml_factory.training.spec import TrainSpec

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
FIRST_SCALE, LEAST_SCALE, STEPS_TO_GROW = 2.0**16, 1.0, 2000


def warmup_cosine_learning_rate(step: int, total: int, spec: TrainSpec) -> float:
    """Return the learning rate of step 0 .. total - 1: linear warm-up, then a cosine that would reach 0 at `total`."""
    warm = int(spec.warmup * total)
    if step < warm:
        return spec.lr * (step + 1) / warm
    share = (step - warm) / max(total - warm, 1)
    return spec.lr * 0.5 * (1 + math.cos(math.pi * share))


def optimizer_step_scalars(step: int, lr: float, spec: TrainSpec) -> Tensor:
    """Return the numbers of a step, float32 (4,) on the host: lr, 1 - lr * weight_decay, lr over the mean's bias
    correction, and one over the root of the square's.
    """
    count = step + 1
    values = lr, 1 - lr * spec.weight_decay, lr / (1 - BETA1**count), (1 - BETA2**count) ** -0.5
    return torch.tensor(values, dtype=torch.float32)


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) without state on the host; matrices decay, biases, norms and other vectors do
    not.

    Equal to torch.optim.AdamW, but a flag on the device can skip a step, and nothing waits for it.
    """

    def __init__(self, network: nn.Module):
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        # Decaying parameters first, so that each group is one slice of every list.
        named.sort(key=lambda item: item[1].ndim < 2)
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.decayed = sum(p.ndim >= 2 for p in self.parameters)
        # A kernel per parameter dominates compile time on XLA: all moments are one vector each there.
        self.one_vector = any(p.device.type == "xla" for p in self.parameters)
        self.means, self.squares = self._zeros(), self._zeros()

    def gradients(self) -> list[Tensor]:
        """Return each parameter's gradient; 0 for a parameter that the loss does not reach."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, numbers: Tensor, factor: Tensor, ok: Tensor) -> None:
        """Take one step along factor * gradient; where `ok` is false nothing changes, whatever the gradients hold.

        numbers : `optimizer_step_scalars` of the step, on the device.
        factor : scalar that converts the gradient to that of the mean loss, clipped; 0 where not ok.
        """
        one, zero = torch.ones_like(factor), torch.zeros_like(factor)
        gradients = self._together(self.gradients())
        for gradient in gradients:
            gradient.nan_to_num_(0.0, 0.0, 0.0)  # 0 * inf would be NaN
        torch._foreach_mul_(gradients, factor)
        torch._foreach_mul_(self.means, torch.where(ok, BETA1 * one, one))
        torch._foreach_add_(self.means, gradients, alpha=1 - BETA1)
        torch._foreach_mul_(self.squares, torch.where(ok, BETA2 * one, one))
        torch._foreach_addcmul_(self.squares, gradients, gradients, value=1 - BETA2)
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_mul_(roots, numbers[3])
        torch._foreach_add_(roots, EPSILON)
        moves = torch._foreach_div(self.means, roots)
        torch._foreach_mul_(moves, torch.where(ok, -numbers[2], zero))
        if self.decayed:
            torch._foreach_mul_(self.parameters[: self.decayed], torch.where(ok, numbers[1], one))
        torch._foreach_add_(self.parameters, self._apart(moves))

    def _together(self, tensors: list[Tensor]) -> list[Tensor]:
        """Concatenate tensors in the layout of the moments."""
        return [torch.cat([one.flatten() for one in tensors])] if self.one_vector else tensors

    def _apart(self, kept: list[Tensor]) -> list[Tensor]:
        """Split the moments into one tensor per parameter."""
        if not self.one_vector:
            return kept
        # One by one: torch_xla records a whole split for each of its parts, 58 times 58 slices for a TFT.
        ends = accumulate(p.numel() for p in self.parameters)
        parts = (kept[0].narrow(0, end - p.numel(), p.numel()) for end, p in zip(ends, self.parameters, strict=True))
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _zeros(self) -> list[Tensor]:
        # Made on the host: on a lazy device a fill would be one more program.
        zeros = self._together([torch.zeros(p.shape, dtype=p.dtype) for p in self.parameters])
        return [zero.to(p.device) for zero, p in zip(zeros, self.parameters, strict=False)]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return moments by parameter name: {"weight": {"exp_avg": tensor, "exp_avg_sq": tensor}}."""
        kept = self.means, self.squares
        if self.one_vector:  # cut on the device it would be a program of its own
            kept = [one.cpu() for one in self.means], [one.cpu() for one in self.squares]
        moments = zip(self.names, *map(self._apart, kept), strict=True)
        return {name: {"exp_avg": mean, "exp_avg_sq": square} for name, mean, square in moments}

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the moments of the same network, on each parameter's own device."""
        for kept, moment in ((self.means, "exp_avg"), (self.squares, "exp_avg_sq")):
            for place, value in zip(kept, self._together([state[name][moment] for name in self.names]), strict=True):
                place.copy_(value)


def total_gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients together, float32."""
    if gradients[0].device.type == "xla":
        return torch.cat([gradient.flatten() for gradient in gradients]).float().square().sum().sqrt()
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)).float())


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

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale.cpu(), "good": self.good.cpu()}

    def load(self, state: Mapping[str, Tensor], place) -> None:
        self.scale, self.good = place(state["scale"].clone()), place(state["good"].clone())
