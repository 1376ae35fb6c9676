"""Cut points of the proof, where pipelines typically look ahead and at random, and other futures after them.

A leak may be in one row of ten thousand: the last of a session, the first after a hole, the hour the clocks change. So
the cuts cover such rows first, a few of each kind, and the remaining cuts are spread over the hours of the week.
A perturbed future is a valid feed that differs strongly from the real one after the cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import pandas as pd

from ml_factory.data.sessions import MINUTE_NS, PRICES, assign_sessions
from ml_factory.leakage.tables import Table
from ml_factory.seeding import seeded_generator

CLOCKS_THAT_CHANGE = ("America/New_York", "Europe/London")
EDGES_MIN = (15, 60, 240)
TRUNCATE = "truncate"
SAME_TIMES = ("rewrite",)
MOST_INSERTED = 500  # absent bars after the cut that are filled in
MOST_RANDOM = 20_000  # bars from which the random cuts are drawn


@dataclass(frozen=True)
class CutPoint:
    """A moment that separates past and future.

    first : position of the first bar of the future
    at : when the last bar of the past is complete, ns UTC
    quiet : when the first bar of the future begins. No information arrives between `at` and `quiet`, so where that bar
        keeps its time, rows proven in between must not change either
    why : kind of the cut
    """

    first: int
    at: int
    quiet: int
    why: str

    @property
    def moment(self) -> str:
        """`at` as text."""
        return str(pd.Timestamp(self.at, tz="UTC"))


def choose_cut_points(
    bars: pd.DataFrame, calendar: str, count: int, *, seed: int = 0, earliest: int = 1,
    rows: np.ndarray | None = None, labels: Mapping[str, Table] | None = None,
    bar_minutes: int = 1,
) -> list[CutPoint]:  # fmt: skip
    """Choose at most `count` cuts in time order; the same arguments give the same ones.

    The kinds alternate, so that sixteen cuts cover every kind too; kinds that run out leave theirs to random cuts.

    Parameters
    ----------
    bars : checked bars
    calendar : of the market
    count : number of cuts
    seed : of the random cuts
    earliest : least position that a cut may have (its first future bar)
    rows : int64 ns, `known_at` of the rows of features
    labels : tables whose rows give the moments when a label is resolved
    bar_minutes : length of the bars
    """
    start, bar_ns = bars.index.as_unit("ns").asi8, bar_minutes * MINUTE_NS
    latest = len(start) - 1
    random = seeded_generator("cuts", seed, len(start))
    kinds = {"hour of the week": _hours_of_the_week(start, earliest, latest, random)} | _market_kinds(
        bars, start, calendar, random, bar_minutes
    )
    if rows is not None:
        kinds["row of extreme"] = _first_rows_after(kinds["extreme"], start, rows, bar_ns)
    kinds |= _label_kinds(start, labels or {}, random, bar_ns)
    chosen: dict[int, str] = {}
    usable = {why: places[(places >= earliest) & (places <= latest)].tolist() for why, places in kinds.items()}
    turns = (pair for places in zip_longest(*usable.values()) for pair in zip(usable, places, strict=True))
    for why, place in turns:
        if len(chosen) == count:
            break
        if place is not None:
            chosen.setdefault(place, why)
    return [CutPoint(i, int(start[i - 1]) + bar_ns, int(start[i]), why) for i, why in sorted(chosen.items())]


def _market_kinds(
    bars: pd.DataFrame, start: np.ndarray, calendar: str, random: np.random.Generator, bar_minutes: int
) -> dict:
    """Return positions by kind, the most revealing first."""
    sessions = assign_sessions(start, calendar)
    edges = np.flatnonzero(sessions.session_start_mask())[1:]
    silence = np.diff(start, prepend=start[:1] - bar_minutes * MINUTE_NS) // MINUTE_NS - bar_minutes
    inside = np.flatnonzero((silence > 0) & ~sessions.session_start_mask())
    since = (start - sessions.open_ns) // MINUTE_NS
    clocks = _clock_changes(start)
    return {
        "session end": random.permutation(edges),
        "frame edge": _edges_of_frames(since, random),
        "gap": _largest(inside, silence, random),
        "daylight saving": clocks,
        "extreme": _extremes(bars),
        "short day": _short_days(edges, len(start)),
        "one bar before a session end": random.permutation(edges - 1),
        "newest bars": np.array([len(start) - 1, len(start) - 4]),
        "one bar into a session": random.permutation(edges + 1),
    }


def _hours_of_the_week(start: np.ndarray, earliest: int, latest: int, random: np.random.Generator) -> np.ndarray:
    """Return random cuts, one in each hour of the week in turn, against a look ahead at a fixed hour."""
    places = random.permutation(np.arange(earliest, latest + 1))[:MOST_RANDOM]
    hour = start[places] // (60 * MINUTE_NS) % (7 * 24)
    rotation = pd.Series(hour).groupby(hour).cumcount().to_numpy()  # the first of each hour, then the second of each
    rank = random.permutation(7 * 24)[hour]
    return places[np.lexsort((rank, rotation))]


def _edges_of_frames(since: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return whole quarters, hours and four hours of the session, one of each in turn."""
    found = [random.permutation(np.flatnonzero((since > 0) & (since % step == 0)))[:50] for step in EDGES_MIN]
    return np.array([i for rotation in zip_longest(*found) for i in rotation if i is not None], np.int64)


