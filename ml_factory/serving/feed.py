"""Feeds of a bundle: bars pushed one by one, each answered once it is on the disk; a restart continues exactly."""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.errors import BarsError, CheckpointError, SettingsError, refuse_damaged_content
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.bundle import Bundle, check_bars_on_tick, example_bars
from ml_factory.inference.guard import (
    DEFAULT_SETTINGS,
    REMEMBERED,
    GuardedStream,
    GuardSettings,
)
from ml_factory.storage.files import files, mount_of
from ml_factory.storage.json_values import parse_json, to_json_value
from ml_factory.storage.locks import acquire_lock_file, release_lock_file
from ml_factory.storage.serialization import read_state_file, write_state_file

_FACTS = ("symbol", "model", "run_id", "horizon", "lookback", "warmup_bars", "classes", "feature_names", "certified",
          "certificate", "metrics", "verdict", "versions", "split_times", "data", "file")  # fmt: skip
Bars = Sequence[Mapping] | Mapping[str, Sequence] | pd.DataFrame
_HUGE_PRICES = np.errstate(over="ignore", invalid="ignore")  # those of a client are no failure


class ServedBundle:
    """A loaded bundle with its guard; its methods run in one thread at a time."""

    def __init__(self, bundle: Bundle, guard: GuardSettings = DEFAULT_SETTINGS):
        self.bundle, self.guard = bundle, guard
        self.id = bundle.fingerprint[:16]
        self.symbol, self.run_id = str(bundle.description["symbol"]), str(bundle.description["run_id"])

    @classmethod
    def load(cls, path: str | Path, guard: GuardSettings = DEFAULT_SETTINGS) -> "ServedBundle":
        """Read and check the bundle, and answer its example, so that the first request waits for no compiler.

        Raises as `Bundle.load`.
        """
        served = cls(Bundle.load(path), guard)
        if served.bundle.example:  # with the usual guard, which refuses no bars: this one may refuse synthetic ones
            cls(served.bundle).predict(example_bars(served.bundle).reset_index(), 1, None)
        return served

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts for `/info`."""
        named = {name: self.bundle.description.get(name) for name in _FACTS}
        own = {"bundle": self.id, "engine": self.bundle.engine, "guard": asdict(self.guard)}
        return to_json_value(named | own)

    @property
    def names(self) -> dict[str, str]:
        """What an answer names: symbol, run and id of the bundle."""
        return {"symbol": self.symbol, "run_id": self.run_id, "bundle": self.id}

    @_HUGE_PRICES
    def predict(self, bars: Bars, last: int, now: pd.Timestamp | None) -> dict[str, Any]:
        """Return the answers for the newest `last` rows of these raw bars. Raises SettingsError, and BarsError also
        where the guard refuses the newest row.

        bars : of a request
        now : the clock, to which the newest bar is compared; None: history
        """
        table, spec = to_table(bars), self.bundle.spec
        check_symbol_column(table, self.symbol, "bars")
        stream = GuardedStream(self.bundle, self.guard)
        with _reading_bars():
            checked, _ = spec.check_bars(table)
            check_bars_on_tick(checked, spec.market, self.bundle.description["off_tick"])
        end = checked.index[-1] + pd.Timedelta(minutes=spec.market.bar_minutes)
        parts = [stream.answer_bars(checked, now, last), stream.answer_clock(now or end)]
        answers = _to_answers({name: np.concatenate([one[name] for one in parts])[-last:] for name in parts[0]})
        if not answers:
            raise BarsError(
                "Too few bars for a prediction", where="bars", got=f"{len(checked):,} bars",
                wanted=f"{stream.lacking_bars or 1:,} more of {spec.features.base_minutes} minutes, or a whole window "
                "in one session", next_step="give as many before the first wanted row as the features need",
            )  # fmt: skip
        if answers[-1]["guard"] == "refuse":
            raise BarsError("The guard refuses these bars", where="bars", got=answers[-1]["reason"],
                            next_step="correct the feed")  # fmt: skip
        return self.names | {"answers": answers}


def _reading_bars() -> AbstractContextManager:
    """Raise BarsError where the values of a client cannot be read."""
    return refuse_damaged_content(BarsError, "These bars cannot be read", where="bars", next_step="send others")


def to_table(bars: Bars) -> pd.DataFrame:
    """Return the bars of a request as a table. Raises BarsError for columns of unequal lengths."""
    with _reading_bars():
        return pd.DataFrame(bars)


def check_symbol_column(table: pd.DataFrame, symbol: str, where: object) -> None:
    """Raise BarsError for bars that name another symbol in a column of theirs."""
    for name in table:
        if str(name).strip().lower() == "symbol":
            others = [str(one) for one in table[name].dropna().unique() if str(one) != symbol]
            if others:
                raise BarsError("These are bars of another symbol", where=where, got=", ".join(others[:3]),
                                wanted=symbol, next_step=f"give bars of {symbol} alone")  # fmt: skip


def _to_answers(found: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return the rows of a prediction with `guard` and `reason` as JSON values; NaN becomes null."""
    columns = [name for name in (*PROBABILITIES, "split", "side", "guard", "reason") if name in found]
    rows = zip(*(found[name].tolist() for name in columns), strict=True)
    return [
        {"known_at": pd.Timestamp(moment, tz="UTC").isoformat()}
        | {name: None if isinstance(one, float) and not math.isfinite(one) else one
           for name, one in zip(columns, row, strict=True)}
        for moment, row in zip(found["known_at"].tolist(), rows, strict=True)
    ]  # fmt: skip


