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
from ml_factory.storage.files import files, remote_address
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
    remote = remote_address(address)
    path = fetch_file(remote) if remote else check_file_exists(Path(address).expanduser(), "one TSV file")
    rows = dict[str, list[str]]()
    try:
        header, *lines = files.read(path, 1 << 30).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise FileError("The file is no UTF-8", where=f"{path}, line {line}", got=str(error)[:200],
                        next_step="iconv -t utf-8 converts it") from None  # fmt: skip
    names = [name.strip().lower() for name in header.split("\t")]
    if missing := [name for name in COLUMNS if names.count(name.lower()) != 1]:
        raise FileError("The header does not name the columns", where=f"{path}, line 1", got=header[:100],
                        wanted=f"{missing[0]} once, separated by tabs", next_step="correct the line")  # fmt: skip
    for number, line in enumerate(lines, 2):
        values = [value.strip() for value in line.split("\t")]
        own = [values[at] for at in (names.index(name.lower()) for name in COLUMNS) if at < len(values)]
        if line.strip() and (len(values) != len(names) or "" in own or own[0] in rows):
            raise FileError(
                "This line cannot be read", where=f"{path}, line {number}", got=repr(line[:100]),
                wanted=f"{len(names)} fields as in the header, no empty Id, Text or Label, and each Id once",
                next_step="correct the line, or delete it",
            )  # fmt: skip
        if line.strip():
            rows[own[0]] = own
    if not rows:
        raise FileError("The file has no rows", where=path, wanted="lines below the header")
    return pd.DataFrame(rows.values(), columns=COLUMNS, dtype=object)


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
    """Return counts and lengths of each part.

    seen_in_training : rows of another part whose text, but for case and blanks, is in the training rows as well.
    """
    seen = {name: {"seen_in_training": int((~unseen_rows(parts, name)).sum())} for name in parts if name != "train"}
    return {
        name: {
            "rows": len(rows), "labels": rows["Label"].value_counts().sort_index().to_dict(),
            "median_characters": float(rows["Text"].str.len().median()),
        } | seen.get(name, {}) for name, rows in parts.items()
    }  # fmt: skip


def unseen_rows(parts: Mapping[str, pd.DataFrame], name: str) -> np.ndarray:
    """Return which rows of this part have a text that no training row has, bool (N,)."""
    return ~_plain(parts[name]).isin(_plain(parts["train"])).to_numpy()


def _plain(rows: pd.DataFrame) -> pd.Series:
    return rows["Text"].str.lower().str.split().str.join(" ")


def describe(found: Mapping[str, Any]) -> str:
    """Format an overview in one line a part."""
    return "\n".join(
        f"{name}: {one['rows']:,} rows ("
        + ", ".join(f"{label[:24]} {count:,}" for label, count in list(one["labels"].items())[:8])
        + f"); characters, median {one['median_characters']:.0f}"
        + (f"; {one['seen_in_training']:,} seen in training" if name != "train" else "")
        for name, one in found.items()
    )


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
