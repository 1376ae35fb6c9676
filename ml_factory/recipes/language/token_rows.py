"""Packed sequences of tokens on disk: documents joined end to end and cut into rows of one length, never padded.

Rows are written in parts of equal size, each in one step, and the index after each: a process that is killed continues
at the token where the last part ended. N rows, T tokens of a row.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from tokenize import TokenError

import numpy as np

from ml_factory.errors import FileError, SettingsError
from ml_factory.progress import progress_phase
from ml_factory.recipes.language.text_sources import Document, TextSource
from ml_factory.recipes.language.tokenizers import Tokenizer
from ml_factory.storage.files import files
from ml_factory.storage.locks import file_lock

PART_BYTES = 1 << 24
_INDEX = "index.json"
_AT_ONCE = 64  # documents that are tokenized together


@dataclass(frozen=True)
class PartIndex:
    """Progress of the parts.

    parts : number of finished parts.
    rows : rows in them.
    documents, offset : the next token is token `offset` of the document with this number.
    done : the source has ended, or enough tokens were read.
    dropped : tokens at the very end that do not fill a row.
    """

    parts: int = 0
    rows: int = 0
    documents: int = 0
    offset: int = 0
    done: bool = False
    dropped: int = 0


class PartedRows:
    """Rows of several .npy files as one array: `rows[positions]` reads only those from disk.

    paths : files, of `part_rows` rows each, the last one of fewer.
    """

    def __init__(self, paths: Sequence[Path], part_rows: int, start: int = 0, stop: int | None = None):
        self._paths, self._part_rows, self._start = list(paths), part_rows, start
        self._maps: dict[int, np.ndarray] = {}
        rows = part_rows * (len(paths) - 1) + len(self._part(len(paths) - 1)) if paths else 0
        self._stop = rows if stop is None else min(stop, rows)

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self._part(0).shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self._part(0).dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        rows = np.asarray(positions, np.int64) + self._start
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        parts = rows // self._part_rows
        for part in np.unique(parts):
            inside = parts == part
            out[inside] = self._part(int(part))[rows[inside] - part * self._part_rows]
        return out

    def between(self, start: int, stop: int) -> "PartedRows":
        """Return the rows start .. stop - 1 of these."""
        return PartedRows(self._paths, self._part_rows, self._start + start, self._start + stop)

    def whole(self) -> np.ndarray:
        """Return all rows in memory."""
        return self[np.arange(len(self))]

    def _part(self, number: int) -> np.ndarray:
        if number not in self._maps:
            path = self._paths[number]
            found = open_array(path)
            whole = number == len(self._paths) - 1 or len(found) == self._part_rows
            if not whole or (number and found.shape[1:] != self._part(0).shape[1:]):
                raise _damaged(path, f"shape {found.shape}")
            self._maps[number] = found
        return self._maps[number]


def open_array(path: Path) -> np.ndarray:
    """Open an array of rows that `write_array` wrote, on disk. Raises FileError for a damaged one."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError, TypeError, OverflowError, MemoryError, TokenError) as error:
        raise _damaged(path, " ".join(str(error).split())[:200]) from error
    if not isinstance(found, np.ndarray) or found.ndim < 2:
        raise _damaged(path, "no rows")
    return found


def _damaged(path: Path, why: str) -> FileError:
    return FileError("This part of the rows is damaged", where=path, got=why,
                     next_step=f"delete {path.parent}: it is made again")  # fmt: skip


