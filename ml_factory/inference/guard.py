"""Guard of live predictions: what its newest bars, rows, predictions and outcomes tell of a feed, and a stream with it.

A finding is a function of this tail alone: it holds as long as the tail shows it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_settings
from ml_factory.data.quality import OFF_SHARE, ON_SHARE, off_tick_rows
from ml_factory.data.resample import BarChunk, to_bar_chunk
from ml_factory.data.sessions import (
    DAY_NS,
    HOLE_MINUTES,
    MINUTE_NS,
    MarketSpec,
    assign_sessions,
    scheduled_session_days,
)
from ml_factory.errors import CheckpointError, SettingsError, refuse_damaged_content
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.features.build import FeatureRows
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.guard_reference import (
    BAR_WINDOW,
    BINS,
    CHANNELS,
    OUTCOME_WINDOW,
    ROW_WINDOW,
    USUAL_BARS,
    ColumnReference,
    GuardReference,
    bar_channels,
    constant_rows,
    outcome_losses,
)
from ml_factory.inference.stream import START_AGAIN, PredictionStream, predictions_table
from ml_factory.targets.labels import stored_label_classes

ACTIONS = ("ok", "warn", "abstain", "refuse")  # in order of weight
KINDS = ("stale", "gap", "unit", "tick", "stuck", "range", "constant", "drift", "calibration")
RECENT_BARS, RECENT_ROWS = 90, 18  # for which a gap, a strange row or a strange window is a finding
REMEMBERED = 2000  # predictions that wait for their outcome
_KEPT_BARS, _KEPT_ROWS = USUAL_BARS + BAR_WINDOW + RECENT_BARS, ROW_WINDOW + RECENT_ROWS
_TAILS = ("bars", "features", "p", "waiting")
_DRIFTING = {"bars": RECENT_BARS, "features": RECENT_ROWS, "probabilities": RECENT_ROWS}  # and for how many rows
_NO_MOMENTS = np.empty(0, np.int64)
_Check = tuple[
    str, np.ndarray, Callable[[int], str]
]  # kind or kind:part, place at each moment or -1, message of a place


@dataclass(frozen=True)
class GuardFinding:
    """One finding of the guard.

    kind : one of KINDS
    action : "warn", "abstain" (the answer has no probabilities) or "refuse" (the request is an error)
    message : what, got, wanted, in one sentence
    part : of a drift, what it is in
    """

    kind: str
    action: str
    message: str
    part: str = ""


@dataclass(frozen=True)
class GuardSettings:
    """Action of each kind of finding ("warn", "abstain", "refuse"; "ok": not checked), and limits.

    stale : the newest bar is older than the clock allows, or later than the clock
    gap : minutes are absent while the market is open
    unit : the price jumped as another unit, contract or adjustment would make it, and windows hold bars of both sides
    tick : prices are off the market's tick, where those of training were on it
    stuck : the feed repeats one price
    range : features further outside the range of training than it is wide, or NaN where training never has it
    constant : features that vary in training keep one value, or are absent
    drift : inputs or probabilities are distributed otherwise than in training (PSI, KS)
    calibration : outcomes contradict the predicted probabilities
    stale_minutes : open minutes without a bar before the newest is stale
    gap_minutes : open minutes without a bar that are a gap; None: from the bundle's reference, else the market's hole
    drift_scale : factor on the thresholds of drift and calibration; above 1 fewer findings
    """

    stale: str = "abstain"
    gap: str = "warn"
    unit: str = "abstain"
    tick: str = "abstain"
    stuck: str = "abstain"
    range: str = "warn"
    constant: str = "warn"
    drift: str = "warn"
    calibration: str = "warn"
    stale_minutes: int = 5
    gap_minutes: int | None = None
    drift_scale: float = 1.0

    def __post_init__(self) -> None:
        limits = dict.fromkeys(("stale_minutes", "gap_minutes", "drift_scale"), "(0, 1e9)")
        check_settings(self, **dict.fromkeys(KINDS, ACTIONS), **limits)


DEFAULT_SETTINGS = GuardSettings()


@dataclass
class _Rows:
    """The newest rows of a table.

    known_at : int64 [n], UTC ns
    values : float [n, C]
    first : number of the first of them among all rows that there were
    """

    known_at: np.ndarray
    values: np.ndarray
    first: int = 0

    def add(self, known_at: np.ndarray, values: np.ndarray) -> None:
        self.known_at = np.concatenate([self.known_at, known_at])
        self.values = np.concatenate([self.values, values])

    def keep(self, most: int) -> None:
        gone = max(len(self.known_at) - most, 0)
        self.known_at, self.values = self.known_at[gone:].copy(), self.values[gone:].copy()
        self.first += gone

    def ends(self, moments: np.ndarray) -> np.ndarray:
        """Return how many of these rows are known at each moment."""
        return np.searchsorted(self.known_at, moments, side="right")


class Guard:
    """The tail of one feed, and its findings. Without a reference in the bundle drift is not checked."""

    def __init__(self, bundle: Bundle, settings: GuardSettings = DEFAULT_SETTINGS):
        self.settings, self._market, self._reference = settings, bundle.spec.market, bundle.reference
        limits = self._reference.limits if self._reference else {}
        self._gap = settings.gap_minutes or limits.get("gap_minutes") or HOLE_MINUTES
        self._jump = float(np.exp(limits.get("unit_jump", np.log(2))))
        self._stuck = int(limits.get("stuck_bars", 60))
        self._on_tick = self._market.tick is not None and bundle.description["off_tick"] <= ON_SHARE
        self._names, self._warmup = list(bundle.description["feature_names"]), bundle.description["warmup_bars"]
        self._classes = sorted(stored_label_classes(bundle.description["spec"]))
        columns = 5 if self._market.has_volume else 4
        self._bars = _Rows(_NO_MOMENTS, np.empty((0, columns)))  # known_at: the end of a bar
        self._features = _Rows(_NO_MOMENTS, np.empty((0, len(self._names)), np.float32))
        self._p = _Rows(_NO_MOMENTS, np.empty((0, 3)))
        self._waiting, self.losses = _Rows(_NO_MOMENTS, np.empty((0, 3))), np.empty((0, 2))
        self._rows, self._last_mixed = 0, -2  # base bars, the last one that reads bars of two units
        self._jumps = [(0, "")]  # end of the bar after a jump, message
        self._known: dict[str, dict[int, np.ndarray]] = {name: {} for name in _DRIFTING}  # number of the end -> ratios

    @property
    def bars(self) -> int:
        """Bars so far."""
        return self._bars.first + len(self._bars.known_at)

    @property
    def last_end(self) -> int:
        """End of the newest bar, UTC ns; 0 before the first."""
        return int(self._bars.known_at[-1]) if self.bars else 0

    def push(self, chunk: BarChunk, known_at: np.ndarray) -> np.ndarray:
        """Take the next bars; return which base bars that they complete read bars of two units, bool (N,).

        known_at : of these base bars, UTC ns
        """
        ends, before = chunk.start + self._market.bar_minutes * MINUTE_NS, self._bars.values[-1:, 3]
        self._bars.add(ends, np.column_stack(chunk.columns[: self._bars.values.shape[1]]))
        first = 1 - len(before)  # that has a bar before it
        ratio = chunk.columns[0][first:] / np.append(before, chunk.columns[3][:-1])[: len(ends)]
        jumps = np.flatnonzero((ratio > self._jump) | (ratio < 1 / self._jump))
        limit = np.full(len(known_at) + 1, self._last_mixed)
        if len(jumps) and self.settings.unit != "ok":
            rows = np.searchsorted(known_at, ends[jumps + first])
            np.maximum.at(limit, rows, self._rows + rows + self._warmup)
            limit = np.maximum.accumulate(limit)
            wanted = f"between {1 / self._jump:.3g} and {self._jump:.3g} wanted"
            self._jumps += [
                (int(ends[one]), f"the price at {_utc_text(chunk.start[one])} is {times:.4g} times that of the bar "
                 f"before, {wanted}")
                for one, times in zip(jumps + first, ratio[jumps], strict=True)
            ]  # fmt: skip
        mixed = self._rows + np.arange(len(known_at)) <= limit[:-1]
        self._rows, self._last_mixed = self._rows + len(known_at), int(limit[-1])
        return mixed

    def add(self, known_at: np.ndarray, values: np.ndarray, predicted_at: np.ndarray, p_N3: np.ndarray) -> None:
        """Take the next feature rows, float32 (N, F), and the next predictions, which now wait for their outcomes."""
        self._features.add(known_at, values)
        self._p.add(predicted_at, p_N3)
        self._waiting.add(predicted_at, p_N3)

    def forget(self) -> None:
        """Forget what no later finding reads."""
        self._bars.keep(_KEPT_BARS)
        self._features.keep(_KEPT_ROWS)
        self._p.keep(_KEPT_ROWS)
        self._waiting.keep(REMEMBERED)
        for table, known in self._known.items() if self._reference else ():
            first = self._table(table)[1].first
            self._known[table] = {number: ratios for number, ratios in known.items() if number > first}
        del self._jumps[:-1]

    def add_outcome(self, known_at: int, label: int) -> bool:
        """Compare the prediction of a moment with what happened; False where no such prediction waits."""
        if label not in self._classes:
            wanted = " or ".join(map(str, self._classes))
            raise SettingsError("There is no such outcome", where="label", got=label, wanted=wanted)
        place = np.flatnonzero(self._waiting.known_at == known_at)
        if not len(place):
            return False
        losses = outcome_losses(self._waiting.values[place], np.array([label]))
        self.losses = np.concatenate([self.losses, np.column_stack(losses)])[-OUTCOME_WINDOW:]
        self._waiting.known_at = np.delete(self._waiting.known_at, place)
        self._waiting.values = np.delete(self._waiting.values, place, axis=0)
        return True

    def findings(self, moments: np.ndarray | None = None, mixed: np.ndarray | None = None) -> list[list[GuardFinding]]:
        """Return the findings at each of these rising moments (UTC ns), the weightiest first; None: as of now.

        mixed : whether the row of each moment reads bars of two units
        """
        if moments is None or mixed is None:
            moments, mixed = np.array([np.iinfo(np.int64).max]), np.array([self._rows - 1 <= self._last_mixed])
        out: list[list[GuardFinding]] = [[] for _ in moments]
        for name, places, message in self._checks(moments, mixed) if len(moments) else ():
            kind, _, part = name.partition(":")
            action = getattr(self.settings, kind)
            text = cache(message)  # of many rows one place is the newest
            for number in np.flatnonzero(places >= 0).tolist() if action != "ok" else ():
                out[number].append(GuardFinding(kind, action, text(int(places[number])), part))
        return [sorted(found, key=lambda one: (-ACTIONS.index(one.action), KINDS.index(one.kind))) for found in out]

    def drift_of_columns(self) -> dict[str, float]:
        """Return column -> distance in the newest window as a multiple of its threshold, the largest first."""
        names, found = ([f"bars: {name}" for name in CHANNELS], self._names, PROBABILITIES), dict[str, float]()
        for table, own in zip(_DRIFTING if self._reference else (), names, strict=False):
            reference, rows = self._table(table)
            for ratios in self._ratios(table, len(rows.values) - reference.step, len(rows.values))[1]:
                found |= {name: round(float(one), 3) for name, one in zip(own, ratios, strict=True)}
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def get_state(self) -> dict:
        """Return plain numbers, texts and arrays, from which `load_state` continues to the bit."""
        tails = {name: dict(vars(getattr(self, f"_{name}"))) for name in _TAILS}
        jump = {"rows": self._rows, "last_mixed": self._last_mixed, "jumped": self._jumps[-1][1]}
        return tails | {"losses": self.losses.copy()} | jump

    def load_state(self, state: Mapping) -> None:
        """Restore a state of `get_state`."""
        for name in _TAILS:
            empty, one = getattr(self, f"_{name}").values, state[name]
            values = np.array(one["values"], empty.dtype).reshape(-1, empty.shape[1])
            setattr(self, f"_{name}", _Rows(np.array(one["known_at"], np.int64), values, int(one["first"])))
        self.losses = np.array(state["losses"], np.float64).reshape(-1, 2)
        self._rows, self._last_mixed = int(state["rows"]), int(state["last_mixed"])
        self._jumps = [(0, str(state["jumped"]))]
        self._known = {name: {} for name in _DRIFTING}

    def _chunk(self) -> BarChunk:
        """Return the bars of the tail."""
        columns = tuple(self._bars.values.T)
        start = self._bars.known_at - self._market.bar_minutes * MINUTE_NS
        return BarChunk(start, (*columns[:4], columns[4] if len(columns) > 4 else np.empty(0), np.empty(0)), None)

    def _table(self, name: str) -> tuple[ColumnReference, _Rows]:
        """Return the reference and the tail of bars, features or probabilities."""
        rows = {"bars": self._bars, "features": self._features, "probabilities": self._p}[name]
        return getattr(self._reference, name), rows

    def _codes(self, table: str, first: int, end: int) -> np.ndarray:
        """Return the bins of rows [first, end) of a table; of bars those of their channels."""
        reference, rows = self._table(table)
        if table != "bars" or self._reference is None:
            return reference.codes(rows.values[first:end])
        chunk = self._chunk().part(first - USUAL_BARS, end)
        return reference.codes(bar_channels(chunk, self._market, self._reference.season)[USUAL_BARS:])

    def _ratios(self, table: str, after: int, until: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends in (after, until] of windows of a table, and their distances as multiples of the thresholds,
        float64 (E, C); each window is measured once.
        """
        (reference, rows), known = self._table(table), self._known[table]
        earliest = reference.window + (USUAL_BARS if table == "bars" else 0)
        ends = reference.window_ends(len(rows.values), rows.first)
        ends = ends[(ends > after) & (ends >= earliest) & (ends <= until)]
        new = ends[[end + rows.first not in known for end in ends.tolist()]]
        if len(new):
            first = int(new[0]) - reference.window
            codes = self._codes(table, first, int(new[-1]))
            ratios = reference.ratios(reference.distances(codes, new - first))
            known.update(zip((new + rows.first).tolist(), ratios, strict=True))
        return ends, np.array([known[end + rows.first] for end in ends.tolist()]).reshape(-1, len(reference.edges))

    def _checks(self, moments: np.ndarray, mixed: np.ndarray) -> Iterator[_Check]:
        newest = np.searchsorted([end for end, _ in self._jumps], moments, side="right") - 1
        yield "unit", np.where(mixed, newest, -1), lambda place: self._jumps[place][1]
        yield from self._checks_of_bars(self._bars.ends(moments))
        if self._reference is not None:
            yield from self._checks_of_rows(self._reference, self._features.ends(moments))
            yield from self._drifts(self._reference.limits["strange_features"] * self.settings.drift_scale, moments)
            yield from self._calibration(self._reference.limits["excess"] * self.settings.drift_scale, len(moments))

    def _checks_of_bars(self, ends: np.ndarray) -> Iterator[_Check]:
        chunk, known_at, market = self._chunk(), self._bars.known_at, self._market
        _, high, low, close = chunk.columns[:4]
        silent = np.flatnonzero(chunk.start[1:] - known_at[:-1] > self._gap * MINUTE_NS) + 1
        silent = silent[silent >= ends[0] - RECENT_BARS].tolist()
        absent = {
            row + 1: open_minutes(int(known_at[row - 1]), int(chunk.start[row]), market.calendar) for row in silent
        }
        absent = {end: minutes for end, minutes in absent.items() if minutes > self._gap}
        yield (
            "gap",
            _newest(list(absent), ends, RECENT_BARS),
            lambda end: (
                f"{absent[end]} open minutes without a bar before {_utc_text(chunk.start[end - 1])}, "
                f"at most {self._gap:g} wanted"
            ),
        )
        if self._on_tick and market.tick is not None:
            off = np.append(0, np.cumsum(off_tick_rows(chunk.columns[:4], market.tick)))
            share = (off[ends] - off[np.maximum(ends - BAR_WINDOW, 0)]) / BAR_WINDOW
            yield (
                "tick",
                np.where(share > OFF_SHARE / 4, np.arange(len(ends)), -1),
                lambda number: (
                    f"{share[number]:.0%} of the last {BAR_WINDOW} bars have prices off the tick of {market.tick:g}, "
                    f"as in training at most {ON_SHARE:.0%} wanted"
                ),
            )
        place = np.arange(len(close))
        flat = (high == low) & (close == np.append(np.nan, close[:-1]))
        run = place - np.maximum.accumulate(np.where(flat, -1, place))
        yield (
            "stuck",
            _newest(np.flatnonzero(run >= self._stuck) + 1, ends, RECENT_BARS),
            lambda end: (
                f"{run[end - 1]} bars in a row at the price {close[end - 1]:g}, fewer than {self._stuck} wanted"
            ),
        )

    def _checks_of_rows(self, reference: GuardReference, ends: np.ndarray) -> Iterator[_Check]:
        values, (low, high) = self._features.values, (reference.low, reference.high)
        outside = np.maximum(2 * low - high - values, values - 2 * high + low) > 0
        outside |= np.isnan(values) & (reference.features.shares[:, BINS] == 0)
        yield (
            "range",
            _newest(np.flatnonzero(outside.any(axis=1)) + 1, ends, RECENT_ROWS),
            lambda end: (
                f"{self._some(outside[end - 1])} are further outside the range of training than it is wide, or NaN and "
                f"never were: the first is {values[end - 1, outside[end - 1]][0]:.4g}, between "
                f"{low[outside[end - 1]][0]:.4g} and {high[outside[end - 1]][0]:.4g} wanted"
            ),
        )

        constant = constant_rows(values, ROW_WINDOW) & reference.varying
        yield (
            "constant",
            _newest(np.flatnonzero(constant.any(axis=1)) + 1, ends, RECENT_ROWS),
            lambda end: (
                f"{self._some(constant[end - 1])} have one value, or none, in {ROW_WINDOW} rows, changing ones as in "
                "training wanted"
            ),
        )

    def _drifts(self, most: float, moments: np.ndarray) -> Iterator[_Check]:
        """Yield the checks of distributions; at most so many features may be strange at once."""
        parts, scale = (tuple(CHANNELS), ("features",), tuple(PROBABILITIES)), self.settings.drift_scale
        for (table, recent), names in zip(_DRIFTING.items(), parts, strict=True):
            ends = self._table(table)[1].ends(moments)
            windows, ratios = self._ratios(table, int(ends[0]) - recent, int(ends[-1]))
            strange = ratios > scale
            if table == "features":
                strange = strange.sum(axis=1, keepdims=True) > most
            for column in np.flatnonzero(strange.any(axis=0)).tolist():
                message = partial(self._drift, table, CHANNELS.get(names[column], names[column]), column)
                if table == "features":
                    message = partial(self._strange_features, most)
                yield f"drift:{names[column]}", _newest(windows[strange[:, column]], ends, recent), message

    def _drift(self, table: str, what: str, column: int, end: int) -> str:
        """Return what is strange about one column of the window that ends there."""
        reference, (_, (ratios,)) = self._table(table)[0], self._ratios(table, end - 1, end)
        codes = self._codes(table, end - reference.window, end)[:, column]
        known, shares = codes[codes < BINS], reference.shares[column, :BINS]
        usual = float(shares @ np.arange(BINS)) / max(float(shares.sum()), 1e-9)
        where = "absent" if not len(known) else "mostly higher" if known.mean() > usual else "mostly lower"
        return (
            f"{what}, of the last {reference.window}, is distributed otherwise than in training, {where}: PSI or KS is "
            f"{ratios[column]:.2f} times its largest there, at most {self.settings.drift_scale:g} wanted"
        )

    def _strange_features(self, most: float, end: int) -> str:
        _, (ratios,) = self._ratios("features", end - 1, end)
        worst = ", ".join(self._names[one] for one in np.argsort(-ratios, kind="stable")[:3])
        return (
            f"{(ratios > self.settings.drift_scale).sum()} features of the last {ROW_WINDOW} rows are distributed "
            f"otherwise than in training ({worst}, ...), at most {most:.0f} wanted"
        )

    def _calibration(self, limit: float, moments: int) -> Iterator[_Check]:
        if len(self.losses) == OUTCOME_WINDOW:
            loss, expected = self.losses.mean(axis=0).tolist()
            yield (
                "calibration",
                np.full(moments, 0 if loss - expected > limit else -1),
                lambda _: (
                    f"the last {OUTCOME_WINDOW} outcomes contradict the probabilities: log loss {loss:.3f}, expected "
                    f"{expected:.3f}, at most {limit:.3f} more wanted"
                ),
            )

    def _some(self, chosen: np.ndarray) -> str:
        """Return how many features are chosen, and the first of them."""
        names = [name for name, one in zip(self._names, chosen, strict=True) if one]
        return f"{len(names)} features ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _check_clock(last_end: int, now: pd.Timestamp, market: MarketSpec, settings: GuardSettings) -> list[GuardFinding]:
    """Return the finding on a newest bar that is too old, or later than the clock.

    last_end : end of the newest bar, UTC ns
    """
    now_ns, allowed = now.tz_convert("UTC").as_unit("ns").value, settings.stale_minutes + market.bar_minutes
    ahead = (last_end - now_ns) / MINUTE_NS
    silent = open_minutes(last_end, now_ns, market.calendar) if -ahead > allowed else 0
    if settings.stale == "ok" or (ahead <= market.bar_minutes and silent <= allowed):
        return []
    message = f"the newest bar ended at {_utc_text(last_end)}, {silent} open minutes before {_utc_text(now_ns)}, "
    message += f"at most {allowed} wanted"
    if ahead > market.bar_minutes:
        message = f"the newest bar ends at {_utc_text(last_end)}, {ahead:.0f} min after the clock "
        message += f"({_utc_text(now_ns)}), bars of the past wanted: is the feed in another zone?"
    return [GuardFinding("stale", settings.stale, message)]


