"""The baselines against hand-worked numbers, loops over rows, and rows whose shares are known."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import FactoryError
from tests.contract import doors


def test_class_shares_equal_hand_computed_values():
    p = doors.prior_baseline_probabilities(np.array([-1, 0, 0, 1]), np.array([3.0, 1.0, 1.0, 5.0]), 2)
    np.testing.assert_allclose(p, [[0.3, 0.2, 0.5]] * 2, rtol=1e-15)
    absent = np.array([3.5, 0.5, 1.5]) / 5.5  # half a row is added to each class
    np.testing.assert_allclose(doors.class_shares([-1, -1, -1, 1]), absent)
    with pytest.raises(FactoryError, match="No class shares"):
        doors.class_shares([])


def test_last_move_probabilities_without_weights_equal_hand_computed_values():
    moves, y = np.array([0.1, 0.2, 0.3, -0.1, -0.2]), np.array([1, 1, 0, -1, 0])
    prior = np.array([1, 2, 2]) / 5
    p = doors.last_move_baseline_probabilities(moves, y, np.array([5.0, -5.0, 0.0, np.nan]))
    np.testing.assert_allclose(p[0], (np.array([0, 1, 2]) + prior) / 4)
    np.testing.assert_allclose(p[1], (np.array([1, 1, 0]) + prior) / 3)
    np.testing.assert_allclose(p[2:], [prior, prior])


# ---- the time of the session -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calendar", "moments", "progress", "minutes_left"),
    [  # CME: 17:00 the evening before to 16:00 Chicago, 23 hours; its early close of 2024-11-29 was 18:15 UTC
        ("cme", ["2024-01-02 23:05", "2024-01-03 10:30", "2024-01-03 22:00", "2024-11-29 18:00"],
         [5 / 1380, 0.5, 1.0, 1140 / 1155], [1375, 690, 0, 15]),
        # midnight belongs to the session that ends
        ("24h", ["2024-01-03 00:00", "2024-01-03 00:05", "2024-01-03 12:00"], [1, 5 / 1440, 0.5], [0, 1435, 720]),
    ],
)  # fmt: skip
def test_session_time_equals_hand_computed_values(calendar, moments, progress, minutes_left):
    clock = doors.session_time(pd.DatetimeIndex(moments).as_unit("ns").asi8, calendar)
    np.testing.assert_allclose(clock.progress, progress)
    np.testing.assert_allclose(clock.minutes_left, minutes_left)


def volatility_by_loops(close, segment, span):
    found = np.full(len(close), np.nan)
    for i in range(len(close)):
        window = [k for k in range(max(i - span + 1, 1), i + 1) if segment[k] == segment[k - 1]]
        if len(window) >= span / 2:
            found[i] = np.log(np.sqrt(np.mean([np.log(close[k] / close[k - 1]) ** 2 for k in window])))
    return found


def test_trailing_volatility_over_sessions_equals_loops():
    rng = np.random.default_rng(0)
    close, segment = 100 * np.exp(rng.normal(0, 0.01, 200).cumsum()), np.repeat([0, 1, 2, 3], [60, 4, 40, 96])
    np.testing.assert_allclose(
        doors.baseline_trailing_volatility(close, segment, 10), volatility_by_loops(close, segment, 10)
    )


def rows_of(days: int, seed: int, horizon: int):
    """Five-minute rows of a 24-hour market: mostly neutral in the first half of a day, and near its end; touched
    more often when volatility is high for the time of day, which it tells by itself.

    Returns clock, volatility, labels and the shares they were drawn from.
    """
    rng = np.random.default_rng(seed)
    step = np.tile(np.arange(1, 289), days)
    clock = doors.SessionTime(step / 288, (288 - step) * 5.0)
    excess = rng.normal(size=len(step))
    volatility = excess + np.where(clock.progress < 0.5, 5.0, -5.0)
    neutral = np.where(clock.progress < 0.5, 0.7, 0.3) + np.where(288 - step < horizon, 0.2, 0.0)
    neutral = np.clip(neutral - 0.15 * np.sign(excess), 0.02, 0.98)
    p = np.stack([0.4 * (1 - neutral), neutral, 0.6 * (1 - neutral)], axis=1)
    y = (p.cumsum(axis=1) < rng.random((len(p), 1))).sum(axis=1) - 1
    return clock, volatility, y, p


def fitted(days=120, seed=1, horizon=20):
    clock, volatility, y, _ = rows_of(days, seed, horizon)
    return doors.SessionClock.fit(clock, y, horizon=horizon, bar_minutes=5.0, volatility=volatility)


def test_clock_baseline_on_known_shares_predicts_those_shares():
    """By time alone the shares of the draw without the volatility term, with it those of the draw."""
    baseline = fitted()
    clock, volatility, _, p = rows_of(5, 2, 20)
    timed = np.clip(np.where(clock.progress < 0.5, 0.7, 0.3) + np.where(clock.minutes_left < 100, 0.2, 0), 0, 1)
    found = baseline.predict(clock)
    assert np.abs(found[:, 1] - timed).mean() < 0.02
    assert np.abs(baseline.predict(clock, volatility) - p).mean() < 0.05 < np.abs(found - p).mean()
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(baseline.predict(clock, volatility).sum(axis=1), 1, rtol=1e-12)


def test_clock_baseline_cells_equal_loops_over_rows():
    """A horizon of 60 bars: 48 cells of progress, then 48 of the bars left, 0 to 59."""
    clock, _, y, _ = rows_of(7, 3, 60)
    baseline = doors.SessionClock.fit(clock, y, horizon=60, bar_minutes=5.0)
    keys = [
        ("left", int(left // 5) * 48 // 60) if left < 300 else ("progress", min(int(progress * 48), 47))
        for progress, left in zip(clock.progress, clock.minutes_left, strict=True)
    ]
    prior, k = doors.class_shares(y), baseline.pseudo_count
    wanted = {}
    for key in set(keys):
        mine = y[[one == key for one in keys]]
        counts = np.array([(mine == side).sum() for side in (-1, 0, 1)])
        wanted[key] = (counts + k * prior) / (len(mine) + k)
    np.testing.assert_allclose(baseline.predict(clock), [wanted[key] for key in keys], rtol=1e-12)


def test_clock_baseline_pseudo_count_equals_blockwise_search():
    clock, _, y, _ = rows_of(12, 5, 20)
    baseline = doors.SessionClock.fit(clock, y, horizon=20, bar_minutes=5.0)
    block, losses = np.arange(len(y)) * 10 // len(y), []
    cell = np.where(clock.minutes_left < 100, 100 + clock.minutes_left // 5, np.minimum(clock.progress * 48, 47) // 1)
    for k in doors.PSEUDO_COUNTS:
        loss = 0.0
        for b in range(10):
            rest, out = block != b, block == b
            prior = np.array([(y[rest] == side).sum() + 0.5 for side in (-1, 0, 1)])
            prior /= prior.sum()
            for c in np.unique(cell[out]):
                mine, assessed = y[rest & (cell == c)], y[out & (cell == c)]
                p = (np.array([(mine == side).sum() for side in (-1, 0, 1)]) + k * prior) / (len(mine) + k)
                loss -= np.log(p[assessed + 1]).sum()
        losses.append(loss)
    assert baseline.pseudo_count == doors.PSEUDO_COUNTS[int(np.argmin(losses))]
    assert 0 < int(np.argmin(losses)) < len(losses) - 1


def test_clock_baseline_predict_nan_volatility_uses_time_only():
    baseline, (clock, volatility, _, _) = fitted(20), rows_of(2, 6, 20)
    volatility[::3] = np.nan
    p, timed = baseline.predict(clock, volatility), baseline.predict(clock)
    assert (p[::3] == timed[::3]).all() and (p[1::3] != timed[1::3]).any()
    clock, volatility, y, _ = rows_of(10, 7, 20)
    baseline = doors.SessionClock.fit(clock, y, horizon=20, bar_minutes=5.0, volatility=np.full(len(y), np.nan))
    np.testing.assert_allclose(baseline.predict(clock, volatility), baseline.predict(clock), rtol=1e-12)
