"""Which part of time a row stands in, seen from a finished model: train, validation, test, or new."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ml_factory.errors import CheckpointError
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.workflows.dataset import Dataset

OUT_OF_SAMPLE = ("test", "new")


def split_times(data: Dataset) -> dict[str, str]:
    """ISO times of the first validation row, the first test row and the last labelled row, stored with an artifact."""
    known = data.labels.index
    first = {name: known[data.splits[name][0]].isoformat() for name in ("validation", "test")}
    return first | {"last_label": known[-1].isoformat()}


def split_at(index: pd.DatetimeIndex, times: Mapping[str, str]) -> np.ndarray:
    """The part of each moment: object (N,) of train, validation, test, new (after the last labelled row).

    Rows between two parts, whose labels reach across the edge (purged), and rows without a label belong to the part
    before: nothing that a model may have learnt from, even by an overlapping label, is called out of sample.
    """
    names = np.full(len(index), "train", dtype=object)
    for name in ("validation", "test"):
        names[index >= pd.Timestamp(times[name])] = name
    names[index > pd.Timestamp(times["last_label"])] = "new"
    return names


def split_of_rows(artifact: Artifact, index: pd.DatetimeIndex) -> np.ndarray:
    """`split_at` for the model's own split. Raises CheckpointError for a model of a version that did not store it."""
    if "split_times" not in artifact.facts:
        raise CheckpointError(
            "This model does not say where its training rows end", where=artifact.path, got="one of an older version",
            next_step="train it again",
        )  # fmt: skip
    return split_at(index, artifact.facts["split_times"])
