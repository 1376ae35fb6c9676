"""The common interface of all models: fit, predict_proba, get_state, load_state, save, load.

Labels are -1, 0, +1 outside of the models and 0, 1, 2 inside.
"""

import dataclasses
import importlib.metadata
import inspect
import logging
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ml_factory.argument_checks import check_settings
from ml_factory.errors import CheckpointError, FactoryError, SettingsError, did_you_mean, refuse_damaged_content
from ml_factory.models.rows import (
    CLASSES,
    TrainingRows,
    balanced_class_factors,
    check_training_rows,
    training_data_checksum,
)
from ml_factory.models.session_clock import SessionClockOffset
from ml_factory.process_identity import cores
from ml_factory.storage.serialization import read_state_file, write_state_file

WATCHED = ("numpy", "pandas", "scikit-learn", "xgboost", "lightgbm", "catboost", "torch")
STATE_FORMAT = 3  # of the states of models, and of the checkpoints of their fits
FLAT_EPOCHS, FLAT_SHARE = 3, 1e-3  # epochs, and share of the loss, within which a training loss is called flat
_log = logging.getLogger("ml_factory.training")


@dataclass
class ModelFitResult:
    """Facts of a fit.

    history : one dict per epoch (or booster block): epoch, train_loss, val_loss (None without validation), seconds.
    best_epoch : epoch (from 1) of the final model.
    resumed_from : finished epochs (blocks) that the run resumed after; None from the start.
    resumed_step : optimizer step that a network resumed at.
    stopped_early : True where early stopping ended the fit.
    nondeterminism : why its bits may differ from an uninterrupted fit: another machine, thread count or library.
    compiles : train, accumulate, evaluate -> number of compilations by a lazy device.
    machine : of networks: device, threads, precision, parameters, peak_bytes (None where the device does not report
        it), rows_per_second (of this session, validation included).
    """

    history: list[dict] = field(default_factory=list)
    best_epoch: int = 0
    resumed_from: int | None = None
    resumed_step: int | None = None
    stopped_early: bool = False
    nondeterminism: tuple[str, ...] = ()
    compiles: dict = field(default_factory=dict)
    machine: dict = field(default_factory=dict)


MACHINE_SETTINGS = ("device", "threads", "accumulate", "save_seconds", "log_steps")
CLASS_WEIGHTS = ("none", "balanced")


@dataclass(frozen=True)
class EstimatorSpec:
    """Settings of every model's training.

    patience : rounds (counted across blocks) or epochs without a better validation loss before stopping; 0 for never.
    class_weight : none, or balanced: each class of the training rows gets the same share of their total weight.
        Validation rows get the same factors, so that early stopping uses the loss of training.
    threads : number of threads, 0 for every core; another number gives other last bits.
    offset_column : input that grows evenly through the session, of the `SessionClockOffset` the model starts from;
        -1 for none.
    offset_bars : bars before the session's end with cells of their own in the offset.
    SEARCH : setting -> (low, high), (low, high, "log") or (low, high, step), that `auto` searches.
    """

    SEARCH: ClassVar[Mapping[str, tuple]] = {}
    patience: int = 30
    class_weight: str = "none"
    seed: int = 0
    threads: int = 0
    offset_column: int = -1
    offset_bars: int = 0

    def __post_init__(self):
        some = "[0, inf)"
        check_settings(
            self, patience=some, threads=some, offset_bars=some, offset_column="[-1, inf)", class_weight=CLASS_WEIGHTS
        )

    def identity(self) -> dict:
        """Return the settings that make another run when they change; a run may resume with others of the machine."""
        return {name: value for name, value in asdict(self).items() if name not in MACHINE_SETTINGS}

    @property
    def thread_count(self) -> int:
        """Threads as a number."""
        return self.threads or cores()


