"""A prediction stream with its guard, and the check of a single request."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict

import numpy as np
import pandas as pd

from ml_factory.data.resample import BarChunk, resample_bars, to_bar_chunk
from ml_factory.data.sessions import MINUTE_NS
from ml_factory.errors import BarsError, CheckpointError, SettingsError, refuse_damaged_content
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.features.build import FeatureRows
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.bundle_checks import check_bars_on_tick
from ml_factory.inference.guard import ACTIONS, DEFAULT_SETTINGS, Finding, Guard, GuardSettings, check_clock
from ml_factory.inference.stream import PredictionStream

SILENT = ("abstain", "refuse")  # actions whose answers have no probabilities
NO_REFERENCE = "none in this bundle: training rows were too few; drift is not checked"
_BARS_AT_ONCE = 10_000  # bounds memory, and changes no answer
_NO_BARS = BarChunk(np.empty(0, np.int64), (np.empty(0),) * 6, None)


class GuardedStream:
    """Predictions of one symbol's feed, each with what the guard found up to its moment.

    An answer depends on the bars that ended by its `known_at`, and on the outcomes added before, not on how the bars
    were pushed; staleness also on the clock. Without a reference in the bundle drift is not checked, which `status`
    reports.

    cold : as of `PredictionStream`
    """

    def __init__(self, bundle: Bundle, settings: GuardSettings = DEFAULT_SETTINGS, *, cold: bool = True):
        self.bundle, self.settings = bundle, settings
        self._stream, self._guard = PredictionStream(bundle, cold=cold), Guard(bundle, settings)
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
        return self.push_checked(self.check_bars(bars), now=now)

    def check_bars(self, bars: pd.DataFrame, where: object = "bars of the stream") -> pd.DataFrame:
        """As of `PredictionStream`."""
        return self._stream.check_bars(bars, where)

    def push_checked(self, bars: pd.DataFrame, *, now: pd.Timestamp | None = None) -> pd.DataFrame:
        """As `push`, of bars in the canonical form of `check_bars`."""
        chunk = to_bar_chunk(bars, self.bundle.spec.market)
        self._guard.check_order(chunk)
        market = self.bundle.spec.market
        last = int(chunk.start[-1]) + market.bar_minutes * MINUTE_NS if len(chunk.start) else self._guard.last_end
        self._clock = [] if now is None else check_clock(last, now, market, self.settings)
        parts = [
            chunk.part(first, first + _BARS_AT_ONCE) for first in range(0, max(len(chunk.start), 1), _BARS_AT_ONCE)
        ]
        answers = [self._answer(self._stream.feature_rows(part), part) for part in parts]
        return answers[0] if len(answers) == 1 else pd.concat(answers)

    def advance(self, now: pd.Timestamp) -> pd.DataFrame:
        """Return the predictions of bars that are complete by the clock, once all raw bars up to `now` are pushed."""
        self._clock = check_clock(self._guard.last_end, now, self.bundle.spec.market, self.settings)
        return self._answer(self._stream.clock_rows(now), None)

    def add_outcome(self, known_at: pd.Timestamp, label: int) -> bool:
        """Compare the prediction of a moment with what happened; False where no such prediction is remembered.

        label : one of the classes of the bundle's labels; another raises SettingsError
        """
        return self._guard.add_outcome(pd.Timestamp(known_at).tz_convert("UTC").as_unit("ns").value, label)

    def status(self) -> dict:
        """Return what the guard finds now, as JSON values.

        `drift` : distance of the newest window from training as a multiple of its threshold, the largest first
        """
        found, reference = self._guard.findings()[0] + self._clock, self.bundle.guard_reference
        action, reason = action_and_reason(found)
        last = pd.Timestamp(self._guard.last_end, tz="UTC").isoformat() if self._guard.bars else None
        return {
            "guard": action, "reason": reason, "bars": self._guard.bars, "last_bar_end": last,
            "findings": [asdict(one) for one in found], "drift": self._guard.drift_of_columns(),
            "reference": "training rows of this bundle" if reference else NO_REFERENCE, **self._guard.outcomes(),
        }  # fmt: skip

    def get_state(self) -> dict:
        """Return plain numbers, texts and arrays, from which `load_state` continues to the bit."""
        clock = [one.message for one in self._clock]
        return {"stream": self._stream.get_state(), "guard": self._guard.get_state(), "clock": clock}

    def load_state(self, state: Mapping) -> None:
        """Restore a state of `get_state`. Raises SettingsError for the state of another bundle, CheckpointError for a
        damaged one.
        """
        self._stream.load_state(state["stream"])
        step = "start the stream again from the history"
        with refuse_damaged_content(CheckpointError, "This state of a guard is damaged", next_step=step):
            self._guard.load_state(state["guard"])
            self._clock = [Finding("stale", self.settings.stale, str(message)) for message in state["clock"]]

    def _answer(self, rows: FeatureRows, chunk: BarChunk | None) -> pd.DataFrame:
        """Return the predictions of the feature rows that these bars completed, with the guard's answers."""
        frame = self._stream.predict_rows(rows)
        mixed = self._guard.push(chunk or _NO_BARS, rows.known_at)
        known_at, p_N3 = frame.index.as_unit("ns").asi8, frame[PROBABILITIES].to_numpy()
        silent = mixed[np.searchsorted(rows.known_at, known_at)]
        self._guard.add_rows(rows.known_at[~mixed], rows.values[~mixed])
        self._guard.add_predictions(known_at[~silent], p_N3[~silent])
        answers = [action_and_reason(found + self._clock) for found in self._guard.findings(known_at, silent)]
        self._guard.forget()
        columns = {
            name: pd.array([answer[place] for answer in answers], dtype="str")
            for place, name in enumerate(("guard", "reason"))
        }  # arrays: quicker than series, which are aligned
        silent = np.array([action in SILENT for action, _ in answers], bool)
        if silent.any():
            columns |= dict(zip(PROBABILITIES, np.where(silent[:, None], np.nan, p_N3).T, strict=True))
        return frame.assign(**columns)


def check_request(
    bundle: Bundle, bars: pd.DataFrame, settings: GuardSettings = DEFAULT_SETTINGS, *, now: pd.Timestamp | None = None
) -> list[Finding]:
    """Return the findings on raw bars of one request, as they stand at its last bar, without the state of a feed.

    Bars that `Bundle.predict` refuses give one finding of the kind "schema".
    """
    market = bundle.spec.market
    try:
        checked, _ = bundle.spec.check_bars(bars)
        check_bars_on_tick(checked, market, bundle.off_tick_share)
        chunk, guard = to_bar_chunk(checked, market), Guard(bundle, settings)
        guard.check_order(chunk)
    except (BarsError, SettingsError) as error:
        return [Finding("schema", "refuse", str(error))]
    guard.push(chunk, resample_bars(checked, market, bundle.spec.features.base_minutes).known_at)
    return guard.findings()[0] + ([] if now is None else check_clock(guard.last_end, now, market, settings))


def action_and_reason(findings: Iterable[Finding]) -> tuple[str, str]:
    """Return the weightiest action and all messages."""
    found = list(findings)
    return max((one.action for one in found), key=ACTIONS.index, default="ok"), "; ".join(one.message for one in found)
