import math

import pytest
import torch
from torch import nn

from ml_factory.errors import CheckpointError
from ml_factory.training.optim import AdamW, controls, rate, total_norm
from ml_factory.training.spec import TrainSpec

ONE, YES = torch.tensor(1.0), torch.tensor(True)


def test_the_rate_climbs_then_falls_on_a_cosine():
    spec = TrainSpec(lr=1.0, warmup=0.2)
    rates = [rate(step, 10, spec) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5) and rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert rate(0, 10, TrainSpec(lr=1.0, warmup=0.0)) == 1.0 and min(rates) > 0


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2))


@pytest.mark.parametrize("first", [0, 36_290])
def test_it_is_torchs_adamw_over_a_whole_schedule(first):
    """Also where the corrections are exactly 1 (from step 15,935 on in float32) and the rate nearly 0."""
    ours, theirs, spec = network(), network(), TrainSpec(weight_decay=0.1, lr=0.01)
    optimizer = AdamW(ours)
    groups = [[p for p in theirs.parameters() if (p.ndim >= 2) is many] for many in (True, False)]
    twin = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in zip(groups, (0.1, 0.0), strict=True)]
    )
    for p in theirs.parameters():
        twin.state[p] = {
            "step": torch.tensor(float(first)),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    torch.manual_seed(1)
    for step in range(20):
        x = torch.randn(8, 6)
        lr = rate(step, 20, spec)
        for group in twin.param_groups:
            group["lr"] = lr
        for net in (ours, theirs):
            net(x).square().mean().backward()
        optimizer.update(controls(first + step, lr, spec), ONE, YES)
        twin.step()
        optimizer.clear()
        twin.zero_grad()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)


def test_no_number_of_the_schedule_is_missing_from_the_vector():
    spec = TrainSpec(weight_decay=0.1, ema=0.999)
    lr, keep, step_size, root, moved = controls(1, 0.5, spec).tolist()
    assert (lr, keep) == pytest.approx((0.5, 0.95))
    assert step_size == pytest.approx(0.5 / (1 - 0.9**2)) and root == pytest.approx(1 / math.sqrt(1 - 0.999**2))
    assert moved == pytest.approx(1 - 3 / 12) and controls(10**6, 0.5, spec)[4] == pytest.approx(0.001)
    late = controls(40_000, 0.0, spec)
    assert late[3] == 1 and late[1] == 1 and late[0] == 0  # what a compiler must never see as constants


def test_a_step_left_out_changes_no_bit_whatever_the_gradients():
    net = network()
    optimizer = AdamW(net)
    net(torch.ones(4, 6)).square().sum().backward()
    optimizer.update(controls(0, 0.1, TrainSpec()), ONE, YES)
    before = [value.clone() for value in (*net.parameters(), *optimizer.means, *optimizer.squares)]
    for number, gradient in enumerate(optimizer.gradients()):
        gradient.fill_((float("nan"), float("inf"), 1e30)[number % 3])
    optimizer.update(controls(1, 0.1, TrainSpec()), torch.tensor(0.0), torch.tensor(False))
    after = (*net.parameters(), *optimizer.means, *optimizer.squares)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_the_norm_is_torchs():
    gradients = [torch.randn(3, 4), torch.randn(5)]
    parameters = [nn.Parameter(g) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.testing.assert_close(total_norm(gradients), expected)


def test_moments_travel_by_name():
    torch.manual_seed(0)
    nets = [network(), network()]
    optimizers = [AdamW(net) for net in nets]
    x = torch.randn(4, 6)

    def step(which, count):
        nets[which](x).square().mean().backward()
        optimizers[which].update(controls(count, 0.1, TrainSpec()), ONE, YES)
        optimizers[which].clear()

    step(0, 0)
    assert sorted(optimizers[0].state()) == sorted(name for name, _ in nets[0].named_parameters())
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers[1].load(optimizers[0].state())
    step(0, 1)
    step(1, 1)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, other)
    for wrong in ({"2.weight": {}}, {**optimizers[0].state(), "3.bias": {}}):
        with pytest.raises(CheckpointError, match="another network"):
            optimizers[1].load(wrong)
