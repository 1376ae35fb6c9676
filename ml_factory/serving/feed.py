"""A feed of one symbol: bars pushed one by one, each answered once it is on the disk; a restart continues exactly."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from ml_factory.errors import BarsError, CheckpointError, FactoryError, refuse_damaged_content
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.guard.guarded_stream import GuardedStream
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.feed_log import FeedLog
from ml_factory.serving.served_bundle import ServedBundle
from ml_factory.serving.tables import Columns, frame_to_answers, to_frame
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json, parse_json
from ml_factory.storage.serialization import read_state_file, write_state_file

FORMAT = "ml_factory.feed/1"
RECORDS_BETWEEN_SNAPSHOTS, BARS_BETWEEN_SNAPSHOTS, RECORDS_OF_SEGMENT = 200, 5000, 2000
MOST_KEPT_BARS = 200_000  # of bundles that need the whole history
ADVANCE_TOLERANCE = pd.Timedelta(minutes=1)  # that a sender's clock may be ahead of this one
RECENT_BARS, STORED_RECENT = 1000, 50  # bars whose answers can be sent again; of those, in a snapshot


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
            same values, are left out, and counted in `repeated`. Where all were, their answers are returned again.
        now : the clock; None: history

        Raises BarsError for bars that cannot be, after which the feed is as before.
        """
        log = self._continue(served)
        keys = _row_keys(columns)
        if not keys:
            raise BarsError("There are no bars", where="bars", got="empty columns", wanted="at least one bar",
                            next_step="send the next bar")  # fmt: skip
        repeated = next((number for number, key in enumerate(keys) if key not in self._recent), len(keys))
        if repeated == len(keys):
            return self._answers_again(keys)
        rest = {name: column[repeated:] for name, column in columns.items()}
        content = {"columns": rest, "now": None if now is None else now.value}
        frame = self._apply_and_log(log, "bars", len(keys) - repeated, content)
        return self._reply(frame, keys[repeated:]) | {"repeated": repeated}

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
        return self._reply(self._apply_and_log(log, "advance", 0, {"until": until.value}), [])

    def add_outcome(self, served: ServedBundle, known_at: pd.Timestamp, label: int) -> dict[str, Any]:
        """Give the guard the outcome of an earlier answer; `remembered` is False where it holds no such answer."""
        log = self._continue(served)
        remembered = self._stream.add_outcome(known_at, label)
        if remembered:
            self._log_record(log, "outcome", 0, {"known_at": known_at.value, "label": label})
        return {"remembered": remembered, "run_id": served.run_id, "bundle": served.id}

    def position(self, served: ServedBundle) -> dict[str, Any]:
        """Return from which bar on the feed continues: `next` is the earliest start of a bar; null where none came."""
        self._continue(served)
        status = self._stream.status()
        return {"symbol": served.symbol, "next": status["last_bar_end"], "run_id": served.run_id, "bundle": served.id}

    def last_answers(self, served: ServedBundle) -> list[dict[str, Any]]:
        """Return the answers of the last push, each with its bundle; none where another bundle has read its bars."""
        self._continue(served)
        reply = next(reversed(self._recent.values()), None)
        return name_answers(reply) if reply else []

    def status(self) -> dict[str, Any]:
        """Return the state of the guard's checks."""
        return self._stream.status()

    def close(self) -> None:
        """Write a snapshot, so that the next start replays nothing."""
        if self._log is not None:
            if self._log.last > self._snapshot_number:
                self._write_snapshot(self._log)
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

    def _reply(self, frame: pd.DataFrame, keys: Sequence[str]) -> dict[str, Any]:
        """Return the answers, and remember them for the bars of these keys."""
        reply = self._served.named(frame_to_answers(frame))
        for key in keys[-RECENT_BARS:]:
            self._recent[key] = reply | {"answers": reply["answers"] if key == keys[-1] else []}
        while len(self._recent) > RECENT_BARS:
            self._recent.popitem(last=False)
        return reply

    def _answers_again(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the stored answers of bars that were all pushed before; of one bundle, that of the last."""
        found = [self._recent[key] for key in keys]
        same = [one for one in found if one["bundle"] == found[-1]["bundle"]]
        return found[-1] | {"answers": [answer for one in same for answer in one["answers"]], "repeated": len(keys)}

    # ---- the disk --------------------------------------------------------------------------------------------------

    def _restore(self, served: ServedBundle) -> None:
        """Take the stream to the end of the log: from the snapshot, or with another bundle from the kept bars."""
        self._start_stream(served)
        log, path = FeedLog(self._folder), self._folder / "snapshot.state"
        stored = self._read_snapshot(path, log) if files.is_file(path) else None
        self._snapshot_number = stored["number"] if stored else 0
        what, step = "The stored state of this feed is damaged", "delete the folder of this feed, and push its history"
        with refuse_damaged_content(CheckpointError, what, where=self._folder, next_step=step):
            if stored and stored["identity"] != self._identity:
                self._warm_up(log)
            else:
                if stored:
                    self._stream.load_state(stored["stream"])
                    self._recent = OrderedDict(
                        (key, dict(reply)) for key, reply in parse_json(stored["recent"], largest=None)
                    )
                for record in log.read(self._snapshot_number):
                    frame = self._apply(record["kind"], record)
                    if record["kind"] == "bars":
                        self._reply(frame, _row_keys(record["columns"]))
        self._log = log

    def _start_stream(self, served: ServedBundle) -> None:
        self._served, self._recent, self._bars_since = served, OrderedDict[str, dict[str, Any]](), 0
        self._identity = fingerprint_json([served.id, asdict(self._guard)])
        cold = served.bundle.description["warmup_bars"] is not None
        self._stream = GuardedStream(served.bundle, self._guard, cold=cold)

    def _warm_up(self, log: FeedLog) -> None:
        """Push the kept bars as history, without answering them, and write that state."""
        tables = [record["columns"] for record in log.read() if record["kind"] == "bars"]
        if tables:
            for _, equal in groupby(tables, _form):
                self._push_history([to_frame(columns) for columns in equal])
            for key in [key for columns in tables[-STORED_RECENT:] for key in _row_keys(columns)]:
                self._recent.setdefault(key, self._served.named([]))
        self._write_snapshot(log)

    def _push_history(self, frames: list[pd.DataFrame]) -> None:
        """Push messages that were read alone: together, or where they cannot be read so, in two parts."""
        try:
            self._stream.push(pd.concat(frames, ignore_index=True))
        except BarsError:
            if len(frames) == 1:
                raise
            half = len(frames) // 2
            self._push_history(frames[:half])
            self._push_history(frames[half:])

    def _write_snapshot(self, log: FeedLog) -> None:
        state = {
            "format": FORMAT, "number": log.last, "identity": self._identity, "stream": self._stream.get_state(),
            "recent": json.dumps(list(self._recent.items())[-STORED_RECENT:]),
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
            parse_json(stored["recent"], largest=None)
        return stored


def name_answers(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the answers of a reply, each with the symbol, run and id of its bundle."""
    named = {name: reply[name] for name in ("symbol", "run_id", "bundle")}
    return [named | answer for answer in reply["answers"]]


def kept_bars(bundle: Bundle) -> int:
    """Return how many raw bars another bundle of this kind reads before its first answer: its warm-up and two days."""
    warmup, spec = bundle.description["warmup_bars"], bundle.spec
    if warmup is None or not isinstance(spec.features.base, int):
        return MOST_KEPT_BARS
    minutes = spec.market.bar_minutes
    return warmup * max(spec.features.base // minutes, 1) + 2 * 1440 // minutes


def _row_keys(columns: Columns) -> list[str]:
    """Return the text of each bar, by which it is known again."""
    names = sorted(columns)
    return [json.dumps([names, row]) for row in zip(*(columns[name] for name in names), strict=True)]


def _form(columns: Columns) -> list[tuple[str, bool]]:
    """Return the names of the columns, and whether each holds texts; columns of one form are read together."""
    return sorted((name, any(isinstance(value, str) for value in column)) for name, column in columns.items())
