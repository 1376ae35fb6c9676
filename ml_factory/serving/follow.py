"""Answers to the bars that are appended to a file: a feed that reads what is new whenever the file has changed."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from ml_factory.data.bar_files import read_bars_table
from ml_factory.errors import FactoryError, SettingsError, WorkspaceError
from ml_factory.inference.bundle import check_bars_on_tick
from ml_factory.serving.feed import Feed, ServedBundle, kept_bars
from ml_factory.storage.workspace import parse_raw_bars_name

TORN_SECONDS = 10.0  # a file that cannot be read for so long is not being written, it is damaged
BARS_AT_ONCE = 100  # that are answered before the state is written: their answers may come twice after a kill
TAIL = 4 * 2**20  # bytes of a CSV that are read, its last ones: some 70,000 bars; more where they begin too late


class FollowedFile:
    """A file of bars, Parquet or CSV, that grows or is replaced by a longer one.

    path : of the file; a CSV in UTF-8
    served : the bundle that answers
    state : folder of the feed's state; of this file and bundle alone, and of one process at a time
    live : bars are compared with the clock, as they are of now
    """

    def __init__(self, path: Path, served: ServedBundle, state: Path, *, live: bool = True):
        self._path, self._served, self._live = path, served, live
        named = parse_raw_bars_name(f"{path.stem}.parquet")
        if named and named[0] != served.symbol:
            raise SettingsError("These are bars of another symbol", where=path, got=named[0], wanted=served.symbol,
                                next_step=f"follow the bars of {served.symbol}, or serve a bundle of {named[0]}",
                                )  # fmt: skip
        self._feed = Feed(state / served.symbol / "follow", served)
        self._seen: tuple[int, ...] | None = None
        self._torn_since: float | None = None

    @property
    def position(self) -> pd.Timestamp | None:
        """Earliest start of the next bar; None before the first."""
        return self._feed.position

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the answers of bars that the file has got since the last call; none where it has not changed.

        At the very first start the bars that are there are the history, which is not answered; after a restart those
        that came meanwhile are answered. Bars count as answered once the next answer is requested: after a kill those
        of the last BARS_AT_ONCE may be answered again. Raises BarsError for bars of another symbol or format.
        """
        try:
            found = _identity(self._path)
            if found == self._seen:
                return
            table = self._read(found)
        except (FactoryError, FileNotFoundError):  # perhaps it is being written
            self._torn_since = self._torn_since or time.monotonic()
            if time.monotonic() - self._torn_since > TORN_SECONDS:
                raise
            return
        self._torn_since = None
        if table is not None:
            try:
                yield from self._answers(table)
            except BaseException:
                self._feed.drop()
                raise
        self._seen = found

    def _read(self, before: tuple[int, ...]) -> pd.DataFrame | None:
        """Return the bars in the file, of a CSV those of its last whole lines, from the position on or before; None
        where there is none, or where the file was written over while it was read.
        """
        if self._path.suffix.lower() in (".parquet", ".pq", ".gz"):
            table, after = read_bars_table(self._path), _identity(self._path)
            return None if after[:2] == before[:2] and after != before else table  # replaced: the older or the newer
        tail = TAIL
        while True:
            with open(self._path, "rb") as file:
                header = file.readline()
                start = max(os.fstat(file.fileno()).st_size - tail, len(header))
                file.seek(start)
                text = file.read()
            begin = text.find(b"\n") + 1 if start > len(header) else 0
            whole = text[begin : text.rfind(b"\n") + 1]
            if not whole:  # a header alone
                return None
            with tempfile.TemporaryDirectory() as folder:  # the file itself may have half a line more by now
                copy = Path(folder, "bars.csv")
                copy.write_bytes(header + whole)
                table = read_bars_table(self._path, copy=copy)
            if start == len(header) or not self._begins_late(table):
                return table
            tail *= 2

    def _begins_late(self, table: pd.DataFrame) -> bool:
        """Return whether bars may be absent before the first of the table; False where that one is refused."""
        try:
            return self.position is not None and self._feed.check(table.head(1)).index[0] > self.position
        except FactoryError:
            return False

    def _answers(self, table: pd.DataFrame) -> Iterator[dict[str, Any]]:
        """Yield the answers of the rows that are later than those before, part by part."""
        bars = self._feed.check(table, self._path)
        if self.position is None:
            bundle, first = self._served.bundle, -kept_bars(self._served.bundle)
            checked, _ = bundle.spec.check_bars(table.iloc[first:], where=self._path)
            check_bars_on_tick(checked, bundle.spec.market, bundle.description["off_tick"])
            self._feed.push(bars.iloc[first:], None)
            return
        bars = bars[bars.index >= self.position]
        now = pd.Timestamp.now(tz="UTC") if self._live else None
        for begin in range(0, len(bars), BARS_AT_ONCE):
            reply = self._feed.push(bars.iloc[begin : begin + BARS_AT_ONCE], now, save=False)
            yield from (self._served.names | one for one in reply["answers"])
            self._feed.save()


def follow_file(
    followed: FollowedFile, *, poll_seconds: float, announce: Callable[[str], None], answer: Callable[[dict], None]
) -> None:
    """Answer what the file gets, until Ctrl-C or SIGTERM raises KeyboardInterrupt, on the command line Interrupted.

    announce : called with one line where it waits for bars
    answer : called with each answer
    """
    for one in followed.poll():
        answer(one)
    announce(f"waiting for bars after {followed.position or 'the first of the file'}")
    while True:
        time.sleep(poll_seconds)
        for one in followed.poll():
            answer(one)


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
