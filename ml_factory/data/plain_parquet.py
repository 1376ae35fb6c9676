"""Columns of float32 as a Parquet file, block after block: plain pages, no compression, one page a column and block.

Any Parquet reader reads it. Numbers go from the caller's memory to the file without a copy in between, which a general
writer needs, and each page begins at a multiple of 64 bytes, so that it can be mapped and computed on where it lies.
Format: github.com/apache/parquet-format; its metadata is Thrift's compact protocol, of which five forms are needed.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from ml_factory.errors import FactoryError, SettingsError

ALIGNED = 64
_MAGIC = b"PAR1"
_MAKER = b"ml_factory"
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
_FLOAT, _REQUIRED, _PLAIN, _RLE, _UNCOMPRESSED, _DATA_PAGE = 4, 0, 0, 3, 0, 0
_PIECES_AT_ONCE = 512  # of memory in one call: systems take 1024


class ColumnWriter:
    """Writes a file of float32 columns that are never missing; blocks of rows in order.

    write : [F, n] float32, each row contiguous, becomes a row group.  close : the footer; without it there is no file.
    """

    def __init__(self, path: str | os.PathLike, names: Sequence[str]):
        self.names = list(names)
        self._groups: list[tuple[int, int]] = []  # (where the first page's numbers begin, rows)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
        try:
            self._end = self._put([_MAGIC + bytes(ALIGNED - len(_MAGIC))])
        except OSError:
            os.close(self._file)
            raise

    def __enter__(self) -> "ColumnWriter":
        return self

    def __exit__(self, kind, *_) -> None:
        self.close() if kind is None else os.close(self._file)

    def write(self, block_FN: np.ndarray) -> None:
        """Append these rows. SettingsError where they are not one float32 row a column, each contiguous."""
        features, rows = block_FN.shape
        fits = features == len(self.names) and block_FN.dtype == np.float32
        if not (fits and rows and block_FN.strides[1] == block_FN.itemsize):
            wanted = f"float32 ({len(self.names)}, n), each column contiguous"
            got = f"{block_FN.dtype} {block_FN.shape}, steps of {block_FN.strides} bytes"
            raise SettingsError("This block cannot be written", where="ColumnWriter.write", got=got, wanted=wanted)
        lead = _lead(rows)
        pieces = [piece for column in block_FN for piece in (lead, memoryview(column).cast("B"))]
        self._groups.append((self._end + len(lead), rows))
        for first in range(0, len(pieces), _PIECES_AT_ONCE):
            self._end += self._put(pieces[first : first + _PIECES_AT_ONCE])

    def close(self) -> None:
        """Write what says where everything is."""
        try:
            footer = _footer(self.names, self._groups)
            self._put([footer, len(footer).to_bytes(4, "little"), _MAGIC])
        finally:
            os.close(self._file)

    def _put(self, pieces: list) -> int:
        """Write all of it, though a call may take only a part."""
        size = sum(map(len, pieces))
        done = os.writev(self._file, pieces)
        if done < size:
            rest = memoryview(b"".join(pieces))[done:]
            while rest:
                rest = rest[os.write(self._file, rest) :]
        return size


class ColumnBlocks(Sequence):
    """The blocks of a file that a ColumnWriter wrote, mapped as they are asked for: read-only float32 [F, n], in order.

    features : F.  rows : of each block in the file.  stop : rows from here on are left out.
    sizes : n of each block that is left.
    sample : (rows int64[S], values [F, S]) that whoever wrote the file kept of them, evenly spread; or None.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        features: int,
        rows: Sequence[int],
        stop: int | None = None,
        sample: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        self.path, self.features, self.rows = Path(path), features, list(rows)
        self._begins = list(accumulate((features * _step(count) for count in self.rows), initial=ALIGNED))
        firsts = list(accumulate(self.rows, initial=0))
        stop = firsts[-1] if stop is None else stop
        self.sizes = [min(count, stop - first) for count, first in zip(self.rows, firsts, strict=False) if first < stop]
        kept = 0 if sample is None else int(np.searchsorted(sample[0], stop))
        self.sample = None if sample is None else (sample[0][:kept], sample[1][:, :kept])

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> np.ndarray:
        """float32 [F, n]; its pages leave memory with the last view of it."""
        used, rows = self.sizes[number], self.rows[number]
        begin = self._begins[number]
        page = begin - begin % mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            length = begin - page + self.features * _step(rows)
            mapped = mmap.mmap(file.fileno(), length, offset=page, access=mmap.ACCESS_READ)
        first = begin - page + len(_lead(rows))
        return np.ndarray((self.features, used), np.float32, mapped, first, (_step(rows), 4))

    def columns(self, part: slice) -> Iterator[np.ndarray]:
        """These columns of each block in turn: float32 [F, n] in a room that the next one is read into as well.

        Reading costs less than mapping, and leaves the numbers in the processor's cache.
        """
        count = part.stop - part.start
        room = bytearray(max(map(_step, self.rows), default=0) * count)
        with open(self.path, "rb", buffering=0) as file:
            for begin, used, rows in zip(self._begins, self.sizes, self.rows, strict=False):
                step = _step(rows)
                file.seek(begin + part.start * step + len(_lead(rows)))
                rest = memoryview(room)[: (count - 1) * step + 4 * used]
                while rest:
                    rest = rest[_some(file.readinto(rest), self.path) :]
                yield np.ndarray((count, used), np.float32, room, 0, (step, 4))

    def before(self, stop: int) -> "ColumnBlocks":
        """The rows before this one."""
        return ColumnBlocks(self.path, self.features, self.rows, stop, self.sample)


