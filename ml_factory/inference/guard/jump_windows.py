"""Base bars whose feature windows hold bars before and after a jump of unit: from the jump until the warm-up passed."""

from collections.abc import Mapping

import numpy as np

from ml_factory.data.bar_stream import TimeBarStream
from ml_factory.data.resample import BarChunk
from ml_factory.data.sessions import MINUTE_NS, MarketSpec


class JumpWindows:
    """Base bars of a feed and which of them read bars of two units; they are counted as the features count them.

    length : of a base bar, minutes
    warmup : base bars before its own that a row reads
    """

    def __init__(self, market: MarketSpec, length: int, warmup: int):
        self._frame, self._warmup, self._bar_ns = (
            TimeBarStream(market, length), warmup, market.bar_minutes * MINUTE_NS
        )  # fmt: skip
        self._count, self._newest, self._last = 0, 0, -2  # base bars, known_at of the newest, number of the last mixed
        self.known_at, self.mixed = np.empty(0, np.int64), np.empty(0, bool)

    @property
    def holds(self) -> bool:
        """Return whether the newest base bar, or the one under way, reads bars of two units."""
        return self._count - 1 <= self._last

    def push(self, chunk: BarChunk, jumps: np.ndarray, last_end: int) -> np.ndarray:
        """Return the moments (UTC ns) at which windows are of one unit again; `known_at` and `mixed` become those of
        the base bars that these bars complete.

        jumps : positions of the bars before which the unit changes
        last_end : end of the bar before the first, UTC ns
        """
        ends = np.append(last_end, chunk.start + self._bar_ns)
        return self._complete(self._frame.push(chunk).known_at, ends[jumps], ends[jumps + 1])

    def advance(self, now_ns: int) -> np.ndarray:
        """Return the moments as `push` does, of the base bars that are complete by the clock."""
        none = np.empty(0, np.int64)
        return self._complete(self._frame.advance(now_ns).known_at, none, none)

    def _complete(self, known_at: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Mark completed base bars; before, after : ends of the bars on both sides of each jump, UTC ns."""
        held, count = self.holds, len(known_at)
        until = self._count - 1 + np.searchsorted(np.append(self._newest, known_at), before) + self._warmup
        limit = np.full(count + 1, self._last, np.int64)
        np.maximum.at(limit, np.searchsorted(known_at, after), until)
        limit = np.maximum.accumulate(limit)
        self.known_at, self.mixed = known_at, self._count + np.arange(count) <= limit[:-1]
        self._count, self._last = self._count + count, int(limit[-1])
        self._newest = int(known_at[-1]) if count else self._newest
        return known_at[np.append(held, self.mixed[:-1])[:count] & ~self.mixed]

    def is_mixed(self, known_at: np.ndarray) -> np.ndarray:
        """Return which of the base bars completed last, by their `known_at`, read bars of two units; bool (N,)."""
        return self.mixed[np.searchsorted(self.known_at, known_at)] if len(known_at) else np.empty(0, bool)

    def get_state(self) -> dict:
        return {
            "frame": self._frame.get_state(), "count": self._count, "newest": self._newest, "last": self._last
        }  # fmt: skip

    def load_state(self, state: Mapping) -> None:
        self._frame.load_state(state["frame"])
        self._count, self._newest, self._last = (int(state[name]) for name in ("count", "newest", "last"))
