import math

import torch

from ml_factory.training.losses import weighted_cross_entropy


def test_weighted_cross_entropy_equals_hand_computed_values():
    logits_BC = torch.tensor([[0.0, 0.0, 0.0], [math.log(2.0), 0.0, 0.0]])
    total, weight = weighted_cross_entropy(logits_BC, torch.tensor([2, 0]), torch.tensor([1.0, 4.0]))
    assert weight == 5
    torch.testing.assert_close(total, torch.tensor(math.log(3.0) + 4 * math.log(2.0)))


def test_weighted_cross_entropy_parts_sum_and_zero_weight_has_no_gradient():
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
