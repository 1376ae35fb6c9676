"""Microstructure features: proxies of spreads, order pressure and price impact from bars.

Sources: Roll (1984); Corwin and Schultz (2012); Abdi and Ranaldo (2017); Lesmond, Ogden and Trzcinka (1999) for zero
returns; Amihud (2002); Kyle (1985); Hasbrouck (2009) by way of Lopez de Prado (2018), 19.4; Pastor and Stambaugh
(2003); Easley, Lopez de Prado and O'Hara (2012) for bulk volume classification and VPIN; Livshin for the balance of
power. No tick size is used, so a back-adjusted price series off its tick gives the same columns.
"""

import math
from collections.abc import Iterator

import numpy as np
from numba import njit

from ml_factory.features.engine import Block, Column
from ml_factory.features.windows import balance, lag, ratio, window_correlation, window_covariances, window_sum


def microstructure(b: Block) -> Iterator[Column]:
    """Yield the columns; see the module."""
    body, span, closed = b.close - b.open, b.high - b.low, lag(b.close)
    place = (b.close - b.low) - (b.high - b.close)
    yield "bar_body", ratio(body, span)
    yield "bar_place", ratio(place, span)
    if b.coarse:
        return

    gap, before, spans = b.open - closed, lag(b.ret), window_sum(span, 12)
    wicks = (b.high - np.maximum(b.open, b.close)) - (np.minimum(b.open, b.close) - b.low)
    yield "bar_wicks", ratio(wicks, span)
    yield "body_mean_12", ratio(window_sum(body, 12), spans)
    yield "open_gap", gap / lag(b.atr)
    yield "autocorrelation_48", window_correlation(b.ret, before, 48)
    # Roll (1984): 2 sqrt(-cov of successive log returns), 0 where it is positive; share of price.
    yield "roll_spread_96", 2.0 * np.sqrt(np.maximum(-window_covariances(b.ret, before, 96)[0], 0.0))
    yield "corwin_schultz_24", window_sum(_corwin_schultz(b), 24) / 24.0
    yield "abdi_ranaldo_24", window_sum(_abdi_ranaldo(b), 24) / 24.0
    side = np.sign(b.ret)
    yield "zero_share_48", window_sum(1.0 - side * side, 48) / 48.0  # bars whose close did not move
    # -1 where every move turns back, as between bid and ask, 1 in one long run.
    yield "sign_persistence_48", window_sum(side * lag(side), 48) / 48.0
    yield "place_mean_12", ratio(window_sum(place, 12), spans)
    yield "body_share_24", ratio(window_sum(abs(body), 24), window_sum(span, 24))
    yield "gap_share_24", ratio(window_sum(abs(gap), 24), b.sum("span", 24))
    # Bars beyond both ends of the bar before, less bars inside both.
    high, low = np.sign(b.high - lag(b.high)), np.sign(lag(b.low) - b.low)
    yield "outside_share_24", window_sum(np.where(high == low, high, 0.0 * high), 24) / 24.0
    if b.volume is None:
        return

    impact, side = ratio(abs(b.ret), b.close * b.volume), np.sign(body)
    yield "amihud_ratio_12_96", balance(window_sum(impact, 12) / 12.0, window_sum(impact, 96) / 96.0)
    yield "kyle_48", window_correlation(b.ret, side * b.volume, 48)
    # A bar's volume splits by the normal distribution of its return in deviations of the last n (Easley et al., 2012).
    signed = _error_function(b.ret / (b.return_std(48) * math.sqrt(2.0))) * b.volume
    yield "vpin_48", ratio(window_sum(abs(signed), 48), b.sum("volume", 48))
    yield "bulk_imbalance_48", ratio(window_sum(signed, 48), b.sum("volume", 48))
    yield "hasbrouck_48", window_correlation(b.ret, side * np.sqrt(b.close * b.volume), 48)
    yield "pastor_stambaugh_48", window_correlation(b.ret, lag(b.volume) * np.sign(before), 48)


def _corwin_schultz(b: Block) -> np.ndarray:
    """Corwin and Schultz (2012), eq. 14 and 18, over two bars, negatives set to 0; share of price."""
    now, high, low = b.log_high - b.log_low, lag(b.log_high), lag(b.log_low)
    beta, root = now * now + lag(now) * lag(now), 3.0 - 2.0 * math.sqrt(2.0)
    both = np.maximum(b.log_high, high) - np.minimum(b.log_low, low)  # sqrt(gamma)
    alpha = (math.sqrt(2.0) - 1.0) / root * np.sqrt(beta) - both / math.sqrt(root)
    return 2.0 * np.tanh(0.5 * np.maximum(alpha, 0.0))  # = 2 (e^a - 1) / (1 + e^a)


def _abdi_ranaldo(b: Block) -> np.ndarray:
    """Abdi and Ranaldo (2017), the two-day corrected estimator over two bars; share of price.

    The close is measured from the middle of its own range and of the next bar's: 2 sqrt((c - m)(c - m next)), in logs.
    """
    middle, close = 0.5 * (b.log_high + b.log_low), lag(b.log_close)
    return 2.0 * np.sqrt(np.maximum((close - lag(middle)) * (close - middle), 0.0))


@njit(cache=True, nogil=True, error_model="numpy")
def _error_function(x):
    """The error function, which NumPy lacks."""
    out = np.empty(len(x))
    for i in range(len(x)):
        out[i] = math.erf(x[i])
    return out