def open_minutes(begin: int, end: int, calendar: str) -> int:
    """Return the minutes between two moments (UTC ns) in which the market is open by its calendar, begun ones too."""
    if end <= begin:
        return 0
    first, last = assign_sessions(np.array([begin, end - 1]), calendar).id
    days, lengths = scheduled_session_days(calendar, int(first), int(last))
    opens = assign_sessions(days * DAY_NS + 15 * 60 * MINUTE_NS, calendar).open_ns  # within each day's session
    spans = np.minimum(opens + lengths * MINUTE_NS, end) - np.maximum(opens, begin)
    return int((-(-np.maximum(spans, 0) // MINUTE_NS)).sum())


def _newest(places: np.ndarray | Sequence[int], ends: np.ndarray, recent: int) -> np.ndarray:
    """Return the newest of these rising places up to each end, -1 where it is not among the `recent` last ones."""
    places = np.append(-1 - recent, np.asarray(places, np.int64))
    found = places[np.searchsorted(places, ends, side="right") - 1]
    return np.where(found > ends - recent, found, -1)


def _utc_text(moment_ns: int) -> str:
    return f"{pd.Timestamp(moment_ns, tz='UTC'):%Y-%m-%d %H:%M} UTC"


NO_REFERENCE = "none in this bundle: training rows were too few; drift is not checked"
_NO_BARS = BarChunk(np.empty(0, np.int64), (np.empty(0),) * 6, None)


class GuardedStream(PredictionStream):
    """Predictions of one symbol's feed, each with what the guard found up to its moment.

    An answer depends on the bars that ended by its `known_at`, and on the outcomes added before, not on how the bars
    were pushed; staleness also on the clock. Without a reference in the bundle drift is not checked, which `status`
    reports.

    cold : as of `PredictionStream`
    """

    def __init__(self, bundle: Bundle, settings: GuardSettings = DEFAULT_SETTINGS, *, cold: bool = True):
        super().__init__(bundle, cold=cold)
        self.settings, self.guard = settings, Guard(bundle, settings)
        self._clock: list[GuardFinding] = []

    def push(self, bars: pd.DataFrame, *, now: pd.Timestamp | None = None) -> pd.DataFrame:
        """Return the predictions that these bars complete, with the columns `guard` and `reason`.

        bars : as of `PredictionStream.push`
        now : the clock, for staleness; None: not checked

        `guard` is "ok", "warn", "abstain" or "refuse"; with the last two the probabilities are NaN. Raises BarsError
        for bars that cannot be, after which the stream is as before.
        """
        return predictions_table(self.answer_bars(self.check_bars(bars), now))

    def advance(self, now: pd.Timestamp) -> pd.DataFrame:
        """Return the predictions of bars that are complete by the clock, once all raw bars up to `now` are pushed."""
        return predictions_table(self.answer_clock(now))

    def answer_bars(
        self, bars: pd.DataFrame, now: pd.Timestamp | None = None, newest: int = sys.maxsize
    ) -> dict[str, np.ndarray]:
        """As `push`, of bars in the canonical form of `check_bars`; returns columns, as `predict_rows`.

        newest : at least so many of the newest answers; what is found in others is not wanted
        """
        market = self.bundle.spec.market
        chunk = to_bar_chunk(bars, market)
        rows = self.feature_rows(chunk)  # raises before anything is changed
        last = int(chunk.start[-1]) + market.bar_minutes * MINUTE_NS if len(chunk.start) else self.guard.last_end
        self._clock = [] if now is None else _check_clock(last, now, market, self.settings)
        return self._answer(rows, chunk, newest)

    def answer_clock(self, now: pd.Timestamp) -> dict[str, np.ndarray]:
        """As `advance`; returns columns, as `predict_rows`."""
        self._clock = _check_clock(self.guard.last_end, now, self.bundle.spec.market, self.settings)
        return self._answer(self.clock_rows(now), _NO_BARS)

    def add_outcome(self, known_at: pd.Timestamp, label: int) -> bool:
        """Compare the prediction of a moment with what happened; False where no such prediction is remembered.

        label : one of the classes of the bundle's labels; another raises SettingsError
        """
        return self.guard.add_outcome(pd.Timestamp(known_at).tz_convert("UTC").as_unit("ns").value, label)

    def status(self) -> dict:
        """Return what the guard finds now, as JSON values.

        `drift` : distance of the newest window from training as a multiple of its threshold, the largest first
        """
        found = self.guard.findings()[0] + self._clock
        action, reason = _action_and_reason(found)
        losses = self.guard.losses
        means = losses.mean(axis=0).tolist() if len(losses) else [None, None]
        last = pd.Timestamp(self.guard.last_end, tz="UTC").isoformat() if self.guard.bars else None
        return {
            "guard": action, "reason": reason, "bars": self.guard.bars, "last_bar_end": last,
            "findings": [asdict(one) for one in found], "drift": self.guard.drift_of_columns(),
            "reference": "training rows of this bundle" if self.bundle.reference else NO_REFERENCE,
            "outcomes": len(losses), "log_loss": means[0], "expected_log_loss": means[1],
        }  # fmt: skip

    def get_state(self) -> dict:
        """Return plain numbers, texts and arrays, from which `load_state` continues to the bit."""
        clock = [one.message for one in self._clock]
        return super().get_state() | {"guard": self.guard.get_state(), "clock": clock}

    def load_state(self, state: Mapping) -> None:
        """Restore a state of `get_state`. Raises SettingsError for the state of another bundle, CheckpointError for a
        damaged one.
        """
        super().load_state(state)
        with refuse_damaged_content(CheckpointError, "This state of a guard is damaged", next_step=START_AGAIN):
            self.guard.load_state(state["guard"])
            self._clock = [GuardFinding("stale", self.settings.stale, str(message)) for message in state["clock"]]

    def _answer(self, rows: FeatureRows, chunk: BarChunk, newest: int = sys.maxsize) -> dict[str, np.ndarray]:
        """Return the predictions of the feature rows that these bars completed, with the guard's answers."""
        mixed, found = self.guard.push(chunk, rows.known_at), self.predict_rows(rows)
        known_at, p_N3 = found["known_at"], np.column_stack([found[name] for name in PROBABILITIES])
        silent = mixed[np.searchsorted(rows.known_at, known_at)]
        self.guard.add(rows.known_at[~mixed], rows.values[~mixed], known_at[~silent], p_N3[~silent])
        found = {name: one[-newest:] for name, one in found.items()}
        findings = self.guard.findings(found["known_at"], silent[-newest:])
        answers = [_action_and_reason(one + self._clock) for one in findings]
        self.guard.forget()
        for place, name in enumerate(("guard", "reason")):
            found[name] = np.array([answer[place] for answer in answers], object)
        silent = np.array([action in ("abstain", "refuse") for action, _ in answers], bool)
        return found | {name: np.where(silent, np.nan, found[name]) for name in PROBABILITIES}


def _action_and_reason(findings: Iterable[GuardFinding]) -> tuple[str, str]:
    """Return the weightiest action and all messages."""
    found = list(findings)
    return max((one.action for one in found), key=ACTIONS.index, default="ok"), "; ".join(one.message for one in found)
