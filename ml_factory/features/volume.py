"""Volume and VWAP features: amount and side of trading, for markets whose volume is meaningful.

Sources: Granville for on-balance volume; Quong and Soudack for MFI; Chaikin for money flow and its oscillator; Elder
for the force index; Klinger (1997) for the volume oscillator; Arms for ease of movement; Dormeier (2007) for the tilt
of the VWAP against the plain mean; Karpoff (1987) for volume against the move and its size. Every column is a share or
a ratio, so it does not depend on the unit of volume.
"""

import numpy as np
from numba import njit

from ml_factory.features.engine import FeatureFamily
from ml_factory.features.ewm import ewm_means
from ml_factory.features.rolling import (
    HISTORY,
    elementwise_abs,
    elementwise_product,
    lag,
    normalized_difference,
    rolling_coefficient_of_variation,
    rolling_max,
    rolling_min,
    rolling_sum,
    rolling_sum_ratio,
    safe_ratio,
    write_rolling_correlation,
)

COARSE = ("volume_surprise_20", "mfi_14", "money_flow_20", "obv_share_20", "vwap_gap_24")
BASE = (
    "volume_trend_12_96", "volume_dispersion_48", "force_13", "session_vwap_gap", "return_volume_correlation_48",
    "size_volume_correlation_48", "vwap_gap_96", "vwap_tilt_48", "session_volume_pace", "volume_autocorrelation_48",
    "chaikin_3_10", "klinger_34_55", "price_volume_share_48", "ease_of_movement_14", "breakout_volume_24",
)  # fmt: skip

# Places of the recursions in the state.
_FORCE, _FORCE_SIZE, _FLOW_3, _FLOW_10, _TRADED_10, _TREND_34, _TREND_55, _TRADED_55, _SESSION = range(9)


def _names(market, coarse):
    """None where the market has no volume."""
    if not market.has_volume:
        return ()
    return COARSE if coarse else COARSE + BASE


@njit(cache=True, nogil=True, error_model="numpy")
def _kernel(b, state, out, coarse):
    if len(out) == 0:
        return
    typical = _typical_price(b)
    flow, money, trend = elementwise_product(typical, b.volume), _money_flow_volume(b), money_flow_direction(typical)
    usual = rolling_sum(b.volume, 20, b.t0, HISTORY - 1)
    _volume_surprise(b.volume, usual, 20, out[0])
    money_flow_index(flow, trend, 14, b.t0, out[1])
    rolling_sum_ratio(money, usual, 20, b.t0, out[2])
    rolling_sum_ratio(_signed_volume(b.close, b.volume), usual, 20, b.t0, out[3])
    _vwap_gap(b, typical, flow, 24, out[4])
    if coarse:
        return
    usual = rolling_sum(b.volume, 96, b.t0, HISTORY)
    _volume_trend(rolling_sum(b.volume, 12, b.t0, HISTORY), 12, usual, 96, out[5])
    rolling_coefficient_of_variation(b.volume, 48, b.t0, out[6])
    write_rolling_correlation(b.ret, b.volume, 48, b.t0, out[9])
    write_rolling_correlation(elementwise_abs(b.ret), b.volume, 48, b.t0, out[10])
    write_rolling_correlation(lag(b.volume), b.volume, 48, b.t0, out[14])
    _session_vwap_and_volume(b, flow, usual, 96, state[_SESSION], out[8], out[13])
    _vwap_gap(b, typical, flow, 96, out[11])
    _vwap_tilt(b, typical, flow, 48, out[12])
    _volume_oscillators(b, money, trend, state[:_SESSION], out[7], out[15], out[16])
    _window_net_to_gross_ratio(elementwise_product(b.ret, b.volume), 48, b.t0, out[17])
    _window_net_to_gross_ratio(_ease_of_movement(b), 14, b.t0, out[18])
    rolling_sum_ratio(_breakout_volume(b, 24), rolling_sum(b.volume, 24, b.t0, HISTORY), 24, b.t0, out[19])


FAMILY = FeatureFamily(names=_names, kernel=_kernel, recursions=9)


