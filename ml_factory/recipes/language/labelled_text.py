"""Texts with a label, from tab-separated files `Id, Text, Label`: reading, an overview, and a split by blocks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ml_factory.argument_checks import check_file_exists
from ml_factory.errors import FileError, SettingsError
from ml_factory.seeding import seeded_generator
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.mirror import fetch_file

COLUMNS = ("Id", "Text", "Label")
LARGEST = 1 << 30  # bytes of a file
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class LabelledTexts:
    """Rows of a file, in its order; the three are equally long."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def fingerprint(self) -> str:
        """Hash of all rows."""
        return fingerprint_json([self.ids, self.texts, self.labels])[:16]

    def select(self, positions: Sequence[int] | np.ndarray) -> "LabelledTexts":
        """Return the rows at these positions."""
        return LabelledTexts(*(tuple(column[int(at)] for at in positions)
                               for column in (self.ids, self.texts, self.labels)))  # fmt: skip


def read_labelled_texts(address: str) -> LabelledTexts:
    """Read a tab-separated file with a header line that names the columns Id, Text and Label, in any order and case.

    Nothing is quoted: a tab always ends a field. Other columns are ignored, and so are empty lines.

    address : a file, or gs://bucket/file.
    Raises SettingsError, FileError with the number of the first wrong line.
    """
    path = fetch_file(address) if "://" in address else check_file_exists(Path(address).expanduser())
    lines = [line.removesuffix(b"\r") for line in files.read(path, LARGEST).split(b"\n")]
    header = _text(lines[0].removeprefix(b"\xef\xbb\xbf"), path, 1).split("\t")
    names = [name.strip().lower() for name in header]
    if missing := [name for name in COLUMNS if names.count(name.lower()) != 1]:
        raise FileError(
            "The header lacks a column", where=f"{path}, line 1", got=" | ".join(header)[:100],
            wanted=f"{', '.join(COLUMNS)}, separated by tabs", next_step=f"name {missing[0]} once",
        )  # fmt: skip
    places, rows, seen = [names.index(name.lower()) for name in COLUMNS], [], {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        fields = _text(line, path, number).split("\t")
        if len(fields) != len(names):
            raise _wrong(path, number, f"{len(fields)} fields", f"{len(names)}, as the header has",
                         "replace tabs inside a text by blanks")  # fmt: skip
        row = [fields[at].strip() for at in places]
        for name, value in zip(COLUMNS, row, strict=True):
            if not value:
                raise _wrong(path, number, f"an empty {name}", "a value in every column", "fill it or delete the line")
        if row[0] in seen:
            raise _wrong(path, number, f"Id {row[0][:60]!r} as in line {seen[row[0]]}", "every Id once",
                         "delete one of the lines")  # fmt: skip
        seen[row[0]] = number
        rows.append(row)
    if not rows:
        raise FileError("The file has no rows", where=path, wanted="lines below the header")
    return LabelledTexts(*(tuple(column) for column in zip(*rows, strict=True)))


def _text(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _wrong(path, number, f"byte {line[error.start]:#04x} at place {error.start + 1}", "UTF-8",
                     "convert the file: iconv -t utf-8") from None  # fmt: skip


def _wrong(path: Path, number: int, got: str, wanted: str, next_step: str) -> FileError:
    return FileError("This line cannot be read", where=f"{path}, line {number}", got=got, wanted=wanted,
                     next_step=next_step)  # fmt: skip


def split_by_blocks(rows: LabelledTexts, validation: float, test: float) -> dict[str, LabelledTexts]:
    """Return train, validation and test: of each label's rows, in the order of the file, the first, next and last.

    Neighbouring rows are often about the same thing; in contiguous blocks few of them are on two sides.

    validation, test : shares of the rows. Raises SettingsError where a label has too few rows.
    """
    at: dict[str, list[int]] = {}
    for place, label in enumerate(rows.labels):
        at.setdefault(label, []).append(place)
    parts: dict[str, list[int]] = {name: [] for name in PARTS}
    for label, places in at.items():
        ends = [round(len(places) * (1 - validation - test)), round(len(places) * (1 - test)), len(places)]
        if not 0 < ends[0] < ends[1] < ends[2]:
            raise SettingsError("A label has too few rows to split", where=label[:60], got=f"{len(places)} rows",
                                wanted="one in each part", next_step="give --validation and --test files")  # fmt: skip
        for name, low, high in zip(PARTS, [0, *ends], ends, strict=False):
            parts[name] += places[low:high]
    return {name: rows.select(sorted(places)) for name, places in parts.items()}


def check_parts(parts: Mapping[str, LabelledTexts]) -> tuple[str, ...]:
    """Return the labels of the training rows, sorted. Raises SettingsError for one label, or others elsewhere."""
    labels = tuple(sorted(set(parts["train"].labels)))
    if len(labels) < 2:
        raise SettingsError("There is nothing to learn", where="train", got=f"one label, {labels[0][:60]!r}",
                            wanted="at least two")  # fmt: skip
    for name in PARTS[1:]:
        if other := sorted(set(parts[name].labels) - set(labels)):
            raise SettingsError("A label that no training row has", where=name, got=repr(other[0][:60]),
                                wanted=", ".join(label[:20] for label in labels[:20]))  # fmt: skip
    return labels


def overview(parts: Mapping[str, LabelledTexts]) -> dict[str, Any]:
    """Return counts, lengths, balance, and repeated texts of each part.

    seen_in_training : rows of another part whose text, but for case and blanks, is in the training rows as well.
    """
    trained = {_plain(text) for text in parts["train"].texts}
    found = {}
    for name, rows in parts.items():
        lengths = np.array([len(text) for text in rows.texts])
        words = np.array([len(text.split()) for text in rows.texts])
        found[name] = {
            "rows": len(rows), "labels": dict(sorted(Counter(rows.labels).items())),
            "characters": _quantiles(lengths), "words": _quantiles(words),
            "repeated": len(rows) - len({_plain(text) for text in rows.texts}),
        }  # fmt: skip
        if name != "train":
            found[name]["seen_in_training"] = sum(_plain(text) in trained for text in rows.texts)
    return found


def unseen_rows(parts: Mapping[str, LabelledTexts], name: str) -> np.ndarray:
    """Return which rows of this part have a text that no training row has, bool (N,)."""
    trained = {_plain(text) for text in parts["train"].texts}
    return np.array([_plain(text) not in trained for text in parts[name].texts])


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _quantiles(values: np.ndarray) -> dict[str, int]:
    least, median, high, most = np.percentile(values, [0, 50, 95, 100], method="lower").astype(int).tolist()
    return {"least": least, "median": median, "95%": high, "most": most}


def describe(found: Mapping[str, Any]) -> str:
    """Format an overview in one line a part."""
    lines = []
    for name, facts in found.items():
        counts = ", ".join(f"{label[:24]} {count:,}" for label, count in list(facts["labels"].items())[:8])
        size = facts["characters"]
        seen = f", {facts['seen_in_training']:,} seen in training" if "seen_in_training" in facts else ""
        lines.append(
            f"{name}: {facts['rows']:,} rows ({counts}); characters {size['least']} to {size['most']:,}, "
            f"median {size['median']}; {facts['repeated']:,} repeated{seen}"
        )
    return "\n".join(lines)


def made_up_texts(rows: int, seed: int) -> LabelledTexts:
    """Return made-up sentences of two labels, which differ in their words."""
    words = {"harbour": ["ship", "sail", "wave", "anchor", "tide", "rope", "captain", "port"],
             "kitchen": ["bread", "salt", "oven", "spoon", "butter", "pepper", "table", "cook"]}  # fmt: skip
    common = ["the", "a", "of", "and", "with", "near", "under", "some", "old", "new"]
    drawn, texts, labels = seeded_generator(seed, "made-up texts"), [], []
    for number in range(rows):
        label = ("harbour", "kitchen")[number % 2]
        count = int(drawn.integers(4, 14))
        pool = [words[label] if share < 0.4 else common for share in drawn.random(count)]
        pool[int(drawn.integers(count))] = words[label]
        texts.append(" ".join(one[int(drawn.integers(len(one)))] for one in pool))
        labels.append(label)
    return LabelledTexts(tuple(str(number) for number in range(rows)), tuple(texts), tuple(labels))
