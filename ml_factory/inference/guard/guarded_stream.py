"""A prediction stream with its guard: each answer with an action and its reason."""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from ml_factory.data.resample import BarChunk, to_bar_chunk
from ml_factory.data.sessions import MINUTE_NS
from ml_factory.errors import BarsError, CheckpointError, refuse_damaged_content
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.guard.alarms import Alarms, Event
from ml_factory.inference.guard.bar_checks import BarChecks, check_clock
from ml_factory.inference.guard.settings import DEFAULT_SETTINGS, Finding, GuardSettings
from ml_factory.inference.stream import PredictionStream


class BarGuard:
    """Guard of the bars of one feed, without a model."""

    def __init__(self, bundle: Bundle, settings: GuardSettings):
        self._market = bundle.spec.market
        self._checks = BarChecks(self._market, settings, {}, bundle.description["off_tick"])
        self.alarms = Alarms(settings)
        self.bars, self.last_end = 0, 0

    def check_order(self, chunk: BarChunk) -> None:
        """Raise BarsError where these bars do not follow those before; nothing is changed."""
        length = self._market.bar_minutes * MINUTE_NS
        starts = np.append(self.last_end, chunk.start[:-1] + length)
        wrong = np.flatnonzero(chunk.start < starts)
        if len(wrong):
            row = int(wrong[0])
            raise BarsError(
                "Bars overlap", where=f"bars of the stream, row {row}",
                got=f"a bar at {pd.Timestamp(chunk.start[row], tz='UTC')}",
                wanted=f"bars from {pd.Timestamp(starts[row], tz='UTC')} on",
                next_step="push bars in time order, each once",
            )  # fmt: skip

    def push(self, chunk: BarChunk) -> list[Event]:
        """Return the events of the next bars, which are not yet in `alarms`."""
        events = self._checks.push(chunk, self.bars)
        self.bars += len(chunk.start)
        self.last_end = int(chunk.start[-1]) + self._market.bar_minutes * MINUTE_NS
        return events

    def get_state(self) -> dict:
        return {
            "bars": self.bars, "last_end": self.last_end, "checks": self._checks.get_state(),
            "alarms": self.alarms.get_state(),
        }  # fmt: skip

    def load_state(self, state: Mapping) -> None:
        self.bars, self.last_end = int(state["bars"]), int(state["last_end"])
        self._checks.load_state(state["checks"])
        self.alarms.load_state(state["alarms"])


class GuardedStream:
    """Predictions of one symbol's feed, each with what the guard found up to its moment.

    An answer depends on the bars that ended by its `known_at` alone, not on how they were pushed; staleness also on
    the clock.

    cold : as of `PredictionStream`
    """

    def __init__(self, bundle: Bundle, settings: GuardSettings = DEFAULT_SETTINGS, *, cold: bool = True):
        self.bundle, self.settings = bundle, settings
        self._stream, self._guard = PredictionStream(bundle, cold=cold), BarGuard(bundle, settings)
        self._clock: list[Finding] = []

    def push(self, bars: pd.DataFrame, *, now: pd.Timestamp | None = None) -> pd.DataFrame:
        """Return the predictions that these bars complete, with the columns `guard` and `reason`.

        bars : as of `PredictionStream.push`
        now : the clock, for staleness; None: not checked

        `guard` is "ok", "warn", "abstain" or "refuse"; with the last two the probabilities are NaN. Raises BarsError
        for bars that cannot be, after which the stream is as before.
        """
        checked = self._stream.check_bars(bars)
        chunk = to_bar_chunk(checked, self.bundle.spec.market)
        first, ends = self._guard.bars, chunk.start + self.bundle.spec.market.bar_minutes * MINUTE_NS
        self._guard.check_order(chunk)
        frame = self._stream.predict_rows(self._stream.feature_rows(checked))
        events = self._guard.push(chunk) if len(chunk.start) else []
        return self._answer(frame, events, now, first, ends)

    def advance(self, now: pd.Timestamp) -> pd.DataFrame:
        """Return the predictions of bars that are complete by the clock, once all raw bars up to `now` are pushed."""
        frame = self._stream.advance(now)
        return self._answer(frame, [], now, self._guard.bars, np.empty(0, np.int64))

    def status(self) -> dict:
        """Return the state of every check as JSON values."""
        checks = self._guard.alarms.status(self._guard.bars - 1)
        if self._clock:
            checks["stale"] |= {"state": "alarm", "last": self._clock[0].message}
        action, reason = self._now()
        last = pd.Timestamp(self._guard.last_end, tz="UTC").isoformat() if self._guard.bars else None
        return {"guard": action, "reason": reason, "bars": self._guard.bars, "last_bar_end": last, "checks": checks}

    def get_state(self) -> dict:
        """Return plain numbers, texts and arrays, from which `load_state` continues to the bit."""
        return {"stream": self._stream.get_state(), "guard": self._guard.get_state()}

    def load_state(self, state: Mapping) -> None:
        """Restore a state of `get_state`. Raises SettingsError for the state of another bundle, CheckpointError for a
        damaged one.
        """
        self._stream.load_state(state["stream"])
        step = "start the stream again from the history"
        with refuse_damaged_content(CheckpointError, "This state of a guard is damaged", next_step=step):
            self._guard.load_state(state["guard"])
        self._clock = []

    def _now(self) -> tuple[str, str]:
        return self._guard.alarms.answers([], [self._guard.bars - 1], self._clock)[0]

    def _answer(
        self, frame: pd.DataFrame, events: Iterable[Event], now: pd.Timestamp | None, first: int, ends: np.ndarray
    ) -> pd.DataFrame:
        """Return the predictions with the guard's answers.

        first, ends : number of the first bar pushed, and the ends of all, UTC ns
        """
        if now is not None:
            self._clock = check_clock(self._guard.last_end, now, self.bundle.spec.market, self.settings)
        known_at = frame.index.as_unit("ns").asi8
        bars = (first - 1 + np.searchsorted(ends, known_at, side="right")).tolist()
        answers = self._guard.alarms.answers(events, bars, self._clock)
        guard = pd.Series([action for action, _ in answers], frame.index, dtype=str)
        frame = frame.assign(guard=guard, reason=pd.Series([reason for _, reason in answers], frame.index, dtype=str))
        frame.loc[guard.isin(["abstain", "refuse"]).to_numpy(), PROBABILITIES] = np.nan
        return frame
