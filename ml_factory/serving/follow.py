"""Answers to the bars that are appended to a file: a feed that reads it again whenever it has changed."""

import codecs
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from datetime import time as clock_time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.data.bar_columns import match_bar_columns
from ml_factory.data.bar_files import read_bars_table, read_copied_bars_table
from ml_factory.data.validation import RawBarSpec, validate_bar_columns
from ml_factory.errors import (
    BarsError,
    CheckpointError,
    FactoryError,
    SettingsError,
    WorkspaceError,
    refuse_damaged_content,
)
from ml_factory.inference.bundle_checks import check_bars_on_tick
from ml_factory.serving.feed import Feed, kept_bars
from ml_factory.serving.recent_answers import RECENT_BARS, name_answers
from ml_factory.serving.served_bundle import ServedBundle
from ml_factory.serving.tables import Columns, check_symbol_column
from ml_factory.storage.files import files
from ml_factory.storage.scratch_folder import scratch_folder
from ml_factory.storage.workspace import parse_raw_bars_name

TORN_SECONDS = 10.0  # a file that cannot be read for so long is not being written, it is damaged
_BARS_AT_ONCE = RECENT_BARS  # the feed keeps their answers until they are delivered


class FollowedFile:
    """A file of bars, Parquet or CSV, that grows or is replaced by a longer one.

    path : of the file
    served : the bundle that answers
    state : folder of the feed's state; of this file and bundle alone, and of one process at a time
    live : bars are compared with the clock, as they are of now
    """

    def __init__(self, path: Path, served: ServedBundle, state: Path, *, live: bool = True):
        self._path, self._served, self._live = path, served, live
        _check_name(path, served.symbol)
        folder = state / served.symbol
        self._feed = Feed(folder / "follow", served)
        self._delivered = _DeliveryMark(folder / "delivered.json", self.position)
        self._delivering = True  # perhaps the process before was killed meanwhile
        self._seen: tuple[int, ...] | None = None
        self._torn_since: float | None = None

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the answers of bars that the file has got since the last call; none where it has not changed.

        At the very first start the bars that are there are the history, which is not answered; after a restart those
        that came meanwhile are answered. An answer counts as delivered once the next one is requested: those that were
        not are yielded again at the next call, also after a restart; each names its bundle. Raises
        BarsError for bars of another symbol or format, after which the state holds the bars before them.
        """
        if self._delivering:
            yield from self._deliver(self.undelivered())
        try:
            found = _identity(self._path)
            if found == self._seen:
                return
            table = self._read()
        except FactoryError:  # perhaps it is being written
            self._torn_since = self._torn_since or time.monotonic()
            if time.monotonic() - self._torn_since > TORN_SECONDS:
                raise
            return
        self._torn_since = None
        if table is not None:
            for part in self._answers(table):
                yield from self._deliver(part)
        self._seen = found

    def undelivered(self) -> list[dict[str, Any]]:
        """Return the answers of the last bars that were not delivered before, each with its bundle."""
        return [one for one in self._feed.last_answers() if self._delivered.is_before(one["known_at"])]

    def close(self) -> None:
        """Note what was delivered."""
        self._delivered.write()

    @property
    def position(self) -> str | None:
        """End of the last bar that was read, as ISO text; None before the first."""
        return self._feed.status()["last_bar_end"]

    def _deliver(self, answers: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the answers that were not delivered, and note that they were."""
        self._delivering = True
        for one in answers:
            if self._delivered.is_before(one["known_at"]):
                yield one
                self._delivered.move(one["known_at"])
        self._delivered.write()
        self._delivering = False

    def _read(self) -> pd.DataFrame | None:
        """Return the bars in the file; None where it has none yet, or was written over while it was read."""
        before = _identity(self._path)
        if self._path.suffix.lower() in (".parquet", ".pq", ".gz"):
            table = read_bars_table(self._path)
            after = _identity(self._path)
            return None if after[:2] == before[:2] and after != before else table  # replaced: the older or the newer
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            text = file.read()
            mark = b"\n\0" if text.startswith(codecs.BOM_UTF16_LE) else b"\n"
            whole = text[: text.rfind(mark) + len(mark)]
            if whole.count(b"\n") < 2:  # a header alone
                return None
            with scratch_folder("follow-") as folder:  # the file itself may have half a line more by now
                copy = folder / "bars.csv"
                copy.write_bytes(whole)
                return read_copied_bars_table(self._path, copy)
        return None

    def _answers(self, table: pd.DataFrame) -> Iterator[list[dict[str, Any]]]:
        """Yield the answers of the rows that are later than those before, part by part; each is on the disk then."""
        texts = {name: table[name].astype(str).tolist() for name in table if str(name).strip().lower() == "symbol"}
        check_symbol_column(texts, self._served.symbol, self._path)
        bundle, first = self._served.bundle, self.position is None
        spec = bundle.spec.stream_bars
        start_ns, _, _, minutes = validate_bar_columns(table, spec, self._path)
        if not (np.diff(start_ns) > 0).all():
            row = int(np.flatnonzero(np.diff(start_ns) <= 0)[0]) + 1
            raise BarsError("Bars are out of order", where=self._path, got=f"row {row} not later than the one before",
                            wanted="rising times, each once", next_step="sort the bars")  # fmt: skip
        if first:
            table = table.iloc[-kept_bars(bundle) :]
            _, report = bundle.spec.check_bars(table, where=self._path)
            check_bars_on_tick(report, bundle.spec.market, bundle.description["off_tick"])
            self._delivered.move(_iso(int(start_ns[-1]) + minutes * 60 * 10**9))
            self._delivered.write()  # before the history is there: it is not answered
            self._feed.push(_columns(table, spec, self._path), None)
            return
        table = table[start_ns >= pd.Timestamp(self.position).value]
        now = pd.Timestamp.now(tz="UTC") if self._live else None
        for begin in range(0, len(table), _BARS_AT_ONCE):
            part = table.iloc[begin : begin + _BARS_AT_ONCE]
            yield name_answers(self._feed.push(_columns(part, spec, self._path), now))


