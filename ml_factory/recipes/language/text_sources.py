"""Text to train on, read as a stream of documents: files, folders, objects in a bucket, data sets of the hub."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ml_factory.errors import FactoryError, FileError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.bucket_sync import download_bucket_file
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json

parquet, datasets = LazyModule("pyarrow.parquet"), LazyModule("datasets")

_PIECE = 1 << 18  # characters of a plain text that are read as one document
_SUFFIXES = (".txt", ".parquet", ".jsonl")


@dataclass(frozen=True)
class Document:
    """Some text. ends : False where the text continues in the next document."""

    text: str
    ends: bool = True


class TextSource(Protocol):
    """Documents in a fixed order. fingerprint : hash of what they are."""

    fingerprint: str

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yield the documents from number `start` on; few are in memory at once."""


class TextFiles:
    """Documents of .txt, .parquet and .jsonl files: a plain text is one document, a row or line of the others too.

    paths : files, read in this order.
    column : text column, or name in a line.
    """

    def __init__(self, paths: list[Path], column: str = "text"):
        self.paths, self.column = paths, column
        known = hashlib.sha256(column.encode())
        for path in paths:
            known.update(f"{path.name}\0{files.sha256(path)}\0".encode())
        self.fingerprint = known.hexdigest()[:16]

    def documents(self, start: int = 0) -> Iterator[Document]:
        yield from itertools.islice(self._all(), start, None)

    def _all(self) -> Iterator[Document]:
        readers = {".txt": _plain_text, ".parquet": self._rows, ".jsonl": self._lines}
        for path in self.paths:
            with files.local_copy(path) as local:
                yield from readers[path.suffix.lower()](local)

    def _rows(self, path: Path) -> Iterator[Document]:
        with parquet.ParquetFile(path) as table:
            if self.column not in table.schema_arrow.names:
                raise SettingsError(
                    "The file has no such text column", where=path, got=self.column,
                    wanted=", ".join(table.schema_arrow.names), next_step="set data.text_column",
                )  # fmt: skip
            for batch in table.iter_batches(256, columns=[self.column]):
                for text in batch.column(0).to_pylist():
                    yield Document(str(text or ""))

    def _lines(self, path: Path) -> Iterator[Document]:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield Document(str(parse_json(line)[self.column]))
                except (ValueError, KeyError, TypeError) as error:
                    raise FileError("A line is no JSON object with this text", where=f"{path}, line {number}",
                                    got=repr(error), wanted=f"{{{self.column!r}: ...}}") from error  # fmt: skip


def _plain_text(path: Path) -> Iterator[Document]:
    """Yield pieces of one text, cut at the end of a line where there is one."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        left = ""
        while piece := file.read(_PIECE):
            left += piece
            cut = left.rfind("\n") + 1 or len(left)
            yield Document(left[:cut], ends=False)
            left = left[cut:]
        yield Document(left)


class HubData:
    """A data set of the Hugging Face hub, streamed: never downloaded whole. What the hub answers is not tested here."""

    def __init__(self, name: str, config: str = "", split: str = "train", column: str = "text"):
        self.name, self.config, self.split, self.column = name, config, split, column
        self.fingerprint = hashlib.sha256(json.dumps([name, config, split, column]).encode()).hexdigest()[:16]

    def documents(self, start: int = 0) -> Iterator[Document]:
        try:
            rows = datasets.load_dataset(self.name, self.config or None, split=self.split, streaming=True)
            for row in rows.skip(start) if start else rows:
                yield Document(str(row[self.column] or ""))
        except FactoryError:
            raise
        except (OSError, ValueError, LookupError, RuntimeError) as error:
            raise SettingsError(
                "The data set cannot be read", where=self.name, got=" ".join(repr(error).split())[:200],
                wanted="a data set of the Hugging Face hub with this split and text column",
                next_step="check the name, --dataset_config and data.text_column; or give a .txt, .jsonl or .parquet",
            ) from error  # fmt: skip


def open_text(name: str, config: str = "", split: str = "train", column: str = "text") -> TextSource:
    """Open text by name: a file, a folder of files, gs://bucket/file, else a data set of the hub."""
    if name.startswith("gs://"):
        return TextFiles([_with_known_suffix(download_bucket_file(name))], column)
    path = Path(name).expanduser()
    if files.is_folder(path):
        found = [path / entry for entry in files.names(path) if Path(entry).suffix.lower() in _SUFFIXES]
        if not found:
            raise SettingsError("The folder holds no text", where=path, wanted=f"files {', '.join(_SUFFIXES)}")
        return TextFiles(found, column)
    if files.is_file(path):
        return TextFiles([_with_known_suffix(path)], column)
    if path.suffix.lower() in _SUFFIXES:
        raise SettingsError("There is no such file", where=path, next_step="check the path of --dataset")
    return HubData(name, config, split, column)


def _with_known_suffix(path: Path) -> Path:
    if path.suffix.lower() not in _SUFFIXES:
        raise SettingsError("Text of an unknown kind", where=path, got=path.suffix or "no suffix",
                            wanted=", ".join(_SUFFIXES))  # fmt: skip
    return path
