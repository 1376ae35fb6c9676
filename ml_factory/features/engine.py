"""Feature engine for batch and streaming: bars of a frame in, in chunks or singly, the families' columns out.

The state between two chunks is the last HISTORY rows of every series and the families' recursions: plain arrays, saved
and restored to the bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec, assign_sessions
from ml_factory.features.ewm import ewm_means
from ml_factory.features.rolling import FLOOR, HISTORY, RollingBlock
from ml_factory.features.vector_log import vectorized_log

CHUNK = 8192
"""Rows passed to the kernels at once: a column of that many stays in the processor's cache, and the HISTORY rows that
warm up every window cost little in comparison."""
STATE_NUMBERS = 4
_SERIES = RollingBlock._fields[1:6] + RollingBlock._fields[7:]  # all but t0 and session
_ATR_BARS = 14.0


@dataclass(frozen=True)
class FeatureFamily:
    """A named group of columns and the kernel that writes them.

    names : (market, coarse) -> the columns, in order; the shorter list where `coarse`
    kernel : compiled (block, state, out_FC, coarse); writes column f of the rows after the history to out_FC[f]
    recursions : rows of STATE_NUMBERS numbers that the kernel keeps from one chunk to the next
    clock : the kernel reads the block's `progress`, which is NaN where no family does
    """

    names: Callable[[MarketSpec, bool], Sequence[str]]
    kernel: Callable
    recursions: int = 0
    clock: bool = False


class FeatureEngine:
    """The columns of some families on one frame.

    push : bars -> float64[n, F] (or into `out`), one row a bar, past only; NaN until a column's window is full
    rows : number of bars so far
    newest : the last row written
    """

    def __init__(self, market: MarketSpec, families: dict[str, FeatureFamily], *, coarse: bool):
        self.market, self.families, self.coarse = market, families, coarse
        listed = {name: list(family.names(market, coarse)) for name, family in families.items()}
        self._width = {name: len(columns) for name, columns in listed.items()}
        self.names = [column for columns in listed.values() for column in columns]
        self._history = np.full((len(_SERIES), HISTORY + CHUNK), np.nan)
        self._session = np.full(HISTORY + CHUNK, -1, np.int64)
        self._scratch = np.empty(max(self._width.values(), default=0) * CHUNK)  # reused: new pages cost a third more
        self.rows, self.newest = 0, np.full(len(self.names), np.nan)
        self._atr = np.zeros((1, STATE_NUMBERS))
        self._state = {name: np.zeros((max(f.recursions, 1), STATE_NUMBERS)) for name, f in families.items()}

    def push(self, bars: ResampledBars, out: np.ndarray | None = None, skip: int = 0) -> np.ndarray:
        """Return values of the new bars, which follow those pushed before.

        out : [n - skip, F] of float32 or float64 to write into, without the first `skip` rows
        """
        if out is None:
            out = np.empty((max(len(bars) - skip, 0), len(self.names)))
        for begin in range(0, len(bars), CHUNK):
            rows = slice(begin, min(begin + CHUNK, len(bars)))
            block = self._take(bars, rows)
            drop = min(max(skip - begin, 0), rows.stop - begin)
            place = 0
            for name, family in self.families.items():
                width, count = self._width[name], rows.stop - begin
                values = self._scratch[: width * count].reshape(width, count)
                family.kernel(block, self._state[name], values, self.coarse)
                rows_out = out[begin + drop - skip : rows.stop - skip, place : place + len(values)]
                if rows_out.strides[0] == rows_out.itemsize:  # columns are contiguous in memory
                    rows_out.T[:] = values[:, drop:]
                else:
                    _store(values[:, drop:], rows_out)
                place += len(values)
            self._keep(rows.stop - begin)
        if len(out):
            self.newest = out[-1].copy()
        return out

    def get_state(self) -> dict:
        """Return plain numbers and arrays, from which an equal engine continues to the bit."""
        return {
            "rows": self.rows,
            "history": self._history[:, :HISTORY].copy(),
            "session": self._session[:HISTORY].copy(),
            "atr": self._atr.copy(),
            "families": {name: state.copy() for name, state in self._state.items()},
        }

    def load_state(self, state: dict) -> None:
        """Continue from a state of `get_state`."""
        self.rows = int(state["rows"])
        self._history[:, :HISTORY] = state["history"]
        self._session[:HISTORY] = state["session"]
        self._atr[:] = state["atr"]
        for name, numbers in state["families"].items():
            self._state[name][:] = numbers

    def _take(self, bars: ResampledBars, rows: slice) -> RollingBlock:
        """Return the block of these rows: after the history, with the series that every family shares."""
        stop = HISTORY + rows.stop - rows.start
        series = self._history[:, :stop]
        for place, name in enumerate(_SERIES[:4]):
            series[place, HISTORY:] = getattr(bars, name)[rows]
        series[4, HISTORY:] = np.nan if bars.volume is None else bars.volume[rows]
        if any(family.clock for family in self.families.values()):
            series[5, HISTORY:] = elapsed_session_share(bars.start[rows], bars.known_at[rows], self.market.calendar)
        self._session[HISTORY:stop] = bars.session[rows]
        _derive(series, self._atr)
        return RollingBlock(self.rows, *series[:5], self._session[:stop], *series[5:])

    def _keep(self, count: int) -> None:
        self._history[:, :HISTORY] = self._history[:, count : count + HISTORY]
        self._session[:HISTORY] = self._session[count : count + HISTORY]
        self.rows += count


def compute_family_columns(
    family: FeatureFamily, bars: ResampledBars, market: MarketSpec, coarse: bool
) -> dict[str, np.ndarray]:
    """Return column name -> float64[N] of one family on a whole frame."""
    engine = FeatureEngine(market, {"": family}, coarse=coarse)
    return dict(zip(engine.names, engine.push(bars).T, strict=True))


def elapsed_session_share(start: np.ndarray, known_at: np.ndarray, calendar: str) -> np.ndarray:
    """Return the elapsed share of the session at `known_at`, 0 to 1; early closes count as announced."""
    edges = assign_sessions(start, calendar)
    return (known_at - edges.open_ns) / (edges.close_ns - edges.open_ns)


@njit(cache=True, nogil=True, error_model="numpy")
def _derive(series, atr_state):
    """Fill the derived series: logs, return, true range and ATR of the rows after the history."""
    for k in range(4):
        vectorized_log(series[k, HISTORY:], series[6 + k, HISTORY:])
    high, low, close, before = series[1, HISTORY:], series[2, HISTORY:], series[3, HISTORY:], series[3, HISTORY - 1 :]
    log_close, log_before = series[9, HISTORY:], series[9, HISTORY - 1 :]
    ret, span, atr = series[10, HISTORY:], series[11, HISTORY:], series[12, HISTORY:]
    for i in range(len(ret)):
        ret[i] = log_close[i] - log_before[i]
        # A missing close before the first bar makes the true range missing too.
        span[i] = max(high[i], before[i]) - min(low[i], before[i]) + 0.0 * before[i]
        atr[i] = span[i]
    ewm_means(series[12:13], np.full(1, _ATR_BARS), np.full(1, 1.0 / _ATR_BARS), atr_state)
    for i in range(len(atr)):
        atr[i] = max(atr[i], FLOOR * close[i]) + 0.0 * atr[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _store(values_FC, out_CF):
    """Copy rows of columns to rows of the matrix, eight columns at a time so that a cache line is filled at once."""
    columns, rows = values_FC.shape
    whole = columns - columns % 8
    for f in range(0, whole, 8):
        a, b, c, d = values_FC[f], values_FC[f + 1], values_FC[f + 2], values_FC[f + 3]
        e, g, h, j = values_FC[f + 4], values_FC[f + 5], values_FC[f + 6], values_FC[f + 7]
        for i in range(rows):
            row = out_CF[i, f : f + 8]
            row[0], row[1], row[2], row[3] = a[i], b[i], c[i], d[i]
            row[4], row[5], row[6], row[7] = e[i], g[i], h[i], j[i]
    for f in range(whole, columns):
        for i in range(rows):
            out_CF[i, f] = values_FC[f, i]
