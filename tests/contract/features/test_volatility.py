"""Volatility against TA-Lib and against the papers' formulas written out row by row."""

import math
from dataclasses import replace

import numpy as np
import pytest
import talib

from tests.contract.doors import FAMILIES, compute_family_columns, range_variances
from tests.contract.features.plain import FLOOR, atr, correlation, deviation, returns, true_ranges, window

volatility = FAMILIES["volatility"]

UNSTABLE = 600
KNOWN = ("natr_14", "bollinger_place_20", "bollinger_width_20")


@pytest.mark.parametrize(("symbol", "minutes"), [("ES", 5), ("SPY", 5), ("XAUUSD", 5), ("ES", 60)])
def test_volatility_standard_indicators_equal_talib(real_frame, markets, symbol, minutes):
    frame = real_frame(symbol, minutes)
    found = compute_family_columns(volatility, frame, markets[symbol], False)
    upper, middle, lower = talib.BBANDS(frame.close, 20, 2.0, 2.0)
    wanted = {
        "natr_14": talib.NATR(frame.high, frame.low, frame.close, 14),
        "bollinger_place_20": (frame.close - lower) / (upper - lower) - 0.5,
        "bollinger_width_20": (upper - lower) / middle,
    }
    assert set(wanted) == set(KNOWN)
    for name, want in wanted.items():
        got = found[name]
        assert np.abs(got - want)[UNSTABLE:].max() <= 1e-6 * got[UNSTABLE:].std(), name


def over_window(variance):
    """sqrt of the mean over 24 bars of a variance of (open, high, low, close), each in logs."""

    def reference(frame, i):
        bars = zip(frame.open[i - 23 : i + 1], frame.high[i - 23 : i + 1], frame.low[i - 23 : i + 1],
                   frame.close[i - 23 : i + 1], strict=True)  # fmt: skip
        return max(math.sqrt(max(np.mean([variance(*map(math.log, bar)) for bar in bars]), 0.0)), FLOOR)

    return reference


parkinson = over_window(lambda o, h, l, c: (h - l) ** 2 / (4 * math.log(2)))  # noqa: E741
garman_klass = over_window(lambda o, h, l, c: 0.5 * (h - l) ** 2 - (2 * math.log(2) - 1) * (c - o) ** 2)  # noqa: E741
rogers_satchell = over_window(lambda o, h, l, c: (h - o) * (h - c) + (l - o) * (l - c))  # noqa: E741


def yang_zhang(frame, i):
    n = 24
    o, h, low, c = (np.log(x[i - n : i + 1]) for x in (frame.open, frame.high, frame.low, frame.close))
    jump, body = o[1:] - c[:-1], (c - o)[1:]
    inner = ((h - o) * (h - c) + (low - o) * (low - c))[1:].mean()
    k = 0.34 / (1.34 + (n + 1) / (n - 1))
    return max(math.sqrt(max(np.var(jump, ddof=1) + k * np.var(body, ddof=1) + (1 - k) * inner, 0.0)), FLOOR)


def choppiness(frame, i):
    before = frame.close[i - 14]
    reach = max(*frame.high[i - 13 : i + 1], before) - min(*frame.low[i - 13 : i + 1], before)
    return math.log(window(true_ranges(frame), i, 14).sum() / reach) / math.log(14) if reach else 0.0


def downside(n):
    def reference(frame, i):
        moves = returns(frame, i, n)
        return (moves[moves < 0] ** 2).sum() / (moves**2).sum() - 0.5 if moves.any() else 0.0

    return reference


def jump_share(frame, i):
    size = np.abs(returns(frame, i, 48))
    realised = (size**2).sum()
    return 1 - math.pi / 2 * 48 / 47 * (size[1:] * size[:-1]).sum() / realised if realised else 0.0


def dispersion(frame, i):
    spans = window(true_ranges(frame), i, 48)
    return spans.std() / spans.mean() if spans.mean() else 0.0


def moment(power, centre):
    def reference(frame, i):
        moves = returns(frame, i, 48)
        return np.mean((moves - moves.mean()) ** power) / moves.std() ** power - centre if np.ptp(moves) else 0.0

    return reference


def median_jump_share(frame, i):
    size = np.abs(returns(frame, i, 48))
    middle = [sorted(size[k - 1 : k + 2])[1] ** 2 for k in range(1, 47)]
    return 1 - math.pi / (6 - 4 * 3**0.5 + math.pi) * 48 / 46 * sum(middle) / (size**2).sum() if size.any() else 0.0


