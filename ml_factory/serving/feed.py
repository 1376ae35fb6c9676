"""A feed of one symbol: bars pushed one by one, each answered once it is on the disk; a restart continues exactly."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.errors import BarsError, CheckpointError, FactoryError, refuse_damaged_content
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.guard.guarded_stream import GuardedStream
from ml_factory.inference.guard.outcomes import REMEMBERED
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.feed_log import FeedLog
from ml_factory.serving.recent_answers import (
    RECENT_BARS,
    RecentAnswers,
    answers_and_moments,
    bar_ends,
    bar_keys,
)
from ml_factory.serving.served_bundle import ServedBundle
from ml_factory.serving.tables import Columns, check_symbol_column, frame_to_answers, to_frame
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.serialization import read_state_file, write_state_file

FORMAT = "ml_factory.feed/1"
RECORDS_BETWEEN_SNAPSHOTS, BARS_BETWEEN_SNAPSHOTS, RECORDS_OF_SEGMENT = 200, 5000, 2000
ADVANCE_TOLERANCE = pd.Timedelta(minutes=1)  # that a sender's clock may be ahead of this one


class Feed:
    """The stream of a feed, its log, and the answers of its last bars. Its methods run in one thread at a time.

    folder : of its log and snapshot
    served : the bundle that answers
    guard : settings of the guard
    """

    def __init__(self, folder: Path, served: ServedBundle, guard: GuardSettings):
        self._folder, self._guard = folder, guard
        self._log: FeedLog | None = None
        self._restore(served)

    def push(self, served: ServedBundle, columns: Columns, now: pd.Timestamp | None) -> dict[str, Any]:
        """Return the answers that these bars complete, once the bars are on the disk.

        columns : raw bars by column, as the client sent them; bars at the beginning that were pushed before, with the
            same values, are counted in `repeated`; their first answers come before the new ones, and are counted in
            `repeated_answers`. An answer of another bundle than the reply's names its own. `lacking_bars` base bars
            must still come before the first answer.
        now : the clock; None: history

        Raises BarsError for bars that cannot be, after which the feed is as before.
        """
        check_symbol_column(columns, served.symbol, "bars")
        log = self._continue(served)
        keys = bar_keys(columns)
        if not keys:
            raise BarsError("There are no bars", where="bars", got="empty columns", wanted="at least one bar",
                            next_step="send the next bar")  # fmt: skip
        repeated = self._recent.count_repeated(keys)
        first = self._recent.answers(keys[:repeated], served.id)
        new: list[dict[str, Any]] = []
        if repeated < len(keys):
            rest = {name: column[repeated:] for name, column in columns.items()}
            content = {"columns": rest, "now": None if now is None else now.value}
            new = self._remember(self._apply_and_log(log, "bars", len(keys) - repeated, content), rest)
        reply = served.named(first + new) | {"repeated": repeated, "repeated_answers": len(first)}
        return reply | {"lacking_bars": self._stream.lacking_bars}

    def advance(self, served: ServedBundle, until: pd.Timestamp, now: pd.Timestamp) -> dict[str, Any]:
        """Return the answers of bars that are complete at this moment, once all bars up to it were pushed.

        now : the clock. Raises BarsError for a later moment, which would refuse every bar before it.
        """
        if until > now + ADVANCE_TOLERANCE:
            raise BarsError(
                "This moment is in the future", where="until", got=until.isoformat(),
                wanted=f"at most {ADVANCE_TOLERANCE} after {now.isoformat()}", next_step="correct the sender's clock",
            )  # fmt: skip
        log = self._continue(served)
        answers = frame_to_answers(self._apply_and_log(log, "advance", 0, {"until": until.value}))
        return served.named(answers) | {"lacking_bars": self._stream.lacking_bars}

    def add_outcome(self, served: ServedBundle, known_at: pd.Timestamp, label: int) -> dict[str, Any]:
        """Give the guard the outcome of an earlier answer; `remembered` is False where it holds no such answer."""
        log = self._continue(served)
        remembered = self._stream.add_outcome(known_at, label)
        if not remembered:
            return not_remembered(served, "no answer of this moment waits for an outcome: it has one, or another "
                                  f"known_at, or {REMEMBERED:,} answers came after it")  # fmt: skip
        self._log_record(log, "outcome", 0, {"known_at": known_at.value, "label": label})
        return not_remembered(served, "") | {"remembered": True}

    def position(self, served: ServedBundle) -> dict[str, Any]:
        """Return from which bar on the feed continues: `next` is the earliest start of a bar; null where none came."""
        self._continue(served)
        status = self._stream.status()
        return empty_position(served) | {"next": status["last_bar_end"]}

    def last_answers(self, served: ServedBundle) -> list[dict[str, Any]]:
        """Return the answers of the last RECENT_BARS bars, each with its bundle."""
        self._continue(served)
        return self._recent.all_answers()

    def status(self) -> dict[str, Any]:
        """Return the state of the guard's checks."""
        return self._stream.status()

    def close(self) -> None:
        """Write a snapshot, so that the next start replays nothing."""
        if self._log is not None:
            try:
                if self._log.last > self._snapshot_number:
                    self._write_snapshot(self._log)
            finally:
                self._log.close()

    # ---- the stream ------------------------------------------------------------------------------------------------

    def _continue(self, served: ServedBundle) -> FeedLog:
        """Bring the stream to the end of the log, of this bundle; return the log."""
        if self._log is None:
            self._restore(served)
        elif served is not self._served:
            recent = self._recent
            try:
                self._start_stream(served)
                self._recent = recent
                self._warm_up(self._log)
            except BaseException:  # the next call reads the disk again: no answer comes from a cold stream
                self._drop()
                raise
        assert self._log is not None
        return self._log

    def _apply(self, kind: str, content: Mapping[str, Any]) -> pd.DataFrame:
        """Give one record to the stream; return its predictions."""
        if kind == "outcome":
            self._stream.add_outcome(pd.Timestamp(content["known_at"], tz="UTC"), content["label"])
            return pd.DataFrame()
        if kind == "advance":
            return self._stream.advance(pd.Timestamp(content["until"], tz="UTC"))
        now = None if content["now"] is None else pd.Timestamp(content["now"], tz="UTC")
        with np.errstate(over="ignore", invalid="ignore"):  # a price of 1e308 is off the tick, and no failure
            return self._stream.push(to_frame(content["columns"]), now=now)

    def _apply_and_log(self, log: FeedLog, kind: str, bars: int, content: Mapping[str, Any]) -> pd.DataFrame:
        """Give one record to the stream, and write it to the disk; return its predictions.

        Where either fails unexpectedly, the stream is built again from the disk at the next call.
        """
        try:
            with refuse_damaged_content(BarsError, "These bars cannot be read", where="bars", next_step="send bars"):
                frame = self._apply(kind, content)
        except FactoryError as error:
            if error.__cause__ is not None or kind == "advance":  # its clock may have moved
                self._drop()
            raise
        except BaseException:  # a signal: the stream may have taken a part of the record
            self._drop()
            raise
        if kind != "advance" or len(frame):  # the bars tell what a moment without an answer completes
            self._log_record(log, kind, bars, content)
        return frame

    def _log_record(self, log: FeedLog, kind: str, bars: int, content: Mapping[str, Any]) -> None:
        """Write what the stream has taken; and a snapshot, where the last one is long ago."""
        try:
            log.append(kind, bars, content)
        except BaseException:
            self._drop()
            raise
        self._bars_since += bars
        if log.last - self._snapshot_number >= RECORDS_BETWEEN_SNAPSHOTS or self._bars_since >= BARS_BETWEEN_SNAPSHOTS:
            with suppress(FactoryError):  # the log holds everything; the next record tries again
                self._write_snapshot(log)

    def _drop(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    def _remember(self, frame: pd.DataFrame, columns: Columns) -> list[dict[str, Any]]:
        """Return the answers of these bars, and keep them."""
        answers, moments = answers_and_moments(frame)
        keys = bar_keys(columns)
        alone = len(keys) == 1 or not answers  # the time of each bar tells nothing then
        ends = np.zeros(len(keys), np.int64) if alone else bar_ends(self._served.bundle, columns)
        self._recent.remember(keys, self._served.named(answers), moments, ends)
        return answers

    # ---- the disk --------------------------------------------------------------------------------------------------

    def _restore(self, served: ServedBundle) -> None:
        """Take the stream to the end of the log: from the snapshot, or with another bundle from the kept bars."""
        self._start_stream(served)
        log, path = FeedLog(self._folder), self._folder / "snapshot.state"
        stored = self._read_snapshot(path, log) if files.is_file(path) else None
        self._snapshot_number = stored["number"] if stored else 0
        what, step = "The stored state of this feed is damaged", "delete the folder of this feed, and push its history"
        with refuse_damaged_content(CheckpointError, what, where=self._folder, next_step=step):
            if stored:
                self._recent = RecentAnswers.from_text(stored["recent"])
            if stored and stored["identity"] != self._identity:
                self._warm_up(log)
            else:
                if stored:
                    self._stream.load_state(stored["stream"])
                for record in log.read(self._snapshot_number):
                    frame = self._apply(record["kind"], record)
                    if record["kind"] == "bars":
                        self._remember(frame, record["columns"])
        self._log = log

    def _start_stream(self, served: ServedBundle) -> None:
        self._served, self._recent, self._bars_since = served, RecentAnswers(), 0
        self._identity = fingerprint_json([served.id, asdict(self._guard)])
        self._stream = GuardedStream(served.bundle, self._guard, cold=True)

    def _warm_up(self, log: FeedLog) -> None:
        """Push the kept bars as history, and write that state.

        Bars whose first answers are known keep them; those after the last snapshot of another bundle, whose answers
        were lost with it, have those of this one.
        """
        tables = [record["columns"] for record in log.read() if record["kind"] == "bars"]
        if tables:
            frames = []
            for _, equal in groupby(tables, _form):
                frames += self._push_history([to_frame(columns) for columns in equal])
            self._remember_history(pd.concat(frames), tables)
        self._write_snapshot(log)

    def _remember_history(self, frame: pd.DataFrame, tables: list[Columns]) -> None:
        keys, ends = list[str](), list[np.ndarray]()
        for columns in reversed(tables):
            keys, ends = bar_keys(columns) + keys, [bar_ends(self._served.bundle, columns), *ends]
            if len(keys) >= RECENT_BARS:
                break
        answers, moments = answers_and_moments(frame)
        before = int(np.searchsorted(moments, ends[0][0], side="right")) if ends else 0  # of bars that are not kept
        self._recent.remember(keys, self._served.named(answers[before:]), moments[before:], np.concatenate(ends))

    def _push_history(self, frames: list[pd.DataFrame]) -> list[pd.DataFrame]:
        """Push messages that were read alone: together, or where they cannot be read so, in two parts; return the
        predictions.
        """
        try:
            return [self._stream.push(pd.concat(frames, ignore_index=True))]
        except BarsError:
            if len(frames) == 1:
                raise
            half = len(frames) // 2
            return self._push_history(frames[:half]) + self._push_history(frames[half:])

    def _write_snapshot(self, log: FeedLog) -> None:
        state = {
            "format": FORMAT, "number": log.last, "identity": self._identity, "stream": self._stream.get_state(),
            "recent": self._recent.to_text(),
        }  # fmt: skip
        write_state_file(self._folder / "snapshot.state", state)
        self._snapshot_number, self._bars_since = log.last, 0
        if log.newest_records >= RECORDS_OF_SEGMENT or log.newest_bars >= BARS_BETWEEN_SNAPSHOTS:
            log.start_segment(kept_bars(self._served.bundle))

    def _read_snapshot(self, path: Path, log: FeedLog) -> dict[str, Any]:
        what, step = "The snapshot of this feed is damaged", "delete this file; the stream then starts from the log"
        try:
            stored = read_state_file(path)
        except CheckpointError as error:
            raise CheckpointError(what, where=path, got=error.got, next_step=step) from error
        with refuse_damaged_content(CheckpointError, what, where=path, next_step=step):
            if stored["format"] != FORMAT or not 0 <= stored["number"] <= log.last:
                raise CheckpointError("The snapshot is not of this log", where=path, got=f"record {stored['number']}",
                                      wanted=f"at most {log.last}", next_step=step)  # fmt: skip
            RecentAnswers.from_text(stored["recent"])
        return stored


def empty_position(served: ServedBundle) -> dict[str, Any]:
    """Return `Feed.position` of a feed without bars."""
    return {"symbol": served.symbol, "next": None, "run_id": served.run_id, "bundle": served.id}


def not_remembered(served: ServedBundle, reason: str) -> dict[str, Any]:
    """Return the reply to an outcome that belongs to no answer."""
    return {"remembered": False, "reason": reason, "run_id": served.run_id, "bundle": served.id}


def kept_bars(bundle: Bundle) -> int:
    """Return how many raw bars another bundle of this kind reads before its first answer: its warm-up and two days."""
    warmup, spec = bundle.description["warmup_bars"], bundle.spec
    minutes = spec.market.bar_minutes
    return warmup * max(spec.features.base_minutes // minutes, 1) + 2 * 1440 // minutes


def _form(columns: Columns) -> list[tuple[str, bool]]:
    """Return the names of the columns, and whether each holds texts; columns of one form are read together."""
    return sorted((name, any(isinstance(value, str) for value in column)) for name, column in columns.items())
