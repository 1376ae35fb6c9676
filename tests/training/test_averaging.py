import pytest
import torch
from torch import nn

from ml_factory.errors import CheckpointError
from ml_factory.training.averaging import WeightAverage


def averaged(network):
    named = dict(network.named_parameters())
    return WeightAverage(list(named), list(named.values()))


def test_weight_average_update_equals_hand_computed_average():
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, 1.0)
    average = averaged(network)
    for value, moved in ((3.0, 0.5), (7.0, 0.25)):
        nn.init.constant_(network.weight, value)
        average.update(torch.tensor(moved))
    assert average.values[0].item() == 2.0 * 0.75 + 7.0 * 0.25
    assert network.weight.item() == 7.0


def test_weight_average_in_place_restores_network_weights_after_error():
    network = nn.Linear(3, 2)
    average, before = averaged(network), network.weight.detach().clone()
    average.values[0].fill_(5.0)
    with pytest.raises(ZeroDivisionError), average.use_averaged_weights():
        assert (network.weight == 5).all()
        raise ZeroDivisionError
    assert torch.equal(network.weight, before) and network.weight.requires_grad


def test_weight_average_state_loads_by_parameter_name():
    one, other = averaged(nn.Linear(3, 2)), averaged(nn.Linear(3, 2))
    other.load(one.state())
    assert all(map(torch.equal, one.values, other.values))
    with pytest.raises(CheckpointError, match="another network"):
        other.load({"weight": one.values[0]})
