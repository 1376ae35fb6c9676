"""Split of a row by time, as a finished model stores it: train, validation, test, or new."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ml_factory.errors import CheckpointError, FactoryError

OUT_OF_SAMPLE = ("test", "new")


def times_of_splits(known: pd.DatetimeIndex, splits: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return ISO times of the first validation row, the first test row and the last labelled row, for an artifact's
    facts.

    known : index of the labels.
    splits : split -> positions into it.
    """
    first = {name: known[splits[name][0]].isoformat() for name in ("validation", "test")}
    return first | {"last_label": known[-1].isoformat()}


def split_by_times(index: pd.DatetimeIndex, times: Mapping[str, str]) -> np.ndarray:
    """Return the split of each moment: object (N,) of train, validation, test, new (after the last labelled row).

    Purged rows between two splits, and rows without a label, belong to the split before: no row that an overlapping
    training label covers is called out of sample.
    """
    names = np.full(len(index), "train", dtype=object)
    for name in ("validation", "test"):
        names[index >= pd.Timestamp(times[name])] = name
    names[index > pd.Timestamp(times["last_label"])] = "new"
    return names


def add_prediction_splits(frame: pd.DataFrame, facts: Mapping, all_rows: bool, where: object = None) -> pd.DataFrame:
    """Add the columns `split` and `run_id`, and keep out-of-sample rows (test and new) only, unless `all_rows`.

    facts : of a finished model: symbol, run_id, split_times.
    where : file or folder of the model, for the message.
    Raises FactoryError where no row is out of sample, CheckpointError for a model of an older version.
    """
    if "split_times" not in facts:
        raise CheckpointError(
            "This model stores no end of its training rows", where=where, got="one of an older version",
            next_step="train it again",
        )  # fmt: skip
    frame = frame.assign(split=split_by_times(frame.index, facts["split_times"]), run_id=facts["run_id"])
    if all_rows and len(frame):
        return frame
    kept = frame[np.isin(frame["split"].to_numpy(dtype=object), OUT_OF_SAMPLE)]
    if not len(kept):
        raise FactoryError(
            "No row of these bars is out of sample", where=facts["symbol"],
            got=f"rows until {frame.index[-1]}" if len(frame) else "no rows",
            wanted=f"rows from {facts['split_times']['test']} on, where the test rows begin",
            next_step="newer bars, or --all (all_rows=True) for rows the model was fitted or chosen on",
        )  # fmt: skip
    return kept
