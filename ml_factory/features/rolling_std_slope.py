"""Deviations and slopes of windows of 3, 6, 12, 24... values, each combined from two windows of half its length.

Two halves are combined by the rule of Chan, Golub and LeVeque (1979): no nearly equal numbers are subtracted, windows
of many lengths share their halves, and every row is independent, so that loops run on vector registers and a row's bits
depend on its own window only. Arguments are as in `rolling`; the rows from `first` on are valid.
"""

import math

import numpy as np
from numba import njit

from ml_factory.features.rolling import FLOOR


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_moments_of_three(x, first):
    """Return (mean, sum of squared distances) of the last 3 values; equal values give exactly (value, 0)."""
    mean, spread = np.empty(len(x)), np.empty(len(x))
    oldest, older, newest, means, spreads = x[first - 2 :], x[first - 1 :], x[first:], mean[first:], spread[first:]
    for i in range(len(means)):
        apart, middle = older[i] - oldest[i], 0.5 * (older[i] + oldest[i])
        away = newest[i] - middle
        means[i] = middle + away * (1.0 / 3.0)
        spreads[i] = 0.5 * apart * apart + (2.0 / 3.0) * away * away
    return mean, spread


@njit(cache=True, nogil=True, error_model="numpy")
def double_rolling_moments(mean, spread, n, first):
    """Return the moments of 2 n values from those of n (Chan, Golub and LeVeque 1979)."""
    double_mean, double_spread = np.empty(len(mean)), np.empty(len(mean))
    newer, older, means = mean[first:], mean[first - n :], double_mean[first:]
    newer_2, older_2, spreads, weight = spread[first:], spread[first - n :], double_spread[first:], 0.5 * n
    for i in range(len(means)):
        apart = newer[i] - older[i]
        means[i] = older[i] + 0.5 * apart
        spreads[i] = (newer_2[i] + older_2[i]) + weight * (apart * apart)
    return double_mean, double_spread


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_std_from_moments(spread, n, first):
    """Population deviation of n values whose squared distances from their mean sum to `spread`, at least FLOOR."""
    out = np.empty(len(spread))
    rows, spread, share = out[first:], spread[first:], 1.0 / n
    for i in range(len(rows)):
        root = math.sqrt(spread[i] * share)
        rows[i] = FLOOR if root < FLOOR else root
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_std_48(ret, first):
    """`deviation` of 48, from 3 values by doubling."""
    mean, spread = rolling_moments_of_three(ret, first - 45)
    n = 3
    while n < 48:
        mean, spread = double_rolling_moments(mean, spread, n, first - 48 + 2 * n)
        n *= 2
    return rolling_std_from_moments(spread, 48, first)


@njit(cache=True, nogil=True, error_model="numpy")
def rolling_slope_sums_24(x, first):
    """Return (sum of products of 24 values' and times' distances from their means, mean, sum of squares)."""
    n, back = 3, 21
    mean, spread = rolling_moments_of_three(x, first - back)
    rise = np.empty(len(x))
    rows, oldest, newest = rise[first - back :], x[first - back - 2 :], x[first - back :]
    for i in range(len(rows)):
        rows[i] = newest[i] - oldest[i]
    while n < 24:
        back = 24 - 2 * n
        rise = double_rolling_slope_sums(rise, mean, n, first - back)
        mean, spread = double_rolling_moments(mean, spread, n, first - back)
        n *= 2
    return rise, mean, spread


@njit(cache=True, nogil=True, error_model="numpy")
def double_rolling_slope_sums(rise, mean, n, first):
    """Return the products of 2 n values and their times from those of n; the newer half's mean time is n later."""
    out = np.empty(len(rise))
    newer, older, newer_mean, older_mean = rise[first:], rise[first - n :], mean[first:], mean[first - n :]
    rows, weight = out[first:], 0.5 * n * n
    for i in range(len(rows)):
        rows[i] = (newer[i] + older[i]) + weight * (newer_mean[i] - older_mean[i])
    return out
