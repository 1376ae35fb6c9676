"""What we ask of each row: which barrier does the price reach first, and from when on is that proven?

Triple barrier (Lopez de Prado, *Advances in Financial Machine Learning*, 2018, chapter 3), with barriers symmetric in
log price so that a log-driftless walk does not lean, and with an end that holds whatever bars come after it.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numba import njit

from ml_factory.data import sessions
from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import BarsError, SettingsError

BARRIERS = ("upper", "lower", "vertical", "session", "ambiguous")
UPPER, LOWER, VERTICAL, SESSION, AMBIGUOUS = range(5)
NONE = -1
SIDE = np.array([1, -1, 0, 0, 0], dtype=np.int8)
NOT_PROVEN = np.iinfo(np.int64).max
ON_TICK = 1e-4  # of a tick: closer than this a price stands on the grid
SLACK = 1e-6  # of a tick: what binary fractions of a decimal tick may be off


@dataclass(frozen=True)
class LabelSpec:
    """How a row is judged.

    horizon : existing bars of the base frame until the vertical barrier.
    k_up, k_down : barrier distance in units of sigma * sqrt(horizon); sigma is one bar's volatility.
    sigma_span : span, in bars, of the exponentially weighted volatility; the first label waits for as many returns.
    cost_ticks : round-trip cost; no barrier is nearer than this, nor nearer than one tick.
    session_end : "session" ends a label at the last bar of its session or before a hole;
        "drop" leaves out every row with fewer than `horizon` bars left there, touched or not.
    """

    horizon: int = 20
    k_up: float = 1.0
    k_down: float = 1.0
    sigma_span: int = 100
    cost_ticks: float = 2.0
    session_end: str = "session"

    def __post_init__(self):
        whole = {"horizon": (1, 10_000), "sigma_span": (2, 100_000)}
        for name, (least, most) in whole.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
                raise SettingsError(
                    "A label cannot be asked like this",
                    where=f"LabelSpec.{name}",
                    got=repr(value),
                    wanted=f"a whole number of bars from {least} to {most}",
                    next_step=f"set {name} to a number such as {20 if name == 'horizon' else 100}",
                )
        for name, least in {"k_up": 1e-6, "k_down": 1e-6, "cost_ticks": 0.0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                raise SettingsError(
                    "A label cannot be asked like this",
                    where=f"LabelSpec.{name}",
                    got=repr(value),
                    wanted="a finite number, 0 or more" if least == 0 else "a finite number above 0",
                    next_step=f"set {name} to 1.0",
                )
        if self.session_end not in ("session", "drop"):
            raise SettingsError(
                "A label cannot be asked like this",
                where="LabelSpec.session_end",
                got=repr(self.session_end),
                wanted="'session' or 'drop'",
                next_step="use 'session' to keep rows near the end of a session",
            )


def triple_barrier(
    base: Frame,
    fine: Frame | None,
    spec: LabelSpec,
    market: MarketSpec,
    *,
    session_close: np.ndarray | None = None,
) -> pd.DataFrame:
    """Judge every row of `base` by the barrier its price reaches first.

    Entry is the row's close; scanning starts at the next bar and never leaves the row's segment. A bar that opens
    beyond a barrier leaves at its open. The bar that reaches a barrier is walked through `fine`, with the same
    rule; what the finest bar leaves open (both barriers inside it) is "ambiguous", label 0, return NaN.

    Parameters
    ----------
    base : N bars.  fine : one-minute bars of the same feed, or None when base is the finest.
    session_close : int64[N] ns, the scheduled end of each row's session; default: from `market.calendar`.

    Returns
    -------
    DataFrame, index `known_at` (UTC, ns; unique, increasing, some of the base rows), with
        label int8 (-1, 0, 1), label_end (UTC, ns), ret (log return to the exit), barrier (one of BARRIERS),
        uniqueness (mean of 1/concurrency over the label's life, rows still open counted),
        mae, mfe (worst and best log excursion as a long sees it, mae <= 0 <= mfe),
        up, down (log distances of the barriers, positive), entry_bar, exit_bar (int64 positions in base; a label
        lives on bars entry_bar + 1 to exit_bar).
    `label_end` is when the outcome is proven, so rows with label_end <= cut are the same bits whatever follows the
    cut: the touching bar's known_at; for a segment that stops, the session's scheduled close if its last bar
    reaches it, else the known_at of the next existing bar. What the feed has not proven yet has no row. With
    session_end="drop" a row is proven to be kept only when all its bars are there, so it ends at the last of them.

    Raises BarsError for a close that is not a positive number.
    """
    _check_prices(base)
    last = _last_of_segment(base.segment)
    tick = float(market.tick or 0.0)
    up, down = _barriers(
        base.open, base.high, base.low, base.close, base.segment,
        int(spec.sigma_span), float(spec.k_up), float(spec.k_down), int(spec.horizon), tick, float(spec.cost_ticks),
    )  # fmt: skip
    finest = base if fine is None else fine
    first = np.searchsorted(finest.start, base.start) if fine is not None else np.arange(len(base))
    stop = np.searchsorted(finest.start, base.known_at) if fine is not None else first + 1
    barrier, exit_bar, ret, mae, mfe = _scan(
        base.open, base.high, base.low, base.close, last, up, down, tick * SLACK, int(spec.horizon),
        finest.open, finest.high, finest.low, first.astype(np.int64), stop.astype(np.int64),
    )  # fmt: skip
    entered = np.flatnonzero(barrier != NONE)
    uniqueness = np.full(len(base), np.nan)
    uniqueness[entered] = average_uniqueness(entered + 1, exit_bar[entered], len(base))
    label_end = _proven_at(base, spec, market, last, barrier, exit_bar, session_close)
    rows = entered[label_end[entered] != NOT_PROVEN]
    columns = {
        "label": SIDE[barrier[rows]],
        "label_end": pd.DatetimeIndex(label_end[rows].view("M8[ns]"), tz="UTC"),
        "ret": ret[rows],
        "barrier": pd.Categorical.from_codes(barrier[rows], categories=list(BARRIERS)),
        "uniqueness": uniqueness[rows],
        "mae": mae[rows],
        "mfe": mfe[rows],
        "up": np.log(up[rows] / base.close[rows]),
        "down": np.log(base.close[rows] / down[rows]),
        "entry_bar": rows.astype(np.int64),
        "exit_bar": exit_bar[rows],
    }
    index = pd.DatetimeIndex(base.known_at[rows].view("M8[ns]"), tz="UTC", name="known_at")
    return pd.DataFrame(columns, index=index)


def average_uniqueness(start_pos: np.ndarray, end_pos: np.ndarray, n: int) -> np.ndarray:
    """Mean over each label's life of 1/concurrency (AFML 4.3-4.4); float64, one value per label.

    start_pos, end_pos : int64, first and last bar (both counted) of n bars on which the label lives, start <= end.
    Depends, for each label, only on labels that start no later than it ends.
    """
    start_pos, end_pos = np.asarray(start_pos, np.int64), np.asarray(end_pos, np.int64)
    if len(start_pos) and (start_pos.min() < 0 or end_pos.max() >= n or (start_pos > end_pos).any()):
        raise ValueError(f"labels must live inside 0..{n - 1} and end no earlier than they start")
    change = np.bincount(start_pos, minlength=n + 1) - np.bincount(end_pos + 1, minlength=n + 1)
    return _mean_share(start_pos, end_pos, np.cumsum(change))


def _check_prices(base: Frame) -> None:
    bad = np.flatnonzero(~(base.close > 0) | ~np.isfinite(base.close))
    if len(bad):
        raise BarsError(
            "Labels need positive prices",
            where=f"bar known at {pd.Timestamp(int(base.known_at[bad[0]]), tz='UTC')} and {len(bad) - 1} more",
            got=f"close {base.close[bad[0]]}",
            wanted="a number above 0",
            next_step="use unadjusted or ratio-adjusted bars",
        )


def _last_of_segment(segment: np.ndarray) -> np.ndarray:
    """int64[N]: position of the last bar of each bar's segment."""
    n = len(segment)
    ends = np.append(np.flatnonzero(np.diff(segment)), n - 1) if n else np.empty(0, np.int64)
    return np.repeat(ends, np.diff(ends, prepend=-1)).astype(np.int64)


def _proven_at(base, spec, market, last, barrier, exit_bar, session_close) -> np.ndarray:
    """int64[N] ns: when each row's outcome can no longer change, NOT_PROVEN where the feed ends before that."""
    known_at, n = base.known_at, len(base)
    proven = np.where(barrier == NONE, NOT_PROVEN, known_at[np.minimum(exit_bar, n - 1)])
    if spec.session_end == "drop":
        vertical = np.arange(n) + int(spec.horizon)
        inside = (barrier != NONE) & (vertical <= last)
        return np.where(inside, known_at[np.minimum(vertical, n - 1)], NOT_PROVEN)
    ends = np.unique(last)
    if session_close is None:
        close_at = sessions.sessions_of(base.start[ends], market.calendar).close_ns
    else:
        close_at = np.asarray(session_close, np.int64)[ends]
    # Before the scheduled close only a bar of another segment proves that no further bar comes.
    following = np.append(known_at[ends[:-1] + 1], NOT_PROVEN) if n else np.empty(0, np.int64)
    segment_proof = np.where(known_at[ends] >= close_at, known_at[ends], following)
    cut_short = barrier == SESSION
    proven[cut_short] = segment_proof[np.searchsorted(ends, exit_bar[cut_short])]
    return proven


@njit(cache=True)
def _barriers(open_, high, low, close, segment, span, k_up, k_down, horizon, tick, cost_ticks):
    """Barrier prices float64[N], NaN before the volatility is known. Scalar on purpose: the same bits at any N."""
    n = len(close)
    up, down = np.full(n, np.nan), np.full(n, np.nan)
    decay = 1.0 - 2.0 / (span + 1.0)
    squares, weight, seen = 0.0, 0.0, 0
    for i in range(n):
        # A jump over a session edge or a hole is no bar's return.
        if i > 0 and segment[i] == segment[i - 1]:
            r = math.log(close[i] / close[i - 1])
            squares, weight, seen = decay * squares + r * r, decay * weight + 1.0, seen + 1
        if seen < span:
            continue
        scale = math.sqrt(squares / weight) * math.sqrt(horizon)
        least = math.log1p(max(1.0, cost_ticks) * tick / close[i])
        far, near = max(k_up * scale, least), max(k_down * scale, least)
        if far <= 0.0 or near <= 0.0:
            continue  # a market without a tick that did not move: no distance to ask about
        up[i], down[i] = close[i] * math.exp(far), close[i] * math.exp(-near)
        # Back-adjusted prices are off the grid: all four of a bar stand on it only where there is one.
        if tick > 0.0 and _on_grid(open_[i], high[i], low[i], close[i], tick):
            up[i] = math.ceil(up[i] / tick - SLACK) * tick
            down[i] = math.floor(down[i] / tick + SLACK) * tick
    return up, down


@njit(cache=True)
def _on_grid(open_, high, low, close, tick):
    for price in (open_, high, low, close):
        steps = price / tick
        if abs(steps - round(steps)) > ON_TICK:
            return False
    return True


@njit(cache=True)
def _touch(open_, high, low, up, down, slack):
    """(barrier, price at which one bar leaves); NONE when it stays inside."""
    if open_ >= up - slack:
        return UPPER, open_
    if open_ <= down + slack:
        return LOWER, open_
    if high >= up - slack:
        return (AMBIGUOUS, np.nan) if low <= down + slack else (UPPER, up)
    return (LOWER, down) if low <= down + slack else (NONE, np.nan)


@njit(cache=True)
def _walk(open_, high, low, first, stop, up, down, slack, best, worst):
    """Bars first..stop-1 until one leaves: (its barrier, price, position, best and worst price before it)."""
    for j in range(first, stop):
        barrier, price = _touch(open_[j], high[j], low[j], up, down, slack)
        if barrier != NONE:
            return barrier, price, j, best, worst
        best, worst = max(best, high[j]), min(worst, low[j])
    return NONE, np.nan, stop - 1, best, worst


@njit(cache=True)
def _leave(barrier, price, open_, high, low, up, down, best, worst):
    """Best and worst price with the leaving bar counted: nothing beyond the exit, the other side at its worst."""
    if barrier == AMBIGUOUS:
        return max(best, up), min(worst, down)
    if price == open_:
        return max(best, price), min(worst, price)
    if barrier == UPPER:
        return max(best, price), min(worst, low)
    return max(best, high), min(worst, price)


@njit(cache=True)
def _scan(open_, high, low, close, last, up, down, slack, horizon, f_open, f_high, f_low, f_first, f_stop):
    """barrier int8[N] (NONE: no row), exit_bar int64[N], ret, mae, mfe float64[N]."""
    n = len(close)
    barrier, exit_bar = np.full(n, NONE, np.int8), np.full(n, -1, np.int64)
    ret, mae, mfe = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
    for i in range(n):
        if math.isnan(up[i]) or i == last[i]:
            continue
        end = min(i + horizon, last[i])
        side, price, j, best, worst = _walk(open_, high, low, i + 1, end + 1, up[i], down[i], slack, close[i], close[i])
        if side == NONE:
            side, price = (VERTICAL if i + horizon <= last[i] else SESSION), close[end]
        else:
            finer, fine_price, f, fine_best, fine_worst = _walk(
                f_open, f_high, f_low, f_first[j], f_stop[j], up[i], down[i], slack, best, worst
            )
            if finer == NONE:  # a fine feed that does not show the touch settles nothing
                best, worst = _leave(side, price, open_[j], high[j], low[j], up[i], down[i], best, worst)
            else:
                side, price = finer, fine_price
                best, worst = _leave(side, price, f_open[f], f_high[f], f_low[f], up[i], down[i], fine_best, fine_worst)
        barrier[i], exit_bar[i] = side, j
        ret[i] = math.log(price / close[i])
        mae[i], mfe[i] = math.log(worst / close[i]), math.log(best / close[i])
    return barrier, exit_bar, ret, mae, mfe


@njit(cache=True)
def _mean_share(start, end, concurrency):
    share = np.empty(len(start))
    for i in range(len(start)):
        total = 0.0
        for t in range(start[i], end[i] + 1):
            total += 1.0 / concurrency[t]
        share[i] = total / (end[i] - start[i] + 1)
    return share
