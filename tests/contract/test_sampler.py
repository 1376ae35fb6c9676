import numpy as np
import pytest

from tests.contract.doors import BatchSampler, StreamSampler, micro_batch_size


def test_order_each_epoch_is_permutation_and_remainder_starts_next():
    order = BatchSampler(10, 4, seed=3)
    stream = np.concatenate([order.positions(step) for step in range(10)])
    assert len(stream) == 40
    for epoch in range(4):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert len({tuple(stream[10 * epoch : 10 * epoch + 10]) for epoch in range(4)}) == 4
    assert [order.steps_until_epoch(epoch) for epoch in range(5)] == [0, 2, 5, 7, 10]


def test_order_positions_depend_on_step_and_seed_only():
    one, other = BatchSampler(10, 4, seed=3), BatchSampler(10, 4, seed=3)
    forward = [one.positions(step).tolist() for step in range(9)]
    assert [other.positions(step).tolist() for step in reversed(range(9))] == forward[::-1]
    assert BatchSampler(10, 4, seed=4).positions(0).tolist() != forward[0]
    assert all(len(positions) == 4 for positions in forward)
    assert sorted(BatchSampler(3, 8, seed=0).positions(1)) == [0, 1, 2]


def test_batch_is_a_multiple_of_the_shares():
    assert BatchSampler(10, 24, seed=1, shares=4).batch == 8


@pytest.mark.parametrize(
    ("rows", "most", "multiple", "size"),
    [(256, 128, 1, 128), (250, 128, 1, 125), (7, 3, 1, 1), (24, 9, 4, 8), (24, 3, 4, 4), (10, 0, 1, 1)],
)
def test_micro_size_divides_batch(rows, most, multiple, size):
    assert micro_batch_size(rows, most, multiple) == size


def test_stream_sampler_gives_consecutive_positions_and_shares_every_second_of_them():
    assert StreamSampler(10, 4, seed=0).positions(3).tolist() == [12, 13, 14, 15]
    shared = StreamSampler(10, 4, seed=0, shares=2).positions(3)
    assert shared.reshape(2, -1, 2)[1].tolist() == [[13, 15]]
    assert StreamSampler(10, 4, seed=0).steps_until_epoch(2) == 5
