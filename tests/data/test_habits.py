"""The market's habits against plain loops."""

import numpy as np

from ml_factory.data.habits import (
    MOVE_WINDOW,
    OUTLIER_TIMES,
    RUN_CAP,
    RUN_WINDOW,
    rows_of_runs,
    runs_of,
    stays,
    surprise,
    usual_move,
)


def test_the_usual_move_is_a_mean_without_outliers():
    rng = np.random.default_rng(0)
    move, known = rng.standard_normal(2000) * 1e-3, rng.random(2000) < 0.9
    move[[300, 301, 1500]] = 0.5
    usual = usual_move(move, known)
    typical = np.median(np.abs(move[known & (move != 0)]))
    first = np.empty(2000)
    for t in range(2000):
        near = slice(max(t - MOVE_WINDOW, 0), t + MOVE_WINDOW + 1)
        first[t] = np.minimum(np.abs(move[near][known[near]]), 20 * typical).mean()
    kept = known & (np.abs(move) <= OUTLIER_TIMES * first)
    for t in (0, 100, 301, 999, 1500, 1999):
        near = slice(max(t - MOVE_WINDOW, 0), t + MOVE_WINDOW + 1)
        assert np.isclose(usual[t], np.abs(move[near][kept[near]]).mean(), rtol=1e-12)
    calm = usual_move(np.where(np.abs(move) > 0.1, 0.0, move), known)
    assert np.abs(usual / calm - 1).max() < 0.01  # what is strange does not hide itself


def test_a_market_that_never_moves_has_no_spike():
    assert np.isinf(usual_move(np.zeros(5), np.ones(5, bool))).all()


def test_surprise_by_hand():
    position, length = np.array([100, 500, 5000]), np.array([3, 40, 2])
    nats = surprise(position, length, 10_000)
    counted = np.minimum(length, RUN_CAP)
    for k in range(3):
        others = sum(counted[j] for j in range(3) if j != k and abs(position[j] - position[k]) <= RUN_WINDOW)
        near = min(position[k] + RUN_WINDOW, 10_000) - max(position[k] - RUN_WINDOW, 0)
        everywhere = counted.sum() - counted[k]
        habit = max((others + 1) / (near + others + 2), (everywhere + 1) / (10_000 + everywhere + 2))
        assert np.isclose(nats[k], -length[k] * np.log(habit))
    assert len(surprise(position[:0], length[:0], 10)) == 0


def test_runs():
    first, length = runs_of(np.array([1, 1, 0, 0, 1, 0, 1, 1, 1], bool))
    assert first.tolist() == [0, 4, 6] and length.tolist() == [2, 1, 3]
    assert rows_of_runs(first, length).tolist() == [0, 1, 4, 6, 7, 8]
    assert len(rows_of_runs(first[:0], length[:0])) == 0 and len(runs_of(np.zeros(3, bool))[0]) == 0


def test_a_move_stays_when_most_of_it_is_left():
    close = np.array([0.0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1])
    assert stays(close, np.array([5, 11]), np.array([1.0, -1.0])).tolist() == [True, False]
