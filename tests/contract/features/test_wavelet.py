"""Haar details against sums of prices, and against swings whose time scale is known."""

import numpy as np

from tests.contract.doors import FAMILIES, SCALES, compute_family_columns
from tests.contract.features.plain import deviation, returns

wavelet = FAMILIES["wavelet"]


def detail(frame, i, scale):
    """By prices alone: (newest move - move before it) / scale."""
    half, log_close = scale // 2, np.log(frame.close)
    newest, before = log_close[i] - log_close[i - half], log_close[i - half] - log_close[i - 2 * half]
    return (newest - before) / scale


def share(scale):
    def reference(frame, i):
        power = (returns(frame, i, 95 + scale) ** 2).sum()
        return sum(detail(frame, k, scale) ** 2 for k in range(i - 95, i + 1)) / power if power else 0.0

    return reference


TWINS = {f"haar_share_{scale}": share(scale) for scale in SCALES}
TWINS |= {
    f"haar_detail_{scale}": lambda f, i, scale=scale: detail(f, i, scale) * scale**0.5 / deviation(f, i, 96)
    for scale in SCALES
}


def test_wavelet_columns_equal_reference(either_frame, markets, check_columns):
    check_columns(wavelet, either_frame("ES", 60), markets["ES"], TWINS)


def test_haar_share_of_periodic_returns_is_largest_at_matching_scale(make_frame, markets):
    for scale in SCALES:
        returns = 1e-3 * np.sin(2 * np.pi * np.arange(400) / (1.5 * scale))
        found = compute_family_columns(wavelet, make_frame(100.0 * np.exp(np.cumsum(returns))), markets["ES"], False)
        shares = {name: found[f"haar_share_{name}"][-1] for name in SCALES}
        assert max(shares, key=shares.get) == scale
