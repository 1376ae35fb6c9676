"""Microstructure features: proxies of spreads, order pressure and price impact from bars.

Sources: Roll (1984); Corwin and Schultz (2012); Abdi and Ranaldo (2017); Lesmond, Ogden and Trzcinka (1999) for zero
returns; Amihud (2002); Kyle (1985); Hasbrouck (2009) by way of Lopez de Prado (2018), 19.4; Pastor and Stambaugh
(2003); Easley, Lopez de Prado and O'Hara (2012) for bulk volume classification and VPIN; Livshin for the balance of
power. No tick size is used, so a back-adjusted price series off its tick gives the same columns.
"""

import math

import numpy as np
from numba import njit

from ml_factory.features.engine import FeatureFamily
from ml_factory.features.rolling import (
    HISTORY,
    elementwise_abs,
    elementwise_difference,
    elementwise_product,
    lag,
    normalized_difference,
    rolling_covariance,
    rolling_return_std,
    rolling_sum,
    rolling_sum_ratio,
    safe_ratio,
    write_rolling_correlation,
)

COARSE = ("bar_body", "bar_place")
BASE = (
    "bar_wicks", "body_mean_12", "open_gap", "autocorrelation_48", "roll_spread_96", "corwin_schultz_24",
    "abdi_ranaldo_24", "zero_share_48", "sign_persistence_48", "place_mean_12", "body_share_24", "gap_share_24",
    "outside_share_24",
)  # fmt: skip
WITH_VOLUME = (
    "amihud_ratio_12_96", "kyle_48", "vpin_48", "bulk_imbalance_48", "hasbrouck_48", "pastor_stambaugh_48",
)  # fmt: skip


def _names(market, coarse):
    if coarse:
        return COARSE
    return COARSE + BASE + WITH_VOLUME if market.has_volume else COARSE + BASE


@njit(cache=True, nogil=True, error_model="numpy")
def _kernel(b, state, out, coarse):
    body, span = elementwise_difference(b.close, b.open), elementwise_difference(b.high, b.low)
    place = elementwise_difference(elementwise_difference(b.close, b.low), elementwise_difference(b.high, b.close))
    _elementwise_ratio(body, span, out[0])
    _elementwise_ratio(place, span, out[1])
    if coarse:
        return
    before = lag(b.ret)
    _elementwise_ratio(_wick_imbalance(b), span, out[2])
    spans = rolling_sum(span, 12, b.t0, HISTORY)
    rolling_sum_ratio(body, spans, 12, b.t0, out[3])
    gap = elementwise_difference(b.open, lag(b.close))
    _elementwise_ratio(gap, lag(b.atr), out[4])
    write_rolling_correlation(b.ret, before, 48, b.t0, out[5])
    _roll_effective_spread(b.ret, before, 96, b.t0, out[6])
    _corwin_schultz_spread(b, 24, out[7])
    _abdi_ranaldo_spread(b, 24, out[8])
    _zero_returns_and_sign_persistence(b.ret, 48, b.t0, out[9], out[10])
    rolling_sum_ratio(place, spans, 12, b.t0, out[11])
    rolling_sum_ratio(elementwise_abs(body), rolling_sum(span, 24, b.t0, HISTORY), 24, b.t0, out[12])
    rolling_sum_ratio(elementwise_abs(gap), rolling_sum(b.span, 24, b.t0, HISTORY), 24, b.t0, out[13])
    _outside_bar_share(b.high, b.low, 24, b.t0, out[14])
    if len(out) > 15:
        _volume_kernel(b, _elementwise_sign(body), before, out[15:])


@njit(cache=True, nogil=True, error_model="numpy")
def _volume_kernel(b, side, before, out):
    _amihud_illiquidity_ratio(b, 12, 96, out[0])
    write_rolling_correlation(b.ret, elementwise_product(side, b.volume), 48, b.t0, out[1])
    _vpin_and_bulk_imbalance(b, 48, out[2], out[3])
    write_rolling_correlation(b.ret, elementwise_product(side, _sqrt_dollar_volume(b)), 48, b.t0, out[4])
    write_rolling_correlation(b.ret, elementwise_product(lag(b.volume), _elementwise_sign(before)), 48, b.t0, out[5])


FAMILY = FeatureFamily(names=_names, kernel=_kernel)


