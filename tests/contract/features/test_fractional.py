"""Fractional differences against the binomial series."""

import numpy as np
import pytest
from scipy.special import binom

from tests.contract.doors import fractional, fractional_difference_weights, fractional_return_weights
from tests.contract.features.plain import deviation


def difference(order):
    def reference(frame, i):
        logs = np.log(frame.close[i - 96 : i + 1])[::-1]
        weights = np.array([(-1) ** k * binom(order, k) for k in range(97)])
        return (weights @ logs - weights.sum() * logs[0]) / deviation(frame, i, 96)

    return reference


@pytest.mark.parametrize(("symbol", "minutes"), [("SPY", 60), ("ES", 5)])
def test_fractional_columns_equal_reference(real_frame, markets, check_columns, symbol, minutes):
    references = {f"fractional_{round(100 * order)}": difference(order) for order in (0.2, 0.4, 0.6, 0.8)}
    check_columns(fractional.fractional, real_frame(symbol, minutes), markets[symbol], references)


def test_fractional_weights_of_integer_orders_equal_binomial_coefficients():
    assert fractional_difference_weights(1.0, 4).tolist() == [1.0, -1.0, 0.0, 0.0]
    assert fractional_difference_weights(2.0, 4).tolist() == [1.0, -2.0, 1.0, 0.0]
    assert fractional_return_weights(1.0, 4).tolist() == [1.0, 0.0, 0.0, 0.0]
