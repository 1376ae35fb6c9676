"""A prediction stream with its guard: each answer with an action and its reason."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ml_factory.data.resample import BarChunk, to_bar_chunk
from ml_factory.data.sessions import MINUTE_NS
from ml_factory.errors import BarsError, CheckpointError, refuse_damaged_content
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.features.stream import StreamedFeatureRows
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.guard.alarms import Alarms, Event, action_and_reason
from ml_factory.inference.guard.bar_channels import CHANNELS
from ml_factory.inference.guard.bar_checks import BarChecks, check_clock
from ml_factory.inference.guard.drift import BarDrift, RowDrift
from ml_factory.inference.guard.feature_range import FeatureRange
from ml_factory.inference.guard.jump_windows import JumpWindows
from ml_factory.inference.guard.outcomes import OutcomeCheck
from ml_factory.inference.guard.settings import DEFAULT_SETTINGS, Finding, GuardSettings
from ml_factory.inference.stream import PredictionStream
from ml_factory.targets.labels import stored_label_classes

SILENT = ("abstain", "refuse")  # actions whose answers have no probabilities
_NO_TEXT = pd.array([], dtype="str")
NO_REFERENCE = "none in this bundle (one of an older version): drift is not checked; export it again"


class BarGuard:
    """Guard of the bars of one feed, without a model. Drift is checked where the bundle has a reference."""

    def __init__(self, bundle: Bundle, settings: GuardSettings):
        self._market, reference = bundle.spec.market, bundle.guard_reference
        limits = reference.limits if reference else {}
        self._checks = BarChecks(self._market, settings, limits, bundle.off_tick_share)
        self.drift = BarDrift(self._market, reference, settings.drift_scale) if reference else None
        self.alarms = Alarms(settings)
        warmup = bundle.description.get("warmup_bars")
        known = warmup is not None and settings.unit != "ok"
        self.windows = JumpWindows(self._market, bundle.spec.features.base_minutes, warmup) if known else None
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
        if self.windows:
            jumps = np.array([event.bar - self.bars for event in events if event.check == "unit"], np.int64)
            ended = self.windows.push(chunk, jumps, self.last_end)
            events = [event._replace(state="begun") if event.check == "unit" else event for event in events]
            ends = chunk.start + self._market.bar_minutes * MINUTE_NS
            events += _ends_of_jumps(self.bars - 1 + np.searchsorted(ends, ended, side="right"))
        if self.drift:
            events += self.drift.push(chunk, self.bars)
        self.bars += len(chunk.start)
        self.last_end = int(chunk.start[-1]) + self._market.bar_minutes * MINUTE_NS
        return events

    def advance(self, now: pd.Timestamp) -> list[Event]:
        """Return the events of base bars that are complete by the clock."""
        if not self.windows:
            return []
        now_ns = pd.Timestamp(now).tz_convert("UTC").as_unit("ns").value
        return _ends_of_jumps(np.full(len(self.windows.advance(now_ns)), self.bars - 1))

    def mixed_rows(self, known_at: np.ndarray) -> np.ndarray:
        """Return which of the feature rows completed last, by their `known_at` (UTC ns), read bars of two units."""
        return self.windows.is_mixed(known_at) if self.windows else np.zeros(len(known_at), bool)

    def get_state(self) -> dict:
        return {
            "bars": self.bars, "last_end": self.last_end, "checks": self._checks.get_state(),
            "alarms": self.alarms.get_state(), "drift": self.drift and self.drift.get_state(),
            "windows": self.windows and self.windows.get_state(),
        }  # fmt: skip

    def load_state(self, state: Mapping) -> None:
        self.bars, self.last_end = int(state["bars"]), int(state["last_end"])
        self._checks.load_state(state["checks"])
        self.alarms.load_state(state["alarms"])
        if self.drift:
            self.drift.load_state(state["drift"])
        if self.windows and state.get("windows"):  # older states, and those without a check of units, have none
            self.windows.load_state(state["windows"])


def _ends_of_jumps(bars: np.ndarray) -> list[Event]:
    return [Event(bar, "unit", "", "ended") for bar in bars.tolist()]


class GuardedStream:
    """Predictions of one symbol's feed, each with what the guard found up to its moment.

    An answer depends on the bars that ended by its `known_at`, and on the outcomes added before, not on how the bars
    were pushed; staleness also on the clock. Without a reference in the bundle drift is not checked, which `status`
    reports.

    cold : as of `PredictionStream`
    """

    def __init__(self, bundle: Bundle, settings: GuardSettings = DEFAULT_SETTINGS, *, cold: bool = True):
        self.bundle, self.settings, self._reference = bundle, settings, bundle.guard_reference
        self._stream, self._guard = PredictionStream(bundle, cold=cold), BarGuard(bundle, settings)
        facts = bundle.description
        names = list(facts["feature_names"])
        self._rows = RowDrift(names, self._reference, settings.drift_scale) if self._reference else None
        checked = self._reference and settings.range != "ok"
        self._range = FeatureRange(names, self._reference) if checked else None
        self._outcomes = OutcomeCheck(int(facts["horizon"]), stored_label_classes(facts["spec"]))
        self._clock: list[Finding] = []

    @property
    def lacking_bars(self) -> int:
        """As of `PredictionStream`."""
        return self._stream.lacking_bars

    def push(self, bars: pd.DataFrame, *, now: pd.Timestamp | None = None) -> pd.DataFrame:
        """Return the predictions that these bars complete, with the columns `guard` and `reason`.

        bars : as of `PredictionStream.push`
        now : the clock, for staleness; None: not checked

        `guard` is "ok", "warn", "abstain" or "refuse"; with the last two the probabilities are NaN. Raises BarsError
        for bars that cannot be, after which the stream is as before.
        """
        checked = self._stream.check_bars(bars)
        chunk = to_bar_chunk(checked, self.bundle.spec.market)
        self._guard.check_order(chunk)
        rows = self._stream.feature_rows(chunk)
        first, ends = self._guard.bars, chunk.start + self.bundle.spec.market.bar_minutes * MINUTE_NS
        events = self._guard.push(chunk) if len(chunk.start) else []
        return self._answer(rows, events, now, (first, ends))

    def advance(self, now: pd.Timestamp) -> pd.DataFrame:
        """Return the predictions of bars that are complete by the clock, once all raw bars up to `now` are pushed."""
        rows, events = self._stream.clock_rows(now), self._guard.advance(now)
        return self._answer(rows, events, now, (self._guard.bars, np.empty(0, np.int64)))

    def add_outcome(self, known_at: pd.Timestamp, label: int) -> bool:
        """Compare the prediction of a moment with what happened; False where no such prediction is remembered.

        label : one of the classes of the bundle's labels; another raises SettingsError
        """
        capital = self._outcomes.add(pd.Timestamp(known_at).tz_convert("UTC").as_unit("ns").value, label)
        if capital is None:
            return False
        limit = self._reference.outcomes * self.settings.drift_scale if self._reference else np.inf
        if capital > limit:
            count, check = self._outcomes.outcomes, self._outcomes
            message = f"{count} outcomes contradict the probabilities: log loss {check.log_loss / count:.3f}, expected "
            message += f"{check.expected / count:.3f}; the log capital against them is {capital:.1f}, "
            message += f"at most {limit:.1f} wanted"
            self._guard.alarms.add(Event(self._guard.bars - 1, "calibration", message))
        return True

    def status(self) -> dict:
        """Return the state of every check as JSON values, and the drift of each column.

        `drift` : distance of the newest window from training as a multiple of its threshold, the largest first
        """
        checks = self._guard.alarms.status(self._guard.bars - 1)
        if self._clock:
            checks["stale"] |= {"state": "alarm", "last": self._clock[0].message}
        action, reason = action_and_reason(self._guard.alarms.findings(self._guard.bars - 1) + self._clock)
        last = pd.Timestamp(self._guard.last_end, tz="UTC").isoformat() if self._guard.bars else None
        outcomes = self._outcomes
        return {
            "guard": action, "reason": reason, "bars": self._guard.bars, "last_bar_end": last, "checks": checks,
            "reference": "training rows of this bundle" if self._reference else NO_REFERENCE,
            "drift": self._drift_of_columns(), "outcomes": outcomes.outcomes,
            "log_loss": outcomes.log_loss / outcomes.outcomes if outcomes.outcomes else None,
            "expected_log_loss": outcomes.expected / outcomes.outcomes if outcomes.outcomes else None,
        }  # fmt: skip

    def get_state(self) -> dict:
        """Return plain numbers, texts and arrays, from which `load_state` continues to the bit."""
        return {
            "stream": self._stream.get_state(), "guard": self._guard.get_state(),
            "rows": self._rows and self._rows.get_state(), "outcomes": self._outcomes.get_state(),
            "clock": [one.message for one in self._clock],
        }  # fmt: skip

    def load_state(self, state: Mapping) -> None:
        """Restore a state of `get_state`. Raises SettingsError for the state of another bundle, CheckpointError for a
        damaged one.
        """
        self._stream.load_state(state["stream"])
        step = "start the stream again from the history"
        with refuse_damaged_content(CheckpointError, "This state of a guard is damaged", next_step=step):
            self._guard.load_state(state["guard"])
            if self._rows:
                self._rows.load_state(state["rows"])
            self._outcomes.load_state(state["outcomes"])
            messages = state.get("clock", [])  # older states have none
            self._clock = [Finding("stale", self.settings.stale, str(message)) for message in messages]

    def _drift_of_columns(self) -> dict[str, float]:
        if not (self._rows and self._guard.drift):
            return {}
        bars = {f"bars: {name}": round(float(one), 3)
                for name, one in zip(CHANNELS, self._guard.drift.columns.ratio, strict=True)}  # fmt: skip
        return dict(sorted((bars | self._rows.ratios()).items(), key=lambda one: -one[1]))

    def _answer(
        self, rows: StreamedFeatureRows, events: list[Event], now: pd.Timestamp | None, pushed: tuple[int, np.ndarray]
    ) -> pd.DataFrame:
        """Return the predictions of feature rows with the guard's answers.

        pushed : number of the first bar pushed, and the ends of all, UTC ns
        """
        market, last_end = self.bundle.spec.market, self._guard.last_end
        self._clock = [] if now is None else check_clock(last_end, now, market, self.settings)
        first, ends = pushed
        frame = self._stream.predict_rows(rows)
        if not len(rows):  # four pushes of five, where a base bar has five minutes
            self._guard.alarms.answers(events, [])
            return frame.assign(guard=_NO_TEXT, reason=_NO_TEXT)
        known_at, p_N3 = frame.index.as_unit("ns").asi8, frame[PROBABILITIES].to_numpy()
        bars = first - 1 + np.searchsorted(ends, known_at, side="right")
        sound, answered = ~self._guard.mixed_rows(rows.known_at), ~self._guard.mixed_rows(known_at)
        values, newest = rows.values[sound], first - 1 + np.searchsorted(ends, rows.known_at[sound], side="right")
        if self._range:
            events = events + self._range.events(values, newest)
        if self._rows:
            events = events + self._rows.push_features(values, newest)
            events += self._rows.push_probabilities(p_N3[answered], bars[answered])
        self._outcomes.remember(known_at[answered], p_N3[answered])
        answers = self._guard.alarms.answers(events, bars.tolist(), self._clock)
        columns = {
            name: pd.array([answer[place] for answer in answers], dtype="str")
            for place, name in enumerate(("guard", "reason"))
        }  # arrays: quicker than series, which are aligned
        silent = np.array([action in SILENT for action, _ in answers], bool)
        if silent.any():
            columns |= dict(zip(PROBABILITIES, np.where(silent[:, None], np.nan, p_N3).T, strict=True))
        return frame.assign(**columns)
