"""XGBoost, LightGBM and CatBoost, trained in blocks that resume to the bit.

A booster that samples rows and columns and is continued from its model file draws other random numbers than one that
was never interrupted. So every run, interrupted or not, trains in blocks of fixed length. XGBoost and LightGBM take a
seed derived from the block's number and go on from the model as it was serialised. CatBoost keeps its generator in a
snapshot file of its own, which travels in the checkpoint as bytes.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from ml_factory.errors import FactoryError, SettingsError
from ml_factory.models.contract import (
    Estimator,
    FitResult,
    apply_limits,
    check_rows,
    check_same_run,
    cores,
    data_signature,
    differences,
    environment,
    make_settings,
    merged,
)
from ml_factory.seeding import derive_seed


@dataclass(frozen=True)
class BoosterSpec:
    """Settings of all three boosters.

    rounds : trees a class at most. block : rounds between two possible checkpoints. patience : rounds without a better
    validation loss before stopping, 0 for never. threads : 0 takes every core. row_sample, column_sample : share drawn
    for each tree.
    """

    rounds: int = 300
    block: int = 10
    learning_rate: float = 0.05
    depth: int = 5
    row_sample: float = 0.8
    column_sample: float = 0.8
    min_leaf: float = 20.0
    l2: float = 1.0
    patience: int = 30
    seed: int = 0
    threads: int = 0

    def __post_init__(self):
        for name, low in (("rounds", 1), ("block", 1), ("depth", 1), ("patience", 0), ("threads", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise SettingsError(
                    "Cannot train with this", where=name, got=repr(value), wanted=f"an integer >= {low}"
                )
        for name in ("learning_rate", "row_sample", "column_sample"):
            if not 0 < getattr(self, name) <= 1:
                raise SettingsError("Cannot train with this", where=name, got=getattr(self, name), wanted="in (0, 1]")
        for name in ("min_leaf", "l2"):
            if not getattr(self, name) >= 0:
                raise SettingsError("Cannot train with this", where=name, got=getattr(self, name), wanted=">= 0")

    @property
    def thread_count(self) -> int:
        """Threads as a number."""
        return self.threads or cores()


@dataclass
class Rows:
    """x_NF, classes 0..2 and weights."""

    x: np.ndarray
    target: np.ndarray
    weight: np.ndarray


class Grower(ABC):
    """A booster in the making. `part` is all it needs to go on, in bytes."""

    @abstractmethod
    def grow(self, first: int, until: int, seed: int) -> tuple[list[float], list[float]]:
        """Train rounds first..until; returns the training and validation log loss after each of them."""

    @abstractmethod
    def part(self) -> dict[str, bytes]:
        """What `restore` needs."""

    @abstractmethod
    def restore(self, part: Mapping[str, bytes], rounds: int) -> None:
        """Stand where `part` was taken, after that many rounds."""

    @abstractmethod
    def model(self, rounds: int) -> bytes:
        """The finished model of that many rounds, in the library's own format."""

    def close(self) -> None:  # noqa: B027 (most have nothing to give back)
        """Give back files and memory."""


