import math

import pytest
import torch
from torch import nn

from tests.contract.doors import AdamW, TrainSpec, optimizer_step_scalars, warmup_cosine_learning_rate

ONE, YES = torch.tensor(1.0), torch.tensor(True)


def test_rate_warms_up_then_decays_by_cosine():
    spec = TrainSpec(lr=1.0, warmup=0.2)
    rates = [warmup_cosine_learning_rate(step, 10, spec) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5) and rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert warmup_cosine_learning_rate(0, 10, TrainSpec(lr=1.0, warmup=0.0)) == 1.0 and min(rates) > 0


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2))


@pytest.mark.parametrize("first", [0, 36_290])
def test_adamw_over_whole_schedule_equals_torch_adamw(first):
    """Also where the corrections are exactly 1 (from step 15,935 on in float32) and the rate nearly 0."""
    ours, theirs, spec = network(), network(), TrainSpec(weight_decay=0.1, lr=0.01)
    optimizer = AdamW(ours)
    groups = [[p for p in theirs.parameters() if (p.ndim >= 2) is many] for many in (True, False)]
    reference = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in zip(groups, (0.1, 0.0), strict=True)]
    )
    for p in theirs.parameters():
        reference.state[p] = {
            "step": torch.tensor(float(first)),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    torch.manual_seed(1)
    for step in range(20):
        x = torch.randn(8, 6)
        lr = warmup_cosine_learning_rate(step, 20, spec)
        for group in reference.param_groups:
            group["lr"] = lr
        for net in (ours, theirs):
            net(x).square().mean().backward()
        optimizer.step(optimizer_step_scalars(first + step, lr, spec), ONE, YES)
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)
