"""Rows that models learn from: checked labels and weights, balanced classes, and a checksum."""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ml_factory.errors import FactoryError

CLASSES = (-1, 0, 1)


@dataclass
class TrainingRows:
    """Checked rows of a fit.

    x : float32 (N, F) of tabular models, `Windows` of networks.
    target : classes 0..2.
    weight : float64 (N,).
    offset : scores (N, 3) that the model starts from; None: none.
    """

    x: Any
    target: np.ndarray
    weight: np.ndarray
    offset: np.ndarray | None = None


def balanced_class_factors(target: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return factors, float64 (3,), that balance the classes' shares of these rows' weight; 1 for an absent class."""
    held = np.bincount(target, weight, minlength=len(CLASSES))
    present = held > 0
    return np.where(present, held.sum() / (present.sum() * np.where(present, held, 1.0)), 1.0)


def check_training_rows(n_x: int, y, weight, *, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (labels 0..2 int64, weights float64) for n_x rows. Raises FactoryError for rows that cannot be learned
    from.
    """
    target = labels_to_class_index(y, where=f"{where} y")
    weight = np.ones(len(target)) if weight is None else np.asarray(weight, dtype=np.float64)
    if not n_x == len(target) == len(weight):
        raise FactoryError("Rows do not match", where=where, got=f"{n_x} x, {len(target)} y, {len(weight)} weights")
    if not (np.isfinite(weight).all() and (weight >= 0).all()):
        raise FactoryError("Weights must be finite and not negative", where=where)
    if len(np.unique(target[weight > 0])) < 2 and where == "training":
        raise FactoryError(
            "Training rows with weight hold fewer than two classes",
            got=f"{len(target)} rows",
            next_step="take more rows, another fold or a shorter horizon",
        )
    if not weight.sum() > 0:
        raise FactoryError("No row has weight", where=where, got=f"{len(target)} rows")
    return target, weight


def labels_to_class_index(y, *, where: str = "y") -> np.ndarray:
    """Convert labels -1, 0, 1 to int64 0, 1, 2."""
    y = np.asarray(y)
    if y.ndim != 1:
        raise FactoryError("Labels must be one column", where=where, got=f"shape {y.shape}", wanted="(N,)")
    strange = ~np.isin(y, CLASSES)
    if strange.any():
        raise FactoryError(
            "Unknown label", where=f"{where}, row {int(strange.argmax())}", got=y[strange][0], wanted=CLASSES
        )
    return y.astype(np.int64) + 1


def training_data_checksum(n_features: int, *arrays: np.ndarray) -> dict:
    """Return the identity of training data: lengths of the arrays and a checksum of their bytes."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, checksum)
    return {"features": int(n_features), "rows": [len(array) for array in arrays], "checksum": checksum}
