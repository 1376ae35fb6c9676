import math

import pytest
import torch
from torch import nn

from ml_factory.errors import CheckpointError
from ml_factory.training.optim import load_optimizer_state, make_adamw, optimizer_state, rate, set_rate
from ml_factory.training.spec import TrainSpec


def test_the_rate_climbs_then_falls_on_a_cosine():
    spec = TrainSpec(lr=1.0, warmup=0.2)
    rates = [rate(step, 10, spec) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5) and rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert rate(0, 10, TrainSpec(lr=1.0, warmup=0.0)) == 1.0 and min(rates) > 0


def test_one_step_of_adamw_by_hand():
    """First step: both moments' corrections cancel, so it moves lr * sign(grad); matrices decay by lr * decay too."""
    network = nn.Linear(1, 1)
    nn.init.constant_(network.weight, 2.0)
    nn.init.constant_(network.bias, 2.0)
    optimizer = make_adamw(network, TrainSpec(weight_decay=0.1))
    set_rate(optimizer, 0.5)
    network(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert network.weight.item() == pytest.approx(2 - 0.5 * 0.1 * 2 - 0.5, abs=1e-6)
    assert network.bias.item() == pytest.approx(1.5, abs=1e-6)


def test_moments_travel_by_name():
    torch.manual_seed(0)
    x, networks, optimizers = torch.randn(4, 3), [], []
    for _ in range(2):
        networks.append(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
        optimizers.append(make_adamw(networks[-1], TrainSpec()))

    def step(which):
        networks[which](x).square().mean().backward()
        optimizers[which].step()
        optimizers[which].zero_grad()

    step(0)
    assert sorted(optimizer_state(networks[0], optimizers[0])) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    networks[1].load_state_dict(networks[0].state_dict())
    load_optimizer_state(networks[1], optimizers[1], optimizer_state(networks[0], optimizers[0]))
    step(0)
    step(1)
    for one, other in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(CheckpointError, match="another network"):
        load_optimizer_state(networks[1], optimizers[1], {"2.weight": {}})
