import math

import numpy as np
import torch

from ml_factory.training.losses import weighted_cross_entropy, weighted_mse, weighted_pinball


def test_sum_and_weight_by_hand():
    logits_BC = torch.tensor([[0.0, 0.0, 0.0], [math.log(2.0), 0.0, 0.0]])
    total, weight = weighted_cross_entropy(logits_BC, torch.tensor([2, 0]), torch.tensor([1.0, 4.0]))
    assert weight == 5
    torch.testing.assert_close(total, torch.tensor(math.log(3.0) + 4 * math.log(2.0)))


def test_parts_add_up_to_the_whole_and_weightless_rows_give_no_gradient():
    torch.manual_seed(0)
    logits_BC, target_B = torch.randn(8, 3, requires_grad=True), torch.arange(8) % 3
    weight_B = torch.rand(8)
    weight_B[3] = 0
    whole = weighted_cross_entropy(logits_BC, target_B, weight_B)
    parts = [weighted_cross_entropy(logits_BC[at], target_B[at], weight_B[at]) for at in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(whole[0], parts[0][0] + parts[1][0])
    torch.testing.assert_close(whole[1], parts[0][1] + parts[1][1])
    (whole[0] / whole[1]).backward()
    assert (logits_BC.grad[3] == 0).all() and (logits_BC.grad[2] != 0).all()


def test_squared_error_by_hand():
    """Two rows of two steps and one channel: errors 1, 3 and 0, 2; row means 5 and 2, weights 1 and 3."""
    y_BSC, target_BSC = torch.tensor([[[1.0], [3.0]], [[0.0], [2.0]]]), torch.zeros(2, 2, 1)
    total, weight = weighted_mse(y_BSC, target_BSC, torch.tensor([1.0, 3.0]))
    assert (total, weight) == (5 + 3 * 2, 4)


def test_quantile_loss_by_hand():
    """Target 1 above a forecast of 0: q; target 1 below a forecast of 3: 2 (1 - q)."""
    y_BSCQ = torch.tensor([0.0, 3.0]).view(1, 1, 1, 2)
    total, weight = weighted_pinball(y_BSCQ, torch.ones(1, 1, 1), torch.tensor([2.0]), (0.1, 0.9))
    torch.testing.assert_close(total, torch.tensor(2 * (0.1 * 1 + 0.1 * 2) / 2))
    assert weight == 2


def test_the_quantile_of_a_sample_has_the_least_quantile_loss():
    sample_B = torch.randn(999, generator=torch.Generator().manual_seed(0))
    tries = torch.linspace(-3, 3, 601)
    for level in (0.1, 0.5, 0.9):
        losses = [
            float(weighted_pinball(y.expand(999, 1, 1, 1), sample_B.view(-1, 1, 1), torch.ones(999), (level,))[0])
            for y in tries
        ]
        assert abs(tries[int(np.argmin(losses))] - sample_B.quantile(level)) <= 0.011