class _DeliveryMark:
    """The last answer that was handed over, on the disk.

    position : end of the last bar of a state without a mark, whose answers were handed over; None: there is no state
    """

    def __init__(self, path: Path, position: str | None):
        self._path = path
        self._written: str | None = None
        stored = files.read_json_or_none(path)
        what, step = "The mark of the last printed answer is damaged", "delete this file"
        with refuse_damaged_content(CheckpointError, what, where=path, next_step=step):
            self._written = None if stored is None else _mark_moment(stored["known_at"], position)
        self._known_at = self._written or position

    def is_before(self, known_at: str) -> bool:
        """Return whether this answer was not handed over."""
        return self._known_at is None or pd.Timestamp(known_at) > pd.Timestamp(self._known_at)

    def move(self, known_at: str) -> None:
        """Take this answer as handed over."""
        self._known_at = known_at

    def write(self) -> None:
        """Write the mark, where it has moved."""
        if self._known_at != self._written:
            files.write_json(self._path, {"known_at": self._known_at})
            self._written = self._known_at


def _mark_moment(stored: object, position: str | None) -> str:
    """Return the moment of a stored mark. Raises ValueError for none, and for one after the end of the last bar, after
    which nothing would be handed over.
    """
    moment = pd.Timestamp(stored) if isinstance(stored, str) else pd.NaT
    if moment is pd.NaT:
        raise ValueError("no moment")
    text = _iso(moment.tz_convert("UTC").value)
    if position is not None and pd.Timestamp(text) > pd.Timestamp(position):
        raise ValueError(f"{text} is after the last bar, which ended at {position}")
    return text


def follow_file(
    followed: FollowedFile, *, poll_seconds: float, announce: Callable[[str], None], answer: Callable[[dict], None]
) -> None:
    """Answer what the file gets, until Ctrl-C or SIGTERM raises KeyboardInterrupt; the state is then written.

    announce : called with one line before answers that were not printed before the last end, and where it waits for
        bars
    answer : called with each answer
    """
    try:
        announced = False
        if again := followed.undelivered():
            names = ", ".join(dict.fromkeys(one["bundle"] for one in again))
            announce(f"{len(again)} answers that were not printed before the last end follow, of bundle {names}")
        while True:
            for one in followed.poll():
                answer(one)
            if not announced:
                announce(f"waiting for bars after {followed.position or 'the first of the file'}")
                announced = True
            time.sleep(poll_seconds)
    finally:
        followed.close()


def answer_line(answer: dict[str, Any]) -> str:
    """Return an answer as one line of text."""
    moment = str(answer["known_at"]).replace("T", " ")
    shares = [f"{name} {'-' if answer[f'p_{name}'] is None else format(answer[f'p_{name}'], '.4f')}"
              for name in ("short", "neutral", "long")]  # fmt: skip
    return "  ".join([moment, *shares, answer["guard"], *([answer["reason"]] if answer["reason"] else [])])


def _identity(path: Path) -> tuple[int, ...]:
    """Return what changes with the content of a file."""
    try:
        facts = os.stat(path)
    except FileNotFoundError as error:
        raise WorkspaceError("There is no such file", where=path, next_step="name the file that the bars are written to"
                             ) from error  # fmt: skip
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _check_name(path: Path, symbol: str) -> None:
    """Raise SettingsError for a file that is named after another symbol, as in data/raw."""
    named = parse_raw_bars_name(f"{path.stem}.parquet")
    if named and named[0] != symbol:
        raise SettingsError("These are bars of another symbol", where=path, got=named[0], wanted=symbol,
                            next_step=f"follow the bars of {symbol}, or serve a bundle of {named[0]}")  # fmt: skip


def _columns(table: pd.DataFrame, spec: RawBarSpec, where: Path) -> Columns:
    """Return the columns that the bundle reads as JSON values, under the names that it expects."""
    columns, _ = match_bar_columns(table, where, spec.columns)
    names = dict(spec.columns)
    return {names.get(name, name): [_json_cell(one) for one in column.tolist()] for name, column in columns.items()}


def _json_cell(value: Any) -> str | int | float | None:
    """Return a cell as a number or a text; None where it is empty."""
    if pd.isna(value):
        return None
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, date | clock_time):  # also Timestamp
        return value.isoformat()
    return value if isinstance(value, int | float) else str(value)


def _iso(moment_ns: int) -> str:
    return pd.Timestamp(moment_ns, tz="UTC").isoformat()
