"""A feed of one symbol: bars pushed one by one, each answered once it is on the disk; a restart continues exactly."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.errors import BarsError, CheckpointError, refuse_damaged_content
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.guard import REMEMBERED
from ml_factory.inference.guarded_stream import GuardedStream
from ml_factory.serving.recent_answers import RecentAnswers, answers_and_moments, bar_ends, bar_keys
from ml_factory.serving.served_bundle import ServedBundle
from ml_factory.serving.tables import Columns, check_symbol_column, to_frame
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json, parse_json
from ml_factory.storage.serialization import read_state_file, write_state_file

FORMAT, STATE_NAME = "ml_factory.feed/2", "feed.state"


class Feed:
    """The stream of a feed, its last bars and their answers, in one file. Its methods run in one thread at a time.

    folder : of its file, which is written with the first bars
    served : the bundle that answers; another one than before begins from the kept bars
    """

    def __init__(self, folder: Path, served: ServedBundle):
        self._path, self._served = folder / STATE_NAME, served
        self._identity = fingerprint_json([served.id, asdict(served.guard)])
        self._read()

    def push(self, columns: Columns, now: pd.Timestamp | None) -> dict[str, Any]:
        """Return the answers that these bars complete, once the bars are on the disk.

        columns : raw bars by column, as the client sent them; bars at the beginning that were pushed before, with the
            same values, are counted in `repeated`; their first answers come before the new ones, and are counted in
            `repeated_answers`. An answer of another bundle than the reply's names its own. `lacking_bars` base bars
            must still come before the first answer; `next` is the earliest start of the next bar.
        now : the clock; None: history

        Raises BarsError for bars that cannot be, after which the feed is as before.
        """
        check_symbol_column(columns, self._served.symbol, "bars")
        keys = bar_keys(columns)
        if not keys:
            raise BarsError("There are no bars", where="bars", got="empty columns", wanted="at least one bar",
                            next_step="send the next bar")  # fmt: skip
        with self._change() as stream:
            repeated = self._recent.count_repeated(keys)
            first = self._recent.answers(keys[:repeated], self._served.id)
            new: list[dict[str, Any]] = []
            if repeated < len(keys):
                rest = {name: column[repeated:] for name, column in columns.items()}
                refused = refuse_damaged_content(BarsError, "These bars cannot be read", where="bars",
                                                 next_step="send bars")  # fmt: skip
                with refused, np.errstate(over="ignore", invalid="ignore"):  # a price of 1e308 is no failure
                    frame = stream.push(to_frame(rest), now=now)
                new = self._remember(frame, rest, keys[repeated:])
                self._write()
        reply = self._served.named(first + new) | {"repeated": repeated, "repeated_answers": len(first)}
        return reply | {"lacking_bars": stream.lacking_bars, "next": stream.status()["last_bar_end"]}

    def add_outcome(self, known_at: pd.Timestamp, label: int) -> dict[str, Any]:
        """Give the guard the outcome of an earlier answer; `remembered` is False where it holds no such answer."""
        with self._change() as stream:
            remembered = stream.add_outcome(known_at, label)
            if remembered:
                self._write()
        reason = "" if remembered else (
            "no answer of this moment waits for an outcome: it has one, or another known_at, or "
            f"{REMEMBERED:,} answers came after it"
        )  # fmt: skip
        return {
            "remembered": remembered,
            "reason": reason,
            "run_id": self._served.run_id,
            "bundle": self._served.id,
        }

    def status(self) -> dict[str, Any]:
        """Return the state of the guard's checks; `last_bar_end` is the earliest start of the next bar."""
        with self._change() as stream:
            return stream.status()

    def last_answers(self) -> list[dict[str, Any]]:
        """Return the answers of the last bars in time order, each with its bundle."""
        with self._change():
            return self._recent.all_answers()

    @contextmanager
    def _change(self) -> Iterator[GuardedStream]:
        """Yield the stream; where the block fails, it is read from the disk again at the next call."""
        if self._stream is None:
            self._read()
        assert self._stream is not None
        try:
            yield self._stream
        except BaseException:
            self._stream = None
            raise

    def _remember(self, frame: pd.DataFrame, columns: Columns, keys: list[str]) -> list[dict[str, Any]]:
        """Keep these bars and their answers; return the answers."""
        answers, moments = answers_and_moments(frame)
        alone = len(keys) == 1 or not answers  # the time of each bar tells nothing then
        ends = np.zeros(len(keys), np.int64) if alone else bar_ends(self._served.bundle, columns)
        self._recent.remember(keys, self._served.named(answers), moments, ends)
        if self._bars and _form(self._bars[-1]) == _form(columns):
            for name, column in columns.items():
                self._bars[-1][name] += column
        else:
            self._bars.append({name: list(column) for name, column in columns.items()})
        surplus = sum(map(_count, self._bars)) - kept_bars(self._served.bundle)
        while surplus > 0 and surplus >= _count(self._bars[0]):
            surplus -= _count(self._bars.pop(0))
        if surplus > 0:
            self._bars[0] = {name: column[surplus:] for name, column in self._bars[0].items()}
        return answers

    def _read(self) -> None:
        """Take the stream from the disk, or with another bundle from the kept bars. Raises CheckpointError."""
        self._stream: GuardedStream | None = None
        self._recent, self._bars = RecentAnswers(), list[Columns]()
        stream, other_bundle = GuardedStream(self._served.bundle, self._served.guard, cold=True), False
        if files.is_file(self._path):
            what, step = "The stored state of this feed is damaged", "delete this file, and push its history"
            try:
                stored = read_state_file(self._path)
            except CheckpointError as error:
                raise CheckpointError(what, where=self._path, got=error.got, next_step=step) from error
            with refuse_damaged_content(CheckpointError, what, where=self._path, next_step=step):
                if stored["format"] != FORMAT:
                    raise ValueError(f"format {stored['format']}")
                self._recent = RecentAnswers.from_text(stored["recent"])
                self._bars = parse_json(stored["bars"], largest=None)
                other_bundle = stored["identity"] != self._identity
                if not other_bundle:
                    stream.load_state(stored["stream"])
                for columns in self._bars if other_bundle else ():
                    _push_history(stream, to_frame(columns))
        self._stream = stream
        if other_bundle:
            self._write()

    def _write(self) -> None:
        assert self._stream is not None
        state = {
            "format": FORMAT, "identity": self._identity, "stream": self._stream.get_state(),
            "recent": self._recent.to_text(), "bars": json.dumps(self._bars),
        }  # fmt: skip
        write_state_file(self._path, state)


def kept_bars(bundle: Bundle) -> int:
    """Return how many raw bars another bundle of this kind reads before its first answer: its warm-up and two days."""
    warmup, spec = bundle.description["warmup_bars"], bundle.spec
    minutes = spec.market.bar_minutes
    return warmup * max(spec.features.base_minutes // minutes, 1) + 2 * 1440 // minutes


def _push_history(stream: GuardedStream, frame: pd.DataFrame) -> None:
    """Push bars of several messages: together, or where they cannot be read so, in two parts."""
    try:
        stream.push(frame)
    except BarsError:
        if len(frame) == 1:
            raise
        half = len(frame) // 2
        _push_history(stream, frame.iloc[:half])
        _push_history(stream, frame.iloc[half:])


def _form(columns: Columns) -> list[tuple[str, bool]]:
    """Return the names of the columns, and whether each holds texts; columns of one form are kept together."""
    return sorted((name, any(isinstance(value, str) for value in column)) for name, column in columns.items())


def _count(columns: Columns) -> int:
    return len(next(iter(columns.values())))
