"""Losses as a sum and a weight, so that batches, epochs and processes add up to the same mean."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
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


def weighted_mse(y_BSC: Tensor, target_BSC: Tensor, weight_B: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of w * mean squared error of a row, sum of w); steps S and channels C of a row have equal weight."""
    loss_B = (y_BSC.float() - target_BSC).square().mean(dim=(1, 2))
    return (weight_B * loss_B).sum(), weight_B.sum()


def weighted_pinball(
    y_BSCQ: Tensor, target_BSC: Tensor, weight_B: Tensor, quantiles: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """(sum of w * mean quantile loss of a row, sum of w): max(q e, (q - 1) e) with e = target - forecast (Koenker and
    Bassett 1978), the mean over steps, channels and quantiles. Half the absolute error for the median alone.
    """
    level_Q = torch.tensor(tuple(quantiles), dtype=torch.float32).to(y_BSCQ.device)
    error_BSCQ = target_BSC.unsqueeze(-1) - y_BSCQ.float()
    loss_B = torch.maximum(level_Q * error_BSCQ, (level_Q - 1) * error_BSCQ).mean(dim=(1, 2, 3))
    return (weight_B * loss_B).sum(), weight_B.sum()
