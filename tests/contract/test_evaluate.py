import numpy as np
import pytest
import torch
from torch import nn

from tests.contract.doors import BatchLoader, Device, evaluate_mean_loss, evaluate_network_outputs

RNG = np.random.default_rng(0)
X, Y, W = (RNG.normal(size=shape).astype(np.float32) for shape in ((10, 2), (10, 1, 1), (10,)))


class Noting(nn.Linear):
    """Notes the shape of what it is given."""

    def forward(self, x):
        self.__dict__.setdefault("shapes", []).append(tuple(x.shape))
        return super().forward(x)


def loss(network, batch):
    weight_B = batch[2]
    return (weight_B * (network(batch[0])[:, 0] - batch[1][:, 0, 0]).square()).sum(), weight_B.sum()


@pytest.mark.parametrize("size", [3, 4, 10, 99])
@pytest.mark.parametrize("chips", [1, 4])
def test_mean_loss_batches_share_one_shape_and_count_each_row_once(size, chips):
    device, network = Device("cpu", 1, chips=chips), Noting(2, 1)
    found = evaluate_mean_loss(network, BatchLoader(device, [X, Y, np.abs(W)]), loss, device, size)
    every = evaluate_network_outputs(network, BatchLoader(device, [X]), device, size)
    assert len(set(network.shapes)) == 1 and network.shapes[0][0] % chips == 0
    with torch.no_grad():
        expected = nn.Linear.forward(network, torch.from_numpy(X))
    torch.testing.assert_close(every, expected)
    error = (expected.numpy()[:, 0] - Y[:, 0, 0]) ** 2
    assert found == pytest.approx(np.average(error, weights=np.abs(W)), rel=1e-6)


def test_mean_loss_and_outputs_are_float32_under_any_precision():
    network, found = nn.Linear(2, 1), []
    for precision in ("fp32", "bf16"):
        device = Device("cpu", 1, precision)
        with torch.no_grad(), device.autocast():
            step = network(torch.from_numpy(X))
        mean = evaluate_mean_loss(network, BatchLoader(device, [X, Y, np.abs(W)]), loss, device, 4)
        found.append((mean, evaluate_network_outputs(network, BatchLoader(device, [X]), device, 4), step))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][2], found[1][2].float())
