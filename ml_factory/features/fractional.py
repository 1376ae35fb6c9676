"""Fractional differentiation at given orders: between the price's level, with infinite memory, and its return.

Sources: Hosking (1981), eq. 2.3, for the weights; Lopez de Prado, Advances in Financial Machine Learning (2018), 5.5,
for a window of fixed width.
"""

from collections.abc import Iterator

import numpy as np

from ml_factory.features.engine import Block, Column
from ml_factory.features.windows import window_weighted_sum

ORDERS = (0.2, 0.4, 0.6, 0.8)
WINDOW = 96


def fractional(b: Block) -> Iterator[Column]:
    """Yield a column an order; none where `coarse`: the window of the base frame covers those frames."""
    for order in () if b.coarse else ORDERS:
        difference = window_weighted_sum(b.ret, fractional_return_weights(order, WINDOW))
        yield f"fractional_{round(100 * order)}", difference / b.return_std(WINDOW)


def fractional_difference_weights(order: float, n: int) -> np.ndarray:
    """Return the weights of (1 - L)^order, newest first, for n terms (Hosking 1981, eq. 2.3)."""
    k = np.arange(1.0, n)
    return np.append(1.0, np.cumprod((k - 1.0 - order) / k))


def fractional_return_weights(order: float, n: int) -> np.ndarray:
    """Return weights of the newest n returns in (1 - L)^order of n + 1 log prices relative to the newest one.

    The truncated weights do not sum to 0, so the direct form would include the price's level; relative to the newest
    price it does not. The return k bars ago lies between the newest price and all older than k: its weight is minus
    their sum.
    """
    return -np.cumsum(fractional_difference_weights(order, n + 1)[:0:-1])[::-1].copy()
