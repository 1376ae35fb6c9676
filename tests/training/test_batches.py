import numpy as np
import pytest
import torch

from ml_factory.datasets.windows import Windows
from ml_factory.training.batches import BatchBuffer, BatchLoader
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


def test_batch_loader_prefetched_batch_is_used_only_for_same_positions(parts):
    feed, gathered = BatchLoader(Device("cpu", 1), parts, resident=False), []
    gather = feed._gather
    feed._gather = lambda positions: gathered.append(positions.tolist()) or gather(positions)
    assert BatchLoader(Device("cpu", 1), parts).prefetch is None
    for announced, asked in (([1, 2], [1, 2]), ([1, 2], [2, 3]), (None, [5, 6])):
        if announced:
            feed.prefetch(np.array(announced))
        assert torch.equal(feed(np.array(asked))[1], torch.from_numpy(parts[1][asked]))
    feed._worker.shutdown()
    assert sorted(gathered) == [[1, 2], [1, 2], [2, 3], [5, 6]]


def test_batch_loader_batches_prefetches_next_batch(parts):
    feed, reported = BatchLoader(Device("cpu", 1), parts, resident=False), []
    feed._prefetch = lambda positions: reported.append(positions.tolist())
    wanted = [np.array([3, 4]), np.array([5, 6]), np.array([7, 8])]
    for number, (_, target_B) in enumerate(feed.batches(wanted)):
        assert reported == [positions.tolist() for positions in wanted[1 : number + 2]]
        np.testing.assert_array_equal(target_B, parts[1][wanted[number]])
    feed._worker.shutdown()


@pytest.mark.parametrize("resident", [True, False])
def test_batch_loader_referenced_batch_or_view_is_not_overwritten(parts, resident):
    feed = BatchLoader(Device("cpu", 1), parts, resident)
    held = [feed(np.array([at, at + 1]))[0] for at in range(5)]
    views = [feed(np.array([at, at + 1]))[0][:, -1:, 1] for at in range(5)]
    for at in range(5):
        rows = parts[0].x_NF.numpy()[at + 2 : at + 8]
        np.testing.assert_array_equal(held[at], np.stack([rows[:5], rows[1:]]))
        np.testing.assert_array_equal(views[at], [rows[4:5, 1], rows[5:, 1]])


def test_batch_loader_unreferenced_batch_memory_is_reused(parts):
    feed, seen = BatchLoader(Device("cpu", 1), parts), set()
    for at in range(6):
        batch = feed(np.array([at, at + 1]))  # the one before is held until this one is there
        seen.add(batch[0].data_ptr())
    assert len(seen) == 2
    weight = torch.ones(3, requires_grad=True)
    kept = (batch[0] * weight).sum()  # what backward wants is held too
    del batch
    others = {feed(np.array([0, 1]))[0].data_ptr() for _ in range(4)}
    assert len(others) == 1 and others < seen
    kept.backward()
    torch.testing.assert_close(weight.grad, torch.from_numpy(parts[0][[5, 6]].sum((0, 1))))


def test_batch_buffer_keeps_two_of_many_released_batches():
    memory = BatchBuffer()
    many = [memory.empty_tensor(2, 3) for _ in range(9)]
    assert len({one.data_ptr() for one in many}) == 9
    del many
    for _ in range(3):
        one = memory.empty_tensor(2, 3)
        other = memory.empty_tensor(2, 3)
        assert one.data_ptr() != other.data_ptr() and len(memory._kept) == 2
        del one, other


def test_batch_buffer_other_shape_releases_kept_memory():
    memory = BatchBuffer()
    first = memory.empty_tensor(2, 3)
    first.fill_(7)
    assert memory.empty_tensor(4, 3).shape == (4, 3) and len(memory._kept) == 1
    assert (first == 7).all() and memory.empty_tensor(2, 3).data_ptr() != first.data_ptr()