def sample_rows(rows: int) -> int:
    """How many of so many rows a sample should have that brackets quantiles: what it costs to sort it and what its
    brackets hold grow alike."""
    return int(4 * rows ** (2 / 3))


def _some(count: int, path: Path) -> int:
    """That many bytes came; FactoryError where the file ends too soon."""
    if not count:
        raise FactoryError("A file of columns is cut short", where=path, next_step="write it again")
    return count


@cache
def _step(rows: int) -> int:
    """Bytes from one column's page to the next: what leads up to it, the numbers, and what fills the last 64."""
    return len(_lead(rows)) + 4 * rows


@cache
def _lead(rows: int) -> bytes:
    """What stands before a page's numbers: filling, and the page's header; with the numbers a multiple of 64 bytes."""
    header = _header(rows)
    return bytes(-(len(header) + 4 * rows) % ALIGNED) + header


@cache
def _header(rows: int) -> bytes:
    """PageHeader of a plain page of numbers that are never missing."""
    return _struct(
        (1, _I32, _whole(_DATA_PAGE)), (2, _I32, _whole(4 * rows)), (3, _I32, _whole(4 * rows)),
        (5, _STRUCT, _struct(
            (1, _I32, _whole(rows)), (2, _I32, _whole(_PLAIN)), (3, _I32, _whole(_RLE)), (4, _I32, _whole(_RLE))
        )),
    )  # fmt: skip


def _footer(names: list[str], groups: list[tuple[int, int]]) -> bytes:
    """FileMetaData.  groups : (where the first page's numbers begin, rows)."""
    root = _struct((4, _BINARY, _text("schema")), (5, _I32, _whole(len(names))))
    leaves = [
        _struct((1, _I32, _whole(_FLOAT)), (3, _I32, _whole(_REQUIRED)), (4, _BINARY, _text(name))) for name in names
    ]
    return _struct(
        (1, _I32, _whole(1)),
        (2, _LIST, _list(_STRUCT, [root, *leaves])),
        (3, _I64, _whole(sum(rows for _, rows in groups))),
        (4, _LIST, _list(_STRUCT, [_group(names, *group) for group in groups])),
        (6, _BINARY, _text(_MAKER)),
    )


def _group(names: list[str], begin: int, rows: int) -> bytes:
    """RowGroup."""
    size, step = len(_header(rows)) + 4 * rows, _step(rows)
    pages = _wholes(begin - len(_header(rows)) + step * np.arange(len(names), dtype=np.uint64))
    chunks = [_chunk(name, rows) + page + b"\0\0" for name, page in zip(names, pages, strict=True)]
    return _struct((1, _LIST, _list(_STRUCT, chunks)), (2, _I64, _whole(size * len(names))), (3, _I64, _whole(rows)))


@cache
def _chunk(name: str, rows: int) -> bytes:
    """ColumnChunk up to where its page begins (data_page_offset), the same in every block of as many rows."""
    size = len(_header(rows)) + 4 * rows
    facts = _struct(
        (1, _I32, _whole(_FLOAT)),
        (2, _LIST, _list(_I32, [_whole(_PLAIN)])),
        (3, _LIST, _list(_BINARY, [_text(name)])),
        (4, _I32, _whole(_UNCOMPRESSED)),
        (5, _I64, _whole(rows)),
        (6, _I64, _whole(size)),
        (7, _I64, _whole(size)),
        (9, _I64, b""),
    )
    return _struct((2, _I64, _whole(0)), (3, _STRUCT, facts[:-1]))[:-1]


# ---- Thrift's compact protocol ------------------------------------------------------------------------------------


def _struct(*fields: tuple[int, int, bytes]) -> bytes:
    """(number, type, value) in rising order, each number told as the step from the one before."""
    steps = (number - before for before, number in pairwise([0, *(number for number, *_ in fields)]))
    return (
        b"".join(bytes([step << 4 | kind]) + value for step, (_, kind, value) in zip(steps, fields, strict=True))
        + b"\0"
    )


def _list(kind: int, values: list[bytes]) -> bytes:
    count = len(values)
    return (bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + _varint(count)) + b"".join(values)


def _text(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return _varint(len(raw)) + raw


def _whole(number: int) -> bytes:
    """A whole number of 32 or 64 bits: 0, -1, 1, -2... become 0, 1, 2, 3..."""
    return _varint(number << 1 if number >= 0 else -2 * number - 1)


def _wholes(numbers: np.ndarray) -> list[bytes]:
    """`_whole` of many at once; none is negative."""
    sevens = (numbers[:, None] << np.uint64(1)) >> np.arange(0, 63, 7, dtype=np.uint64)
    lengths = np.maximum(np.count_nonzero(sevens, axis=1), 1)
    more = np.arange(9) < lengths[:, None] - 1
    raw = ((sevens & np.uint64(127)) | (more * np.uint64(128))).astype(np.uint8).tobytes()
    return [raw[9 * i : 9 * i + length] for i, length in enumerate(lengths.tolist())]


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out) + bytes([number])
