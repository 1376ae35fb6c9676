"""Log of a feed: what was pushed, in order, each record on the disk before it is acknowledged.

A folder holds segments `log-NUMBER.jsonl`, named by their first record. A line is a checksum and a JSON object with
the record's number `n`, its `kind`, the number of its `bars`, and its content. Only the end of the last segment can be
torn, by a process that was killed: that record was not acknowledged, and is cut off. Segments without bars are deleted
once a snapshot holds what they did; the segment before them is then named `log-NUMBER-NEXT.jsonl`, by its first record
and the one that follows.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_factory.errors import CheckpointError, refuse_damaged_content
from ml_factory.storage.atomic_replace import flush_folder, flush_to_disk
from ml_factory.storage.files import disk_errors, files
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.regular_files import open_regular_file

LARGEST_SEGMENT = 256 * 2**20  # bytes that are read at once
_SEGMENT = re.compile(r"log-\d{1,18}(-\d{1,18})?\.jsonl")
_NEXT = "delete the folder of this feed, and push its history again"


@dataclass
class _Segment:
    """path : of the file; first : number of its first record; records, bars : it holds; deleted : records after it."""

    path: Path
    first: int
    records: int = 0
    bars: int = 0
    deleted: int = 0


class FeedLog:
    """Records of one feed.

    folder : made with the first record; one process writes to it
    """

    def __init__(self, folder: Path):
        self._folder, self._segments = folder, list[_Segment]()
        self._descriptor: int | None = None
        self.last = 0
        found = files.names(folder) if files.is_folder(folder) else []
        names = [name for name in found if _SEGMENT.fullmatch(name)]
        for name in names:
            self._read_segment(folder / name, is_last=name == names[-1])

    @property
    def newest_records(self) -> int:
        """Records in the newest segment."""
        return self._segments[-1].records if self._segments else 0

    @property
    def newest_bars(self) -> int:
        """Bars in the newest segment."""
        return self._segments[-1].bars if self._segments else 0

    def append(self, kind: str, bars: int, content: Mapping[str, Any]) -> int:
        """Write one record to the disk and return its number. Raises WorkspaceError; nothing is then appended."""
        record = {"n": self.last + 1, "kind": kind, "bars": bars, **content}
        text = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        if self._descriptor is None:
            self._open_segment()
        assert self._descriptor is not None
        segment = self._segments[-1]
        with disk_errors(segment.path, lambda: len(line)):
            size = os.fstat(self._descriptor).st_size
            try:
                view = memoryview(line)
                while view:
                    view = view[os.write(self._descriptor, view) :]
                flush_to_disk(self._descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, size)
                raise
        self.last, segment.records, segment.bars = self.last + 1, segment.records + 1, segment.bars + bars
        return self.last

    def read(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the records with a greater number."""
        for segment in list(self._segments):
            if segment.first + segment.records > after + 1:
                records, _ = _parse_segment(segment.path, is_last=segment is self._segments[-1])
                yield from (record for record in records if record["n"] > after)

    def start_segment(self, keep_bars: int) -> None:
        """Begin a new segment with the next record, and delete those without bars and the oldest that later ones do
        not need. A snapshot holds all records.

        keep_bars : newest bars that are kept at least
        """
        self.close()
        self._delete_segments_without_bars()
        kept = 0
        for number in range(len(self._segments) - 1, -1, -1):
            if kept >= keep_bars:
                for old in self._segments[: number + 1]:
                    files.remove(old.path)
                del self._segments[: number + 1]
                break
            kept += self._segments[number].bars

    def _delete_segments_without_bars(self) -> None:
        """Delete the segments after the first with bars that have none; the one before them takes over their numbers.

        A kill in between leaves segments whose records that name already counts as deleted: the next start deletes
        them.
        """
        kept: list[_Segment] = []
        for segment in self._segments:
            if segment.bars or not kept:
                kept.append(segment)
            else:
                kept[-1].deleted += segment.records + segment.deleted
        if len(kept) < len(self._segments):
            for segment in kept:
                _rename(segment)
            for path in {one.path for one in self._segments} - {one.path for one in kept}:
                files.remove(path)
            self._segments = kept

    def close(self) -> None:
        """Close the file; the next record opens a new one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open_segment(self) -> None:
        path = self._folder / f"log-{self.last + 1:012d}.jsonl"
        with disk_errors(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._descriptor = open_regular_file(path, flags)
            flush_folder(self._folder)
        self._segments.append(_Segment(path, self.last + 1))

    def _read_segment(self, path: Path, is_last: bool) -> None:
        """Add a segment of the folder. Raises CheckpointError where records are damaged or absent."""
        records, size = _parse_segment(path, is_last)
        if not records:
            files.remove(path)
            return
        first = records[0]["n"]
        if self._segments and self._segments[-1].deleted and records[-1]["n"] <= self.last:
            files.remove(path)  # its deletion was interrupted
            return
        if [record["n"] for record in records] != list(range(first, first + len(records))) or (
            self._segments and first != self.last + 1
        ):
            raise CheckpointError("The log of this feed lacks records", where=path, got=f"record {first}",
                                  wanted=f"record {self.last + 1}", next_step=_NEXT)  # fmt: skip
        if size < files.size(path):
            _truncate(path, size)
        following = int(path.stem.split("-")[2]) if path.stem.count("-") == 2 else records[-1]["n"] + 1
        bars = sum(record["bars"] for record in records)
        self._segments.append(_Segment(path, first, len(records), bars, following - 1 - records[-1]["n"]))
        self.last = following - 1


def _rename(segment: _Segment) -> None:
    """Name the file of a segment by its first record and, where later ones were deleted, the one that follows."""
    following = segment.first + segment.records + segment.deleted
    path = segment.path.with_name(f"log-{segment.first:012d}-{following:012d}.jsonl")
    if segment.deleted and path != segment.path:
        with disk_errors(path):
            os.replace(segment.path, path)
            flush_folder(path.parent)
        segment.path = path


def _truncate(path: Path, size: int) -> None:
    """Cut the file off, on the disk as well: the next record begins another segment, and only the last may be torn."""
    with disk_errors(path):
        descriptor = open_regular_file(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.ftruncate(descriptor, size)
            flush_to_disk(descriptor)
        finally:
            os.close(descriptor)
        flush_folder(path.parent)


def _parse_segment(path: Path, is_last: bool) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a segment, and the bytes that they take.

    is_last : its last record may be torn. Raises CheckpointError for any other damage.
    """
    lines = files.read(path, LARGEST_SEGMENT).split(b"\n")
    records: list[dict[str, Any]] = []
    size = 0
    for number, line in enumerate(lines):
        if not line and number == len(lines) - 1:
            break
        record = _parse_line(line, path) if number < len(lines) - 1 else None
        if record is None:
            if is_last and number >= len(lines) - 2 and not (number == len(lines) - 2 and lines[-1]):
                break
            raise CheckpointError("The log of this feed is damaged", where=path, got=f"line {number + 1}",
                                  wanted="its checksum", next_step=_NEXT)  # fmt: skip
        records.append(record)
        size += len(line) + 1
    return records, size


def _parse_line(line: bytes, path: Path) -> dict[str, Any] | None:
    """Return the record of a line; None where its checksum is another's. Raises CheckpointError."""
    sum_text, _, text = line.partition(b" ")
    if sum_text != b"%08x" % zlib.crc32(text):
        return None
    with refuse_damaged_content(CheckpointError, "The log of this feed is damaged", where=path, next_step=_NEXT):
        record = parse_json(text)
        if not (isinstance(record["n"], int) and isinstance(record["bars"], int) and isinstance(record["kind"], str)):
            raise TypeError("a record of other types")
        return record
