"""A trained model with all it needs to predict from feature rows: preprocessing, feature names, calibration."""

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.models.base import CLASSES, ModelBase
from ml_factory.models.registry import build_model_from_state
from ml_factory.storage.serialization import read_state_file, write_state_file
from ml_factory.targets.labels import stored_label_classes

FORMAT = "ml_factory.model/2"
WATCHED = ("numpy", "pandas", "scikit-learn", "xgboost", "lightgbm", "catboost", "torch")


def installed_library_versions(names: Iterable[str] = WATCHED) -> dict[str, str]:
    """Return installed versions of python and these packages; an absent one is left out."""
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@dataclass(frozen=True)
class TrainedModel:
    """A model with all it needs to predict from unscaled features.

    model_state : `get_state()` of the model.
    scaler : `RobustScaler.to_dict()`.
    feature_names : the columns it was trained on, in order.
    spec : settings of features and labels.
    calibration : `Calibration.to_dict()`.
    lookback : base rows of a network's window, 0 for tabular models.
    versions : library versions of training.
    facts : facts of the run (symbol, horizon, model…).
    """

    model_state: dict
    scaler: dict
    feature_names: tuple[str, ...]
    spec: dict = field(default_factory=dict)
    calibration: dict = field(default_factory=lambda: {"temperature": 1.0, "bias": [0.0, 0.0, 0.0]})
    lookback: int = 0
    versions: dict = field(default_factory=installed_library_versions)
    facts: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_names", tuple(self.feature_names))
        doubled = sorted({name for name in self.feature_names if self.feature_names.count(name) > 1})
        if not self.feature_names or doubled:
            raise SettingsError(
                "A model needs its features' names, each once", where="feature_names", got=doubled or "none"
            )
        if self.lookback < 0:
            raise SettingsError(
                "A look-back cannot be negative", where="lookback", got=self.lookback, wanted="0 or more"
            )

    @cached_property
    def estimator(self) -> ModelBase:
        """The fitted model, built once. Raises CheckpointError for a damaged state."""
        return build_model_from_state(self.model_state)

    def predict_rows(self, scaled_NF: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the estimator's probabilities, float64 (len(rows), 3), of some of the preprocessed rows.

        rows : positions; each has its whole window before it.
        """
        if not len(rows):
            return np.empty((0, len(CLASSES)))
        if not self.lookback:
            return self.estimator.predict_proba(scaled_NF[rows])
        # torch is loaded for networks only: a booster predicts where torch is not installed.
        windows = import_module_or_explain("ml_factory.datasets.windows")
        return self.estimator.predict_proba(windows.Windows(scaled_NF, rows, self.lookback))

    @property
    def classes(self) -> tuple[int, ...]:
        """Possible labels of the training data."""
        return stored_label_classes(self.spec)

    def to_state(self) -> dict:
        """Return the model as plain values, for `save` or the artifact registry."""
        state = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"format": FORMAT, **state, "feature_names": list(self.feature_names)}

    @classmethod
    def from_state(cls, state: Mapping, where: object = None) -> "TrainedModel":
        """Build the model of a `to_state`; where : path it was read from, for the message.

        Raises
        ------
        CheckpointError for a state of something else, or of an unknown form.
        """
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise CheckpointError(
                "Not a trained model of this version", where=where, wanted=FORMAT,
                got=state.get("format", "no model") if isinstance(state, Mapping) else "no model",
                next_step="train the model again, or use the version of ml_factory that wrote it",
            )  # fmt: skip
        missing = [item.name for item in fields(cls) if item.name not in state]
        if missing:
            raise CheckpointError("A trained model lacks parts", where=where, got=f"no {', '.join(missing)}")
        names = state["feature_names"]
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise CheckpointError("A model's feature names are damaged", where=where, got=repr(names)[:60])
        return cls(**{item.name: state[item.name] for item in fields(cls)})

    def save(self, path: str | Path) -> Path:
        """Write the model to one file, whole or not at all."""
        write_state_file(path, self.to_state())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "TrainedModel":
        """Read the file of `save`. Raises CheckpointError as `from_state` does."""
        return cls.from_state(read_state_file(path), where=path)

    def check_features(self, columns: Iterable[str]) -> None:
        """Raise SettingsError for features other than those of training, or in another order, naming the first
        difference.
        """
        columns = list(columns)
        if columns == list(self.feature_names):
            return
        place = next(
            (i for i, (a, b) in enumerate(zip(columns, self.feature_names, strict=False)) if a != b),
            min(len(columns), len(self.feature_names)),
        )
        missing = [name for name in self.feature_names if name not in set(columns)]
        extra = [name for name in columns if name not in set(self.feature_names)]
        if missing:
            next_step = f"prepare the features with the model's settings; missing: {_some(missing)}"
        else:
            next_step = "select the model's columns in its order: features[list(model.feature_names)]"
        raise SettingsError(
            f"These are not the model's {len(self.feature_names)} features"
            + (f"; not known to it: {_some(extra)}" if extra else ""),
            where=f"column {place + 1}",
            got=repr(columns[place]) if place < len(columns) else "nothing",
            wanted=repr(self.feature_names[place]) if place < len(self.feature_names) else "nothing",
            next_step=next_step,
        )

    def changed_versions(self, now: Mapping[str, str] | None = None) -> list[str]:
        """Return one line per library whose version differs from that of training."""
        now = installed_library_versions() if now is None else now
        return [
            f"{name} {was} when trained, {now.get(name, 'absent')} now"
            for name, was in self.versions.items()
            if now.get(name) != was
        ]


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
