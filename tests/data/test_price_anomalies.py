"""The market's habits against plain loops."""

import numpy as np

from ml_factory.data.price_anomalies import (
    FEW_MOVES,
    MOVE_WINDOW,
    OUTLIER_TIMES,
    RUN_CAP,
    RUN_WINDOW,
    expand_runs_to_rows,
    find_runs_of_true,
    outlier_robust_move_size,
    price_move_persists,
    run_length_surprisal,
)


def around(t: int, session: np.ndarray, known: np.ndarray) -> list[np.ndarray]:
    """bool[N], twice: the known bars that say what is usual at bar t."""
    rows = np.arange(len(known))
    both = known & (np.abs(rows - t) <= MOVE_WINDOW)
    own = np.flatnonzero(session == session[t])
    first = max(min(t - MOVE_WINDOW, own[-1] - 2 * MOVE_WINDOW), own[0])
    near = known & (session == session[t]) & (rows >= first) & (rows <= first + 2 * MOVE_WINDOW)
    return [near if near.sum() >= FEW_MOVES else both, both]


def test_typical_move_equals_larger_of_two_window_means_without_outliers():
    rng = np.random.default_rng(0)
    move, known = rng.standard_normal(2000) * 1e-3, rng.random(2000) < 0.9
    edge = np.isin(np.arange(2000), [0, 700, 730, 1400])  # the second session has too few bars of its own
    session = np.cumsum(edge)
    move[700:1400] *= 3
    move[[300, 301, 1500]] = 0.5
    usual = outlier_robust_move_size(move, known, edge)
    typical = np.median(np.abs(move[known & (move != 0)]))
    wanted = np.zeros(2000)
    windows = [around(t, session, known) for t in range(2000)]
    for which in range(2):
        first = [np.minimum(np.abs(move[one[which]]), 20 * typical).mean() for one in windows]
        kept = np.abs(move) <= OUTLIER_TIMES * np.array(first)
        wanted = np.maximum(wanted, [np.abs(move[one[which] & kept]).mean() for one in windows])
    np.testing.assert_allclose(usual, wanted, rtol=1e-9)
    calm = outlier_robust_move_size(np.where(np.abs(move) > 0.1, 0.0, move), known, edge)
    assert np.abs(usual / calm - 1).max() < 0.01  # what is strange does not hide itself


def test_typical_move_of_constant_prices_is_infinite():
    assert np.isinf(outlier_robust_move_size(np.zeros(5), np.ones(5, bool), np.zeros(5, bool))).all()


def test_run_surprisal_equals_hand_computed_values():
    position, length = np.array([100, 500, 5000]), np.array([3, 40, 2])
    nats = run_length_surprisal(position, length, 10_000)
    counted = np.minimum(length, RUN_CAP)
    for k in range(3):
        others = sum(counted[j] for j in range(3) if j != k and abs(position[j] - position[k]) <= RUN_WINDOW)
        near = min(position[k] + RUN_WINDOW, 10_000) - max(position[k] - RUN_WINDOW, 0)
        everywhere = counted.sum() - counted[k]
        habit = max((others + 1) / (near + others + 2), (everywhere + 1) / (10_000 + everywhere + 2))
        assert np.isclose(nats[k], -length[k] * np.log(habit))
    assert len(run_length_surprisal(position[:0], length[:0], 10)) == 0


def test_true_runs_and_expand_runs_equal_hand_computed_values():
    first, length = find_runs_of_true(np.array([1, 1, 0, 0, 1, 0, 1, 1, 1], bool))
    assert first.tolist() == [0, 4, 6] and length.tolist() == [2, 1, 3]
    assert expand_runs_to_rows(first, length).tolist() == [0, 1, 4, 6, 7, 8]
    assert len(expand_runs_to_rows(first[:0], length[:0])) == 0 and len(find_runs_of_true(np.zeros(3, bool))[0]) == 0


def test_persists_is_true_only_where_most_of_move_remains():
    close = np.array([0.0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1])
    assert price_move_persists(close, np.array([5, 11]), np.array([1.0, -1.0])).tolist() == [True, False]