FORMAT, STATE_NAME = "ml_factory.feed/9", "feed.state"
_DAMAGED, _AGAIN = "The stored state of this feed is damaged", "delete this file, and push its history"
KNOWN_BARS = 1000  # bars that are known again, with their answers


class Feed:
    """The stream of a feed, its last bars and their answers, in one file. Its methods run in one thread at a time.

    folder : of its file, which is written with the first bars
    served : the bundle that answers; another one than before begins from the kept bars
    """

    def __init__(self, folder: Path, served: ServedBundle):
        self._path, self._served = folder / STATE_NAME, served
        self._length = pd.Timedelta(minutes=served.bundle.spec.market.bar_minutes)
        self._stream: GuardedStream | None = None
        self._kept: dict[str, np.ndarray] = {}  # columns of the newest bars, as many as another bundle needs
        self._next: pd.Timestamp | None = None  # earliest start of the next bar
        self._answers: dict[str, str] = {}  # known_at -> answer in JSON, of the newest KNOWN_BARS
        self._read()

    @_HUGE_PRICES
    def check(self, table: pd.DataFrame, where: object = "bars") -> pd.DataFrame:
        """Return raw bars in canonical form, for `push`. Raises BarsError for bars that cannot be."""
        check_symbol_column(table, self._served.symbol, where)
        with _reading_bars():
            return self._opened().check_bars(table, where)

    @_HUGE_PRICES
    def push(self, bars: pd.DataFrame, now: pd.Timestamp | None, *, save: bool = True) -> dict[str, Any]:
        """Return the answers that these bars complete, once the bars are on the disk.

        bars : of `check`; those at the beginning that were pushed before are counted in `repeated`, and their first
            answers come before the new ones, counted in `repeated_answers`. An answer of another bundle than the
            reply's names its own. `lacking_bars` base bars must still come before the first answer; `next` is the
            earliest start of the next bar.
        now : the clock; None: history
        save : False leaves writing to `save`

        Raises BarsError for bars that overlap with others, after which the feed is as before.
        """
        with self._changing() as stream:
            position = self._next
            repeated = 0 if position is None else int(bars.index.searchsorted(position))
            first = self._answers_again(bars.iloc[:repeated]) if repeated else []
            new = bars.iloc[repeated:] if repeated else bars
            answers: list[dict[str, Any]] = []
            if len(new):
                answers = _to_answers(stream.answer_bars(new, now))
                self._answers |= {one["known_at"]: json.dumps(self._served.names | one) for one in answers}
                self._keep(new)
                if save:
                    self.save()
        position = self._next
        reply = self._served.names | {"answers": first + answers, "repeated": repeated}
        return reply | {
            "repeated_answers": len(first), "lacking_bars": stream.lacking_bars,
            "next": None if position is None else position.isoformat(),
        }  # fmt: skip

    def add_outcome(self, known_at: pd.Timestamp, label: int) -> dict[str, Any]:
        """Give the guard the outcome of an earlier answer; `remembered` is False where it holds no such answer."""
        with self._changing() as stream:
            remembered = stream.add_outcome(known_at, label)
            if remembered:
                self.save()
        why = "no answer of this moment waits for an outcome: it has one, or another known_at, or "
        reason = "" if remembered else f"{why}{REMEMBERED:,} answers came after it"
        return {"remembered": remembered, "reason": reason, "run_id": self._served.run_id, "bundle": self._served.id}

    def status(self) -> dict[str, Any]:
        """Return what the guard finds; `last_bar_end` is the earliest start of the next bar."""
        return self._opened().status()

    @property
    def position(self) -> pd.Timestamp | None:
        """Earliest start of the next bar; None before the first."""
        self._opened()
        return self._next

    def save(self) -> None:
        """Write the state, whole or not at all."""
        state = {
            "format": FORMAT, "bundle": self._served.id, "stream": self._stream.get_state(),
            "bar_minutes": self._served.bundle.spec.market.bar_minutes, "bars": self._kept,
            "answers": f"[{','.join(self._answers.values())}]".encode(),  # bytes: text would be escaped
        }  # fmt: skip
        write_state_file(self._path, state)

    def drop(self) -> None:
        """Forget what is not saved."""
        self._stream = None

    def _keep(self, new: pd.DataFrame) -> None:
        """Add bars to the kept ones; leave the newest, and the answers of the newest of them."""
        joined, most = _join_columns(self._kept, _to_columns(new)), kept_bars(self._served.bundle)
        self._kept, self._next = {name: one[-most:] for name, one in joined.items()}, new.index[-1] + self._length
        oldest = pd.Timestamp(self._kept["start"][-KNOWN_BARS:][0], tz="UTC").isoformat()
        self._answers = {known_at: one for known_at, one in self._answers.items() if known_at > oldest}

    def _answers_again(self, repeated: pd.DataFrame) -> list[dict[str, Any]]:
        """Return the first answers of bars that were pushed before. Raises BarsError for others at their time."""
        kept = _to_bars(self._kept)
        known = kept.iloc[-KNOWN_BARS:][lambda bars: bars.index.isin(repeated.index)]
        if not known.equals(_to_bars(_to_columns(repeated))):
            raise BarsError(
                "Bars overlap with others that were pushed before", where="bars", got=f"a bar at {repeated.index[0]}",
                wanted=f"one of the last {KNOWN_BARS:,} with the same values, or bars from {self._next} on",
                next_step="push bars in time order, each once",
            )  # fmt: skip
        before = kept.index[kept.index < repeated.index[0]][-1:] + self._length
        after = before[0].isoformat() if len(before) else ""
        until = (repeated.index[-1] + self._length).isoformat()
        found = [json.loads(one) for known_at, one in self._answers.items() if after < known_at <= until]
        own = self._served.names
        return [one if one["bundle"] != own["bundle"] else {name: one[name] for name in one if name not in own}
                for one in found]  # fmt: skip

    @contextmanager
    def _changing(self) -> Iterator[GuardedStream]:
        """Yield the stream; where the block fails, it is read from the disk again at the next call."""
        try:
            yield self._opened()
        except BaseException:
            self.drop()
            raise

    def _opened(self) -> GuardedStream:
        if self._stream is None:
            self._read()
        return self._stream

    def _read(self) -> None:
        """Take the stream from the disk, or with another bundle from the kept bars. Raises CheckpointError."""
        self._kept, self._next, self._answers, self._stream = {}, None, {}, None
        stream, replayed = GuardedStream(self._served.bundle, self._served.guard), False
        if files.is_file(self._path):
            try:
                stored = read_state_file(self._path)
            except CheckpointError as error:
                raise CheckpointError(_DAMAGED, where=self._path, got=error.got, next_step=_AGAIN) from error
            if stored.get("format") != FORMAT:
                raise CheckpointError("Not the state of a feed of this version", where=self._path,
                                      got=stored.get("format"), wanted=FORMAT, next_step=_AGAIN)  # fmt: skip
            with refuse_damaged_content(CheckpointError, _DAMAGED, where=self._path, next_step=_AGAIN):
                self._kept = stored["bars"]
                every = _to_bars(self._kept)
                minutes, volume, market = stored["bar_minutes"], "volume" in every, self._served.bundle.spec.market
                if minutes != market.bar_minutes or volume < market.has_volume:
                    raise CheckpointError(
                        "This bundle reads other bars than those of this feed", where=self._path,
                        got=f"bars of {minutes} min{' without volume' * (not volume)}", next_step=_AGAIN,
                        wanted=f"bars of {market.bar_minutes} min{' with volume' * market.has_volume}",
                    )  # fmt: skip
                self._next = every.index[-1] + self._length
                self._answers = {one["known_at"]: json.dumps(one) for one in parse_json(stored["answers"])}
                replayed = stored["bundle"] != self._served.id
                if replayed:
                    stream.answer_bars(every)
                else:
                    stream.load_state(stored["stream"])
        self._stream = stream
        if replayed:
            self.save()


