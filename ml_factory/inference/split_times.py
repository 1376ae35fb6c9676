"""Split of a row by time, as a finished model stores it: train, validation, test, or new."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ml_factory.errors import CheckpointError
from ml_factory.storage.artifact_registry import Artifact

OUT_OF_SAMPLE = ("test", "new")


def times_of_splits(known: pd.DatetimeIndex, splits: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return ISO times of the first validation row, the first test row and the last labelled row, for an artifact's
    facts.

    known : index of the labels.
    splits : split -> positions into it.
    """
    first = {name: known[splits[name][0]].isoformat() for name in ("validation", "test")}
    return first | {"last_label": known[-1].isoformat()}


def _split_by_times(index: pd.DatetimeIndex, times: Mapping[str, str]) -> np.ndarray:
    """Return the split of each moment: object (N,) of train, validation, test, new (after the last labelled row).

    Purged rows between two splits, and rows without a label, belong to the split before: no row that an overlapping
    training label covers is called out of sample.
    """
    names = np.full(len(index), "train", dtype=object)
    for name in ("validation", "test"):
        names[index >= pd.Timestamp(times[name])] = name
    names[index > pd.Timestamp(times["last_label"])] = "new"
    return names


def split_by_model_times(artifact: Artifact, index: pd.DatetimeIndex) -> np.ndarray:
    """Return `_split_by_times` for the model's own split. Raises CheckpointError for a model of an older version."""
    if "split_times" not in artifact.facts:
        raise CheckpointError(
            "This model stores no end of its training rows", where=artifact.path, got="one of an older version",
            next_step="train it again",
        )  # fmt: skip
    return _split_by_times(index, artifact.facts["split_times"])
