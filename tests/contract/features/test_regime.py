"""Filters and regime measures against twins written another way."""

import math

import numpy as np
from scipy.stats import norm

from tests.contract.doors import compute_family_columns, regime
from tests.contract.features.plain import atr, deviation, window


def surprises(frame):
    close = frame.close
    return [math.log(close[i] / close[i - 1]) / deviation(frame, i - 1, 96) for i in range(97, len(close))]


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
    def reference(frame, i):
        log_close = np.log(frame.close)
        many = [log_close[k] - log_close[k - q] for k in range(i - n + 1, i + 1)]
        one = [log_close[k] - log_close[k - 1] for k in range(i - n - q + 2, i + 1)]
        return np.var(many) / (q * np.var(one)) - 1 if np.ptp(one) else 0.0

    return reference


def three_states(frame):
    """P(rising) - P(falling) by Bayes' rule on three densities."""
    chance, out = np.full(3, 1 / 3), [np.nan] * 97
    moves = np.full((3, 3), 0.025) + np.eye(3) * 0.925
    for z in surprises(frame):
        chance = (chance @ moves) * norm.pdf(z, loc=[0.3, 0.0, -0.3])
        chance /= chance.sum()
        out.append(chance[0] - chance[2])
    return np.array(out)


def run_lengths(frame):
    """Adams and MacKay's algorithm 1 with run lengths 0 to 7, the last for all longer: the two columns."""
    chance, total = np.eye(8)[0], np.zeros(8)
    recent, mean = [np.nan] * 97, [np.nan] * 97
    for z in np.clip(surprises(frame), -8, 8):
        precision = np.arange(8) + 1.0  # of the mean: the prior counts as one bar
        grown = chance * norm.pdf(z, loc=total / precision, scale=np.sqrt(1 + 1 / precision))
        evidence, tail = grown.sum(), grown[-2:].sum()
        longest = grown[-2:] @ total[-2:] / tail if tail else 0.0
        chance = np.append(1 / 16, 15 / 16 * np.append(grown[:-2], tail) / evidence)
        total = np.concatenate([[0.0], total[:-2] + z, [(longest + z) * 7 / 8]])
        recent.append(chance[:3].sum())
        mean.append(chance @ np.arange(8) / 8 - 0.5)
    return np.array(recent), np.array(mean)


def place(frame, i):
    recent = np.array([deviation(frame, k, 24) for k in range(i - 191, i + 1)])
    return (recent[-1] - recent.min()) / np.ptp(recent) - 0.5 if np.ptp(recent) else 0.0


def references(frame):
    unit = atr(frame)
    recent, mean = run_lengths(frame)
    return {
        "wild_probability": hamilton(frame),
        "trend_probability": three_states(frame),
        "cusum": page(frame),
        "change_probability": recent,
        "run_length": mean,
        "variance_ratio_4_48": variance_ratio(4, 48),
        "variance_ratio_12_96": variance_ratio(12, 96),
        "deviation_place_192": place,
        "drawdown_192": lambda f, i: (f.close[i] - window(f.high, i, 192).max()) / (unit[i] * 192**0.5),
    }


def test_regime_columns_equal_reference(real_frame, make_frame, markets, check_columns):
    hourly = real_frame("SPY", 60)
    check_columns(regime.regime, hourly, markets["SPY"], references(hourly))
    ties = make_frame(100.0 + np.cumsum(np.random.default_rng(6).integers(-2, 3, 900)) * 0.25)
    check_columns(regime.regime, ties, markets["SPY"], references(ties))


def test_regime_columns_in_dead_market_show_calm_and_no_change(rough, markets):
    found = compute_family_columns(regime.regime, rough, markets["ES"], False)
    at = 790  # 290 bars into the dead stretch
    still = ("cusum", "variance_ratio_12_96", "drawdown_192")
    assert {name: float(found[name][at]) for name in still} == dict.fromkeys(still, 0.0)
    assert found["wild_probability"][at] < 0.05
    assert abs(found["trend_probability"][at]) < 0.01


def test_wild_probability_of_switching_volatility_detects_wild_stretches():
    rng = np.random.default_rng(8)
    wild = np.repeat([0, 1, 0, 1, 0], 400).astype(bool)
    surprise = np.where(wild, 1.7, 0.7) * rng.normal(size=2000)
    probability = regime.volatile_regime_probability(surprise, 0, np.full(1, 0.5))
    assert np.mean((probability > 0.5) == wild) > 0.9


def first_run():
    """Before the first number a run of length 0 is certain."""
    return np.eye(1, 2 * regime.RUNS).reshape(2, regime.RUNS)


def test_trend_probability_and_change_point_detect_drift_changes():
    rng = np.random.default_rng(9)
    surprise = rng.normal(size=4000) + np.repeat([0.0, 0.5, -0.5, 0.0], 1000)
    trend = regime.trend_regime_probability(surprise, 0, np.full(2, 1 / 3))
    assert trend[1000:2000].mean() > 0.5
    assert trend[2000:3000].mean() < -0.5
    jumps = np.where(np.arange(4000) % 40 == 0, rng.choice([-4.0, 4.0], 4000), 0.0)  # the mean jumps for one bar
    change, run = regime.bayesian_change_point(0.5 * surprise + jumps, 0, first_run())
    after = np.arange(4000) % 40 == 1
    assert change[after][5:].mean() > 2 * change[~after].mean()
    assert run[after][5:].mean() < run[~after].mean()


def test_regime_filters_with_extreme_or_nan_input_stay_finite():
    z = np.array([np.nan, 0.1, 1e9, -1e150, 0.1, np.nan, 0.2] + [0.1] * 50)
    probability = regime.volatile_regime_probability(z, 0, np.full(1, 0.5))
    assert np.isnan(probability[[0, 5]]).all()
    assert np.isfinite(np.delete(probability, [0, 5])).all()
    assert probability[3] > 0.999 > probability[-1]
    others = [
        regime.trend_regime_probability(z, 0, np.full(2, 1 / 3)),
        regime.cusum(z, 0.25, 12.0, 0, np.zeros(2)),
        *regime.bayesian_change_point(z, 0, first_run()),
    ]
    assert np.isfinite(np.delete(others, [0, 5], axis=1)).all()