class ModelBase:
    """Base of all models: rows are checked, weighted and given the clock's offset, states are converted. A subclass has

    set_settings(given) : make `settings` of them; also called with those of a stored state.
    _inputs(x, where, features) : checked inputs; of so many features where that is not 0.
    _column(x, column) : one feature of the inputs, (N,); of a window its last step.
    _arrays(x) : the arrays of the inputs, for the checksum of a run.
    _learn(spec, train, valid, identity, callbacks, checkpoints) : fit; a checkpoint of another identity is refused.
    _scores(x) : class scores (N, 3) without the offset.
    _parts() : the fitted model in plain values, parts of its state.
    _parts_of_checkpoint(saved) : the same from a checkpoint of a fit, finished or not.
    _load_parts(state) : load the fitted model of a state.

    name : name in the registry.
    settings : an `EstimatorSpec`.
    lookback : number of base rows a prediction reads (1: the row itself).
    trained_on : {"symbol", "horizon", "features": names in order} of its training rows; {} where unknown.
    """

    name: str
    settings: Any
    lookback: int = 1
    n_features: int = 0
    offset: SessionClockOffset | None = None
    trained_on: Mapping[str, Any] = {}

    def fit(self, x, y, sample_weight=None, *, validation=None, callbacks=(), checkpoints=None) -> ModelFitResult:
        """Learn from x and y in {-1, 0, 1}.

        validation : (x, y, weight or None), read for early stopping alone.
        callbacks : each is called (epoch, {"train_loss", "val_loss", "seconds"}) after every epoch or booster block,
            and with this model as third argument where it takes one; `get_state()` is then the model of that moment. An
            optional `remember(history)` is called first with the epochs that an interrupted fit had finished.
        checkpoints : as of `CheckpointManager.phase(name)`; an unfinished fit resumes there, to the bit.
        """
        spec, parts = self.settings, [self._checked_rows(x, y, sample_weight, where="training")]
        features = parts[0].x.shape[-1]
        if validation is not None:
            parts.append(self._checked_rows(*validation, where="validation", features=features))
        self.n_features = features
        if spec.class_weight == "balanced":
            factor = balanced_class_factors(parts[0].target, parts[0].weight)
            for part in parts:
                part.weight = part.weight * factor[part.target]
        self._start_from_offset(spec, parts)
        arrays = [array for part in parts for array in (*self._arrays(part.x), part.target, part.weight)]
        identity = {
            "format": STATE_FORMAT, "model": self.name, "settings": self._settings_dict(spec.identity()),
            "data": training_data_checksum(self.n_features, *arrays), "offset": self.offset and self.offset.to_dict(),
        }  # fmt: skip
        train, valid = (*parts, None)[:2]
        return self._learn(spec, train, valid, identity, _bind_model_to_callbacks(callbacks, self), checkpoints)

    def _checked_rows(self, x, y, weight=None, *, where: str, features: int = 0) -> TrainingRows:
        x = self._inputs(x, where, features)
        return TrainingRows(x, *check_training_rows(len(x), y, weight, where=where))

    def _start_from_offset(self, spec: EstimatorSpec, parts: Sequence[TrainingRows]) -> None:
        """Count the offset on the first part, the training rows, and give every part its scores."""
        self.offset, column = None, spec.offset_column
        if column < 0:
            return
        if column >= self.n_features:
            wanted = f"-1 to {self.n_features - 1}"
            raise SettingsError("There is no such input", where="offset_column", got=column, wanted=wanted)
        train = parts[0]
        self.offset = SessionClockOffset.fit(
            self._column(train.x, column), train.target, train.weight, column=column, ending=spec.offset_bars
        )
        for part in parts:
            part.offset = self.offset.log_class_shares(self._column(part.x, column))

    def predict_proba(self, x) -> np.ndarray:
        """Return class probabilities, float64 (N, 3), columns -1, 0, +1, rows summing to 1."""
        x = self._inputs(x, "x", self.n_features)
        if not len(x):
            return np.empty((0, len(CLASSES)))
        scores = self._scores(x)
        if self.offset is not None:
            scores = scores + self.offset.log_class_shares(self._column(x, self.offset.column))
        return softmax(scores)

    def _fitted(self, part: Any) -> Any:
        """Return a part that a fitted model has. Raises FactoryError before the fit."""
        if part is None:
            raise FactoryError("The model is not fitted", where=self.name, next_step="call fit or load first")
        return part

    def get_state(self) -> dict:
        """Return the state of the model in numbers, strings, bytes, lists, dicts and arrays."""
        return self._state(self._parts(), self.n_features, self.offset and self.offset.to_dict())

    def state_from_checkpoint(self, saved: Mapping) -> dict:
        """Return the state, as of `get_state`, of the model in a training's checkpoint, finished or not."""
        return self._state(self._parts_of_checkpoint(saved), saved["data"]["features"], saved["offset"])

    def load_state(self, state: Mapping) -> "ModelBase":
        """Load the state of an equal model; returns self.

        Raises CheckpointError for the state of another model or version, or where symbol, horizon or features of both
        are known and differ.
        """
        if state.get("model") != self.name:
            raise CheckpointError(
                "Not a state of this model",
                got=repr(state.get("model")),
                wanted=repr(self.name),
                next_step="use ml_factory.models.registry.build_model_from_state, which builds the right one",
            )
        check_state_format(state)
        _check_same_training_data(self.trained_on, state)
        self.trained_on = state.get("trained_on") or self.trained_on
        self.set_settings(state["settings"])
        self.n_features = int(state["n_features"])
        self.offset = None if state["offset"] is None else SessionClockOffset.from_dict(state["offset"])
        self._load_parts(state)
        return self

    def _state(self, parts: Mapping, n_features: int, offset: Mapping | None) -> dict:
        """Return a state with these parts, and the training data it belongs to, where that is known."""
        known = {"trained_on": dict(self.trained_on)} if self.trained_on else {}
        facts = {"format": STATE_FORMAT, "model": self.name, "settings": self._settings_dict(asdict(self.settings))}
        return {**facts, "n_features": n_features, "offset": offset, **parts, **known}

    def _settings_dict(self, training: dict) -> dict:
        """Return these settings of the training with all others that `set_settings` takes."""
        return training

    def save(self, path: str | Path) -> None:
        """Write the state to one file (safetensors and JSON, no pickle)."""
        write_state_file(path, self.get_state())

    def load(self, path: str | Path) -> "ModelBase":
        """Load the model that `save` wrote; returns self."""
        return self.load_state(read_state_file(path))


