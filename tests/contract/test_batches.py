import numpy as np
import pytest

from tests.contract.doors import BatchLoader, Device, Windows, XlaDevice


class Foreign(Device):
    """A device with memory of its own, so much of it free; its tensors are the host's all the same."""

    free = 10_000

    @property
    def torch_device(self):
        return "cpu"

    def free_bytes(self):
        return self.free


class Small(Foreign):
    """Too small for 952 bytes, of which it gives 40 %."""

    free = 2_000


class Padded(Foreign):
    """A device that wants other lengths."""

    def padded_row_count(self, rows):
        return 64


@pytest.fixture
def parts():
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(50, 3)).astype(np.float32)
    return Windows(x_NF, np.arange(6, 50), 5), rng.integers(0, 3, 44)


@pytest.mark.parametrize("device", [Device("cpu", 1), Foreign("there", 1), Small("there", 1), Padded("there", 1)])
def test_batch_loader_returns_requested_rows(parts, device):
    feed, positions = BatchLoader(device, parts), np.array([3, 0, 43, 3])
    x_BTF, target_B = feed(positions)
    by_hand = np.stack([parts[0].x_NF.numpy()[6 + at - 4 : 6 + at + 1] for at in positions])
    np.testing.assert_array_equal(x_BTF, by_hand)
    np.testing.assert_array_equal(target_B, parts[1][positions])
    assert len(feed) == 44 and feed.resident == (not isinstance(device, Small))


@pytest.mark.parametrize(
    ("rows", "capacity"), [(1, 1), (15, 15), (16, 16), (17, 18), (97, 104), (104, 104), (130, 144)]
)
def test_padded_length_on_xla_has_eight_steps_per_power_of_two(rows, capacity):
    assert XlaDevice("xla", 1).padded_row_count(rows) == capacity and Device("cpu", 1).padded_row_count(rows) == rows
