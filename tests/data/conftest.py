"""A clean file of raw bars, to be spoiled in one way a test."""

import numpy as np
import pandas as pd
import pytest


@pytest.fixture
def make_raw():
    """make_raw(rows, start, minutes): a table in the contract's form, on a tick of 0.25, without weekend."""

    def build(rows: int = 600, start: str = "2024-03-05 00:00", minutes: int = 1, seed: int = 1) -> pd.DataFrame:
        rng = np.random.default_rng(seed)
        close = 5000 + np.cumsum(rng.integers(-3, 4, rows)) * 0.25
        opens = np.concatenate([[5000.0], close[:-1]])
        return pd.DataFrame(
            {
                "timestamp": pd.date_range(start, periods=rows, freq=f"{minutes}min", tz="UTC"),
                "open": opens,
                "high": np.maximum(opens, close) + 0.25 * rng.integers(0, 3, rows),
                "low": np.minimum(opens, close) - 0.25 * rng.integers(0, 3, rows),
                "close": close,
                "volume": rng.integers(1, 500, rows).astype(float),
            }
        )

    return build
