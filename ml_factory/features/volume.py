"""Volume and VWAP: how much traded, and on which side. Only for markets whose volume means something.

Sources: Granville for on-balance volume; Quong and Soudack for MFI; Chaikin for money flow; Elder for the force
index. Every column is a share or a ratio, so a market quoted in lots and one quoted in coins look alike.
"""

import numpy as np

from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.features import rolling
from ml_factory.features.rolling import ema, lag, ratio, rolling_mean, rolling_sum


def volume(bars: Frame, market: MarketSpec, coarse: bool) -> dict[str, np.ndarray]:
    """Columns of the family, float64 of the frame's length; the shorter list where `coarse`."""
    high, low, close, traded = bars.high, bars.low, bars.close, bars.volume
    atr = rolling.average_true_range(high, low, close)
    typical = (high + low + close) / 3.0
    change = close - lag(close, 1)
    columns = {
        "volume_surprise_20": balance(traded, lag(rolling_mean(traded, 20), 1)),
        "mfi_14": mfi(typical, traded, 14),
        "money_flow_20": money_flow(high, low, close, traded, 20),
        "obv_share_20": ratio(rolling_sum(np.sign(change) * traded, 20), rolling_sum(traded, 20)),
        "vwap_gap_24": (close - vwap(typical, traded, 24)) / atr,
    }
    if coarse:
        return columns
    session_vwap = ratio_or(
        rolling.session_sum(typical * traded, bars.session), rolling.session_sum(traded, bars.session), close
    )
    returns = rolling.log_returns(close)
    return columns | {
        "volume_trend_12_96": balance(rolling_mean(traded, 12), rolling_mean(traded, 96)),
        "volume_dispersion_48": ratio(rolling.rolling_std(traded, 48), rolling_mean(traded, 48)),
        "force_13": ratio(ema(change * traded, 13), ema(np.abs(change) * traded, 13)),
        "session_vwap_gap": (close - session_vwap) / atr,
        "return_volume_correlation_48": rolling.rolling_correlation(returns, traded, 48),
        "size_volume_correlation_48": rolling.rolling_correlation(np.abs(returns), traded, 48),
    }


def balance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(a - b) / (a + b) of two amounts: -1 to 1, and 0 where both are 0."""
    return ratio(a - b, a + b)


def ratio_or(a: np.ndarray, b: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """a / b, and `otherwise` of the same row where b is 0."""
    return np.where(b == 0.0, otherwise, ratio(a, b))


def mfi(typical: np.ndarray, traded: np.ndarray, n: int) -> np.ndarray:
    """Money flow index, 0 to 100; 50 where no money moved the price (TA-Lib MFI)."""
    change, flow = typical - lag(typical, 1), typical * traded
    # A third of a sum is rounded: equal prices may differ in their last bits, and that is no move.
    change = np.where(np.abs(change) < 1e-12 * typical, 0.0, change)
    started = np.where(np.isnan(change), np.nan, 0.0)
    up = rolling_sum(np.where(change > 0.0, flow, started), n)
    down = rolling_sum(np.where(change < 0.0, flow, started), n)
    return 100.0 * ratio(up, up + down, empty=0.5)


def money_flow(high: np.ndarray, low: np.ndarray, close: np.ndarray, traded: np.ndarray, n: int) -> np.ndarray:
    """Chaikin money flow: volume weighted by the close's place in its bar (TA-Lib AD over n bars), over volume."""
    place = ratio((close - low) - (high - close), high - low)
    return ratio(rolling_sum(place * traded, n), rolling_sum(traded, n))


def vwap(typical: np.ndarray, traded: np.ndarray, n: int) -> np.ndarray:
    """Volume-weighted mean of n typical prices; their plain mean where nothing traded."""
    return ratio_or(rolling_sum(typical * traded, n), rolling_sum(traded, n), rolling_mean(typical, n))
