"""Chosen rows stay in unbroken runs; windows stay in their segment."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.doors import mask_rows_with_full_window, sample_contiguous_blocks


@given(n=st.integers(0, 300), limit=st.integers(1, 300), blocks=st.integers(1, 9))
def test_contiguous_blocks_random_rows_are_contiguous_spread_and_at_limit(n, limit, blocks):
    rows = np.cumsum(np.random.default_rng(n).integers(1, 4, n))
    picked = sample_contiguous_blocks(rows, limit, blocks)
    assert len(picked) == min(n, limit)
    places = np.searchsorted(rows, picked)
    assert (rows[places] == picked).all() and (np.diff(places) > 0).all()
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    assert len(runs) <= blocks
    if n > limit and blocks > 1 and limit > 1:
        assert places[0] == 0 and places[-1] == n - 1


def test_contiguous_blocks_equal_hand_computed_rows():
    assert sample_contiguous_blocks(np.arange(30), 8, 4).tolist() == [0, 1, 9, 10, 19, 20, 28, 29]
    assert sample_contiguous_blocks(np.arange(5), 8).tolist() == [0, 1, 2, 3, 4]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), lookback=st.integers(1, 10))
def test_rows_with_window_keep_windows_inside_one_segment(lengths, lookback):
    segment = np.repeat(np.arange(len(lengths)), lengths)
    rows = np.arange(len(segment))[::2]
    inside = [r - lookback + 1 >= 0 and len(set(segment[r - lookback + 1 : r + 1])) == 1 for r in rows]
    assert mask_rows_with_full_window(segment, rows, lookback).tolist() == inside
