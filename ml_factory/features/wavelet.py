"""Wavelet features: energy by time scale, from Haar details of a causal window.

Source: Percival and Walden, Wavelet Methods for Time Series Analysis (2000), section 5.8: the undecimated (maximal
overlap) Haar transform, whose detail of a row looks back only. Differences of log prices are taken, so the level of
the price does not enter.
"""

import math

import numpy as np
from numba import njit

from ml_factory.features.engine import FeatureFamily
from ml_factory.features.rolling import HISTORY, rolling_return_std, rolling_sum, safe_ratio

SCALES = (2, 4, 8, 16)
WINDOW = 96


def _names(market, coarse):
    """Return no column where `coarse`: the scales cover those frames."""
    return () if coarse else tuple(f"haar_{what}_{scale}" for scale in SCALES for what in ("share", "detail"))


@njit(cache=True, nogil=True, error_model="numpy")
def _kernel(b, state, out, coarse):
    if coarse:
        return
    spread = rolling_return_std(b.ret, WINDOW, b.t0, HISTORY)
    squares = b.ret * b.ret
    for place, scale in enumerate(SCALES):
        detail = _haar_detail(b.ret, scale, b.t0, HISTORY - 2 * WINDOW)
        covered = rolling_sum(squares, WINDOW + scale - 1, b.t0, HISTORY)  # the returns that WINDOW details depend on
        energy = rolling_sum(detail * detail, WINDOW, b.t0, HISTORY)
        for i in range(HISTORY, len(squares)):
            out[2 * place, i - HISTORY] = safe_ratio(energy[i], covered[i], 0.0)
            out[2 * place + 1, i - HISTORY] = detail[i] * math.sqrt(scale) / spread[i]


FAMILY = FeatureFamily(names=_names, kernel=_kernel)


@njit(cache=True, nogil=True, error_model="numpy")
def _haar_detail(x, scale, t0, first):
    """Compute half the difference of the means of the newest scale / 2 values and of those before; `scale` is even.

    Of independent values with variance v it has variance v / scale.
    """
    half = scale // 2
    newest = rolling_sum(x, half, t0, first - half)
    out = np.full(len(x), np.nan)
    for i in range(first, len(x)):
        out[i] = 0.5 * (newest[i] - newest[i - half]) / half
    return out
