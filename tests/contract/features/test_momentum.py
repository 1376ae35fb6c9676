"""Momentum against TA-Lib where TA-Lib has it, against the plain formula where it has not."""

import numpy as np
import pytest
import talib

from tests.contract.doors import FAMILIES, compute_family_columns
from tests.contract.features.plain import correlation, deviation, returns, share, true_ranges, window

momentum = FAMILIES["momentum"]

UNSTABLE = 600  # rows after which a recursion has forgotten how TA-Lib starts it
KNOWN = (
    "rsi_14", "rsi_5", "macd_12_26", "macd_histogram_9", "adx_14", "di_14", "cci_20", "stochastic_14",
    "stochastic_slow_14_3", "channel_48", "ultimate_7_14_28", "aroon_25", "slope_24", "ema_gap_20", "ema_gap_20_50",
)  # fmt: skip


def by_talib(frame) -> dict[str, np.ndarray]:
    high, low, close = frame.high, frame.low, frame.close
    bars, atr = (high, low, close), talib.ATR(high, low, close, 14)
    line, _, histogram = talib.MACD(close, 12, 26, 9)
    fast_k, fast_d = talib.STOCHF(*bars, fastk_period=14, fastd_period=3)
    return {
        "rsi_14": talib.RSI(close, 14),
        "rsi_5": talib.RSI(close, 5),
        "macd_12_26": line / atr,
        "macd_histogram_9": histogram / atr,
        "adx_14": talib.ADX(*bars, 14),
        "di_14": talib.PLUS_DI(*bars, 14) - talib.MINUS_DI(*bars, 14),
        "cci_20": talib.CCI(*bars, 20),
        "stochastic_14": fast_k,
        "stochastic_slow_14_3": fast_d,
        "channel_48": talib.STOCHF(*bars, fastk_period=48, fastd_period=1)[0],
        "ultimate_7_14_28": talib.ULTOSC(*bars, 7, 14, 28),
        "aroon_25": talib.AROONOSC(high, low, 25),
        "slope_24": talib.LINEARREG_SLOPE(close, 24) / atr,
        "ema_gap_20": (close - talib.EMA(close, 20)) / atr,
        "ema_gap_20_50": (talib.EMA(close, 20) - talib.EMA(close, 50)) / atr,
    }


@pytest.mark.parametrize(("symbol", "minutes"), [("ES", 5), ("SPY", 5), ("XAUUSD", 5), ("ES", 60), ("XAUUSD", 15)])
def test_momentum_standard_indicators_equal_talib(real_frame, markets, symbol, minutes):
    frame = real_frame(symbol, minutes)
    found, wanted = compute_family_columns(momentum, frame, markets[symbol], False), by_talib(frame)
    assert set(wanted) == set(KNOWN)
    for name, want in wanted.items():
        got = found[name]
        assert np.abs(got - want)[UNSTABLE:].max() <= 1e-6 * got[UNSTABLE:].std(), name


def regression_fit(frame, i):
    together = correlation(np.arange(24.0), window(frame.close, i, 24))
    return together * abs(together)


def normal_return(n):
    def reference(frame, i):
        return returns(frame, i, n).sum() / deviation(frame, i, 48) / n**0.5

    return reference


def efficiency(frame, i):
    moves = np.diff(window(frame.close, i, 25))
    return share(moves.sum(), np.abs(moves).sum())


def vortex(frame, i):
    high, low = window(frame.high, i, 15), window(frame.low, i, 15)
    moved = np.abs(high[1:] - low[:-1]) - np.abs(low[1:] - high[:-1])
    return share(moved.sum(), window(true_ranges(frame), i, 14).sum())


def streak(frame, i):
    signs = np.sign(np.diff(frame.close[: i + 1]))[::-1]
    run = np.append(np.flatnonzero(signs != signs[0]), len(signs))[0]
    return signs[0] * run


TWINS = {
    **{f"return_{n}": normal_return(n) for n in (1, 2, 4, 12, 24, 48)},
    "efficiency_24": efficiency,
    "vortex_14": vortex,
    "slope_fit_24": regression_fit,
    "streak": streak,
}


def test_momentum_columns_not_in_talib_equal_reference(either_frame, markets, check_columns):
    check_columns(momentum, either_frame("ES", 60), markets["ES"], TWINS, known=KNOWN)


def test_rsi_14_of_rise_fall_and_constant_is_100_0_and_50(make_frame, markets):
    up = np.arange(100.0, 200.0)
    for price, wanted in ((up, 100.0), (up[::-1].copy(), 0.0), (np.full(100, 7.0), 50.0)):
        assert (
            compute_family_columns(momentum, make_frame(price, spread=0.0), markets["ES"], True)["rsi_14"][-1] == wanted
        )


def test_momentum_columns_of_mirrored_prices_have_opposite_signs(make_frame, markets):
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.normal(size=700))
    up = make_frame(1000.0 + walk, spread=0.0)
    down = make_frame(1000.0 - walk, spread=0.0)
    here, there = (compute_family_columns(momentum, frame, markets["ES"], False) for frame in (up, down))
    for name in ("macd_12_26", "di_14", "cci_20", "efficiency_24", "vortex_14", "aroon_25", "slope_24", "streak"):
        np.testing.assert_allclose(here[name][100:], -there[name][100:], rtol=1e-4, atol=1e-3, err_msg=name)
