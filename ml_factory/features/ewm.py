"""Exponential means of several series in parallel, so that their chains of additions are independent.

A mean depends on the previous row's mean only: ten of them hardly take longer than one.
"""

import math

import numpy as np
from numba import njit

from ml_factory.features.rolling import HISTORY


@njit(cache=True, nogil=True, error_model="numpy")
def ewm_means(x_KM, n_K, alpha_K, state_KS):
    """Compute exponential means of K series in place; each starts at the mean of its first n values.

    A missing value is skipped: one 0/0 must not make the rest of the file missing.

    state_KS : a row a series, (mean, values seen)
    """
    count, size = x_KM.shape
    i = HISTORY
    while i < size:  # slow start: some series has not seen its first n values
        waiting = False
        for k in range(count):
            waiting |= state_KS[k, 1] < n_K[k]
        if not waiting:
            break
        for k in range(count):
            x_KM[k, i] = _slow_step(x_KM[k, i], n_K[k], alpha_K[k], state_KS[k])
        i += 1
    missing = np.int64(0)
    for k in range(count):
        missing += _missing(x_KM[k, i:])
    spare, means, alphas = np.zeros(size - i), np.zeros(10), np.zeros(10)  # for unused places
    k = 0
    while k < count:
        used = min(6 if missing or count - k <= 6 else 10, count - k)
        means[:], alphas[:] = 0.0, 0.0
        means[:used], alphas[:used] = state_KS[k : k + used, 0], alpha_K[k : k + used]
        a, b, c = _series(x_KM, k, i, spare), _series(x_KM, k + 1, i, spare), _series(x_KM, k + 2, i, spare)
        d, e, f = _series(x_KM, k + 3, i, spare), _series(x_KM, k + 4, i, spare), _series(x_KM, k + 5, i, spare)
        if missing:
            _means_of_present(a, b, c, d, e, f, means, alphas)
        elif used == 1:
            _one_mean(a, means, alphas)
        elif used <= 6:
            _six_means(a, b, c, d, e, f, means, alphas)
        else:
            g, h = _series(x_KM, k + 6, i, spare), _series(x_KM, k + 7, i, spare)
            p, q = _series(x_KM, k + 8, i, spare), _series(x_KM, k + 9, i, spare)
            _ten_means(a, b, c, d, e, f, g, h, p, q, means, alphas)
        state_KS[k : k + used, 0] = means[:used]
        k += used


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _series(x_KM, k, i, spare):
    return x_KM[k, i:] if k < len(x_KM) else spare


@njit(cache=True, nogil=True, error_model="numpy")
def _missing(x):
    count = np.int64(0)
    for i in range(len(x)):
        count += np.int64(x[i] != x[i])
    return count


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _next_mean(mean, alpha, x):
    return mean + alpha * (x - mean) if x == x else mean


@njit(cache=True, nogil=True, error_model="numpy")
def _means_of_present(x_a, x_b, x_c, x_d, x_e, x_f, means, alphas):
    """Compute exponential means of six series in place, skipping missing values."""
    a, b, c, d, e, f = means[0], means[1], means[2], means[3], means[4], means[5]
    by_a, by_b, by_c, by_d, by_e, by_f = alphas[0], alphas[1], alphas[2], alphas[3], alphas[4], alphas[5]
    for i in range(len(x_a)):
        a, b, c = _next_mean(a, by_a, x_a[i]), _next_mean(b, by_b, x_b[i]), _next_mean(c, by_c, x_c[i])
        d, e, f = _next_mean(d, by_d, x_d[i]), _next_mean(e, by_e, x_e[i]), _next_mean(f, by_f, x_f[i])
        x_a[i], x_b[i], x_c[i], x_d[i], x_e[i], x_f[i] = a, b, c, d, e, f
    means[0], means[1], means[2], means[3], means[4], means[5] = a, b, c, d, e, f


# The same numbers without the check for missing values, a third faster. Means stay in registers from row to row, and
# ten of them hardly take longer than one.


@njit(cache=True, nogil=True, error_model="numpy")
def _one_mean(x, means, alphas):
    a, by_a = means[0], alphas[0]
    for i in range(len(x)):
        a += by_a * (x[i] - a)
        x[i] = a
    means[0] = a


@njit(cache=True, nogil=True, error_model="numpy")
def _six_means(x_a, x_b, x_c, x_d, x_e, x_f, means, alphas):
    a, b, c, d, e, f = means[0], means[1], means[2], means[3], means[4], means[5]
    by_a, by_b, by_c, by_d, by_e, by_f = alphas[0], alphas[1], alphas[2], alphas[3], alphas[4], alphas[5]
    for i in range(len(x_a)):
        a, b, c = a + by_a * (x_a[i] - a), b + by_b * (x_b[i] - b), c + by_c * (x_c[i] - c)
        d, e, f = d + by_d * (x_d[i] - d), e + by_e * (x_e[i] - e), f + by_f * (x_f[i] - f)
        x_a[i], x_b[i], x_c[i], x_d[i], x_e[i], x_f[i] = a, b, c, d, e, f
    means[0], means[1], means[2], means[3], means[4], means[5] = a, b, c, d, e, f


@njit(cache=True, nogil=True, error_model="numpy")
def _ten_means(x_a, x_b, x_c, x_d, x_e, x_f, x_g, x_h, x_p, x_q, means, alphas):
    a, b, c, d, e, f = means[0], means[1], means[2], means[3], means[4], means[5]
    g, h, p, q = means[6], means[7], means[8], means[9]
    by_a, by_b, by_c, by_d, by_e, by_f = alphas[0], alphas[1], alphas[2], alphas[3], alphas[4], alphas[5]
    by_g, by_h, by_p, by_q = alphas[6], alphas[7], alphas[8], alphas[9]
    for i in range(len(x_a)):
        a, b, c = a + by_a * (x_a[i] - a), b + by_b * (x_b[i] - b), c + by_c * (x_c[i] - c)
        d, e, f = d + by_d * (x_d[i] - d), e + by_e * (x_e[i] - e), f + by_f * (x_f[i] - f)
        g, h = g + by_g * (x_g[i] - g), h + by_h * (x_h[i] - h)
        p, q = p + by_p * (x_p[i] - p), q + by_q * (x_q[i] - q)
        x_a[i], x_b[i], x_c[i], x_d[i], x_e[i], x_f[i] = a, b, c, d, e, f
        x_g[i], x_h[i], x_p[i], x_q[i] = g, h, p, q
    means[0], means[1], means[2], means[3], means[4], means[5] = a, b, c, d, e, f
    means[6], means[7], means[8], means[9] = g, h, p, q


@njit(cache=True, nogil=True, error_model="numpy")
def _slow_step(x, n, alpha, state):
    if math.isnan(x):
        pass
    elif state[1] < n:
        state[0] += x / n
        state[1] += 1.0
    else:
        state[0] += alpha * (x - state[0])
    return state[0] if state[1] == n else math.nan
