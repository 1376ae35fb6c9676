"""Made-up markets for the tests of targets, and what must not change when the future does."""

from functools import lru_cache

import numpy as np
import pandas as pd

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec, assign_sessions
from ml_factory.data.synthetic import synthetic_bars

MINUTE = 60_000_000_000


def frame(bars: list[tuple], segment: list[int] | None = None, minutes: int = 5, start: int = 0) -> ResampledBars:
    """Bars (open, high, low, close) one after the other."""
    values = np.array(bars, float).T
    starts = start + np.arange(len(bars), dtype=np.int64) * minutes * MINUTE
    segment = np.zeros(len(bars), np.int32) if segment is None else np.array(segment, np.int32)
    return ResampledBars(minutes, starts, starts + minutes * MINUTE, *values, None, segment, segment)


@lru_cache(maxsize=16)
def gappy(seed: int, tick: float | None, days: int = 4) -> pd.DataFrame:
    """Bars with jumps between minutes, spikes inside them, silences, holes inside sessions and days that stop early."""
    rng = np.random.default_rng(seed)
    bars = synthetic_bars(days=days, kind="null", seed=seed, missing=0.02)[["open", "high", "low", "close"]]
    jumps = np.cumsum(rng.standard_t(2, len(bars)) * 2e-4 * (rng.random(len(bars)) < 0.1))
    wild = bars.mul(np.exp(jumps), axis=0)
    spikes = np.abs(rng.standard_normal((2, len(bars)))) * 1.5e-3 * (rng.random(len(bars)) < 0.05)
    wild["high"], wild["low"] = wild["high"] * np.exp(spikes[0]), wild["low"] * np.exp(-spikes[1])
    if tick is not None:
        wild = (wild / tick).round() * tick
    wild["high"], wild["low"] = wild.max(axis=1), wild.min(axis=1)
    for _ in range(6):
        at = int(rng.integers(len(wild) - 400))
        wild = wild.drop(wild.index[at : at + int(rng.integers(3, 300))])
    return wild


def close_of(base: ResampledBars, market: MarketSpec) -> np.ndarray:
    return assign_sessions(base.known_at - 1, market.calendar).close_ns


def assert_same_bits(whole: pd.DataFrame, other: pd.DataFrame, cut: int) -> int:
    moment = pd.Timestamp(cut, tz="UTC")
    one, two = whole[whole["label_end"] <= moment], other[other["label_end"] <= moment]
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    return len(one)


def absurd(bars: pd.DataFrame, cut: int, rng: np.random.Generator) -> pd.DataFrame:
    """The bars after row `cut` turned back to front, 1.7 times as high, some of them gone, others late."""
    past, future = bars.iloc[:cut], bars.iloc[cut:]
    values = future.to_numpy()[::-1] * 1.7
    strange = pd.DataFrame(values, index=future.index, columns=bars.columns)
    return pd.concat([past, strange[rng.random(len(strange)) < 0.8]])
