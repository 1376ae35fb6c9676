"""Name -> model. Only the one asked for is imported."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ml_factory.errors import CheckpointError, SettingsError, did_you_mean
from ml_factory.models.contract import Estimator


@dataclass(frozen=True)
class ModelSpec:
    """A model's place in the house.

    estimator, network : dotted names "package.module:Class"; boosters have no network.
    family : tabular, sequence or advanced. notebook : the one that trains this family.
    """

    name: str
    family: str
    estimator: str
    network: str | None
    notebook: str

    @property
    def windowed(self) -> bool:
        """Whether it reads windows x_BTF (networks) rather than rows x_NF (boosters)."""
        return self.network is not None


_NEURAL = "ml_factory.training.estimator:NeuralClassifier"
_SPECS = {
    spec.name: spec
    for spec in (
        ModelSpec("xgboost", "tabular", "ml_factory.models.tabular_xgboost:XGBoost", None, "02_train_tabular"),
        ModelSpec("lightgbm", "tabular", "ml_factory.models.tabular_lightgbm:LightGBM", None, "02_train_tabular"),
        ModelSpec("catboost", "tabular", "ml_factory.models.tabular_catboost:CatBoost", None, "02_train_tabular"),
        ModelSpec("lstm", "sequence", _NEURAL, "ml_factory.models.sequence:LSTM", "03_train_sequence"),
        ModelSpec("patchtst", "advanced", _NEURAL, "ml_factory.models.transformer:PatchTST", "04_train_advanced"),
    )
}


def available_models() -> list[str]:
    """Names that `build_model` knows."""
    return list(_SPECS)


def spec_of(name: str) -> ModelSpec:
    """The model's spec; an unknown name is refused with the nearest known one."""
    if name not in _SPECS:
        raise SettingsError("Unknown model", where="MODEL", got=repr(name), next_step=did_you_mean(name, _SPECS))
    return _SPECS[name]


def locate(dotted: str) -> Any:
    """The object behind "package.module:name"."""
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)


def build_model(name: str, **settings: Any) -> Estimator:
    """An unfitted model. Settings are those of its dataclass; an unknown one is refused with a suggestion."""
    spec = spec_of(name)
    kind = locate(spec.estimator)
    return kind(**settings) if spec.network is None else kind(name, locate(spec.network), **settings)


def load_model(state: Mapping) -> Estimator:
    """The fitted model whose `get_state()` this is."""
    if "model" not in state:
        raise CheckpointError("Not a model's state", got=sorted(state)[:8], wanted="a 'model' entry")
    return build_model(state["model"]).load_state(state)