@njit(cache=True, nogil=True, error_model="numpy")
def _elementwise_sign(x):
    """Return 1 above 0, -1 below 0, 0 at 0."""
    out = np.empty(len(x))
    for i in range(len(x)):
        out[i] = np.float64(x[i] > 0.0) - np.float64(x[i] < 0.0) + 0.0 * x[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _wick_imbalance(b):
    """Return upper minus lower shadow of each bar."""
    out = np.empty(len(b.close))
    for i in range(len(out)):
        top, bottom = max(b.open[i], b.close[i]), min(b.open[i], b.close[i])
        out[i] = (b.high[i] - top) - (bottom - b.low[i])
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _sqrt_dollar_volume(b):
    """Return the square root of the money traded in each bar."""
    out = np.empty(len(b.close))
    for i in range(len(out)):
        out[i] = math.sqrt(b.close[i] * b.volume[i])
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _elementwise_ratio(x, of, out):
    """Compute x over `of`, row by row; 0 where that is 0."""
    x, of = x[HISTORY:], of[HISTORY:]
    for i in range(len(out)):
        out[i] = safe_ratio(x[i], of[i], 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _roll_effective_spread(ret, before, n, t0, out):
    """Roll (1984): 2 sqrt(-cov of successive log returns), 0 where the covariance is positive; share of price."""
    together = rolling_covariance(ret, before, n, t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = 2.0 * math.sqrt(0.0 if together[i] > 0.0 else -together[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _corwin_schultz_spread(b, n, out):
    """Corwin and Schultz (2012), eq. 14 and 18, over two bars, negatives set to 0, mean of n; share of price."""
    spread = np.full(len(b.close), np.nan)
    root = 3.0 - 2.0 * math.sqrt(2.0)
    high, low, rows = b.log_high[1:], b.log_low[1:], spread[1:]
    before_high, before_low = b.log_high[:-1], b.log_low[:-1]
    for i in range(len(rows)):
        now, before = high[i] - low[i], before_high[i] - before_low[i]
        beta = now * now + before * before
        both = max(high[i], before_high[i]) - min(low[i], before_low[i])  # sqrt(gamma)
        rows[i] = (math.sqrt(2.0) - 1.0) / root * math.sqrt(beta) - both / math.sqrt(root) + 0.0 * before
    for i in range(len(rows)):
        if rows[i] <= 0.0:
            rows[i] = 0.0
        else:
            rows[i] = 2.0 * math.tanh(0.5 * rows[i])  # = 2 (e^a - 1) / (1 + e^a)
    _window_mean(spread, n, b.t0, out)


@njit(cache=True, nogil=True, error_model="numpy")
def _abdi_ranaldo_spread(b, n, out):
    """Abdi and Ranaldo (2017), the two-day corrected estimator over two bars, mean of n; share of price.

    The close is measured from the middle of its own range and of the next bar's: 2 sqrt((c - m)(c - m next)), in logs.
    """
    spread = np.full(len(b.close), np.nan)
    high, low, rows = b.log_high[1:], b.log_low[1:], spread[1:]
    before_high, before_low, close = b.log_high[:-1], b.log_low[:-1], b.log_close[:-1]
    for i in range(len(rows)):
        product = (close[i] - 0.5 * (before_high[i] + before_low[i])) * (close[i] - 0.5 * (high[i] + low[i]))
        rows[i] = 2.0 * math.sqrt(0.0 if product < 0.0 else product)
    _window_mean(spread, n, b.t0, out)


@njit(cache=True, nogil=True, error_model="numpy")
def _window_mean(x, n, t0, out):
    """Mean of the last n values."""
    x = rolling_sum(x, n, t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = x[i] / n


@njit(cache=True, nogil=True, error_model="numpy")
def _zero_returns_and_sign_persistence(ret, n, t0, out_zero, out_persistence):
    """(share of n bars whose close did not move, Lesmond, Ogden and Trzcinka's measure; mean product of successive
    signs: -1 where every move turns back, as between bid and ask, 1 in one long run)."""
    side, still = _elementwise_sign(ret), np.empty(len(ret))
    for i in range(len(ret)):
        still[i] = 1.0 - side[i] * side[i]
    _window_mean(still, n, t0, out_zero)
    _window_mean(elementwise_product(side, lag(side)), n, t0, out_persistence)


@njit(cache=True, nogil=True, error_model="numpy")
def _outside_bar_share(high, low, n, t0, out):
    """Compute the share of n bars beyond both ends of the previous bar, minus the share inside both."""
    side = np.full(len(high), np.nan)
    before_high, before_low, high, low, rows = high[:-1], low[:-1], high[1:], low[1:], side[1:]
    for i in range(len(rows)):
        outside = (high[i] > before_high[i]) & (low[i] < before_low[i])
        inside = (high[i] < before_high[i]) & (low[i] > before_low[i])
        rows[i] = np.float64(outside) - np.float64(inside) + 0.0 * before_high[i]
    _window_mean(side, n, t0, out)


@njit(cache=True, nogil=True, error_model="numpy")
def _amihud_illiquidity_ratio(b, short, long, out):
    """Compute the balance of Amihud's illiquidity, mean |return| over money traded, of few bars and of many."""
    impact = np.empty(len(b.close))
    for i in range(len(impact)):
        impact[i] = safe_ratio(abs(b.ret[i]), b.close[i] * b.volume[i], 0.0)
    many = rolling_sum(impact, long, b.t0, HISTORY)[HISTORY:]
    impact = rolling_sum(impact, short, b.t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = normalized_difference(impact[i] / short, many[i] / long)


@njit(cache=True, nogil=True, error_model="numpy")
def _vpin_and_bulk_imbalance(b, n, out_vpin, out_imbalance):
    """(VPIN: share of volume on one side of its bar, 0 to 1; the same with its sign, -1 to 1); 0 where nothing traded.

    A bar's volume splits by the normal distribution of its return in deviations of the last n (Easley et al., 2012).
    """
    first = HISTORY - 2 * n
    spread = rolling_return_std(b.ret, n, b.t0, first)
    signed = np.full(len(spread), np.nan)
    for i in range(first, len(spread)):
        signed[i] = math.erf(b.ret[i] / (spread[i] * math.sqrt(2.0))) * b.volume[i]
    traded = rolling_sum(b.volume, n, b.t0, HISTORY)
    rolling_sum_ratio(elementwise_abs(signed), traded, n, b.t0, out_vpin)
    rolling_sum_ratio(signed, traded, n, b.t0, out_imbalance)