@njit(cache=True, nogil=True, error_model="numpy")
def _window_net_to_gross_ratio(x, n, t0, out):
    """Sum of the last n values over the sum of their sizes, -1 to 1; 0 where all are 0."""
    both, x = rolling_sum(elementwise_abs(x), n, t0, HISTORY)[HISTORY:], rolling_sum(x, n, t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = safe_ratio(x[i], both[i], 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _volume_surprise(traded, usual, n, out):
    """Balance of a bar's volume and the mean of the n bars before it, whose sum is `usual`."""
    traded, usual = traded[HISTORY:], usual[HISTORY - 1 :]
    for i in range(len(out)):
        out[i] = normalized_difference(traded[i], usual[i] / n)


@njit(cache=True, nogil=True, error_model="numpy")
def _volume_trend(short, n, long, m, out):
    """Balance of the mean volumes of n and of m bars, given their sums."""
    short, long = short[HISTORY:], long[HISTORY:]
    for i in range(len(out)):
        out[i] = normalized_difference(short[i] / n, long[i] / m)


@njit(cache=True, nogil=True, error_model="numpy")
def _typical_price(b):
    """Mean of high, low and close (TA-Lib TYPPRICE)."""
    out = np.empty(len(b.close))
    for i in range(len(out)):
        out[i] = (b.high[i] + b.low[i] + b.close[i]) / 3.0
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def money_flow_direction(typical):
    """1 where the typical price rose, -1 where it fell, 0 where it stayed."""
    out = np.full(len(typical), np.nan)
    before, now, rows = typical[:-1], typical[1:], out[1:]
    for i in range(len(rows)):
        # A third of a sum is rounded: equal prices may differ in their last bits, and that is no move.
        change, least = now[i] - before[i], 1e-12 * now[i]
        rows[i] = np.float64(change >= least) - np.float64(change <= -least) + 0.0 * change
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def money_flow_index(flow, trend, n, t0, out):
    """Money flow index, 0 to 100; 50 where no money moved the price (TA-Lib MFI)."""
    up, down = np.empty(len(flow)), np.empty(len(flow))
    for i in range(len(flow)):
        up[i] = 0.0 * trend[i] + (flow[i] if trend[i] > 0.0 else 0.0)
        down[i] = flow[i] if trend[i] < 0.0 else 0.0
    up, down = rolling_sum(up, n, t0, HISTORY)[HISTORY:], rolling_sum(down, n, t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = 100.0 * safe_ratio(up[i], up[i] + down[i], 0.5)


@njit(cache=True, nogil=True, error_model="numpy")
def _money_flow_volume(b):
    """Volume times the close's place in its bar, -1 to 1: Chaikin's flow, which TA-Lib AD adds up."""
    out = np.empty(len(b.close))
    for i in range(len(out)):
        place = (b.close[i] - b.low[i]) - (b.high[i] - b.close[i])
        out[i] = safe_ratio(place, b.high[i] - b.low[i], 0.0) * b.volume[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _signed_volume(close, traded):
    """Volume with the sign of the close's change: what TA-Lib OBV adds up."""
    out = np.full(len(close), np.nan)
    before, now, traded, rows = close[:-1], close[1:], traded[1:], out[1:]
    for i in range(len(rows)):
        rows[i] = (np.float64(now[i] > before[i]) - np.float64(now[i] < before[i])) * traded[i] + 0.0 * before[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _rolling_vwap(typical, flow, traded, n, t0):
    """Rows after the history: volume-weighted mean of n typical prices; their plain mean where nothing traded."""
    plain, traded = rolling_sum(typical, n, t0, HISTORY)[HISTORY:], rolling_sum(traded, n, t0, HISTORY)[HISTORY:]
    out = rolling_sum(flow, n, t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = out[i] / traded[i] if traded[i] != 0.0 else plain[i] / n
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _vwap_gap(b, typical, flow, n, out):
    """Close over the VWAP of n bars, in ATRs."""
    mean, close, atr = _rolling_vwap(typical, flow, b.volume, n, b.t0), b.close[HISTORY:], b.atr[HISTORY:]
    for i in range(len(out)):
        out[i] = (close[i] - mean[i]) / atr[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _vwap_tilt(b, typical, flow, n, out):
    """VWAP over the plain mean of n typical prices, in ATRs: did volume come at the high prices or the low ones."""
    mean, atr = _rolling_vwap(typical, flow, b.volume, n, b.t0), b.atr[HISTORY:]
    plain = rolling_sum(typical, n, b.t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = (mean[i] - plain[i] / n) / atr[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _session_vwap_and_volume(b, flow, usual, n, state, out_gap, out_pace):
    """(close over the session's VWAP in ATRs, balance of the session's mean volume and that of n bars).

    usual : sum of n volumes. state : the session's sums of flow and volume and its number of bars so far.
    """
    spent, traded, bars = state[0], state[1], state[2]
    for i in range(HISTORY, len(flow)):
        if b.session[i] != b.session[i - 1]:
            spent, traded, bars = 0.0, 0.0, 0.0
        spent, traded, bars = spent + flow[i], traded + b.volume[i], bars + 1.0
        mean = spent / traded if traded != 0.0 else b.close[i]
        out_gap[i - HISTORY] = (b.close[i] - mean) / b.atr[i]
        out_pace[i - HISTORY] = normalized_difference(traded / bars, usual[i] / n)
    state[0], state[1], state[2] = spent, traded, bars


@njit(cache=True, nogil=True, error_model="numpy")
def _volume_oscillators(b, money, trend, state, out_force, out_chaikin, out_klinger):
    """(force index 13, Chaikin oscillator 3-10, Klinger oscillator 34-55), each over the mean of what it weighs.

    A mean of a running sum needs no running sum: the sum less its exponential mean is (1 - alpha) / alpha times the
    mean of its steps, which makes TA-Lib ADOSC the difference of two means of money volume. Klinger's volume force is
    taken as volume with the sign of the typical price's change, as charting programs do.
    """
    x = np.empty((_SESSION, len(money)))
    for i in range(HISTORY, len(money)):
        x[_FORCE, i] = (b.close[i] - b.close[i - 1]) * b.volume[i]
        x[_FORCE_SIZE, i] = abs(x[_FORCE, i])
        x[_FLOW_3, i] = x[_FLOW_10, i] = money[i]
        x[_TRADED_10, i] = x[_TRADED_55, i] = b.volume[i]
        x[_TREND_34, i] = x[_TREND_55, i] = trend[i] * b.volume[i]
    n = np.array([13.0, 13.0, 3.0, 10.0, 10.0, 34.0, 55.0, 55.0])
    ewm_means(x, n, 2.0 / (n + 1.0), state)
    x = x[:, HISTORY:]
    for i in range(len(out_force)):
        out_force[i] = safe_ratio(x[_FORCE, i], x[_FORCE_SIZE, i], 0.0)
        out_chaikin[i] = safe_ratio(4.5 * x[_FLOW_10, i] - x[_FLOW_3, i], x[_TRADED_10, i], 0.0)
        out_klinger[i] = safe_ratio(x[_TREND_34, i] - x[_TREND_55, i], x[_TRADED_55, i], 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _ease_of_movement(b):
    """Arms' ease of movement of a bar: move of its middle times its range over its volume; 0 where nothing traded."""
    out = np.full(len(b.close), np.nan)
    high, low, traded, rows = b.high[1:], b.low[1:], b.volume[1:], out[1:]
    before_high, before_low = b.high[:-1], b.low[:-1]
    for i in range(len(rows)):
        moved = 0.5 * ((high[i] - before_high[i]) + (low[i] - before_low[i]))
        rows[i] = moved * safe_ratio(high[i] - low[i], traded[i], 0.0)
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _breakout_volume(b, n):
    """Volume of a bar whose high is the highest of n bars, less that of one whose low is the lowest."""
    out = np.full(len(b.close), np.nan)
    first = HISTORY - 2 * n
    top, bottom = rolling_max(b.high, n, b.t0, first), rolling_min(b.low, n, b.t0, first)
    for i in range(first, len(out)):
        side = np.float64(b.high[i] == top[i]) - np.float64(b.low[i] == bottom[i])
        out[i] = side * b.volume[i] + 0.0 * top[i]
    return out
