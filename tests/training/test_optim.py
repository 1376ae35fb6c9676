import math

import pytest
import torch
from torch import nn

from ml_factory.errors import CheckpointError
from ml_factory.training.optim import AdamW, optimizer_step_scalars, total_gradient_norm, warmup_cosine_learning_rate
from ml_factory.training.spec import TrainSpec

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


def test_controls_vector_holds_all_schedule_values():
    spec = TrainSpec(weight_decay=0.1)
    lr, keep, step_size, root = optimizer_step_scalars(1, 0.5, spec).tolist()
    assert (lr, keep) == pytest.approx((0.5, 0.95))
    assert step_size == pytest.approx(0.5 / (1 - 0.9**2)) and root == pytest.approx(1 / math.sqrt(1 - 0.999**2))
    late = optimizer_step_scalars(40_000, 0.0, spec)
    assert late[3] == 1 and late[1] == 1 and late[0] == 0  # what a compiler must never see as constants


def test_adamw_skipped_step_with_non_finite_gradients_changes_no_bit():
    net = network()
    optimizer = AdamW(net)
    net(torch.ones(4, 6)).square().sum().backward()
    optimizer.step(optimizer_step_scalars(0, 0.1, TrainSpec()), ONE, YES)
    before = [value.clone() for value in (*net.parameters(), *optimizer.means, *optimizer.squares)]
    for number, gradient in enumerate(optimizer.gradients()):
        gradient.fill_((float("nan"), float("inf"), 1e30)[number % 3])
    optimizer.step(optimizer_step_scalars(1, 0.1, TrainSpec()), torch.tensor(0.0), torch.tensor(False))
    after = (*net.parameters(), *optimizer.means, *optimizer.squares)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_total_norm_equals_torch_clip_grad_norm():
    gradients = [torch.randn(3, 4), torch.randn(5)]
    parameters = [nn.Parameter(g) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.testing.assert_close(total_gradient_norm(gradients), expected)


def test_adamw_state_loads_by_parameter_name():
    torch.manual_seed(0)
    nets = [network(), network()]
    optimizers = [AdamW(net) for net in nets]
    x = torch.randn(4, 6)

    def step(which, count):
        nets[which](x).square().mean().backward()
        optimizers[which].step(optimizer_step_scalars(count, 0.1, TrainSpec()), ONE, YES)
        optimizers[which].zero_grad()

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
