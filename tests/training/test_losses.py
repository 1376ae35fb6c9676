import math

import torch

from ml_factory.training.losses import weighted_cross_entropy


def test_weighted_cross_entropy_equals_hand_computed_values():
    logits_BC = torch.tensor([[0.0, 0.0, 0.0], [math.log(2.0), 0.0, 0.0]])
    total, weight = weighted_cross_entropy(logits_BC, torch.tensor([2, 0]), torch.tensor([1.0, 4.0]))
    assert weight == 5
    torch.testing.assert_close(total, torch.tensor(math.log(3.0) + 4 * math.log(2.0)))
