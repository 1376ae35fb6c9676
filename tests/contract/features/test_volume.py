"""Volume against TA-Lib and against formulas written out row by row; silence included."""

from dataclasses import replace

import numpy as np
import pytest
import talib

from tests.contract.doors import FAMILIES, compute_family_columns
from tests.contract.features.plain import atr, correlation, returns, share, window

volume = FAMILIES["volume"]

UNSTABLE = 600
KNOWN = ("mfi_14", "chaikin_3_10")


@pytest.mark.parametrize(("symbol", "minutes"), [("SPY", 5), ("XAUUSD", 5), ("SPY", 60)])
def test_volume_standard_indicators_equal_talib(real_frame, markets, symbol, minutes):
    frame = real_frame(symbol, minutes)
    high, low, close, traded = frame.high, frame.low, frame.close, frame.volume
    found = compute_family_columns(volume, frame, markets[symbol], False)
    atr, total = talib.ATR(high, low, close, 14), talib.SUM(traded, 20)
    change = np.diff(close, prepend=np.nan)
    wanted = {
        "mfi_14": talib.MFI(high, low, close, traded, 14),
        "obv_share_20": (talib.OBV(close, traded) - np.roll(talib.OBV(close, traded), 20)) / total,
        "money_flow_20": (talib.AD(high, low, close, traded) - np.roll(talib.AD(high, low, close, traded), 20)) / total,
        "vwap_gap_24": (close - talib.SUM(talib.TYPPRICE(high, low, close) * traded, 24) / talib.SUM(traded, 24)) / atr,
        "vwap_gap_96": (close - talib.SUM(talib.TYPPRICE(high, low, close) * traded, 96) / talib.SUM(traded, 96)) / atr,
        "chaikin_3_10": talib.ADOSC(high, low, close, traded, 3, 10) / talib.EMA(traded, 10),
        "force_13": talib.EMA((change * traded)[1:], 13) / talib.EMA(np.abs(change * traded)[1:], 13),
    }
    wanted["force_13"] = np.append(np.nan, wanted["force_13"])
    for name, want in wanted.items():
        got = found[name]
        assert np.abs(got - want)[UNSTABLE:].max() <= 1e-6 * got[UNSTABLE:].std(), name


def surprise(frame, i):
    return balance(frame.volume[i], window(frame.volume, i - 1, 20).mean())


def balance(a, b):
    return share(a - b, a + b)


def obv_share(frame, i):
    traded = window(frame.volume, i, 20)
    return share((np.sign(np.diff(window(frame.close, i, 21))) * traded).sum(), traded.sum())


def money_flow(frame, i):
    high, low, close, traded = (window(x, i, 20) for x in (frame.high, frame.low, frame.close, frame.volume))
    place = [share((c - l) - (h - c), h - l) for h, l, c in zip(high, low, close, strict=True)]  # noqa: E741
    return share(np.dot(place, traded), traded.sum())


def gap_to_vwap(frame, i, first):
    typical = (frame.high + frame.low + frame.close)[first : i + 1] / 3
    traded = frame.volume[first : i + 1]
    return typical, np.average(typical, weights=traded) if traded.sum() else None


def vwap_gap(n):
    def reference(frame, i):
        typical, mean = gap_to_vwap(frame, i, i - n + 1)
        return (frame.close[i] - (typical.mean() if mean is None else mean)) / atr(frame)[i]

    return reference


def vwap_tilt(frame, i):
    typical, mean = gap_to_vwap(frame, i, i - 47)
    return 0.0 if mean is None else (mean - typical.mean()) / atr(frame)[i]


def session_vwap_gap(frame, i):
    _, mean = gap_to_vwap(frame, i, np.flatnonzero(frame.session == frame.session[i])[0])
    return (frame.close[i] - (frame.close[i] if mean is None else mean)) / atr(frame)[i]


def force(frame, i):
    flow = np.diff(frame.close[: i + 1]) * frame.volume[1 : i + 1]
    return share(exponential(flow, 13), exponential(np.abs(flow), 13))


def session_pace(frame, i):
    session = frame.volume[: i + 1][frame.session[: i + 1] == frame.session[i]].mean()
    return balance(session, window(frame.volume, i, 96).mean())


def exponential(x, n):
    mean = x[:n].mean()
    for value in x[n:]:
        mean = ((n - 1) * mean + 2 * value) / (n + 1)
    return mean


def klinger(frame, i):
    typical = (frame.high + frame.low + frame.close)[: i + 1]
    force = np.sign(np.diff(typical).round(9)) * frame.volume[1 : i + 1]
    return share(exponential(force, 34) - exponential(force, 55), exponential(frame.volume[: i + 1], 55))


def price_volume_share(frame, i):
    flow = returns(frame, i, 48) * window(frame.volume, i, 48)
    return share(flow.sum(), np.abs(flow).sum())


def ease_of_movement(frame, i):
    middle, box = (frame.high + frame.low) / 2, frame.high - frame.low
    eases = [share((middle[k] - middle[k - 1]) * box[k], frame.volume[k]) for k in range(i - 13, i + 1)]
    return share(np.sum(eases), np.abs(eases).sum())


def breakout_volume(frame, i):
    signed = 0.0
    for k in range(i - 23, i + 1):
        signed += frame.volume[k] * (frame.high[k] >= window(frame.high, k, 24).max())
        signed -= frame.volume[k] * (frame.low[k] <= window(frame.low, k, 24).min())
    return share(signed, window(frame.volume, i, 24).sum())


TWINS = {
    "volume_surprise_20": surprise,
    "money_flow_20": money_flow,
    "obv_share_20": obv_share,
    "vwap_gap_24": vwap_gap(24),
    "vwap_gap_96": vwap_gap(96),
    "vwap_tilt_48": vwap_tilt,
    "volume_autocorrelation_48": lambda f, i: correlation(window(f.volume, i, 48), window(f.volume, i - 1, 48)),
    "session_volume_pace": session_pace,
    "klinger_34_55": klinger,
    "price_volume_share_48": price_volume_share,
    "ease_of_movement_14": ease_of_movement,
    "breakout_volume_24": breakout_volume,
    "session_vwap_gap": session_vwap_gap,
    "volume_trend_12_96": lambda f, i: balance(window(f.volume, i, 12).mean(), window(f.volume, i, 96).mean()),
    "volume_dispersion_48": lambda f, i: share(window(f.volume, i, 48).std(), window(f.volume, i, 48).mean()),
    "force_13": force,
    "return_volume_correlation_48": lambda f, i: correlation(returns(f, i, 48), window(f.volume, i, 48)),
    "size_volume_correlation_48": lambda f, i: correlation(np.abs(returns(f, i, 48)), window(f.volume, i, 48)),
}


def test_volume_columns_not_in_talib_equal_reference(either_frame, markets, check_columns):
    check_columns(volume, either_frame("SPY", 60), markets["SPY"], TWINS, known=KNOWN)


def test_volume_columns_with_scaled_volume_are_unchanged(rough, markets):
    here = compute_family_columns(volume, rough, markets["SPY"], False)
    there = compute_family_columns(volume, replace(rough, volume=rough.volume * 1024.0), markets["SPY"], False)
    for name in here:
        np.testing.assert_array_equal(here[name], there[name], err_msg=name)
