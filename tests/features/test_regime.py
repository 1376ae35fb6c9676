"""Filters and regime measures against twins written another way."""

import itertools
import math

import numpy as np
from scipy.special import binom
from scipy.stats import norm

from ml_factory.features.regime import cusum, fractional_weights, regime, wild_probability


def window(x, i, n):
    return x[i - n + 1 : i + 1]


def deviation(close, i, n):
    return max(np.std(np.diff(np.log(window(close, i, n + 1)))), 1e-6)


def surprises(frame):
    close = frame.close
    return [math.log(close[i] / close[i - 1]) / deviation(close, i - 1, 96) for i in range(97, len(close))]


def hamilton(frame):
    """P(wild) by Bayes' rule on the two densities, in high precision of probabilities instead of log odds."""
    wild, out = 0.5, [np.nan] * 97
    for z in surprises(frame):
        before = np.array([0.95 * wild + 0.05 * (1 - wild), 0.05 * wild + 0.95 * (1 - wild)])
        joint = np.log(before) + norm.logpdf(z, scale=[1.7, 0.7])
        wild = np.exp(joint[0] - np.logaddexp.reduce(joint))
        out.append(wild)
    return np.array(out)


def page(frame):
    up, down, out = 0.0, 0.0, [np.nan] * 97
    for z in surprises(frame):
        up, down = np.clip(up + z - 0.25, 0, 12), np.clip(down - z - 0.25, 0, 12)
        out.append(up - down)
    return np.array(out)


def variance_ratio(q, n):
    def twin(frame, i):
        log_close = np.log(frame.close)
        many = [log_close[k] - log_close[k - q] for k in range(i - n + 1, i + 1)]
        one = [log_close[k] - log_close[k - 1] for k in range(i - n - q + 2, i + 1)]
        return np.var(many) / (q * np.var(one)) - 1 if np.ptp(one) else 0.0

    return twin


def rank(frame, i):
    recent = np.array([deviation(frame.close, k, 24) for k in range(i - 239, i + 1)])
    return np.mean(recent < recent[-1]) + np.mean(recent == recent[-1]) / 2 - 0.5


def entropy(frame, i):
    orders = dict.fromkeys(itertools.permutations(range(3)), 0)
    for k in range(i - 47, i + 1):
        orders[tuple(np.argsort(frame.close[k - 2 : k + 1], kind="stable").tolist())] += 1
    shares = np.array([count for count in orders.values() if count]) / 48
    return -(shares * np.log(shares)).sum() / math.log(6)


def fractional(frame, i):
    logs = np.log(window(frame.close, i, 96))[::-1]
    weights = np.array([(-1) ** k * binom(0.4, k) for k in range(96)])
    return (weights @ logs - weights.sum() * logs[0]) / deviation(frame.close, i, 96)


def twins(frame):
    return {
        "wild_probability": hamilton(frame),
        "cusum": page(frame),
        "variance_ratio_4_48": variance_ratio(4, 48),
        "variance_ratio_12_96": variance_ratio(12, 96),
        "deviation_rank_240": rank,
        "entropy_48": entropy,
        "fractional_40": fractional,
    }


def test_columns_equal_their_formula(real_frame, make_frame, markets, check_columns):
    hourly = real_frame("SPY", 60)
    check_columns(regime, hourly, markets["SPY"], twins(hourly))
    ties = make_frame(100.0 + np.cumsum(np.random.default_rng(6).integers(-2, 3, 900)) * 0.25)
    without_rank = twins(ties)
    del without_rank["deviation_rank_240"]  # equal deviations that two formulas round apart have no one rank
    check_columns(regime, ties, markets["SPY"], without_rank, known=("deviation_rank_240",))


def test_a_dead_market_is_calm_and_shows_no_change(rough, markets):
    columns = regime(rough, markets["ES"], False)
    at = 790  # 290 bars into the dead stretch
    assert {name: float(columns[name][at]) for name in ("cusum", "entropy_48", "variance_ratio_12_96")} == {
        "cusum": 0.0, "entropy_48": 0.0, "variance_ratio_12_96": 0.0,
    }  # fmt: skip
    assert columns["wild_probability"][at] < 0.05


def test_the_filter_finds_the_wild_stretch_of_a_market_that_switches():
    rng = np.random.default_rng(8)
    wild = np.repeat([0, 1, 0, 1, 0], 400).astype(bool)
    probability = wild_probability(np.where(wild, 1.7, 0.7) * rng.normal(size=2000))
    assert np.mean((probability > 0.5) == wild) > 0.9


def test_the_filter_survives_any_move_and_both_filters_pass_over_missing_values():
    z = np.array([np.nan, 0.1, 1e9, -1e150, 0.1, np.nan, 0.2] + [0.1] * 50)
    probability = wild_probability(z)
    assert np.isnan(probability[[0, 5]]).all()
    assert np.isfinite(np.delete(probability, [0, 5])).all()
    assert probability[3] > 0.999 > probability[-1]
    assert np.isfinite(np.delete(cusum(z, 0.25, 12.0), [0, 5])).all()


def test_weights_of_whole_differences():
    assert fractional_weights(1.0, 4).tolist() == [1.0, -1.0, 0.0, 0.0]
    assert fractional_weights(2.0, 4).tolist() == [1.0, -2.0, 1.0, 0.0]
