"""Outlier detectors for bars: spikes, flash moves, stale prices and prices off the tick.

Each detector compares bars with the market's own scale (typical move, usual length of gaps); none holds a constant of
one market.
"""

from collections.abc import Iterator

import numpy as np

from ml_factory.data.bar_report import BarFinding, pluralize_count

MOVE_WINDOW = 240  # bars on each side: most of a session, so that one strange bar does not hide itself
FEW_MOVES = 60  # moves of the bar's own session; with fewer, the window ignores session edges
OUTLIER_TIMES = 10.0
PERSISTING_SHARE = 0.6  # of a move that remains five bars later
RUN_WINDOW = 720
RUN_CAP = 30  # bars at most that one run adds to the base rate of runs
SPIKE_TIMES = 25.0  # an extreme this many usual moves beyond both neighbours
FLASH_TIMES = 40.0  # a move this many usual moves away from the bar before; NQ has 4 in 700,000, on news days
VIOLENT_RETURN = 0.10  # within one bar
VIOLENT_DAYS = 0.07  # share of days with a lasting one: 0.03 in the volatile year 2013, 0.2 on a test network
STALE_NATS = 60.0  # a run less likely than exp(-60) given this market's base rate
NO_VOLUME_NATS = 60.0
TICK_ERROR = 1e-3  # of a tick
ON_SHARE, OFF_SHARE = 0.05, 0.5  # of a session's bars: below it is on the tick, above it is off
REGIMES = 20  # more changes than this are no change of adjustment
OFF_SESSIONS = 3


# ---- the market's own scale ------------------------------------------------------------------------------------------


def outlier_robust_move_size(move: np.ndarray, known: np.ndarray, edge: np.ndarray) -> np.ndarray:
    """Compute the mean absolute move around each bar with outliers left out.

    The larger of two means is taken: over the bar's own session, which a missing day next to it does not change, and
    over the bars on both sides, which include the volatile afternoon before a quiet evening.

    Parameters
    ----------
    move : float64[N], log return from close to close
    known : bool[N], True where `move` is the move of one bar
    edge : bool[N], True at the first bar of a session

    Returns
    -------
    float64[N], never 0
    """
    size = np.where(known, np.abs(move), 0.0)
    moved = size[size > 0]
    if not len(moved):
        return np.full(len(move), np.inf)
    typical = float(np.median(moved))
    usual = np.zeros(len(move))
    for around in _windows(known, edge):
        first = _mean_around(np.minimum(size, 20 * typical), known, around)
        kept = known & (size <= OUTLIER_TIMES * np.maximum(first, 0.02 * typical))
        usual = np.maximum(usual, _mean_around(size, kept, around))
    return np.maximum(usual, 0.02 * typical)


def run_length_surprisal(
    position: np.ndarray, length: np.ndarray, bars: int, excluded: np.ndarray | bool = False
) -> np.ndarray:
    """Compute the surprisal of runs of bars, in nats: how unlikely a run of this length is in this market.

    A run of L bars has the probability f^L where a share f of the bars belongs to runs. f is the larger of the share
    in the window around the run (without the run itself) and the share in the whole file, so that quiet nights and
    thin markets excuse long runs.

    Parameters
    ----------
    position : int64[R], row of each run, increasing
    length : int64[R], bars in each run
    bars : number of bars in the file
    excluded : bool[R], runs left out of the base rate

    Returns
    -------
    float64[R]
    """
    if not len(position):
        return np.empty(0)
    counted = np.where(excluded, 0.0, np.minimum(length, RUN_CAP))
    total = np.concatenate([[0.0], np.cumsum(counted)])
    first = np.searchsorted(position, position - RUN_WINDOW)
    after = np.searchsorted(position, position + RUN_WINDOW, side="right")
    others = total[after] - total[first] - counted
    near = np.minimum(position + RUN_WINDOW, bars) - np.maximum(position - RUN_WINDOW, 0)
    here = (others + 1) / (near + others + 2)
    whole = (total[-1] - counted + 1) / (bars + total[-1] - counted + 2)
    return -length * np.log(np.maximum(here, whole))


def price_move_persists(close: np.ndarray, rows: np.ndarray, move: np.ndarray) -> np.ndarray:
    """Return bool[R]: whether a move persists, by the median of the five closes from its row on and the five before."""
    ahead = close[np.minimum(rows[:, None] + np.arange(5), len(close) - 1)]
    behind = close[np.maximum(rows[:, None] - 1 - np.arange(5), 0)]
    left = np.median(ahead, axis=1) - np.median(behind, axis=1)
    return left * np.sign(move) > PERSISTING_SHARE * np.abs(move)


