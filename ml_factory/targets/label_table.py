"""Label tables: functions shared by every kind of label.

`label_end` is when an outcome is proven, so rows with label_end <= cut are the same bits whatever follows the cut.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.data import sessions
from ml_factory.data.resample import ResampledBars, known_at_index, segments_between_rolls
from ml_factory.data.sessions import MarketSpec
from ml_factory.targets.barrier_kernels import BARRIERS, SESSION, SLACK, barrier_exit_kernel

SESSION_ENDS = ("session", "drop", "span")  # treatment of rows near one: `LabelSpec.session_end`
SIDE = np.array([1, -1, 0, 0, 0], dtype=np.int8)  # of each of BARRIERS
NOT_PROVEN = np.iinfo(np.int64).max


@dataclass(frozen=True)
class LabelExits:
    """R rows of a frame and their paths to the exit.

    entry, exit_bar, last : int64[R], positions in the frame of the row, of its exit bar and of the last bar that its
        label may reach; the label lives on bars entry + 1 to exit_bar
    barrier : int8[R], positions in BARRIERS
    ret : float64[R], log return of a long position
    """

    entry: np.ndarray
    exit_bar: np.ndarray
    last: np.ndarray
    barrier: np.ndarray
    ret: np.ndarray


def find_labelable_rows(
    base: ResampledBars, session_end: str, selected: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return int64[R] positions of the rows with a later bar in their segment, and of the segment's last bar.

    With session_end="span" all bars up to a roll's step are one segment.

    selected : bool[N], rows to choose from; None: all
    """
    segment = segments_between_rolls(base) if session_end == "span" else base.segment
    continues = np.zeros(len(base), bool)
    continues[:-1] = segment[1:] == segment[:-1]
    ends = np.flatnonzero(~continues)
    entry = np.flatnonzero(continues if selected is None else continues & selected)
    return entry, np.repeat(ends, np.diff(ends, prepend=-1))[entry]


def simulate_label_exits(
    base: ResampledBars,
    minute_bars: ResampledBars | None,
    entry: np.ndarray,
    last: np.ndarray,
    end: np.ndarray,
    up,
    down,
    market,
    horizon,
) -> LabelExits:
    """Find the exits of the rows `entry` on bars entry + 1 to `end`, between two barrier prices float64[N]."""
    finer, first, stop = _bars_inside(base, minute_bars)
    # Allocated here: NumPy requests huge memory pages, which compiled code does not.
    barrier, exit_bar, ret = np.empty(len(entry), np.int8), np.empty(len(entry), np.int64), np.empty(len(entry))
    barrier_exit_kernel(
        (base.open, base.high, base.low, base.close), entry, end, (up, down), float(market.tick or 0.0) * SLACK,
        int(horizon), (finer.open, finer.high, finer.low, first, stop), (barrier, exit_bar, ret),
    )  # fmt: skip
    return LabelExits(entry, exit_bar, last, barrier, ret)


def build_label_table(
    base: ResampledBars,
    rows: LabelExits,
    label: np.ndarray,
    spec,
    market: MarketSpec,
    facts: dict[str, np.ndarray],
    *,
    kept: np.ndarray | None = None,
) -> pd.DataFrame:
    """Return the proven rows as a table with index known_at (UTC, ns).

    Columns: label, label_end, ret, barrier, uniqueness, then `facts` (R values each), entry_bar, exit_bar.

    kept : bool[R], rows that have a label. Rows without a label, like those still open, count towards concurrency
    """
    label_end = _proven_at(base, rows, int(spec.horizon), spec.session_end, market)
    columns = {
        "label": label,
        "label_end": label_end,
        "ret": rows.ret,
        "barrier": rows.barrier,
        "uniqueness": average_uniqueness(rows.entry + 1, rows.exit_bar, len(base)),
        **facts,
        "entry_bar": rows.entry,
        "exit_bar": rows.exit_bar,
    }
    proven = label_end != NOT_PROVEN if kept is None else (label_end != NOT_PROVEN) & kept
    if not proven.all():
        columns = {name: values[proven] for name, values in columns.items()}
    columns["label_end"] = pd.DatetimeIndex(columns["label_end"].view("M8[ns]"), tz="UTC")
    columns["barrier"] = pd.Categorical.from_codes(columns["barrier"], categories=list(BARRIERS))
    return pd.DataFrame(columns, index=known_at_index(base.known_at[columns["entry_bar"]]), copy=False)