class Booster(Estimator, ABC):
    """The common face of the three; each differs in its Grower and in how its model is read and asked."""

    library: str

    def __init__(self, **settings: Any):
        self.settings = make_settings(BoosterSpec, settings, where=self.name)
        self.n_features = 0
        self.best_round = 0
        self._bytes = b""
        self._predictor: Any = None

    def fit(self, x, y, sample_weight=None, *, validation=None, callbacks=(), checkpoints=None, limits=None):
        spec, limited = apply_limits(self.settings, limits)
        train = _rows(x, y, sample_weight, where="training")
        valid = None if validation is None else _rows(*validation)
        run, here = self._identity(spec, train, valid)
        saved = checkpoints.load() if checkpoints is not None else None
        nothing = {**run, "environment": here, "inexact": [], "rounds": 0, "history": [], "train": [], "val": []}
        progress = dict(saved["state"]) if saved else nothing
        check_same_run(progress, run)
        # Once continued elsewhere, always so: the reasons travel with the run.
        progress["inexact"] = merged(progress["inexact"], differences(progress["environment"], here))
        progress["environment"] = here
        result = FitResult(exact=not progress["inexact"], inexact=tuple(progress["inexact"]), limited=limited)
        result.resumed_from = len(progress["history"]) if saved else None
        if "finished" not in progress:
            grower = self._open(spec, train, valid)
            try:
                self._blocks(spec, grower, progress, callbacks, checkpoints)
            finally:
                grower.close()
        self.load_state(progress["finished"])
        result.history, result.best_round = list(progress["history"]), self.best_round
        result.best_epoch = -(-self.best_round // spec.block)
        result.stopped_early = progress["rounds"] < spec.rounds
        return result

    def _identity(self, spec: BoosterSpec, train: Rows, valid: Rows | None) -> tuple[dict, dict]:
        arrays = [array for part in (train, valid) if part for array in (part.x, part.target, part.weight)]
        settings = {name: value for name, value in asdict(spec).items() if name != "threads"}
        run = {"model": self.name, "settings": settings, "data": data_signature(train.x.shape[1], *arrays)}
        return run, environment(threads=spec.thread_count, **{self.library: version(self.library)})

    def _blocks(self, spec: BoosterSpec, grower: Grower, progress: dict, callbacks, checkpoints) -> None:
        if progress["rounds"]:
            grower.restore(progress["part"], progress["rounds"])
        while progress["rounds"] < spec.rounds and not _out_of_patience(spec, progress):
            began, first = time.perf_counter(), progress["rounds"]
            until = min(first + spec.block, spec.rounds)
            block = first // spec.block
            train_loss, val_loss = grower.grow(first, until, derive_seed(spec.seed, self.name, "block", block))
            progress["train"] = progress["train"] + [float(loss) for loss in train_loss]
            progress["val"] = progress["val"] + [float(loss) for loss in val_loss]
            metrics = {
                "train_loss": progress["train"][-1],
                "val_loss": progress["val"][-1] if progress["val"] else None,
                "seconds": time.perf_counter() - began,
            }
            progress["rounds"] = until
            progress["history"] = [*progress["history"], {"epoch": block + 1, **metrics}]
            if checkpoints is not None and checkpoints.due():
                checkpoints.save({**progress, "part": grower.part()}, metrics=metrics)
            for callback in callbacks:
                callback(block + 1, dict(metrics))
        best = int(np.argmin(progress["val"])) + 1 if progress["val"] else progress["rounds"]
        progress["finished"] = self._state(grower.model(best), best, progress["data"]["features"])
        progress.pop("part", None)
        if checkpoints is not None:
            checkpoints.save(progress, metrics=progress["history"][-1], force=True)

    def predict_proba(self, x) -> np.ndarray:
        if self._predictor is None:
            raise FactoryError("The model is not fitted", where=self.name, next_step="call fit or load first")
        x = _matrix(x, "x")
        if x.shape[1] != self.n_features:
            raise FactoryError("Wrong number of features", where=self.name, got=x.shape[1], wanted=self.n_features)
        if not len(x):
            return np.empty((0, 3))
        p = np.asarray(self._predict(x), dtype=np.float64)
        return p / p.sum(axis=1, keepdims=True)

    @abstractmethod
    def _open(self, spec: BoosterSpec, train: Rows, valid: Rows | None) -> Grower:
        """The library's Grower."""

    @abstractmethod
    def _read(self, model: bytes) -> Any:
        """The library's object behind a finished model."""

    @abstractmethod
    def _predict(self, x: np.ndarray) -> np.ndarray:
        """Probabilities (N, 3) from it."""

    def get_state(self) -> dict:
        return self._state(self._bytes, self.best_round, self.n_features)

    def _state(self, model: bytes, best: int, n_features: int) -> dict:
        return {
            "model": self.name,
            "settings": asdict(self.settings),
            "library": f"{self.library} {version(self.library)}",
            "n_features": n_features,
            "best_round": best,
            "booster": model,
        }

    def load_state(self, state):
        state = self._own(state)
        self.settings = make_settings(BoosterSpec, state["settings"], where=self.name)
        self.n_features, self.best_round = int(state["n_features"]), int(state["best_round"])
        self._bytes = bytes(state["booster"])
        self._predictor = self._read(self._bytes) if self._bytes else None
        return self


def _out_of_patience(spec: BoosterSpec, progress: Mapping) -> bool:
    val = progress["val"]
    return bool(val) and spec.patience > 0 and len(val) - (int(np.argmin(val)) + 1) >= spec.patience


def _matrix(x, where: str) -> np.ndarray:
    """x_NF as contiguous float32; NaN is a missing value, an infinity is refused."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    if x.ndim != 2:
        raise FactoryError("Boosters read rows of features", where=where, got=f"shape {x.shape}", wanted="(N, F)")
    if np.isinf(x).any():
        row, column = np.argwhere(np.isinf(x))[0]
        raise FactoryError("Infinite feature", where=f"{where}, row {row}, column {column}", wanted="finite or NaN")
    return x


def _rows(x, y, weight=None, where: str = "validation") -> Rows:
    x = _matrix(x, f"{where} x")
    return Rows(x, *check_rows(len(x), y, weight, where=where))