def find_runs_of_true(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (first, length) of each run of True."""
    edge = np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))
    first = np.flatnonzero(edge == 1)
    return first, np.flatnonzero(edge == -1) - first


def expand_runs_to_rows(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return every row (int64) of these runs."""
    within = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    return np.repeat(first, length) + within


Windows = tuple[np.ndarray, np.ndarray]  # int64[N] each: the first bar of a window, and the bar after its last one


def _windows(known: np.ndarray, edge: np.ndarray) -> tuple[Windows, Windows]:
    """Return two windows around every bar: inside its session (equally wide near the edges), and across sessions."""
    bars, at, wide = len(known), np.arange(len(known)), 2 * MOVE_WINDOW + 1
    begins = np.flatnonzero(np.append(True, edge[1:]))
    session = np.cumsum(np.append(0, edge[1:]))
    begin, end = begins[session], np.append(begins[1:], bars)[session]
    low = np.maximum(np.minimum(at - MOVE_WINDOW, end - wide), begin)
    own = low, np.minimum(low + wide, end)
    around = np.maximum(at - MOVE_WINDOW, 0), np.minimum(at + MOVE_WINDOW + 1, bars)
    few = _sum_of(known.astype(float), own) < FEW_MOVES
    return (np.where(few, around[0], own[0]), np.where(few, around[1], own[1])), around


def _mean_around(values: np.ndarray, counted: np.ndarray, around: Windows) -> np.ndarray:
    total = _sum_of(np.where(counted, values, 0.0), around)
    return total / np.maximum(_sum_of(counted.astype(float), around), 1)


def _sum_of(values: np.ndarray, around: Windows) -> np.ndarray:
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[around[1]] - total[around[0]]


# ---- spikes, flash moves, feeds that are no market -------------------------------------------------------------------


def spike_scores(log: dict[str, np.ndarray], adjacent: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Compute how far each bar's high or low lies beyond both neighbours, float64[N], in typical moves.

    A missing neighbour (the session's first or last bar, a gap) is replaced by the bar's own open or close.
    """
    follows = np.append(adjacent[1:], False)
    high, low = log["high"], log["low"]
    above, below = np.zeros(len(high)), np.zeros(len(high))
    for values, out, worst, sign in ((high, above, np.maximum, 1.0), (low, below, np.minimum, -1.0)):
        before = np.where(adjacent, np.roll(values, 1), log["open"])
        after = np.where(follows, np.roll(values, -1), log["close"])
        out[:] = sign * (values - worst(before, after))
    return np.maximum(np.maximum(above, below), 0.0) / usual


def find_price_spikes(
    log: dict[str, np.ndarray], adjacent: np.ndarray, edge: np.ndarray, day: np.ndarray, minutes: int
) -> Iterator[BarFinding]:
    """Yield findings on spikes, flash moves and prices of no market.

    Parameters
    ----------
    log : column -> float64[N], log prices in one unit
    adjacent : bool[N], the bar follows its predecessor; False also where the price level shifts
    edge : bool[N], True at the first bar of a session
    day : int[N], the exchange day
    minutes : length of a bar
    """
    close = log["close"]
    move = np.diff(close, prepend=close[:1])
    usual = outlier_robust_move_size(move, adjacent, edge)
    spike = spike_scores(log, adjacent, usual) > SPIKE_TIMES
    if spike.any():
        rows = np.flatnonzero(spike)
        message = f"{pluralize_count(len(rows), 'bar')} with a price more than {SPIKE_TIMES:.0f} usual moves "
        yield BarFinding("spike", "reported", rows, message + "beyond both neighbours")
    # the last close of no spike
    valid = close[np.maximum.accumulate(np.where(spike, 0, np.arange(len(close))))]
    before = np.concatenate([valid[:1], valid[:-1]])
    reach = np.where(adjacent & ~spike, np.maximum(log["high"] - before, before - log["low"]), 0.0)
    flash = np.flatnonzero(reach > FLASH_TIMES * usual)
    if len(flash):
        message = (
            f"{pluralize_count(len(flash), 'bar')} with a move of more than {FLASH_TIMES:.0f} usual ones that does not "
        )
        yield BarFinding(
            "flash_move", "reported", flash, message + f"come straight back (up to {np.expm1(reach.max()):.1%})"
        )
    yield from _not_a_market(close, np.where(adjacent & ~spike, close - before, 0.0), day, minutes)


def persistent_extreme_moves(close: np.ndarray, move: np.ndarray) -> np.ndarray:
    """Return the rows (int64) whose close is more than VIOLENT_RETURN away from the previous close, and remains there.

    Parameters
    ----------
    close : float64[N], log close
    move : float64[N], its move, 0 where it is not the move of one bar
    """
    rows = np.flatnonzero(np.abs(move) > VIOLENT_RETURN)
    return rows[price_move_persists(close, rows, move[rows])]


def share_of_extreme_move_days(violent: np.ndarray, day: np.ndarray) -> float:
    """Return the share of days that hold one of these rows."""
    return len(np.unique(day[violent])) / len(np.unique(day))


def _not_a_market(close: np.ndarray, move: np.ndarray, day: np.ndarray, minutes: int) -> Iterator[BarFinding]:
    violent = persistent_extreme_moves(close, move)
    share = share_of_extreme_move_days(violent, day)
    if minutes <= 5 and len(violent) > 10 and share > VIOLENT_DAYS:
        message = f"on {share:.0%} of the days a bar closes more than {VIOLENT_RETURN:.0%} away from the one before "
        message += f"and the price stays there ({len(violent)} bars): a test network or a broken feed makes such prices"
        yield BarFinding("not_a_market", "reported", violent, message)


# ---- stale prices ----------------------------------------------------------------------------------------------------


def find_stale_prices(
    prices: dict[str, np.ndarray], volume: np.ndarray | None, adjacent: np.ndarray
) -> Iterator[BarFinding]:
    """Yield findings on runs of bars that repeat one price, and on runs without volume.

    Parameters
    ----------
    prices : column -> float64[N]: high, low and close
    volume : float64[N], NaN where unknown; None without volume
    adjacent : bool[N], the bar follows its predecessor within the session
    """
    first, length, score = stale_price_runs(prices, adjacent)
    long = score > STALE_NATS
    if long.any():
        runs = pluralize_count(int(long.sum()), "run")
        message = f"{runs} of bars that repeat one price, the longest of {int(length[long].max())}"
        yield BarFinding("stale_run", "reported", expand_runs_to_rows(first[long], length[long]), message)
    if volume is None:
        return
    first, length = find_runs_of_true(volume == 0)
    long = run_length_surprisal(first, length, len(volume)) > NO_VOLUME_NATS
    if long.any():
        runs = pluralize_count(int(long.sum()), "run")
        message = f"{runs} of bars without volume, the longest of {int(length[long].max())}"
        yield BarFinding("zero_volume", "reported", expand_runs_to_rows(first[long], length[long]), message)


def stale_price_runs(prices: dict[str, np.ndarray], adjacent: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (first, length, surprisal in nats) of the runs of flat bars at the previous close."""
    close = prices["close"]
    flat = (prices["high"] == prices["low"]) & adjacent
    flat[1:] &= close[1:] == close[:-1]
    first, length = find_runs_of_true(flat)
    return first, length, run_length_surprisal(first, length, len(flat))


# ---- the tick --------------------------------------------------------------------------------------------------------


def find_off_tick_prices(
    prices: dict[str, np.ndarray], unit: np.ndarray, day: np.ndarray, tick: float | None
) -> Iterator[BarFinding]:
    """Yield findings on prices off the tick, and on sessions from which prices are adjusted in another way.

    Parameters
    ----------
    prices : column -> float64[N]
    unit : int64[N], the power of ten by which a bar is off (`LevelShifts`)
    day : int[N], the exchange day
    tick : price step, None where unknown
    """
    if tick is None:
        return
    factor = 10.0**-unit
    off = np.zeros(len(day), bool)
    for values in prices.values():
        steps = values * factor / tick
        off |= np.abs(steps - np.round(steps)) > TICK_ERROR
    if not off.any():
        return
    rows = np.flatnonzero(off)
    message = f"{len(rows):,} bars ({off.mean():.2%}) hold prices off the tick of {tick:g}"
    message += ", as ratio back-adjusted series do" if off.mean() > 0.9 else ""
    yield BarFinding("off_tick", "reported", rows, message)
    _, first, count = np.unique(day, return_index=True, return_counts=True)
    share = np.add.reduceat(off.astype(float), first) / count
    kind = np.where(share < ON_SHARE, 0, np.where(share > OFF_SHARE, 1, -1))
    clear = np.flatnonzero(kind >= 0)
    changes = clear[1:][np.diff(kind[clear]) != 0]
    if len(changes) and len(changes) <= REGIMES and (kind[clear] == 1).sum() >= OFF_SESSIONS:
        message = f"sessions change between on and off the tick {len(changes)} times: "
        message += "prices are adjusted in another way from there on"
        yield BarFinding("adjustment", "reported", first[changes], message)