def ewma_ratio(frame, i):
    squares = returns(frame, i, i) ** 2
    variance = squares[:48].mean()
    for square in squares[48:]:
        variance = 0.94 * variance + 0.06 * square
    return math.log(max(math.sqrt(variance), FLOOR) / deviation(frame, i, 48))


def of_deviations(frame, i):
    spreads = np.array([deviation(frame, k, 12) for k in range(i - 47, i + 1)])
    return spreads.std() / spreads.mean()


def atr_place(frame, i):
    recent = window(atr(frame), i, 96)
    return (recent[-1] - recent.min()) / np.ptp(recent) - 0.5 if np.ptp(recent) else 0.0


def range_asymmetry(frame, i):
    o, h, low = (x[i - 23 : i + 1] for x in (frame.open, frame.high, frame.low))
    return (h + low - 2 * o).sum() / (h - low).sum() if (h - low).any() else 0.0


TWINS = {
    "choppiness_14": choppiness,
    "downside_share_48": downside(48),
    "parkinson_ratio_24": lambda f, i: math.log(parkinson(f, i) / deviation(f, i, 24)),
    "garman_klass_ratio_24": lambda f, i: math.log(garman_klass(f, i) / parkinson(f, i)),
    "rogers_satchell_ratio_24": lambda f, i: math.log(rogers_satchell(f, i) / garman_klass(f, i)),
    "yang_zhang_ratio_24": lambda f, i: math.log(yang_zhang(f, i) / deviation(f, i, 24)),
    "deviation_ratio_6_48": lambda f, i: math.log(deviation(f, i, 6) / deviation(f, i, 48)),
    "deviation_ratio_24_96": lambda f, i: math.log(deviation(f, i, 24) / deviation(f, i, 96)),
    "jump_share_48": jump_share,
    "range_surprise_14": lambda f, i: true_ranges(f)[i] / atr(f)[i - 1] - 1,
    "range_dispersion_48": dispersion,
    "skew_48": moment(3, 0.0),
    "kurtosis_48": moment(4, 3.0),
    "median_jump_share_48": median_jump_share,
    "downside_share_12": downside(12),
    "ewma_ratio_48": ewma_ratio,
    "deviation_dispersion_12_48": of_deviations,
    "squeeze_20": lambda f, i: 2 * f.close[i - 19 : i + 1].std() / (1.5 * atr(f)[i]) - 1,
    "channel_width_48": lambda f, i: (
        (window(f.high, i, 48).max() - window(f.low, i, 48).min()) / atr(f)[i] / 48**0.5 - 1
    ),
    "range_asymmetry_24": range_asymmetry,
    "atr_place_96": atr_place,
    "leverage_48": lambda f, i: correlation(returns(f, i - 1, 48), np.abs(returns(f, i, 48))),
    "clustering_48": lambda f, i: correlation(np.abs(returns(f, i - 1, 48)), np.abs(returns(f, i, 48))),
}


def test_volatility_columns_not_in_talib_equal_reference(either_frame, markets, check_columns):
    check_columns(volatility, either_frame("ES", 60), markets["ES"], TWINS, known=KNOWN)


def test_range_volatility_estimators_agree_on_walk_without_drift(markets, make_frame):
    """On many steps per bar each estimator finds the walk's deviation, so every ratio is near 0."""
    rng = np.random.default_rng(3)
    steps = np.cumsum(rng.normal(0, 1e-4, (4000, 400)).ravel()).reshape(4000, 400)
    opens = np.append(0.0, steps[:-1, -1])
    bars = opens, np.maximum(steps.max(1), opens), np.minimum(steps.min(1), opens), steps[:, -1]
    true = 1e-4 * 20
    np.testing.assert_allclose(np.sqrt(np.mean(range_variances(*bars), axis=1)), true, rtol=0.06)
    open_, high, low, close = np.exp(bars)
    frame = replace(make_frame(close), open=open_, high=high, low=low)
    found = compute_family_columns(volatility, frame, markets["ES"], False)
    for name in ("parkinson_ratio_24", "garman_klass_ratio_24", "rogers_satchell_ratio_24", "yang_zhang_ratio_24"):
        assert found[name][100:].mean() == pytest.approx(0.0, abs=0.06), name
