"""Volume and VWAP features: amount and side of trading, for markets whose volume is meaningful.

Sources: Granville for on-balance volume; Quong and Soudack for MFI; Chaikin for money flow and its oscillator; Elder
for the force index; Klinger (1997) for the volume oscillator; Arms for ease of movement; Dormeier (2007) for the tilt
of the VWAP against the plain mean; Karpoff (1987) for volume against the move and its size. Every column is a share or
a ratio, so it does not depend on the unit of volume.
"""

from collections.abc import Iterator

import numpy as np
from numba import njit

from ml_factory.features.engine import HISTORY, Block, Column
from ml_factory.features.windows import (
    balance,
    lag,
    ratio,
    window_correlation,
    window_max,
    window_min,
    window_sum,
    window_variation,
)


def volume(b: Block) -> Iterator[Column]:
    """Yield the columns, none where the market has no volume; see the module."""
    if b.volume is None:
        return
    typical = (b.high + b.low + b.close) / 3.0  # TA-Lib TYPPRICE
    flow, change, usual = typical * b.volume, b.close - lag(b.close), b.sum("volume", 20)
    # A third of a sum is rounded: equal prices may differ in their last bits, and that is no move.
    moved = typical - lag(typical)
    trend = np.sign(np.where(abs(moved) < 1e-12 * typical, 0.0 * moved, moved))
    # Volume times the close's place in its bar, -1 to 1: Chaikin's flow, which TA-Lib AD adds up.
    money = ratio((b.close - b.low) - (b.high - b.close), b.high - b.low) * b.volume

    yield "volume_surprise_20", balance(b.volume, lag(usual) / 20.0)
    up, down = (window_sum(flow * (trend == side) + 0.0 * trend, 14) for side in (1.0, -1.0))
    yield "mfi_14", 100.0 * ratio(up, up + down, 0.5)  # TA-Lib MFI; 50 where no money moved the price
    yield "money_flow_20", ratio(window_sum(money, 20), usual)
    yield "obv_share_20", ratio(window_sum(np.sign(change) * b.volume, 20), usual)  # TA-Lib OBV adds these up
    yield "vwap_gap_24", (b.close - _vwap(b, typical, flow, 24)) / b.atr
    if b.coarse:
        return

    yield "volume_trend_12_96", balance(b.sum("volume", 12) / 12.0, b.sum("volume", 96) / 96.0)
    yield "volume_dispersion_48", window_variation(b.volume, 48)
    # A mean of a running sum needs no running sum: the sum less its exponential mean is (1 - alpha) / alpha times the
    # mean of its steps, which makes TA-Lib ADOSC the difference of two means of money volume. Klinger's volume force is
    # taken as volume with the sign of the typical price's change, as charting programs do.
    force = change * b.volume
    yield "force_13", ratio(b.ema("force", force, 13), b.ema("force size", abs(force), 13))
    spent, traded, bars = (
        _session_sum(x, b.session, HISTORY, b.memory(name, 0.0))
        for name, x in (("session flow", flow), ("session volume", b.volume), ("session bars", np.ones(len(flow))))
    )
    yield "session_vwap_gap", (b.close - ratio(spent, traded, b.close)) / b.atr
    yield "return_volume_correlation_48", window_correlation(b.ret, b.volume, 48)
    yield "size_volume_correlation_48", window_correlation(abs(b.ret), b.volume, 48)
    yield "vwap_gap_96", (b.close - _vwap(b, typical, flow, 96)) / b.atr
    # Did volume come at the high prices or the low ones?
    yield "vwap_tilt_48", (_vwap(b, typical, flow, 48) - window_sum(typical, 48) / 48.0) / b.atr
    yield "session_volume_pace", balance(traded / bars, b.sum("volume", 96) / 96.0)
    yield "volume_autocorrelation_48", window_correlation(lag(b.volume), b.volume, 48)
    chaikin = 4.5 * b.ema("flow 10", money, 10) - b.ema("flow 3", money, 3)
    yield "chaikin_3_10", ratio(chaikin, b.ema("volume 10", b.volume, 10))
    klinger = b.ema("trend 34", trend * b.volume, 34) - b.ema("trend 55", trend * b.volume, 55)
    yield "klinger_34_55", ratio(klinger, b.ema("volume 55", b.volume, 55))
    yield "price_volume_share_48", _net_share(b.ret * b.volume, 48)
    # Arms: move of a bar's middle times its range over its volume.
    middle = 0.5 * ((b.high - lag(b.high)) + (b.low - lag(b.low)))
    yield "ease_of_movement_14", _net_share(middle * ratio(b.high - b.low, b.volume), 14)
    # Volume of bars whose high is the highest of 24 bars, less that of bars whose low is the lowest.
    top, bottom = window_max(b.high, 24), window_min(b.low, 24)
    side = 1.0 * (b.high == top) - (b.low == bottom) + 0.0 * top
    yield "breakout_volume_24", ratio(window_sum(side * b.volume, 24), b.sum("volume", 24))


def _vwap(b: Block, typical: np.ndarray, flow: np.ndarray, n: int) -> np.ndarray:
    """Return the volume-weighted mean of n typical prices; their plain mean where nothing traded."""
    return ratio(window_sum(flow, n), b.sum("volume", n), window_sum(typical, n) / n)


def _net_share(x: np.ndarray, n: int) -> np.ndarray:
    """Return the sum of the last n values over the sum of their sizes, -1 to 1; 0 where all are 0."""
    return ratio(window_sum(x, n), window_sum(abs(x), n))


@njit(cache=True, nogil=True, error_model="numpy")
def _session_sum(x, session, first, state):
    """Sum of the session's values so far, of the rows from `first` on."""
    out, total = np.full(len(x), np.nan), state[0]
    for i in range(first, len(x)):
        total = x[i] + (0.0 if session[i] != session[i - 1] else total)
        out[i] = total
    state[0] = total
    return out
