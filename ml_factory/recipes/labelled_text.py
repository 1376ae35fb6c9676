"""Texts with a label, as tables of the columns Id, Text, Label: reading, overview, split by blocks, baselines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_file_exists
from ml_factory.errors import FileError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.seeding import seeded_generator
from ml_factory.storage.files import files
from ml_factory.storage.mirror import fetch_file

text_features, linear_model, tree = (
    LazyModule("sklearn.feature_extraction.text"),
    LazyModule("sklearn.linear_model"),
    LazyModule("sklearn.tree"),
)
COLUMNS = ["Id", "Text", "Label"]
PARTS = ("train", "validation", "test")


def read_labelled_texts(address: str) -> pd.DataFrame:
    """Read a tab-separated file with a header line that names the columns Id, Text and Label, in any order and case.

    Nothing is quoted: a tab always ends a field. Other columns are ignored, and so are empty lines.

    address : a file, or gs://bucket/file.
    Raises SettingsError, FileError with the number of the first wrong line.
    """
    path = fetch_file(address) if "://" in address else check_file_exists(Path(address).expanduser())

    def wrong(number: int, got: str, wanted: str) -> FileError:
        return FileError("This line cannot be read", where=f"{path}, line {number}", got=got, wanted=wanted,
                         next_step="correct the line, or delete it")  # fmt: skip

    content = files.read(path, 1 << 30)
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise wrong(number, f"byte {content[error.start]:#04x}", "UTF-8 (iconv -t utf-8)") from None
    names = [name.strip().lower() for name in lines[0].split("\t")]
    if missing := [name for name in COLUMNS if names.count(name.lower()) != 1]:
        raise wrong(1, " | ".join(names)[:100], f"a header that names {missing[0]} once, separated by tabs")
    places, rows, seen = [names.index(name.lower()) for name in COLUMNS], [], dict[str, int]()
    for number, line in enumerate(lines[1:], 2):
        values = line.rstrip("\r").split("\t")
        if not line.strip():
            continue
        if len(values) != len(names):
            raise wrong(number, f"{len(values)} fields", f"{len(names)}, as the header has")
        row = [values[at].strip() for at in places]
        if "" in row:
            raise wrong(number, f"an empty {COLUMNS[row.index('')]}", "a value in every column")
        if row[0] in seen:
            raise wrong(number, f"Id {row[0][:60]!r} as in line {seen[row[0]]}", "every Id once")
        seen[row[0]] = number
        rows.append(row)
    if not rows:
        raise FileError("The file has no rows", where=path, wanted="lines below the header")
    return pd.DataFrame(rows, columns=COLUMNS, dtype=object)


def split_by_blocks(rows: pd.DataFrame, validation: float, test: float) -> dict[str, pd.DataFrame]:
    """Return train, validation and test: of each label's rows, in the order of the file, the first, next and last.

    Neighbouring rows are often about the same thing; in contiguous blocks few of them are on two sides.

    validation, test : shares of the rows. Raises SettingsError where a label has too few rows.
    """
    part = pd.Series("", rows.index, dtype=object)
    for label, places in rows.groupby("Label", sort=False).indices.items():
        ends = [0, *(round(len(places) * share) for share in (1 - validation - test, 1 - test, 1))]
        if min(np.diff(ends)) < 1:
            raise SettingsError("A label has too few rows to split", where=str(label)[:60], got=f"{len(places)} rows",
                                wanted="one in each part", next_step="give --validation and --test files")  # fmt: skip
        for name, low, high in zip(PARTS, ends, ends[1:], strict=False):
            part.iloc[places[low:high]] = name
    return {name: rows[part == name].reset_index(drop=True) for name in PARTS}


def check_parts(parts: Mapping[str, pd.DataFrame]) -> tuple[str, ...]:
    """Return the labels of the training rows, sorted. Raises SettingsError for one label, or others elsewhere."""
    labels = tuple(sorted(parts["train"]["Label"].unique()))
    if len(labels) < 2:
        raise SettingsError("There is nothing to learn", where="train", got=f"one label, {labels[0][:60]!r}",
                            wanted="at least two")  # fmt: skip
    for name in PARTS[1:]:
        if other := sorted(set(parts[name]["Label"]) - set(labels)):
            raise SettingsError("A label that no training row has", where=name, got=repr(other[0][:60]),
                                wanted=", ".join(label[:20] for label in labels[:20]))  # fmt: skip
    return labels


def overview(parts: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """Return counts, lengths, balance, and repeated texts of each part.

    seen_in_training : rows of another part whose text, but for case and blanks, is in the training rows as well.
    """
    found = {}
    for name, rows in parts.items():
        found[name] = {
            "rows": len(rows), "labels": rows["Label"].value_counts().sort_index().to_dict(),
            "characters": _quantiles(rows["Text"].str.len()), "words": _quantiles(rows["Text"].str.split().str.len()),
            "repeated": int(_plain(rows).duplicated().sum()),
        }  # fmt: skip
        if name != "train":
            found[name]["seen_in_training"] = int((~unseen_rows(parts, name)).sum())
    return found


def unseen_rows(parts: Mapping[str, pd.DataFrame], name: str) -> np.ndarray:
    """Return which rows of this part have a text that no training row has, bool (N,)."""
    return ~_plain(parts[name]).isin(_plain(parts["train"])).to_numpy()


def _plain(rows: pd.DataFrame) -> pd.Series:
    return rows["Text"].str.lower().str.split().str.join(" ")


def _quantiles(values: pd.Series) -> dict[str, int]:
    found = np.percentile(values, [0, 50, 95, 100], method="lower").astype(int).tolist()
    return dict(zip(("least", "median", "95%", "most"), found, strict=True))


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


def baseline_accuracies(train: pd.DataFrame, test: pd.DataFrame) -> dict[str, float]:
    """Return the accuracy on the test rows of each baseline, fitted on the training rows.

    majority : the commonest label. length : a small tree on the number of characters and words. bag of words : a
    logistic regression on which words and pairs of words a text has.
    """
    lengths, others = (np.array([(len(one), len(one.split())) for one in rows["Text"]]) for rows in (train, test))
    by_length = tree.DecisionTreeClassifier(max_leaf_nodes=8, random_state=0).fit(lengths, train["Label"])
    words = text_features.TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]")
    bag = linear_model.LogisticRegression(C=10.0, max_iter=1000).fit(words.fit_transform(train["Text"]), train["Label"])
    predicted = {
        "majority": [train["Label"].value_counts().index[0]] * len(test), "length": by_length.predict(others).tolist(),
        "bag of words": bag.predict(words.transform(test["Text"])).tolist(),
    }  # fmt: skip
    truth = test["Label"].to_numpy()
    return {name: float(np.mean(truth == np.array(labels, object))) for name, labels in predicted.items()}


def made_up_texts(rows: int, seed: int) -> pd.DataFrame:
    """Return made-up sentences of two labels, which differ in their words."""
    words = {"harbour": ["ship", "sail", "wave", "anchor", "tide", "rope", "captain", "port"],
             "kitchen": ["bread", "salt", "oven", "spoon", "butter", "pepper", "table", "cook"]}  # fmt: skip
    common = ["the", "a", "of", "and", "with", "near", "under", "some", "old", "new"]
    drawn, made = seeded_generator(seed, "made-up texts"), []
    for number in range(rows):
        label = ("harbour", "kitchen")[number % 2]
        count = int(drawn.integers(4, 14))
        pool = [words[label] if share < 0.4 else common for share in drawn.random(count)]
        pool[int(drawn.integers(count))] = words[label]
        made.append([str(number), " ".join(one[int(drawn.integers(len(one)))] for one in pool), label])
    return pd.DataFrame(made, columns=COLUMNS, dtype=object)
