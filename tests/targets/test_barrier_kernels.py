"""Striding over blocks against stepping over bars, on lives longer than any block; shares against plain sums."""

import math

import numpy as np
import pytest

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.targets.barrier_kernels import (
    BARRIERS,
    average_uniqueness_kernel,
    barrier_exit_kernel,
    block_extremes_kernel,
)
from ml_factory.targets.labels import LabelSpec, triple_barrier_labels, triple_barrier_prices

MINUTE = 60_000_000_000


def market(n: int, seed: int, jump: float = 0.0) -> np.ndarray:
    """Open, high, low, close: float64[4, n], a walk whose bars may open away from the last close."""
    rng = np.random.default_rng(seed)
    moves = rng.standard_normal((n, 4)) * 1e-3
    moves[:, 0] *= jump
    path = 100 * np.exp(np.cumsum(moves.ravel())).reshape(n, 4)
    return np.stack([path[:, 0], path.max(axis=1), path.min(axis=1), path[:, 3]])


def stepped(bars: np.ndarray, i: int, end: int, up: float, down: float) -> tuple:
    """(barrier, exit bar, return, worst, best) of one row, bar after bar."""
    open_, high, low, close = bars
    best = worst = close[i]
    for j in range(i + 1, end + 1):
        if open_[j] >= up or open_[j] <= down:
            best, worst = max(best, open_[j]), min(worst, open_[j])
            return ("upper" if open_[j] >= up else "lower"), j, open_[j], worst, best
        if high[j] >= up and low[j] <= down:
            return "ambiguous", j, math.nan, min(worst, down), max(best, up)
        if high[j] >= up:
            return "upper", j, up, min(worst, low[j]), up
        if low[j] <= down:
            return "lower", j, down, down, max(best, high[j])
        best, worst = max(best, high[j]), min(worst, low[j])
    return "vertical", end, close[end], worst, best


@pytest.mark.parametrize("jump", [0.0, 4.0])
@pytest.mark.parametrize("width", [0.002, 0.03, 0.3, 3.0])
def test_scan_by_blocks_equals_bar_by_bar_scan(width, jump):
    """From single bars to lives of 9,000 bars, over every level of blocks and from every offset into them."""
    n, horizon = 20_000, 9_000
    bars = market(n, seed=3, jump=jump)
    rng = np.random.default_rng(4)
    lone, neighbours = rng.integers(0, n - 1, 100), np.arange(100, 400)
    entry = np.unique(np.r_[lone, neighbours, 4095, 4096, 8191])
    far = rng.integers(1, horizon, len(entry))
    end = np.minimum(entry + np.where(np.isin(entry, neighbours[:250]), far[7] % 500 + 40, far), n - 1)
    ups, downs = rng.uniform(0.2, 1, (2, n))
    ups[100:350] = downs[100:350] = (
        0.6  # neighbours as they are in a market, and neighbours that have nothing in common
    )
    up, down = bars[3] * np.exp(width * ups), bars[3] * np.exp(-width * downs)
    none = (np.empty(0, np.int64), np.empty(0, np.int64))
    found = np.empty(len(entry), np.int8), np.empty(len(entry), np.int64), *np.empty((3, len(entry)))
    barrier_exit_kernel(tuple(bars), entry, end, (up, down), 0.0, horizon, (*bars[:3], *none), found)
    for r, i in enumerate(entry):
        barrier, j, price, worst, best = stepped(bars, i, end[r], up[i], down[i])
        name = BARRIERS[found[0][r]]
        assert ("vertical" if name == "session" else name, found[1][r]) == (barrier, j)
        logs = [math.log(price / bars[3][i]), math.log(worst / bars[3][i]), math.log(best / bars[3][i])]
        assert np.array_equal([values[r] for values in found[2:]], logs, equal_nan=True)  # the same bits


def test_block_extremes_equal_numpy_extremes():
    n = 5_000
    _, high, low, _ = market(n, seed=1)
    blocks, begins = block_extremes_kernel(high, low)
    for level, width in enumerate((8, 64, 512, 4096), start=1):
        whole = n // width
        rows = blocks[begins[level] : begins[level + 1]]
        assert len(rows) == whole
        assert (rows[:, 0] == high[: whole * width].reshape(whole, width).max(axis=1)).all()
        assert (rows[:, 1] == low[: whole * width].reshape(whole, width).min(axis=1)).all()


def test_mean_share_equals_plain_sums_for_any_label_length():
    n, rng = 3_000, np.random.default_rng(2)
    start = np.sort(rng.integers(0, n, 2_000))
    end = np.minimum(start + rng.integers(0, 10 ** rng.integers(0, 4, 2_000)), n - 1)
    alive = np.zeros(n)
    for first, last in zip(start, end, strict=True):
        alive[first : last + 1] += 1
    wanted = [np.mean(1 / alive[first : last + 1]) for first, last in zip(start, end, strict=True)]
    np.testing.assert_allclose(average_uniqueness_kernel(start, end, n), wanted, rtol=1e-13)


def test_mean_share_of_label_without_overlap_is_exactly_1():
    """Rounding inside a block never lifts a share above 1."""
    start = np.sort(np.random.default_rng(0).choice(5_000, 1_500, replace=False))
    crowd = np.arange(0, 5_000, 3)
    shares = average_uniqueness_kernel(np.r_[start, crowd], np.r_[start, crowd + 1], 5_002)
    assert shares.max() == 1.0 and shares.min() > 0.3


def test_triple_barrier_label_cut_by_session_end_has_session_barrier():
    bars = market(400, seed=5)
    start = np.arange(400, dtype=np.int64) * MINUTE
    segment = np.repeat(np.arange(4, dtype=np.int32), 100)
    base = ResampledBars(1, start, start + MINUTE, *bars, None, segment, segment)
    spec = LabelSpec(horizon=60, k_up=50.0, k_down=50.0, sigma_span=5)
    table = triple_barrier_labels(base, None, spec, MarketSpec("X", "24h", None, False), session_close=start + MINUTE)
    left = 99 - table["entry_bar"] % 100
    assert ((left >= 60) == (table["barrier"] == "vertical")).all() and set(table["barrier"]) == {"vertical", "session"}


@pytest.mark.parametrize("tick", [0.25, None])
def test_barriers_of_bars_after_10000_fold_price_stay_positive(tick):
    """One bar 10,000 times too high: the volatility after it puts the lower barrier under the first tick."""
    open_, high, low, close = np.round(market(400, seed=5) / 0.25) * 0.25
    for prices in (open_, high, low, close):
        prices[200] *= 10_000.0
    start = np.arange(400) * MINUTE
    marks = np.zeros(400, np.int32)
    base = ResampledBars(1, start, start + MINUTE, open_, high, low, close, None, marks, marks)
    up, down = triple_barrier_prices(base, LabelSpec(200), MarketSpec("X", "24h", tick, False))
    known = ~np.isnan(up)
    assert known[100:].all() and (down[known] > 0).all() and np.isfinite(up[known]).all()
    assert down[201] < 0.25 < 0.25 * np.floor(down[150] / 0.25)  # under one tick after the jump, far above it before
    assert (down[known] < close[known]).all() and (up[known] > close[known]).all()
    labels = triple_barrier_labels(base, None, LabelSpec(200), MarketSpec("X", "24h", tick, False))
    assert np.isfinite(labels[["up", "down"]].to_numpy()).all() and len(labels) > 50
