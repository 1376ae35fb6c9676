"""Wavelet: on which time scale the swings happen, by Haar details of a causal window.

Source: Percival and Walden, Wavelet Methods for Time Series Analysis (2000), section 5.8: the undecimated (maximal
overlap) Haar transform, whose detail of a row looks back only. Differences of log prices are taken, so the level of
the price does not enter.
"""

import numpy as np

from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.features import rolling
from ml_factory.features.rolling import lag, ratio, rolling_mean, rolling_sum

SCALES = (2, 4, 8, 16)
WINDOW = 96


def wavelet(bars: Frame, market: MarketSpec, coarse: bool) -> dict[str, np.ndarray]:
    """Columns of the family, float64 of the frame's length; none where `coarse`: the scales cover those frames."""
    if coarse:
        return {}
    returns = rolling.log_returns(bars.close)
    spread = rolling.deviation(bars.close, WINDOW)
    columns = {}
    for scale in SCALES:
        detail = haar_detail(returns, scale)
        covered = rolling_sum(returns * returns, WINDOW + scale - 1)  # the returns that WINDOW details look at
        columns[f"haar_share_{scale}"] = ratio(rolling_sum(detail * detail, WINDOW), covered)
        columns[f"haar_detail_{scale}"] = detail * np.sqrt(scale) / spread
    return columns


def haar_detail(x: np.ndarray, scale: int) -> np.ndarray:
    """Mean of the newest scale / 2 values minus the mean of the scale / 2 before them, halved; `scale` is even.

    Of independent values with variance v it has variance v / scale.
    """
    half = scale // 2
    newest = rolling_mean(x, half)
    return 0.5 * (newest - lag(newest, half))
