"""Answers to the bars that are appended to a file: a feed that reads it again whenever it has changed."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.data.bar_files import read_bars_table
from ml_factory.data.validation import validate_bar_columns
from ml_factory.errors import BarsError, FactoryError, SettingsError, WorkspaceError
from ml_factory.inference.bundle_checks import check_bars_on_tick
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.feed import Feed, kept_bars
from ml_factory.serving.served_bundle import ServedBundle
from ml_factory.serving.tables import Columns
from ml_factory.storage.workspace import parse_raw_bars_name

TORN_SECONDS = 10.0  # a file that cannot be read for so long is not being written, it is damaged
_BARS_AT_ONCE = 5000


class FollowedFile:
    """A file of bars, Parquet or CSV, that grows or is replaced by a longer one.

    path : of the file
    served : the bundle that answers
    state : folder of the feed's state; of this file and bundle alone, and of one process at a time
    live : bars are compared with the clock, as they are of now
    """

    def __init__(self, path: Path, served: ServedBundle, state: Path, guard: GuardSettings, *, live: bool = True):
        self._path, self._served, self._live = path, served, live
        _check_name(path, served.symbol)
        self._feed = Feed(state / served.symbol / "follow", served, guard)
        self._seen: tuple[int, ...] | None = None
        self._torn_since: float | None = None

    def poll(self) -> list[dict[str, Any]]:
        """Return the answers of bars that the file has got since the last call; none where it has not changed.

        At the very first start the bars that are there are the history, which is not answered; after a restart those
        that came meanwhile are answered. A bar is on the disk of the state before its answer is returned, so that none
        is answered twice. Raises BarsError for bars of another symbol or format, after which the state is as before.
        """
        found = _identity(self._path)
        if found == self._seen:
            return []
        try:
            table = self._read()
        except FactoryError:
            self._torn_since = self._torn_since or time.monotonic()
            if time.monotonic() - self._torn_since > TORN_SECONDS:
                raise
            return []  # perhaps it is being written
        if _identity(self._path) != found:  # it was written meanwhile
            return []
        self._torn_since = None
        answers = [] if table is None else [answer for part in self._answers(table) for answer in part]
        self._seen = found
        return answers

    def close(self) -> None:
        """Write the state, so that the next start reads it alone."""
        self._feed.close()

    @property
    def position(self) -> str | None:
        """End of the last bar that was read, as ISO text; None before the first."""
        return self._feed.position(self._served)["next"]

    def _read(self) -> pd.DataFrame | None:
        """Return the bars in the file; None where it has none yet."""
        if self._path.suffix.lower() in (".parquet", ".pq"):
            return read_bars_table(self._path)
        with open(self._path, "rb") as file:
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        if whole.count(b"\n") < 2:  # a header alone
            return None
        table = read_bars_table(self._path)
        cut_short = len(whole) < len(text) and len(table) > 0  # the last line is not ended yet
        return table.iloc[:-1] if cut_short else table

    def _answers(self, table: pd.DataFrame) -> Iterator[list[dict[str, Any]]]:
        """Yield the answers of the rows that are later than those before."""
        _check_symbol_column(table, self._served.symbol, self._path)
        bundle = self._served.bundle
        first = self.position is None
        start_ns, _, _, _ = validate_bar_columns(table, bundle.spec.stream_bars, self._path)
        if not (np.diff(start_ns) > 0).all():
            row = int(np.flatnonzero(np.diff(start_ns) <= 0)[0]) + 1
            raise BarsError("Bars are out of order", where=self._path, got=f"row {row} not later than the one before",
                            wanted="rising times, each once", next_step="sort the bars")  # fmt: skip
        if first:
            table = table.iloc[-kept_bars(bundle) :]
            _, report = bundle.spec.check_bars(table, where=self._path)
            check_bars_on_tick(report, bundle.spec.market, bundle.description["off_tick"])
            self._feed.push(
                self._served, _columns(table), None
            )  # one record: the history is there whole, or not at all
            return
        table = table[start_ns >= pd.Timestamp(self.position).value]
        now = pd.Timestamp.now(tz="UTC") if self._live else None
        for begin in range(0, len(table), _BARS_AT_ONCE):
            reply = self._feed.push(self._served, _columns(table.iloc[begin : begin + _BARS_AT_ONCE]), now)
            named = {name: reply[name] for name in ("symbol", "run_id", "bundle")}
            yield [named | answer for answer in reply["answers"]]


def follow_file(
    followed: FollowedFile, *, poll_seconds: float, announce: Callable[[str], None], answer: Callable[[dict], None]
) -> None:
    """Answer what the file gets, until Ctrl-C or SIGTERM raises KeyboardInterrupt; the state is then written.

    announce : called with one line where it waits for bars
    answer : called with each answer
    """
    try:
        announced = False
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


def _check_symbol_column(table: pd.DataFrame, symbol: str, where: Path) -> None:
    """Raise BarsError for rows that name another symbol."""
    for name in table.columns:
        if str(name).strip().lower() == "symbol":
            others = [one for one in table[name].astype(str).unique() if one != symbol]
            if others:
                raise BarsError("These are bars of another symbol", where=where, got=", ".join(others[:3]),
                                wanted=symbol, next_step=f"follow a file of {symbol}")  # fmt: skip


def _columns(table: pd.DataFrame) -> Columns:
    """Return the columns as JSON values."""
    if not isinstance(table.index, pd.RangeIndex) and table.index.name is not None:
        table = table.reset_index()
    found: Columns = {}
    for name, column in table.items():
        if column.dtype.kind == "M" or isinstance(column.dtype, pd.DatetimeTZDtype):
            found[str(name)] = [moment.isoformat() for moment in column]
        else:
            found[str(name)] = [None if pd.isna(one) else one for one in column.tolist()]
    return found
