import numpy as np
import pytest

from ml_factory.datasets.windows import Windows
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import Device, XlaDevice


class Foreign(Device):
    """A device with memory of its own, so much of it free; its tensors are the host's all the same."""

    free = 10_000

    @property
    def torch_device(self):
        return "cpu"

    def free_bytes(self):
        return self.free


@pytest.fixture
def parts():
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(50, 3)).astype(np.float32)
    return Windows(x_NF, np.arange(6, 50), 5), rng.integers(0, 3, 44)


@pytest.mark.parametrize("device", [Device("cpu", 1), Foreign("there", 1)])
@pytest.mark.parametrize("resident", [True, False])
def test_batch_loader_resident_or_not_returns_requested_rows(parts, device, resident):
    feed, positions = BatchLoader(device, parts, resident), np.array([3, 0, 43, 3])
    x_BTF, target_B = feed(positions)
    by_hand = np.stack([parts[0].x_NF.numpy()[6 + at - 4 : 6 + at + 1] for at in positions])
    np.testing.assert_array_equal(x_BTF, by_hand)
    np.testing.assert_array_equal(target_B, parts[1][positions])
    assert len(feed) == 44


def test_batch_loader_with_padded_length_returns_requested_rows(parts, monkeypatch):
    placed = []
    monkeypatch.setattr(Foreign, "padded_row_count", lambda self, rows: 64)
    monkeypatch.setattr(Foreign, "to_device", lambda self, value: placed.append(tuple(value.shape)) or value)
    feed = BatchLoader(Foreign("there", 1), parts)
    assert placed == [(64, 3), (64,), (5,), (64,)] and len(feed) == 44
    positions = np.array([3, 0, 43, 3])
    x_BTF, target_B = feed(positions)
    np.testing.assert_array_equal(x_BTF, parts[0][positions])
    np.testing.assert_array_equal(target_B, parts[1][positions])


@pytest.mark.parametrize(
    ("rows", "capacity"), [(1, 1), (15, 15), (16, 16), (17, 18), (97, 104), (104, 104), (130, 144)]
)
def test_padded_length_on_xla_has_eight_steps_per_power_of_two(rows, capacity):
    assert XlaDevice("xla", 1).padded_row_count(rows) == capacity and Device("cpu", 1).padded_row_count(rows) == rows


def test_batch_loader_data_larger_than_device_memory_stays_on_host(parts):
    assert BatchLoader(Foreign("there", 1), parts).resident  # 952 bytes of 10,000
    small = Foreign("there", 1)
    object.__setattr__(small, "free", 2_000)
    assert not BatchLoader(small, parts).resident


@pytest.mark.parametrize("resident", [True, False])
def test_batch_loader_referenced_batch_or_view_is_not_overwritten(parts, resident):
    feed = BatchLoader(Device("cpu", 1), parts, resident)
    held = [feed(np.array([at, at + 1]))[0] for at in range(5)]
    views = [feed(np.array([at, at + 1]))[0][:, -1:, 1] for at in range(5)]
    for at in range(5):
        rows = parts[0].x_NF.numpy()[at + 2 : at + 8]
        np.testing.assert_array_equal(held[at], np.stack([rows[:5], rows[1:]]))
        np.testing.assert_array_equal(views[at], [rows[4:5, 1], rows[5:, 1]])
