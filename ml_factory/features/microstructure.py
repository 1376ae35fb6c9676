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
    deviation,
    lag,
    products,
    ratio,
    sizes,
    subtract,
    window_covariance,
    window_sum,
)
from ml_factory.features.volatility import correlation
from ml_factory.features.volume import balance, window_share

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
    body, span = subtract(b.close, b.open), subtract(b.high, b.low)
    place = subtract(subtract(b.close, b.low), subtract(b.high, b.close))
    bar_share(body, span, out[0])
    bar_share(place, span, out[1])
    if coarse:
        return
    before = lag(b.ret)
    bar_share(wicks(b), span, out[2])
    spans = window_sum(span, 12, b.t0, HISTORY)
    window_share(body, spans, 12, b.t0, out[3])
    gap = subtract(b.open, lag(b.close))
    bar_share(gap, lag(b.atr), out[4])
    correlation(b.ret, before, 48, b.t0, out[5])
    roll_spread(b.ret, before, 96, b.t0, out[6])
    corwin_schultz(b, 24, out[7])
    abdi_ranaldo(b, 24, out[8])
    signs(b.ret, 48, b.t0, out[9], out[10])
    window_share(place, spans, 12, b.t0, out[11])
    window_share(sizes(body), window_sum(span, 24, b.t0, HISTORY), 24, b.t0, out[12])
    window_share(sizes(gap), window_sum(b.span, 24, b.t0, HISTORY), 24, b.t0, out[13])
    outside_share(b.high, b.low, 24, b.t0, out[14])
    if len(out) > 15:
        _volume_kernel(b, directions(body), before, out[15:])


@njit(cache=True, nogil=True, error_model="numpy")
def _volume_kernel(b, side, before, out):
    amihud_ratio(b, 12, 96, out[0])
    correlation(b.ret, products(side, b.volume), 48, b.t0, out[1])
    bulk_sides(b, 48, out[2], out[3])
    correlation(b.ret, products(side, root_money(b)), 48, b.t0, out[4])
    correlation(b.ret, products(lag(b.volume), directions(before)), 48, b.t0, out[5])


FAMILY = FeatureFamily(names=_names, kernel=_kernel)


@njit(cache=True, nogil=True, error_model="numpy")
def directions(x):
    """Return 1 above 0, -1 below 0, 0 at 0."""
    out = np.empty(len(x))
    for i in range(len(x)):
        out[i] = np.float64(x[i] > 0.0) - np.float64(x[i] < 0.0) + 0.0 * x[i]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def wicks(b):
    """Return upper minus lower shadow of each bar."""
    out = np.empty(len(b.close))
    for i in range(len(out)):
        top, bottom = max(b.open[i], b.close[i]), min(b.open[i], b.close[i])
        out[i] = (b.high[i] - top) - (bottom - b.low[i])
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def root_money(b):
    """Return the square root of the money traded in each bar."""
    out = np.empty(len(b.close))
    for i in range(len(out)):
        out[i] = math.sqrt(b.close[i] * b.volume[i])
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def bar_share(x, of, out):
    """Compute x over `of`, row by row; 0 where that is 0."""
    x, of = x[HISTORY:], of[HISTORY:]
    for i in range(len(out)):
        out[i] = ratio(x[i], of[i], 0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def roll_spread(ret, before, n, t0, out):
    """Roll (1984): 2 sqrt(-cov of successive log returns), 0 where the covariance is positive; share of price."""
    together = window_covariance(ret, before, n, t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = 2.0 * math.sqrt(0.0 if together[i] > 0.0 else -together[i])


@njit(cache=True, nogil=True, error_model="numpy")
def corwin_schultz(b, n, out):
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
    mean_of(spread, n, b.t0, out)


@njit(cache=True, nogil=True, error_model="numpy")
def abdi_ranaldo(b, n, out):
    """Abdi and Ranaldo (2017), the two-day corrected estimator over two bars, mean of n; share of price.

    The close is measured from the middle of its own range and of the next bar's: 2 sqrt((c - m)(c - m next)), in logs.
    """
    spread = np.full(len(b.close), np.nan)
    high, low, rows = b.log_high[1:], b.log_low[1:], spread[1:]
    before_high, before_low, close = b.log_high[:-1], b.log_low[:-1], b.log_close[:-1]
    for i in range(len(rows)):
        product = (close[i] - 0.5 * (before_high[i] + before_low[i])) * (close[i] - 0.5 * (high[i] + low[i]))
        rows[i] = 2.0 * math.sqrt(0.0 if product < 0.0 else product)
    mean_of(spread, n, b.t0, out)


@njit(cache=True, nogil=True, error_model="numpy")
def mean_of(x, n, t0, out):
    """Mean of the last n values."""
    x = window_sum(x, n, t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = x[i] / n


@njit(cache=True, nogil=True, error_model="numpy")
def signs(ret, n, t0, out_zero, out_persistence):
    """(share of n bars whose close did not move, Lesmond, Ogden and Trzcinka's measure; mean product of successive
    signs: -1 where every move turns back, as between bid and ask, 1 in one long run)."""
    side, still = directions(ret), np.empty(len(ret))
    for i in range(len(ret)):
        still[i] = 1.0 - side[i] * side[i]
    mean_of(still, n, t0, out_zero)
    mean_of(products(side, lag(side)), n, t0, out_persistence)


@njit(cache=True, nogil=True, error_model="numpy")
def outside_share(high, low, n, t0, out):
    """Compute the share of n bars beyond both ends of the previous bar, minus the share inside both."""
    side = np.full(len(high), np.nan)
    before_high, before_low, high, low, rows = high[:-1], low[:-1], high[1:], low[1:], side[1:]
    for i in range(len(rows)):
        outside = (high[i] > before_high[i]) & (low[i] < before_low[i])
        inside = (high[i] < before_high[i]) & (low[i] > before_low[i])
        rows[i] = np.float64(outside) - np.float64(inside) + 0.0 * before_high[i]
    mean_of(side, n, t0, out)


@njit(cache=True, nogil=True, error_model="numpy")
def amihud_ratio(b, short, long, out):
    """Compute the balance of Amihud's illiquidity, mean |return| over money traded, of few bars and of many."""
    impact = np.empty(len(b.close))
    for i in range(len(impact)):
        impact[i] = ratio(abs(b.ret[i]), b.close[i] * b.volume[i], 0.0)
    many = window_sum(impact, long, b.t0, HISTORY)[HISTORY:]
    impact = window_sum(impact, short, b.t0, HISTORY)[HISTORY:]
    for i in range(len(out)):
        out[i] = balance(impact[i] / short, many[i] / long)


@njit(cache=True, nogil=True, error_model="numpy")
def bulk_sides(b, n, out_vpin, out_imbalance):
    """(VPIN: share of volume on one side of its bar, 0 to 1; the same with its sign, -1 to 1); 0 where nothing traded.

    A bar's volume splits by the normal distribution of its return in deviations of the last n (Easley et al., 2012).
    """
    first = HISTORY - 2 * n
    spread = deviation(b.ret, n, b.t0, first)
    signed = np.full(len(spread), np.nan)
    for i in range(first, len(spread)):
        signed[i] = math.erf(b.ret[i] / (spread[i] * math.sqrt(2.0))) * b.volume[i]
    traded = window_sum(b.volume, n, b.t0, HISTORY)
    window_share(sizes(signed), traded, n, b.t0, out_vpin)
    window_share(signed, traded, n, b.t0, out_imbalance)
