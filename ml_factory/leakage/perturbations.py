"""Perturbations of the future: each is a valid feed that differs strongly from the real one after the cut."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from ml_factory.data.sessions import MINUTE_NS
from ml_factory.seeding import seeded_generator

PRICES = ("open", "high", "low", "close")
TRUNCATE = "truncate"
SAME_TIMES = ("rescale", "mirror", "shuffle", "volume")
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


def _rescale(start, later, last, random):
    """Scale all prices by 3.7 or 0.27, off every tick."""
    factor = 3.7 if random.random() < 0.5 else 0.27
    return start, later | {name: later[name] * factor for name in PRICES}


def _mirror(start, later, last, random):
    """Flip the sign of each log return, five times as large as far as prices stay finite."""
    close = last.close
    moves = {name: np.log(later[name] / close) for name in PRICES}
    reach = max(np.abs(moves["high"]).max(initial=0.0), np.abs(moves["low"]).max(initial=0.0))
    grown = 5.0 if 5.0 * reach < 10.0 else 1.0
    flipped = {"open": "open", "high": "low", "low": "high", "close": "close"}
    return start, later | {name: close * np.exp(-grown * moves[source]) for name, source in flipped.items()}


def _shuffle(start, later, last, random):
    """Permute the bars under the same times; contracts keep their days."""
    order = random.permutation(len(start))
    return start, {name: values if name in ("contract", "chain") else values[order] for name, values in later.items()}


def _delete_insert(start, later, last, random):
    """Delete bars, often those right after the cut, and insert bars where there was none."""
    close = last.close
    kept = random.random(len(start)) >= 0.3
    kept[: int(random.choice((0, 1, 7, 90)))] = False
    absent = _absent_bars(start, last, random)
    price = close * np.exp(random.normal(0.0, 0.05, (4, len(absent))))
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
    before = np.concatenate([[last.start], start])
    after = np.concatenate([start, [before[-1] + last.bar_ns + 60 * MINUTE_NS]])
    silent = (after - before) // last.bar_ns - 1
    total = int(silent.sum())
    nearest = np.arange(min(total, MOST_INSERTED // 2))
    others = random.integers(0, total, MOST_INSERTED // 2) if total else nearest
    chosen = np.unique(np.concatenate([nearest, others]))
    behind = np.cumsum(silent)
    gap = np.searchsorted(behind, chosen, side="right")
    return before[gap] + (chosen - (behind[gap] - silent[gap]) + 1) * last.bar_ns


def _volume(start, later, last, random):
    """Multiply volumes by a thousand, permute them and set a fifth to zero; add volume where there is none."""
    volume = later.get("volume", random.lognormal(5.0, 2.0, len(start)))
    volume = random.permutation(volume) * 1000.0 + 1.0
    volume[random.random(len(start)) < 0.2] = 0.0
    return start, later | {"volume": np.floor(volume)}


PERTURBATIONS: dict[str, Callable] = {
    "rescale": _rescale,
    "mirror": _mirror,
    "shuffle": _shuffle,
    "delete and insert": _delete_insert,
    "volume": _volume,
}