def write_array(path: Path, values: np.ndarray) -> None:
    """Write one array as .npy in one step."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.lib.format.write_array(file, np.ascontiguousarray(values), allow_pickle=False)

    files.replace(path, write, values.nbytes + 128)


def pack_tokens(
    source: TextSource, tokenizer: Tokenizer, length: int, folder: str | os.PathLike, *, most: int = 0,
    part_rows: int = 0,
) -> tuple[PartedRows, PartIndex]:  # fmt: skip
    """Return the rows of `length` tokens of this source, int32 (N, T), made in `folder` unless they are there already.

    Documents follow each other with the tokenizer's end in between. Several processes that ask for the same rows wait
    for the first.

    most : tokens to read at most; 0 for all.
    part_rows : rows of a part; 0 for parts of 16 MB.
    Raises SettingsError where the text is shorter than one row.
    """
    folder, part_rows = Path(folder), part_rows or max(PART_BYTES // (4 * length), 1)
    with file_lock(folder / "lock"):
        index = _read_index(folder)
        if not index.done:
            index = _write_parts(source, tokenizer, length, folder, most, part_rows, index)
    if not index.rows:
        raise SettingsError("The text is shorter than one sequence", got=f"{index.dropped} tokens",
            wanted=f"at least {length}", next_step="more text, or a smaller max_seq_length")  # fmt: skip
    rows = PartedRows([_part_path(folder, number) for number in range(index.parts)], part_rows)
    if len(rows) != index.rows:
        raise _damaged(folder / _INDEX, f"{len(rows)} rows where {index.rows} were written")
    return rows, index


def _write_parts(
    source: TextSource, tokenizer: Tokenizer, length: int, folder: Path, most: int, part_rows: int, index: PartIndex
) -> PartIndex:
    """Write the parts after those of the index; return the last index."""
    part_tokens, most_rows = part_rows * length, most // length if most else 1 << 62
    buffer, held, tokens = [], 0, iter(_tokens_of(source, tokenizer, index))
    with progress_phase("tokenizing", None, of="tokens") as moved:
        while index.rows < most_rows:
            wanted = min(part_tokens, (most_rows - index.rows) * length)
            while held < wanted and (found := next(tokens, None)) is not None:
                buffer.append(found)
                held += len(found[0])
                moved(len(found[0]))
            whole = held // length if held < wanted else wanted // length
            buffer, held, index = _write_part(folder, buffer, held, whole, length, index)
            if whole < part_rows:
                break
    index = replace(index, done=True, dropped=held if index.rows < most_rows else 0)
    files.write_json(folder / _INDEX, asdict(index))
    return index


def _write_part(
    folder: Path, buffer: list[tuple[np.ndarray, int, int]], held: int, whole: int, length: int, index: PartIndex
) -> tuple[list[tuple[np.ndarray, int, int]], int, PartIndex]:
    """Write the first `whole` rows of the buffer as the next part; return what is left, its size and the new index.

    buffer : (tokens, number of their document, offset of the first of them in it) in order.
    """
    if not whole:
        return buffer, held, index
    tokens = np.concatenate([tokens for tokens, _, _ in buffer])
    used = whole * length
    write_array(_part_path(folder, index.parts), tokens[:used].reshape(whole, length))
    left = []
    for part, document, offset in buffer:
        if used < len(part):
            left.append((part[used:], document, offset + used))
        used = max(used - len(part), 0)
    last = buffer[-1]
    document, offset = (left[0][1], left[0][2]) if left else (last[1], last[2] + len(last[0]))
    index = PartIndex(index.parts + 1, index.rows + whole, document, offset)
    files.write_json(folder / _INDEX, asdict(index))
    return left, held - whole * length, index


def _tokens_of(source: TextSource, tokenizer: Tokenizer, index: PartIndex) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield (tokens, number of the document, offset in it) from the place of the index on."""
    documents, number, skip = source.documents(index.documents), index.documents, index.offset
    end = np.array([tokenizer.end], np.int32)
    while batch := list(islice(documents, _AT_ONCE)):
        for document, tokens in zip(batch, tokenizer.encode([one.text for one in batch]), strict=True):
            tokens = _with_end(document, tokens, end)
            if len(tokens) > skip:
                yield tokens[skip:], number, skip
            number, skip = number + 1, 0


def _with_end(document: Document, tokens: np.ndarray, end: np.ndarray) -> np.ndarray:
    return np.concatenate([tokens, end]) if document.ends else tokens


def _read_index(folder: Path) -> PartIndex:
    """Return the stored index; the first one where there is none, or a part of it is missing."""
    path = folder / _INDEX
    if not files.is_file(path):
        return PartIndex()
    stored = files.read_json(path)
    try:
        index = PartIndex(**stored)
        numbers = (index.parts, index.rows, index.documents, index.offset, index.dropped)
        if any(type(number) is not int or number < 0 for number in numbers) or type(index.done) is not bool:
            raise ValueError(f"{stored}")
    except (TypeError, ValueError) as error:
        raise FileError("This index of tokens is damaged", where=path, got=error,
                        next_step=f"delete {folder}: it is made again") from error  # fmt: skip
    whole = all(files.is_file(_part_path(folder, number)) for number in range(index.parts))
    return index if whole else PartIndex()


def _part_path(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:05d}.npy"
