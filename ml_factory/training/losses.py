"""Losses as a sum and a weight, so that batches, epochs and processes add up to the same mean."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]  # (network, batch) -> (sum of w * loss, sum of w)


def weighted_cross_entropy(logits_BC: Tensor, target_B: Tensor, weight_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum of w * cross-entropy, sum of w); their ratio is the weighted mean log loss in nats.

    target_B : int64 classes.
    weight_B : >= 0; a row of weight 0 gives neither loss nor gradient.
    """
    loss_B = F.cross_entropy(logits_BC.float(), target_B, reduction="none")
    return (weight_B * loss_B).sum(), weight_B.sum()
