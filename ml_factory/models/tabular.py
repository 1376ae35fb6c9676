"""XGBoost, LightGBM, CatBoost and a linear baseline, trained in blocks that resume to the bit.

A booster that samples rows and columns and is continued from its model file draws other random numbers than one that
was never interrupted. So every run, interrupted or not, trains in blocks of fixed length. XGBoost and LightGBM take a
seed derived from the block's number and start from the scores that the blocks before gave each row, which a run that
goes on computes again to the same bits. CatBoost keeps its generator in a snapshot file of its own, which travels in
the checkpoint as bytes. The linear model draws nothing.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ml_factory.cores import cores
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.models.contract import (
    Estimator,
    FitResult,
    apply_limits,
    check_same_run,
    data_signature,
    differences,
    environment,
    make_settings,
    merged,
    remind,
)
from ml_factory.models.tabular_data import BinnedData, Rows, check_class_weight, matrix, read_rows, reweighed
from ml_factory.seeding import derive_seed

DEVICES = ("auto", "cpu", "cuda")
_MACHINE = ("threads", "device")  # settings that say where, not what: a run may go on elsewhere, and says so


@dataclass(frozen=True)
class BlockSpec:
    """What every tabular model is told.

    rounds : trees a class, or steps of the linear fit, at most. block : rounds between two possible checkpoints.
    patience : rounds without a better validation loss before stopping, counted across blocks; 0 for never.
    class_weight : none, or balanced (see `reweighed`). threads : 0 takes every core.
    """

    rounds: int = 300
    block: int = 10
    l2: float = 1.0
    patience: int = 30
    class_weight: str = "none"
    seed: int = 0
    threads: int = 0

    def __post_init__(self):
        check_class_weight(self.class_weight)
        self._whole("rounds", 1)
        self._whole("block", 1)
        self._whole("patience", 0)
        self._whole("threads", 0)
        self._at_least_0("l2")

    def _whole(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or value < low:
            raise SettingsError("Cannot train with this", where=name, got=repr(value), wanted=f"an integer >= {low}")

    def _at_least_0(self, name: str) -> None:
        if not getattr(self, name) >= 0:
            raise SettingsError("Cannot train with this", where=name, got=getattr(self, name), wanted=">= 0")

    @property
    def thread_count(self) -> int:
        """Threads as a number."""
        return self.threads or cores()


@dataclass(frozen=True)
class BoosterSpec(BlockSpec):
    """Settings of all three boosters.

    row_sample, column_sample : share drawn for each tree. min_leaf : rows a leaf holds at least.
    device : auto (a GPU where there is one), cpu or cuda. Equal to the bit after an interruption is promised on the
        cpu alone; results of a GPU carry the mark.
    """

    learning_rate: float = 0.05
    depth: int = 5
    row_sample: float = 0.8
    column_sample: float = 0.8
    min_leaf: float = 20.0
    device: str = "auto"

    def __post_init__(self):
        super().__post_init__()
        self._whole("depth", 1)
        self._at_least_0("min_leaf")
        for name in ("learning_rate", "row_sample", "column_sample"):
            if not 0 < getattr(self, name) <= 1:
                raise SettingsError("Cannot train with this", where=name, got=getattr(self, name), wanted="in (0, 1]")
        if self.device not in DEVICES:
            raise SettingsError("Cannot train with this", where="device", got=repr(self.device), wanted=DEVICES)


def gpu_present(devices: Path = Path("/dev")) -> bool:
    """Whether this process is shown an NVIDIA GPU; no library is asked, so none is loaded and none pretends."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return first not in ("", "-1") and any(devices.glob("nvidia[0-9]*"))


