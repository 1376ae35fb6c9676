"""What we ask of each row: which barrier does the price reach first, and from when on is that proven?

Triple barrier (Lopez de Prado, *Advances in Financial Machine Learning*, 2018, chapter 3), with barriers symmetric in
log price so that a log-driftless walk does not lean, and with an end that holds whatever bars come after it.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.data import sessions
from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import BarsError, SettingsError
from ml_factory.targets.barriers import BARRIERS, NONE, SESSION, SLACK, barrier_prices, mean_share, scan

__all__ = ["BARRIERS", "LabelSpec", "average_uniqueness", "triple_barrier"]

SIDE = np.array([1, -1, 0, 0, 0], dtype=np.int8)  # of each of BARRIERS
NOT_PROVEN = np.iinfo(np.int64).max


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
    k_up: float = 0.8
    k_down: float = 0.8
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
                    next_step=f"set {name} to 0.8",
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
    up, down = barrier_prices(
        base.open, base.high, base.low, base.close, base.segment,
        int(spec.sigma_span), float(spec.k_up), float(spec.k_down), int(spec.horizon), tick, float(spec.cost_ticks),
    )  # fmt: skip
    finest, first, stop = _bars_inside(base, fine)
    barrier, exit_bar, ret, mae, mfe = scan(
        base.open, base.high, base.low, base.close, last, up, down, tick * SLACK, int(spec.horizon),
        finest.open, finest.high, finest.low, first, stop,
    )  # fmt: skip
    entered = np.flatnonzero(barrier != NONE)
    uniqueness = np.full(len(base), np.nan)
    uniqueness[entered] = average_uniqueness(entered + 1, exit_bar[entered], len(base))
    label_end = _proven_at(base, spec, market, last, barrier, exit_bar, session_close)
    rows = entered[label_end[entered] != NOT_PROVEN]
    facts = {
        "uniqueness": uniqueness[rows],
        "mae": mae[rows],
        "mfe": mfe[rows],
        "up": np.log(up[rows] / base.close[rows]),
        "down": np.log(base.close[rows] / down[rows]),
        "entry_bar": rows.astype(np.int64),
        "exit_bar": exit_bar[rows],
    }
    return _table(base.known_at[rows], label_end[rows], barrier[rows], ret[rows], facts)


def average_uniqueness(start_pos: np.ndarray, end_pos: np.ndarray, n: int) -> np.ndarray:
    """Mean over each label's life of 1/concurrency (AFML 4.3-4.4); float64, one value per label.

    start_pos, end_pos : int64, first and last bar (both counted) of n bars on which the label lives, start <= end.
    Depends, for each label, only on labels that start no later than it ends.
    """
    start_pos, end_pos = np.asarray(start_pos, np.int64), np.asarray(end_pos, np.int64)
    if len(start_pos) and (start_pos.min() < 0 or end_pos.max() >= n or (start_pos > end_pos).any()):
        raise ValueError(f"labels must live inside 0..{n - 1} and end no earlier than they start")
    change = np.bincount(start_pos, minlength=n + 1) - np.bincount(end_pos + 1, minlength=n + 1)
    return mean_share(start_pos, end_pos, np.cumsum(change))


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


def _table(known_at, label_end, barrier, ret, facts: dict) -> pd.DataFrame:
    """The labels as a table; every argument holds the rows that are kept."""
    columns = {
        "label": SIDE[barrier],
        "label_end": pd.DatetimeIndex(label_end.view("M8[ns]"), tz="UTC"),
        "ret": ret,
        "barrier": pd.Categorical.from_codes(barrier, categories=list(BARRIERS)),
    }
    index = pd.DatetimeIndex(known_at.view("M8[ns]"), tz="UTC", name="known_at")
    return pd.DataFrame(columns | facts, index=index)


def _bars_inside(base: Frame, fine: Frame | None) -> tuple[Frame, np.ndarray, np.ndarray]:
    """The finest frame, and int64[N] first and stop positions of each base bar's bars in it."""
    if fine is None:
        return base, np.arange(len(base)), np.arange(1, len(base) + 1)
    first, stop = np.searchsorted(fine.start, base.start), np.searchsorted(fine.start, base.known_at)
    return fine, first.astype(np.int64), stop.astype(np.int64)


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
        # Asked of the bar's last moment: after an early close its bucket may have begun before that close.
        close_at = sessions.sessions_of(base.known_at[ends] - 1, market.calendar).close_ns
    else:
        close_at = np.asarray(session_close, np.int64)[ends]
    # Before the scheduled close only a bar of another segment proves that no further bar comes.
    following = np.append(known_at[ends[:-1] + 1], NOT_PROVEN) if n else np.empty(0, np.int64)
    segment_proof = np.where(known_at[ends] >= close_at, known_at[ends], following)
    cut_short = barrier == SESSION
    proven[cut_short] = segment_proof[np.searchsorted(ends, exit_bar[cut_short])]
    return proven
