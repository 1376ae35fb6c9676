"""Fractional differentiation at given orders: between the price's level, with infinite memory, and its return.

Sources: Hosking (1981), eq. 2.3, for the weights; Lopez de Prado, Advances in Financial Machine Learning (2018), 5.5,
for a window of fixed width.
"""

import numpy as np
from numba import njit

from ml_factory.features.engine import FeatureFamily
from ml_factory.features.rolling import HISTORY, rolling_return_std, rolling_weighted_sum

ORDERS = (0.2, 0.4, 0.6, 0.8)
WINDOW = 96


def _names(market, coarse):
    """Return no column where `coarse`: the window of the base frame covers those frames."""
    return () if coarse else tuple(f"fractional_{round(100 * order)}" for order in ORDERS)


@njit(cache=True, nogil=True, error_model="numpy")
def _kernel(b, state, out, coarse):
    if coarse:
        return
    spread = rolling_return_std(b.ret, WINDOW, b.t0, HISTORY)
    for place, order in enumerate(ORDERS):
        difference = rolling_weighted_sum(b.ret, fractional_return_weights(order, WINDOW), HISTORY)
        for i in range(HISTORY, len(difference)):
            out[place, i - HISTORY] = difference[i] / spread[i]


FAMILY = FeatureFamily(names=_names, kernel=_kernel)


@njit(cache=True, nogil=True, error_model="numpy")
def fractional_difference_weights(order, n):
    """Return the weights of (1 - L)^order, newest first, for n terms (Hosking 1981, eq. 2.3)."""
    weights = np.ones(n)
    for k in range(1, n):
        weights[k] = weights[k - 1] * (k - 1 - order) / k
    return weights


@njit(cache=True, nogil=True, error_model="numpy")
def fractional_return_weights(order, n):
    """Return weights of the newest n returns in (1 - L)^order of n + 1 log prices relative to the newest one.

    The truncated weights do not sum to 0, so the direct form would include the price's level; relative to the newest
    price it does not. The return k bars ago lies between the newest price and all older than k: its weight is minus
    their sum.
    """
    prices = fractional_difference_weights(order, n + 1)
    older = np.empty(n)
    total = 0.0
    for k in range(n, 0, -1):
        total += prices[k]
        older[k - 1] = -total
    return older
