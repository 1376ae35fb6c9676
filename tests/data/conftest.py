"""Fixtures of raw bars: clean files, to be spoiled in one way a test."""

import numpy as np
import pandas as pd
import pytest

from tests.data.real_markets import Market, clean_markets


@pytest.fixture(scope="session")
def real_markets(shared_data) -> dict[str, Market]:
    """A few clean weeks of four real markets, by symbol, to be spoiled in one way a test."""
    return clean_markets(shared_data / "bars")


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


@pytest.fixture
def gappy_minutes():
    """gappy_minutes(start, days, rolls): every minute round the clock, but for single ones, stretches and hours.

    With `rolls`, the column `contract` changes that many times, half of them back. Volumes are no whole numbers, so a
    sum in another order shows.
    """

    def build(start: str, days: int, *, rolls: int = 0, seed: int = 5) -> pd.DataFrame:
        rng = np.random.default_rng(seed)
        index = pd.date_range(start, periods=days * 1440, freq="1min", tz="UTC")
        close = 5000 + np.cumsum(rng.integers(-3, 4, len(index))) * 0.25
        opens, wick = np.roll(close, 1), rng.integers(0, 4, (2, len(index))) * 0.25
        top, bottom = np.maximum(opens, close) + wick[0], np.minimum(opens, close) - wick[1]
        bars = pd.DataFrame({"open": opens, "high": top, "low": bottom, "close": close}, index=index)
        bars["volume"] = rng.exponential(3, len(index))
        if rolls:
            at = np.sort(rng.choice(len(index), rolls, replace=False))
            bars["contract"] = np.array(["H24", "M24"])[np.searchsorted(at, np.arange(len(index)), side="right") % 2]
        keep = rng.random(len(index)) > 0.1
        for hole in rng.integers(0, len(index), 20):
            keep[hole : hole + rng.choice([3, 17, 61, 130])] = False
        return bars[keep]

    return build
