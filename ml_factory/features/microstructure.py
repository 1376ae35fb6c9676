"""Microstructure proxies: what bars let one guess about spreads, pressure and impact.

Sources: Roll (1984); Corwin and Schultz (2012); Amihud (2002); Kyle (1985); Easley, Lopez de Prado and O'Hara (2012)
for bulk volume classification and VPIN; Livshin for the balance of power. No tick size is used, so a back-adjusted
price series that left its tick gives the same columns.
"""

import math

import numpy as np

from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.features import rolling
from ml_factory.features.rolling import lag, log, ratio, rolling_mean, rolling_sum
from ml_factory.features.volume import balance


def microstructure(bars: Frame, market: MarketSpec, coarse: bool) -> dict[str, np.ndarray]:
    """Columns of the family, float64 of the frame's length; the shorter list where `coarse`."""
    open_, high, low, close = bars.open, bars.high, bars.low, bars.close
    span = high - low
    columns = {
        "bar_body": ratio(close - open_, span),
        "bar_place": ratio((close - low) - (high - close), span),
    }
    if coarse:
        return columns
    returns = rolling.log_returns(close)
    upper, lower = high - np.maximum(open_, close), np.minimum(open_, close) - low
    columns |= {
        "bar_wicks": ratio(upper - lower, span),
        "body_mean_12": ratio(rolling_sum(close - open_, 12), rolling_sum(span, 12)),
        "open_gap": (open_ - lag(close, 1)) / lag(rolling.average_true_range(high, low, close), 1),
        "autocorrelation_48": rolling.rolling_correlation(returns, lag(returns, 1), 48),
        "roll_spread_96": roll_spread(close, 96),
        "corwin_schultz_24": corwin_schultz(high, low, 24),
    }
    if market.has_volume:
        impact = ratio(np.abs(returns), close * bars.volume)
        columns |= {
            "amihud_ratio_12_96": balance(rolling_mean(impact, 12), rolling_mean(impact, 96)),
            "kyle_48": rolling.rolling_correlation(returns, np.sign(close - open_) * bars.volume, 48),
            "vpin_48": vpin(close, bars.volume, 48),
        }
    return columns


def roll_spread(close: np.ndarray, n: int) -> np.ndarray:
    """Roll (1984): 2 sqrt(-cov of successive log returns), 0 where the covariance is positive; share of price."""
    returns = rolling.log_returns(close)
    return 2.0 * np.sqrt(np.maximum(-rolling.rolling_covariance(returns, lag(returns, 1), n), 0.0))


def corwin_schultz(high: np.ndarray, low: np.ndarray, n: int) -> np.ndarray:
    """Corwin and Schultz (2012), eq. 14 and 18, over two bars, negatives set to 0, mean of n; share of price."""
    one = log(high / low) ** 2
    beta = one + lag(one, 1)
    gamma = log(np.maximum(high, lag(high, 1)) / np.minimum(low, lag(low, 1))) ** 2
    root = 3.0 - 2.0 * math.sqrt(2.0)
    alpha = (np.sqrt(2.0 * beta) - np.sqrt(beta)) / root - np.sqrt(gamma / root)
    spread = 2.0 * rolling.tanh(0.5 * alpha)  # = 2 (e^a - 1) / (1 + e^a)
    return rolling_mean(np.maximum(spread, 0.0), n)


def vpin(close: np.ndarray, traded: np.ndarray, n: int) -> np.ndarray:
    """Share of volume that bulk classification puts on one side, 0 to 1; 0 where nothing traded.

    A bar's volume splits by the normal distribution of its return in deviations of the last n (Easley et al., 2012).
    """
    one_sided = np.abs(rolling.erf(rolling.log_returns(close) / (rolling.deviation(close, n) * math.sqrt(2.0))))
    return ratio(rolling_sum(one_sided * traded, n), rolling_sum(np.where(np.isnan(one_sided), np.nan, traded), n))