def check_state_format(stored: Mapping) -> None:
    """Raise CheckpointError for a model's state, or a checkpoint of its fit, that another version wrote."""
    if stored.get("format") != STATE_FORMAT:
        name = stored.get("model")
        raise CheckpointError(
            "Another version of ml_factory wrote this model", where=name, got=f"format {stored.get('format', 1)}",
            wanted=STATE_FORMAT, next_step=f"train it again: python -m ml_factory train --model {name} --fresh",
        )  # fmt: skip


def _check_same_training_data(expected: Mapping, state: Mapping) -> None:
    """Raise CheckpointError where a model of the rows `expected` is given a state of other rows."""
    theirs, step = (
        state.get("trained_on") or {},
        "build a model of its own for it: models.registry.build_model_from_state(state)",
    )
    for name in ("symbol", "horizon"):
        if expected and theirs and expected[name] != theirs[name]:
            raise CheckpointError(
                f"This state is of another {name}", where=state["model"], got=theirs[name], wanted=expected[name],
                next_step=step,
            )  # fmt: skip
    wanted, got = list(expected.get("features", ())), list(theirs.get("features", ()))
    count = len(got) or int(state.get("n_features") or 0)
    if wanted and count and (count != len(wanted) or (got and got != wanted)):
        odd = [name for name in got if name not in wanted] + [name for name in wanted if got and name not in got]
        named = f" ({', '.join(odd[:3])}{', …' * (len(odd) > 3)})" if odd else " in another order" if got else ""
        raise CheckpointError(
            "This state is of other features", where=state["model"], got=f"{count} features{named}",
            wanted=f"the {len(wanted)} that this model reads", next_step=step,
        )  # fmt: skip


def _bind_model_to_callbacks(callbacks: Iterable, model: ModelBase) -> list:
    """Wrap the callbacks to (epoch, metrics); one that takes a third argument also gets the model."""

    def with_model(callback):
        def call(epoch: int, metrics: dict) -> None:
            callback(epoch, metrics, model)

        optional = ("remember", "log_steps")
        vars(call).update({name: getattr(callback, name) for name in optional if hasattr(callback, name)})
        return call

    return [with_model(callback) if _takes_model(callback) else callback for callback in callbacks]