@contextmanager
def open_state_folder(state: Path | None) -> Iterator[Path]:
    """Yield the folder of the feeds' state, which no other process writes to. Raises CheckpointError, SettingsError."""
    if state is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    if mount_of(state):
        raise SettingsError("The state of feeds is written for every bar, and wants a local disk", where="--state",
                            got=state, next_step="give a folder of a local disk")  # fmt: skip
    lock = state / "serve.lock"
    acquire_lock_file(lock, "this folder of feeds")
    try:
        yield state
    finally:
        release_lock_file(lock)


def _to_columns(bars: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return starts (UTC ns) and columns, as a state holds them: texts of contracts as NumPy's."""
    columns = {str(name): one.to_numpy() for name, one in bars.items()}
    texts = {name: one.astype(str) for name, one in columns.items() if one.dtype == object}
    return {"start": bars.index.as_unit("ns").asi8} | columns | texts


def _to_bars(columns: Mapping[str, np.ndarray]) -> pd.DataFrame:
    start = pd.DatetimeIndex(columns["start"].view("M8[ns]"), tz="UTC", name="timestamp")
    return pd.DataFrame({name: one for name, one in columns.items() if name != "start"}, start)


def _join_columns(*parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the rows of all parts; NaN where a part has no such column."""
    parts = tuple(filter(None, parts))
    names = dict.fromkeys(name for one in parts for name in one)
    return {
        name: np.concatenate([one.get(name, np.full(len(one["start"]), np.nan)) for one in parts]) for name in names
    }


def kept_bars(bundle: Bundle) -> int:
    """Return how many raw bars another bundle of this kind reads before its first answer: its warm-up and two days."""
    minutes = bundle.spec.market.bar_minutes
    warmup = bundle.description["warmup_bars"] * max(bundle.spec.features.base_minutes // minutes, 1)
    return max(warmup + 2 * 1440 // minutes, KNOWN_BARS)