class Grower(ABC):
    """A model in the making. `part` is all it needs to go on, in bytes and arrays."""

    @abstractmethod
    def grow(self, first: int, until: int, seed: int) -> tuple[list[float], list[float]]:
        """Train rounds first..until; returns the training and validation log loss after each of them."""

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """What `restore` needs."""

    @abstractmethod
    def restore(self, part: Mapping[str, Any], rounds: int) -> None:
        """Stand where `part` was taken, after that many rounds."""

    @abstractmethod
    def model(self, rounds: int) -> Any:
        """The finished model of that many rounds: bytes in the library's own format, or arrays."""

    def close(self) -> None:  # noqa: B027 (most have nothing to give back)
        """Give back files and memory."""


class Tabular(Estimator, ABC):
    """The common face; a model differs in its Grower, and in how what it fitted is read and asked.

    library : the package whose version its bits depend on. gpu : whether `device="auto"` takes a GPU.
    """

    Spec: type[BlockSpec] = BoosterSpec
    library: str
    gpu: bool = True

    def __init__(self, **settings: Any):
        self.settings = make_settings(self.Spec, settings, where=self.name)
        self.n_features = 0
        self.best_round = 0
        self._fitted: Any = None
        self._predictor: Any = None

    def fit(
        self, x, y, sample_weight=None, *, validation=None, callbacks=(), checkpoints=None, limits=None, binned=None
    ):
        """As of `Estimator.fit`; binned : a `BinnedData` shared by fits on the same rows, other seeds and settings."""
        spec, limited = apply_limits(self.settings, limits)
        valid = None if validation is None else read_rows(*validation)
        train, valid = reweighed(read_rows(x, y, sample_weight, where="training"), valid, spec.class_weight)
        run, here = self._identity(spec, train, valid)
        saved = checkpoints.load() if checkpoints is not None else None
        nothing = {**run, "environment": here, "inexact": [], "rounds": 0, "history": [], "train": [], "val": []}
        progress = dict(saved["state"]) if saved else nothing
        check_same_run(progress, run)
        # Once continued elsewhere, always so: the reasons travel with the run.
        reasons = [*differences(progress["environment"], here), *self._promises(spec)]
        progress["inexact"] = merged(progress["inexact"], reasons)
        progress["environment"] = here
        result = FitResult(exact=not progress["inexact"], inexact=tuple(progress["inexact"]), limited=limited)
        result.resumed_from = len(progress["history"]) if saved else None
        remind(callbacks, progress["history"])
        if "finished" not in progress:
            rows = {"data": run["data"], "device": here["device"]}
            with (binned or BinnedData()).lease(self.name, rows, lambda: self._bin(spec, train, valid)) as bins:
                grower = self._open(spec, train, valid, bins)
                try:
                    self._blocks(spec, grower, progress, callbacks, checkpoints)
                finally:
                    grower.close()
        self.load_state(progress["finished"])
        result.history, result.best_round = list(progress["history"]), self.best_round
        result.best_epoch = -(-self.best_round // spec.block)
        result.stopped_early = progress["rounds"] < spec.rounds
        return result

    def _identity(self, spec: BlockSpec, train: Rows, valid: Rows | None) -> tuple[dict, dict]:
        arrays = [array for part in (train, valid) if part for array in (part.x, part.target, part.weight)]
        settings = {name: value for name, value in asdict(spec).items() if name not in _MACHINE}
        run = {"model": self.name, "settings": settings, "data": data_signature(train.x.shape[1], *arrays)}
        device = "cuda" if self._on_gpu(spec) else "cpu"
        return run, environment(threads=spec.thread_count, device=device, **{self.library: version(self.library)})

    def _on_gpu(self, spec: BlockSpec) -> bool:
        device = getattr(spec, "device", "cpu")
        return device == "cuda" or (device == "auto" and self.gpu and gpu_present())

    def _promises(self, spec: BlockSpec) -> list[str]:
        """What keeps a run that is interrupted from being promised to the bit."""
        return [f"device: {self.name} on a GPU is not promised to the bit"] if self._on_gpu(spec) else []

    def _blocks(self, spec: BlockSpec, grower: Grower, progress: dict, callbacks, checkpoints) -> None:
        if progress["rounds"]:
            grower.restore(progress["part"], progress["rounds"])
        while progress["rounds"] < spec.rounds and patience_end(progress["val"], spec.patience) is None:
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
        heard = progress["val"][: patience_end(progress["val"], spec.patience)]
        best = int(np.argmin(heard)) + 1 if heard else progress["rounds"]
        progress["finished"] = self._state(grower.model(best), best, progress["data"]["features"])
        progress.pop("part", None)
        if checkpoints is not None:
            checkpoints.save(progress, metrics=progress["history"][-1], force=True)

    def predict_proba(self, x) -> np.ndarray:
        x = self._asked(x)
        if not len(x):
            return np.empty((0, 3))
        p = np.asarray(self._predict(x), dtype=np.float64)
        return p / p.sum(axis=1, keepdims=True)

    def importances(self) -> np.ndarray:
        """float64 (F,), summing to 1 (to 0 where nothing was learnt): what each feature gave while training."""
        self._asked(np.zeros((0, self.n_features)))
        gain = np.asarray(self._gain(), dtype=np.float64)
        return gain / (gain.sum() or 1.0)

    def contributions(self, x) -> np.ndarray:
        """SHAP values, float64 (N, 3, F + 1): each feature's part of each class's score, and last the part of none.

        Their sum is the score whose softmax `predict_proba` gives (Lundberg et al. 2020 for trees, computed by the
        libraries; for the linear model the part of a feature against its mean).
        """
        x = self._asked(x)
        if not len(x):
            return np.empty((0, 3, self.n_features + 1))
        return np.asarray(self._contributions(x), dtype=np.float64)

    def _asked(self, x) -> np.ndarray:
        """x as this fitted model reads it."""
        if self._predictor is None:
            raise FactoryError("The model is not fitted", where=self.name, next_step="call fit or load first")
        x = matrix(x, "x")
        if x.shape[1] != self.n_features:
            raise FactoryError("Wrong number of features", where=self.name, got=x.shape[1], wanted=self.n_features)
        return x

    @abstractmethod
    def _bin(self, spec: BlockSpec, train: Rows, valid: Rows | None) -> Any:
        """The library's matrices of the rows: what is built once a fold. Nothing of `spec` but the device counts."""

    @abstractmethod
    def _open(self, spec: BlockSpec, train: Rows, valid: Rows | None, bins: Any) -> Grower:
        """The library's Grower on these matrices."""

    @abstractmethod
    def _read(self, fitted: Any) -> Any:
        """The object behind a finished model."""

    @abstractmethod
    def _predict(self, x: np.ndarray) -> np.ndarray:
        """Probabilities (N, 3) from it."""

    @abstractmethod
    def _gain(self) -> np.ndarray:
        """(F,) of any scale."""

    @abstractmethod
    def _contributions(self, x: np.ndarray) -> np.ndarray:
        """(N, 3, F + 1)."""

    def get_state(self) -> dict:
        return self._state(self._fitted, self.best_round, self.n_features)

    def _state(self, fitted: Any, best: int, n_features: int) -> dict:
        return {
            "model": self.name,
            "settings": asdict(self.settings),
            "library": f"{self.library} {version(self.library)}",
            "n_features": n_features,
            "best_round": best,
            "fitted": fitted,
        }

    def load_state(self, state):
        state = self._own(state)
        self.settings = make_settings(self.Spec, state["settings"], where=self.name)
        self.n_features, self.best_round = int(state["n_features"]), int(state["best_round"])
        self._fitted = state["fitted"]
        self._predictor = None if self._fitted is None else self._read(self._fitted)
        return self


def patience_end(val: list[float], patience: int) -> int | None:
    """The round after which `patience` rounds had brought no lower loss; None while they have not."""
    best, at = np.inf, 0
    for number, loss in enumerate(val, 1):
        if loss < best:
            best, at = loss, number
        elif 0 < patience <= number - at:
            return number
    return None