def _takes_model(callback) -> bool:
    """Return True where the callback has a third positional parameter without a default, or one named `model`."""
    items = inspect.signature(callback).parameters.values()
    placed = [item for item in items if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    return any(item.default is item.empty or item.name == "model" for item in placed[2:3])


def build_model_settings(given: Mapping, *kinds: type, where: str) -> list:
    """Build each settings dataclass from its keyword arguments; an unknown one is refused with the nearest spelling."""
    known = {item.name: kind for kind in kinds for item in dataclasses.fields(kind)}
    for name in given:
        if name not in known:
            step, there = did_you_mean(name, known), ", ".join(sorted(known))
            raise SettingsError(
                "Unknown setting", where=where, got=repr(name), wanted=f"one of {there}", next_step=step
            )
    return [kind(**{name: value for name, value in given.items() if known[name] is kind}) for kind in kinds]


def check_checkpoint_of_same_fit(saved: Mapping, wanted: Mapping) -> None:
    """Raise CheckpointError for a checkpoint of another version, of other settings or of other rows."""
    if "format" in wanted:  # a recipe's training has no model of the registry
        check_state_format(saved)
    for part in ("model", "settings", "data"):
        if saved.get(part) != wanted[part]:
            raise CheckpointError(
                "The checkpoint is of another run",
                where=part,
                got=saved.get(part),
                wanted=wanted[part],
                next_step="give this run its own phase, or start a new run (FRESH=True, --fresh)",
            )


def refuse_damaged_training() -> AbstractContextManager:
    """Raise CheckpointError inside a `with` where a training's state is not what it was saved as."""
    step = "start a new run (FRESH=True, --fresh)"
    return refuse_damaged_content(CheckpointError, "This training's checkpoint is damaged", next_step=step)


def restore_callback_history(callbacks: Iterable, history: Iterable[Mapping]) -> None:
    """Pass the epochs before this session, as in `ModelFitResult.history`, to callbacks that have `remember`."""
    past = [dict(epoch) for epoch in history]
    for callback in callbacks:
        if past and hasattr(callback, "remember"):
            callback.remember(past)


def log_flat_training_loss(history: Sequence[Mapping], rate: float) -> None:
    """Log once, after FLAT_EPOCHS epochs or blocks, that the training loss has not moved since the first."""
    losses = [float(one["train_loss"]) for one in history]
    if len(losses) == FLAT_EPOCHS and max(losses) - min(losses) < FLAT_SHARE * abs(losses[0]):
        _log.warning(
            "The training loss is flat from the first epoch on (%.4f, then %.4f): check the learning rate, %.2g now "
            "(SETTINGS or --set learning_rate=...)", losses[0], losses[-1], rate,
        )  # fmt: skip


_installed_version = cache(importlib.metadata.version)  # reads the package's whole description; an absent one each time


def installed_library_versions(names: Iterable[str] = WATCHED) -> dict[str, str]:
    """Return installed versions of python and these packages; an absent one is left out."""
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = _installed_version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe_differences(saved: Mapping | None, now: Mapping) -> tuple[str, ...]:
    """Return one sentence for each fact in which this machine differs from the one that began."""
    saved = saved or {}
    names = [name for name in sorted({*saved, *now}) if saved.get(name) != now.get(name)]
    return tuple(f"{name}: began with {saved.get(name)}, now {now.get(name)}" for name in names)


def merge_inexact_reasons(reasons: Iterable[str], more: Iterable[str]) -> list[str]:
    """Return the items of both, each once, in order."""
    return list(dict.fromkeys([*reasons, *more]))


def processor_name() -> str:
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(errors="replace"), re.M) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


# ---------------------------------------------------------------------- class scores


def softmax(z_N3: np.ndarray) -> np.ndarray:
    """Return the softmax of each row, float64 (N, 3)."""
    e_N3 = np.exp(z_N3 - z_N3.max(axis=1, keepdims=True), dtype=np.float64)
    return e_N3 / e_N3.sum(axis=1, keepdims=True)


def mean_log_loss(scores_N3: np.ndarray, target_N: np.ndarray, weight_N: np.ndarray) -> float:
    """Return the weighted mean log loss of the softmax of these scores."""
    top = scores_N3.max(axis=1)
    log_N = np.log(np.exp(scores_N3 - top[:, None]).sum(axis=1)) + top
    return float(weight_N @ (log_N - scores_N3[np.arange(len(scores_N3)), target_N]) / weight_N.sum())
