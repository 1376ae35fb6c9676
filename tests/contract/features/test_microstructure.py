"""Microstructure proxies against their papers' formulas, and against spreads that are known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.contract.doors import FAMILIES, compute_family_columns
from tests.contract.features.plain import atr, correlation, deviation, returns, share, window

microstructure = FAMILIES["microstructure"]


def of_bar(formula):
    def reference(frame, i):
        o, h, low, c = (float(x[i]) for x in (frame.open, frame.high, frame.low, frame.close))
        return share(formula(o, h, low, c), h - low)

    return reference


def roll(frame, i):
    covariance = np.cov(returns(frame, i, 96), returns(frame, i - 1, 96), ddof=0)[0, 1]
    return 2 * math.sqrt(max(-covariance, 0.0))


def two_bar_spread(frame, i):
    beta = sum(math.log(frame.high[k] / frame.low[k]) ** 2 for k in (i - 1, i))
    gamma = math.log(max(frame.high[i - 1 : i + 1]) / min(frame.low[i - 1 : i + 1])) ** 2
    root = 3 - 2 * math.sqrt(2)
    alpha = (math.sqrt(2 * beta) - math.sqrt(beta)) / root - math.sqrt(gamma / root)
    return max(2 * (math.exp(alpha) - 1) / (1 + math.exp(alpha)), 0.0)


def amihud(frame, i):
    def mean(n):
        moves = np.abs(returns(frame, i, n))
        return np.mean(
            [share(m, frame.close[k] * frame.volume[k]) for m, k in zip(moves, range(i - n + 1, i + 1), strict=True)]
        )

    return share(mean(12) - mean(96), mean(12) + mean(96))


def signed_impact(size):
    def reference(frame, i):
        return correlation(returns(frame, i, 48), window(np.sign(frame.close - frame.open) * size(frame), i, 48))

    return reference


def vpin(frame, i):
    moves, one_sided = returns(frame, i, 48), 0.0
    for k, move in zip(range(i - 47, i + 1), moves, strict=True):
        buys = 0.5 * (1 + math.erf(move / deviation(frame, k, 48) / math.sqrt(2)))
        one_sided += frame.volume[k] * abs(buys - (1 - buys))
    return share(one_sided, window(frame.volume, i, 48).sum())


def two_bar_distance(frame, i):
    middle = [(math.log(frame.high[k]) + math.log(frame.low[k])) / 2 for k in (i - 1, i)]
    close = math.log(frame.close[i - 1])
    return math.sqrt(max(4 * (close - middle[0]) * (close - middle[1]), 0.0))


def persistence(frame, i):
    signs = np.sign(np.diff(window(frame.close, i, 50)))
    return np.mean(signs[1:] * signs[:-1])


def gap_share(frame, i):
    now, before = slice(i - 23, i + 1), slice(i - 24, i)
    path = np.maximum(frame.high[now], frame.close[before]) - np.minimum(frame.low[now], frame.close[before])
    return share(np.abs(frame.open[now] - frame.close[before]).sum(), path.sum())


def outside_share(frame, i):
    higher, lower = np.sign(np.diff(window(frame.high, i, 25))), np.sign(np.diff(window(frame.low, i, 25)))
    return (np.sum((higher > 0) & (lower < 0)) - np.sum((higher < 0) & (lower > 0))) / 24


def bulk_imbalance(frame, i):
    balance = 0.0
    for k, move in zip(range(i - 47, i + 1), returns(frame, i, 48), strict=True):
        buys = 0.5 * (1 + math.erf(move / deviation(frame, k, 48) / math.sqrt(2)))
        balance += frame.volume[k] * (buys - (1 - buys))
    return share(balance, window(frame.volume, i, 48).sum())


def bar_sum(of, n):
    def reference(frame, i):
        o, h, low, c = (window(x, i, n) for x in (frame.open, frame.high, frame.low, frame.close))
        return share(of(o, h, low, c).sum(), (h - low).sum())

    return reference


PRICE_ONLY = {
    "bar_body": of_bar(lambda o, h, low, c: c - o),
    "bar_place": of_bar(lambda o, h, low, c: 2 * c - h - low),
    "bar_wicks": of_bar(lambda o, h, low, c: (h - max(o, c)) - (min(o, c) - low)),
    "body_mean_12": bar_sum(lambda o, h, low, c: c - o, 12),
    "place_mean_12": bar_sum(lambda o, h, low, c: 2 * c - h - low, 12),
    "body_share_24": bar_sum(lambda o, h, low, c: np.abs(c - o), 24),
    "open_gap": lambda f, i: (f.open[i] - f.close[i - 1]) / atr(f)[i - 1],
    "autocorrelation_48": lambda f, i: correlation(returns(f, i, 48), returns(f, i - 1, 48)),
    "roll_spread_96": roll,
    "corwin_schultz_24": lambda f, i: np.mean([two_bar_spread(f, k) for k in range(i - 23, i + 1)]),
    "abdi_ranaldo_24": lambda f, i: np.mean([two_bar_distance(f, k) for k in range(i - 23, i + 1)]),
    "zero_share_48": lambda f, i: np.mean(np.diff(window(f.close, i, 49)) == 0.0),
    "sign_persistence_48": persistence,
    "gap_share_24": gap_share,
    "outside_share_24": outside_share,
}
WITH_VOLUME = {
    "amihud_ratio_12_96": amihud,
    "kyle_48": signed_impact(lambda f: f.volume),
    "vpin_48": vpin,
    "bulk_imbalance_48": bulk_imbalance,
    "hasbrouck_48": signed_impact(lambda f: np.sqrt(f.close * f.volume)),
    "pastor_stambaugh_48": lambda f, i: correlation(
        returns(f, i, 48), np.sign(returns(f, i - 1, 48)) * window(f.volume, i - 1, 48)
    ),
}


def test_microstructure_columns_equal_reference(either_frame, markets, check_columns):
    check_columns(microstructure, either_frame("SPY", 60), markets["SPY"], PRICE_ONLY | WITH_VOLUME)


def test_microstructure_market_without_volume_has_price_columns_only(real_frame, markets, check_columns):
    check_columns(microstructure, real_frame("ES", 60), markets["ES"], PRICE_ONLY)


def test_roll_spread_of_bid_query_bounce_recovers_spread(make_frame, markets):
    rng = np.random.default_rng(2)
    fair = 100.0 * np.exp(np.cumsum(rng.normal(0, 1e-5, 20_000)))
    trades = fair * (1.0 + 0.0005 * rng.choice([-1.0, 1.0], 20_000))
    spread = compute_family_columns(microstructure, make_frame(trades), markets["ES"], False)["roll_spread_96"][200:]
    assert np.sqrt(np.mean(spread**2)) == pytest.approx(0.001, rel=0.03)  # the covariance has no bias, its root has


def test_range_spread_estimators_recover_known_spread(make_frame, markets):
    rng = np.random.default_rng(4)
    path = 100.0 * np.exp(np.cumsum(rng.normal(0, 1e-4, (3000, 300)).ravel())).reshape(3000, 300)
    quoted = path * (1.0 + 0.0015 * rng.choice([-1.0, 1.0], path.shape))
    of_quoted, of_fair = (
        compute_family_columns(
            microstructure, replace(make_frame(x[:, -1].copy()), high=x.max(1), low=x.min(1)), markets["ES"], False
        )
        for x in (quoted, path)
    )
    for name, near in (("corwin_schultz_24", 0.15), ("abdi_ranaldo_24", 0.3)):
        assert of_quoted[name][30:].mean() == pytest.approx(0.003, rel=near), name
        assert of_fair[name][30:].mean() < 0.4 * of_quoted[name][30:].mean(), name