def average_uniqueness(start_pos: np.ndarray, end_pos: np.ndarray, n: int) -> np.ndarray:
    """Return the mean over each label's lifetime of 1/concurrency (AFML 4.3-4.4), float64.

    Depends, for each label, only on labels that start no later than it ends.

    start_pos, end_pos : int64, first and last bar (both included) of n bars on which the label lives, start <= end
    n : number of bars
    """
    change = np.bincount(start_pos, minlength=n + 1) - np.bincount(end_pos + 1, minlength=n + 1)
    share = np.append(0.0, np.cumsum(1.0 / np.maximum(np.cumsum(change[:n]), 1)))
    return np.minimum((share[end_pos + 1] - share[start_pos]) / (end_pos - start_pos + 1), 1.0)


def _bars_inside(
    base: ResampledBars, minute_bars: ResampledBars | None
) -> tuple[ResampledBars, np.ndarray, np.ndarray]:
    """Return the minute bars, and int64[N] first and stop positions of each base bar's bars in them; none without them.

    No minute bar belongs to two base bars: the minute that shows the beginning of another contract is known with the
    previous bar, and belongs to the new one.
    """
    if minute_bars is None:
        return base, np.empty(0, np.int64), np.empty(0, np.int64)
    over = np.minimum(base.known_at, np.append(base.start[1:], NOT_PROVEN))
    first, stop = np.searchsorted(minute_bars.start, base.start), np.searchsorted(minute_bars.start, over)
    return minute_bars, first.astype(np.int64), stop.astype(np.int64)


def _proven_at(base, rows: LabelExits, horizon, session_end, market) -> np.ndarray:
    """Return int64[R] ns: when each row's outcome can no longer change, NOT_PROVEN where the feed ends before that.

    With session_end="drop" a row is proven to be kept only when all its bars exist; with "span" no session's close
    rules out a further bar.
    """
    known_at = base.known_at
    if session_end == "drop":
        vertical = rows.entry + horizon
        inside = vertical <= rows.last
        return np.where(inside, known_at[np.where(inside, vertical, 0)], NOT_PROVEN)
    proven = known_at[rows.exit_bar]
    cut_short = np.flatnonzero(rows.barrier == SESSION)
    ends, which = np.unique(rows.last[cut_short], return_inverse=True)
    # By the bar's last moment: after an early close its bucket may have begun before that close.
    close_at = sessions.assign_sessions(known_at[ends] - 1, market.calendar).close_ns
    if session_end == "span":
        close_at = np.full(len(ends), NOT_PROVEN)
    # Before the scheduled close only a bar of another segment proves that no further bar comes.
    following = np.append(known_at, NOT_PROVEN)[ends + 1]
    proven[cut_short] = np.where(known_at[ends] >= close_at, known_at[ends], following)[which]
    return proven


def mark_inferred_labels(labels: pd.DataFrame, base: ResampledBars, market: MarketSpec) -> pd.DataFrame:
    """Return the labels, with column `inferred` where facts of the market were inferred: int8, 1 in those sessions.

    Bars after such a row decided the facts it was made with, so it may be used for neither training nor evaluation.
    """
    if not market.learn_since:
        return labels
    return labels.assign(inferred=(base.session[labels["entry_bar"]] < market.learn_since).astype(np.int8))


def usable_label_rows(labels: pd.DataFrame) -> np.ndarray:
    """Return the positions (int64) of the rows that `mark_inferred_labels` left unmarked."""
    return np.flatnonzero(labels["inferred"] == 0) if "inferred" in labels else np.arange(len(labels))