def _largest(places: np.ndarray, size: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the largest and random others, alternating."""
    by_size = places[np.argsort(-size[places], kind="stable")]
    return np.stack([by_size, random.permutation(places)], axis=1).ravel() if len(places) else places


def _clock_changes(start: np.ndarray) -> np.ndarray:
    """Return the first bar after each change of the clocks."""
    hours = np.arange(start[0] // (60 * MINUTE_NS), start[-1] // (60 * MINUTE_NS) + 1) * (60 * MINUTE_NS)
    utc = pd.DatetimeIndex(hours.astype("M8[ns]"), tz="UTC")
    changes = []
    for zone in CLOCKS_THAT_CHANGE:
        offset = utc.tz_convert(zone).tz_localize(None).as_unit("ns").asi8 - hours
        changes += hours[np.flatnonzero(np.diff(offset)) + 1].tolist()
    return np.searchsorted(start, np.array(changes, np.int64))


def _extremes(bars: pd.DataFrame) -> np.ndarray:
    """Return positions before the largest moves, the extreme prices and the largest volumes."""
    close = bars["close"].to_numpy(np.float64)
    moves = np.abs(np.diff(np.log(close), prepend=np.log(close[:1])))
    largest = np.flatnonzero(moves >= np.partition(moves, -min(20, len(moves)))[-min(20, len(moves))])
    places = largest[np.argsort(-moves[largest], kind="stable")[:20]].tolist()
    places[1:1] = [int(bars["high"].to_numpy().argmax()), int(bars["low"].to_numpy().argmin())]
    if "volume" in bars:
        places[1:1] = [int(bars["volume"].to_numpy().argmax())]
    return np.array(places, np.int64)


def _short_days(edges: np.ndarray, rows: int) -> np.ndarray:
    """Return ends of sessions far shorter than usual (early closes, holidays), the shortest first."""
    bounds = np.concatenate([[0], edges, [rows]])
    length = np.diff(bounds)[:-1]
    short = np.flatnonzero(length < 0.8 * np.median(length)) if len(length) else np.empty(0, np.int64)
    return bounds[1:-1][short[np.argsort(length[short], kind="stable")]]


def _first_rows_after(places: np.ndarray, start: np.ndarray, rows: np.ndarray, bar_ns: int) -> np.ndarray:
    """Return cuts at the `known_at` of the first row after each of these bars."""
    seen_by = np.searchsorted(rows, start[places[places < len(start)]] + bar_ns)
    known = rows[seen_by[seen_by < len(rows)]]
    return np.searchsorted(start, known - bar_ns) + 1


def _label_kinds(start: np.ndarray, labels: Mapping[str, Table], random: np.random.Generator, bar_ns: int) -> dict:
    """Return for each way a label ends cuts at the moments when some are resolved; the horizons alternate."""
    places: dict[str, list[list[int]]] = {}
    for table in labels.values():
        barrier = table.rows["barrier"] if "barrier" in table.rows else pd.Series("its end", table.rows.index)
        of_row, ways = pd.factorize(barrier, sort=True)
        for k, way in enumerate(ways):
            rows = random.permutation(np.flatnonzero(of_row == k))[:50]
            found = np.searchsorted(start, table.proven[rows] - bar_ns) + 1
            places.setdefault(f"label proven by {way}", []).append(found.tolist())
    return {
        why: np.array([i for rotation in zip_longest(*lists) for i in rotation if i is not None], np.int64)
        for why, lists in places.items()
    }


# ---- other futures -------------------------------------------------------------------------------------------------


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
    grid = np.arange(last.start + last.bar_ns, end, last.bar_ns)
    there = np.zeros(len(grid), bool)
    there[(start - grid[0]) // last.bar_ns] = True
    absent = grid[~there]
    nearest, others = np.split(absent, [MOST_INSERTED // 2])
    return np.sort(np.concatenate([nearest, random.permutation(others)[: MOST_INSERTED // 2]]))


PERTURBATIONS: dict[str, Callable] = {"rewrite": _rewrite, "rethin": _rethin}
