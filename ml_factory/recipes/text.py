"""Text to train on: documents of files, of objects in a bucket, of data sets of the hub; packed into rows of tokens.

N rows, T tokens of a row.
"""

import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from ml_factory.errors import FileError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.progress import progress_phase
from ml_factory.recipes.language_models import Tokenizer
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.locks import file_lock
from ml_factory.storage.mirror import fetch_file

datasets = LazyModule("datasets")

_KINDS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}
AT_ONCE = 1024  # pieces that are tokenized together

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
    paths = [path / entry for entry in files.names(path)] if files.is_folder(path) else [path]
    known = [one for one in paths if one.suffix.lower() in _KINDS]
    if known and all(files.is_file(one) for one in known):
        made_of = [column, *([one.name, files.sha256(one)] for one in known)]
        return TextSource(
            fingerprint_json(made_of)[:16], lambda: (piece for one in known for piece in _file(one, column))
        )
    if known or files.is_folder(path) or files.is_file(path):
        raise SettingsError("There is no such text", where=path, wanted=f"files {', '.join(_KINDS)}",
                            next_step="check the path of --dataset")  # fmt: skip
    return TextSource(
        fingerprint_json([name, config, split, column])[:16],
        lambda: _rows(name, column, name, config or None, split=split),
    )


def _file(path: Path, column: str) -> Iterator[Piece]:
    kind = _KINDS[path.suffix.lower()]
    if kind != "text":
        yield from _rows(path, column, kind, data_files=glob.escape(str(path)), split="train")
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        yield from ((line, False) for line in file)
    yield "", True


def _rows(where: object, column: str, *given: object, **more: object) -> Iterator[Piece]:
    """Yield the rows of a data set as `datasets.load_dataset` streams them: none is ever downloaded whole."""
    row = None
    try:
        for row in datasets.load_dataset(*given, **more, streaming=True):
            yield str(row[column] or ""), True
        if row is None:
            raise LookupError("no rows")
    except (OSError, ValueError, LookupError, RuntimeError, StopIteration) as error:  # the last: an empty .jsonl
        raise SettingsError(
            "The data set cannot be read", where=where, got=" ".join(repr(error).split())[:200],
            wanted=f"the column {column}; of the Hugging Face hub a data set with this split",
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
    count = 0
    with open(path, "wb") as file, progress_phase("tokenizing", None, of="tokens") as moved:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": (0, length)})
        begin = file.tell()
        for tokens in _tokens_of(source, tokenizer):
            file.write(tokens.astype("<i4").tobytes())
            count += len(tokens)
            moved(len(tokens))
            if most and count >= most:
                break
        rows = min(count, most or count) // length
        file.truncate(begin + 4 * rows * length)
        file.seek(0)  # the length of a header does not depend on the number of rows
        np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": (rows, length)})
    if not rows:
        raise SettingsError("The text is shorter than one sequence", got=f"{count} tokens",
            wanted=f"at least {length}", next_step="more text, or a smaller max_seq_length")  # fmt: skip


def _tokens_of(source: TextSource, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the tokens of some documents at a time, with their ends."""
    pieces, end = source.pieces(), np.array([tokenizer.end], np.int32)
    while batch := list(islice(pieces, AT_ONCE)):
        found = zip(batch, tokenizer.encode([text for text, _ in batch]), strict=True)
        yield np.concatenate([part for (_, ends), tokens in found for part in ((tokens, end) if ends else (tokens,))])


def open_rows(path: Path, mode: str = "c") -> np.ndarray:
    """Open an array of rows on disk, read as it is used. Raises FileError for one that was cut off."""
    try:
        found = np.load(path, mmap_mode="c", allow_pickle=False)  # r+ would extend a file that was cut off
        return found if mode == "c" else np.load(path, mmap_mode=mode, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise FileError("These rows are damaged", where=path, got=" ".join(str(error).split())[:200],
                        next_step=f"delete {path.parent}: it is made again") from error  # fmt: skip
