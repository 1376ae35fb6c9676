"""Rows of tabular models, checked and weighted."""

import zlib
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import numpy as np

from ml_factory.errors import CheckpointError, FactoryError, refuse_damaged_content
from ml_factory.models.base import CLASSES, check_settings
from ml_factory.models.session_clock_offset import check_clock_offset_settings
from ml_factory.process_identity import cores

CLASS_WEIGHTS = ("none", "balanced")
_DAMAGED, _NEXT_STEP = "This training's checkpoint is damaged", "start a new run (FRESH=True, --fresh)"


@dataclass
class TabularRows:
    """Checked rows of a tabular model.

    x : float32 (N, F).
    target : classes 0..2.
    weight : float64 (N,).
    offset : scores (N, 3) that the model starts from; None: none.
    """

    x: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    offset: np.ndarray | None = None


def to_tabular_matrix(x, where: str) -> np.ndarray:
    """Return x_NF as contiguous float32; NaN is a missing value, an infinity is refused."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    if x.ndim != 2:
        raise FactoryError("Tabular models read rows of features", where=where, got=f"shape {x.shape}", wanted="(N, F)")
    if np.isinf(x).any():
        row, column = np.argwhere(np.isinf(x))[0]
        raise FactoryError("Infinite feature", where=f"{where}, row {row}, column {column}", wanted="finite or NaN")
    return x


def check_tabular_rows(x, y, weight=None, where: str = "validation") -> TabularRows:
    """Check rows and convert labels -1, 0, +1 to classes 0..2 in `target`."""
    x = to_tabular_matrix(x, f"{where} x")
    return TabularRows(x, *check_training_rows(len(x), y, weight, where=where))


def apply_tabular_class_weights(
    train: TabularRows, valid: TabularRows | None, class_weight: str
) -> tuple[TabularRows, TabularRows | None]:
    """Multiply the weights of both parts by class factors of the training rows.

    balanced : each class of the training rows gets the same share of their total weight. Validation rows get the same
        factors, so that early stopping uses the loss of training.
    """
    if class_weight == "none":
        return train, valid
    factor = balanced_class_factors(train.target, train.weight)

    def times(rows: TabularRows) -> TabularRows:
        return TabularRows(rows.x, rows.target, rows.weight * factor[rows.target])

    return times(train), None if valid is None else times(valid)


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


def refuse_damaged_training() -> AbstractContextManager:
    """Raise CheckpointError inside a `with` where a training's state is not what it was saved as."""
    return refuse_damaged_content(CheckpointError, _DAMAGED, next_step=_NEXT_STEP)


MACHINE_SETTINGS = ("threads", "device")  # a run may resume with others, and is then marked


@dataclass(frozen=True)
class TabularSpec:
    """Settings of every tabular model.

    rounds : trees per class, or steps of the linear fit, at most.
    block : rounds between two possible checkpoints.
    patience : rounds without a better validation loss before stopping, counted across blocks; 0 for never.
    offset_column : input that grows evenly through the session, of the `SessionClockOffset` the model starts from;
        -1 for none.
    offset_bars : bars before the session's end with cells of their own in the offset.
    class_weight : none, or balanced (see `apply_tabular_class_weights`).
    threads : number of threads; 0 for every core.
    """

    rounds: int = 300
    block: int = 10
    l2: float = 1.0
    patience: int = 30
    class_weight: str = "none"
    seed: int = 0
    threads: int = 0
    offset_column: int = -1
    offset_bars: int = 0

    def __post_init__(self):
        check_settings(
            self, rounds="[1, inf)", block="[1, inf)", patience="[0, inf)", threads="[0, inf)", l2="[0, inf)",
            class_weight=CLASS_WEIGHTS,
        )  # fmt: skip
        check_clock_offset_settings(self.offset_column, self.offset_bars)

    def identity(self) -> dict:
        """The settings that make it another run when they change."""
        return {name: value for name, value in asdict(self).items() if name not in MACHINE_SETTINGS}

    @property
    def thread_count(self) -> int:
        """Threads as a number."""
        return self.threads or cores()


@dataclass(frozen=True)
class TabularBoosterSpec(TabularSpec):
    """Settings of all boosters.

    row_sample, column_sample : share drawn for each tree.
    min_leaf : rows a leaf holds at least.
    """

    learning_rate: float = 0.05
    depth: int = 3
    row_sample: float = 0.8
    column_sample: float = 0.8
    min_leaf: float = 20.0

    def __post_init__(self):
        super().__post_init__()
        share = "(0, 1]"
        check_settings(
            self, depth="[1, inf)", min_leaf="[0, inf)", learning_rate=share, row_sample=share, column_sample=share
        )
