"""Text to train on: documents of files, of objects in a bucket, of data sets of the hub; packed into rows of tokens.

N rows, T tokens of a row.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np

from ml_factory.errors import FactoryError, FileError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.progress import progress_phase
from ml_factory.recipes.language.causal_lm import Tokenizer
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.locks import file_lock
from ml_factory.storage.mirror import fetch_file

parquet, datasets = LazyModule("pyarrow.parquet"), LazyModule("datasets")

_PIECE = 1 << 18  # characters of a plain text that are read at once
_AT_ONCE = 64  # pieces that are tokenized together

Piece = tuple[str, bool]  # some text, and whether its document ends with it


@dataclass(frozen=True)
class TextSource:
    """Documents in a fixed order. fingerprint : hash of what they are. pieces : function that yields them."""

    fingerprint: str
    pieces: Callable[[], Iterator[Piece]]


def open_text(name: str, config: str = "", split: str = "train", column: str = "text") -> TextSource:
    """Open text by name: a file, a folder of files, gs://bucket/file, else a data set of the hub.

    A .txt file is one document; each row of a .parquet and each line of a .jsonl file is one.

    column : of the text in rows and lines. config, split : of the hub's data set.
    """
    path = fetch_file(name) if name.startswith("gs://") else Path(name).expanduser()
    if files.is_folder(path):
        found = [path / entry for entry in files.names(path) if Path(entry).suffix.lower() in _READERS]
        if not found:
            raise SettingsError("The folder holds no text", where=path, wanted=f"files {', '.join(_READERS)}")
        return _of_files(found, column)
    suffix = path.suffix.lower()
    if files.is_file(path):
        if suffix not in _READERS:
            raise SettingsError("Text of an unknown kind", where=path, got=suffix or "no suffix",
                                wanted=", ".join(_READERS))  # fmt: skip
        return _of_files([path], column)
    if suffix in _READERS:
        raise SettingsError("There is no such file", where=path, next_step="check the path of --dataset")
    made_of = json.dumps([name, config, split, column]).encode()
    return TextSource(_hash(made_of), lambda: _hub_rows(name, config, split, column))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _of_files(paths: list[Path], column: str) -> TextSource:
    made_of = "\0".join([column, *(f"{path.name}\0{files.sha256(path)}" for path in paths)])

    def pieces() -> Iterator[Piece]:
        for path in paths:
            yield from _READERS[path.suffix.lower()](path, column)

    return TextSource(_hash(made_of.encode()), pieces)


def _plain_text(path: Path, column: str) -> Iterator[Piece]:
    """Yield pieces of one document, cut at the end of a line where there is one."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        left = ""
        while piece := file.read(_PIECE):
            left += piece
            cut = left.rfind("\n") + 1 or len(left)
            yield left[:cut], False
            left = left[cut:]
        yield left, True


def _parquet_rows(path: Path, column: str) -> Iterator[Piece]:
    with parquet.ParquetFile(path) as table:
        if column not in table.schema_arrow.names:
            raise SettingsError(
                "The file has no such text column", where=path, got=column,
                wanted=", ".join(table.schema_arrow.names), next_step="set data.text_column",
            )  # fmt: skip
        for batch in table.iter_batches(256, columns=[column]):
            for text in batch.column(0).to_pylist():
                yield str(text or ""), True


def _json_lines(path: Path, column: str) -> Iterator[Piece]:
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield str(parse_json(line)[column]), True
            except (ValueError, KeyError, TypeError) as error:
                raise FileError("A line is no JSON object with this text", where=f"{path}, line {number}",
                                got=repr(error), wanted=f"{{{column!r}: ...}}") from error  # fmt: skip


_READERS = {".txt": _plain_text, ".parquet": _parquet_rows, ".jsonl": _json_lines}


def _hub_rows(name: str, config: str, split: str, column: str) -> Iterator[Piece]:
    """Yield the rows of a data set of the Hugging Face hub, streamed: it is never downloaded whole."""
    try:
        for row in datasets.load_dataset(name, config or None, split=split, streaming=True):
            yield str(row[column] or ""), True
    except FactoryError:
        raise
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        raise SettingsError(
            "The data set cannot be read", where=name, got=" ".join(repr(error).split())[:200],
            wanted="a data set of the Hugging Face hub with this split and text column",
            next_step="check the name, --dataset_config and data.text_column; or give a .txt, .jsonl or .parquet",
        ) from error  # fmt: skip


# ---------------------------------------------------------------------- rows of tokens


def pack_tokens(
    source: TextSource, tokenizer: Tokenizer, length: int, folder: str | os.PathLike, *, most: int = 0
) -> np.ndarray:
    """Return the rows of `length` tokens of this source, int32 (N, T) on disk, made in `folder` unless they are there.

    Documents follow each other with the tokenizer's end in between, cut into rows that are never padded: tokens at the
    very end that do not fill a row are left out. Several processes that ask for the same rows wait for the first.

    most : tokens to read at most; 0 for all.
    Raises SettingsError where the text is shorter than one row.
    """
    path = Path(folder) / "tokens.npy"
    with file_lock(path.parent / "lock"):
        if not files.is_file(path):
            files.replace(path, lambda temporary: _write_rows(temporary, source, tokenizer, length, most))
    return open_rows(path)


def _write_rows(path: Path, source: TextSource, tokenizer: Tokenizer, length: int, most: int) -> None:
    rows, limit, left = 0, most // length if most else None, np.zeros(0, np.int32)
    with open(path, "wb") as file, progress_phase("tokenizing", None, of="tokens") as moved:
        write_header(file, np.int32, (0, length))
        for tokens in _tokens_of(source, tokenizer):
            moved(len(tokens))
            left = np.concatenate([left, tokens])
            whole = len(left) // length
            if limit is not None:
                whole = min(whole, limit - rows)
            file.write(left[: whole * length].tobytes())
            rows, left = rows + whole, left[whole * length :]
            if rows == limit:
                break
        file.seek(0)
        write_header(file, np.int32, (rows, length))
    if not rows:
        raise SettingsError("The text is shorter than one sequence", got=f"{len(left)} tokens",
            wanted=f"at least {length}", next_step="more text, or a smaller max_seq_length")  # fmt: skip


def _tokens_of(source: TextSource, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the tokens of some documents at a time, with their ends."""
    pieces, end = source.pieces(), np.array([tokenizer.end], np.int32)
    while batch := list(islice(pieces, _AT_ONCE)):
        found = zip(batch, tokenizer.encode([text for text, _ in batch]), strict=True)
        yield np.concatenate([part for (_, ends), tokens in found for part in ((tokens, end) if ends else (tokens,))])


def write_header(file: BinaryIO, dtype: type, shape: tuple[int, ...]) -> None:
    """Write the header of a .npy file; its length does not depend on the number of rows."""
    facts = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, facts)


def open_rows(path: Path) -> np.ndarray:
    """Open an array of rows on disk. Raises FileError for a damaged one."""
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError, OSError, SyntaxError, TypeError, OverflowError, MemoryError, TokenError) as error:
        raise damaged_rows(path, " ".join(str(error).split())[:200]) from error


def damaged_rows(path: Path, got: str) -> FileError:
    """Return the error of rows on disk that are not what was written."""
    return FileError("These rows are damaged", where=path, got=got,
                     next_step=f"delete {path.parent}: it is made again")  # fmt: skip
