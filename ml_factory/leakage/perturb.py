"""Perturbations of the future: each is a valid feed that differs strongly from the real one after the cut."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from ml_factory.data.sessions import MINUTE_NS
from ml_factory.seeding import seeded_generator

PRICES = ("open", "high", "low", "close")
TRUNCATE = "truncate"
SAME_TIMES = ("rewrite",)
MOST_INSERTED = 500  # absent bars after the cut that are filled in


def perturb_future_bars(bars: pd.DataFrame, first: int, way: str, seed: int = 0, bar_minutes: int = 1) -> pd.DataFrame:
    """Return the bars with everything from position `first` on changed; earlier bars keep every bit.

    Parameters
    ----------
    bars : checked bars of `bar_minutes`, index UTC starts
    first : position of the first changed bar
    way : "truncate" or one of `PERTURBATIONS`
    seed : of the random changes
    bar_minutes : length of the bars
    """
    if way == TRUNCATE:
        return bars.iloc[:first]
    later = {name: bars[name].to_numpy()[first:].copy() for name in bars}
    start = bars.index.as_unit("ns").asi8
    last = _Last(int(start[first - 1]), float(bars["close"].to_numpy(np.float64)[first - 1]), bar_minutes * MINUTE_NS)
    start, later = PERTURBATIONS[way](start[first:], later, last, seeded_generator("disturb", way, first, seed))
    past = bars.iloc[:first]
    if "volume" in later and "volume" not in bars:
        past = past.assign(volume=0.0)
    index = pd.DatetimeIndex(start.view("M8[ns]"), tz="UTC", name=bars.index.name)
    future = pd.DataFrame({name: later[name] for name in past}, index=index)
    return pd.concat([past.set_axis(past.index.as_unit("ns")), future]) if len(future) else past


class _Last(NamedTuple):
    """The last bar before the cut: its start (ns), its close and its length (ns)."""

    start: int
    close: float
    bar_ns: int


def _rewrite(start, later, last, random):
    """Give the same times other bars: permuted, at 3.7 or 0.27 of their prices (off every tick), or with each return
    reversed; volumes a thousand times as large, a fifth of them zero, also where there were none.
    """
    order = random.permutation(len(start))
    later = {name: values if name in ("contract", "chain") else values[order] for name, values in later.items()}
    how = random.integers(0, 3)
    if how < 2:
        later |= {name: later[name] * (3.7, 0.27)[how] for name in PRICES}
    else:
        sources = {"open": "open", "high": "low", "low": "high", "close": "close"}
        later |= {name: last.close * (last.close / later[source]) for name, source in sources.items()}
    volume = np.asarray(later.get("volume", random.lognormal(5.0, 2.0, len(start)))) * 1000.0 + 1.0
    volume[random.random(len(start)) < 0.2] = 0.0
    return start, later | {"volume": np.floor(volume)}


def _rethin(start, later, last, random):
    """Delete bars, often those right after the cut, and insert bars where there was none."""
    kept = random.random(len(start)) >= 0.3
    kept[: int(random.choice((0, 1, 7, 90)))] = False
    absent = _absent_bars(start, last, random)
    price = last.close * np.exp(random.normal(0.0, 0.05, (4, len(absent))))
    new = {"open": price[0], "high": price.max(axis=0), "low": price.min(axis=0), "close": price[1]}
    if "volume" in later:
        new["volume"] = random.integers(1, 10**6, len(absent)).astype(np.float64)
    for name in later.keys() - new.keys():  # attributes such as the contract: those of the previous bar
        at = np.maximum(np.searchsorted(start, absent) - 1, 0)
        new[name] = later[name][at] if len(start) else np.zeros(len(absent), later[name].dtype)
    times = np.concatenate([start[kept], absent])
    order = np.argsort(times, kind="stable")
    return times[order], {name: np.concatenate([later[name][kept], new[name]])[order] for name in later}


def _absent_bars(start: np.ndarray, last: _Last, random: np.random.Generator) -> np.ndarray:
    """Return starts of absent bars from the cut to an hour after the feed: the first ones and random others."""
    end = (start[-1] if len(start) else last.start) + last.bar_ns + 60 * MINUTE_NS
    absent = np.setdiff1d(np.arange(last.start + last.bar_ns, end, last.bar_ns), start)
    nearest, others = np.split(absent, [MOST_INSERTED // 2])
    return np.sort(np.concatenate([nearest, random.permutation(others)[: MOST_INSERTED // 2]]))


PERTURBATIONS: dict[str, Callable] = {"rewrite": _rewrite, "rethin": _rethin}
