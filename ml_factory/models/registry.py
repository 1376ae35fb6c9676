"""Model registry: name -> model. Only the requested model is imported; a user's network is registered by name."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ml_factory.code_fingerprint import user_code_hash
from ml_factory.errors import (
    CheckpointError,
    MissingPackageError,
    SettingsError,
    check_known,
    did_you_mean,
    refuse_damaged_content,
)
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.models.base import ModelBase, check_state_format
from ml_factory.models.setting_names import rename_network_settings, rename_tabular_settings
from ml_factory.seeding import seeded_generator


@dataclass(frozen=True)
class ModelSpec:
    """Registry entry of a model.

    estimator, network : dotted names "package.module:Class", or the class itself; boosters have no network.
    family : tabular, sequence or advanced.
    signature : hash of the sources of a user's network, else "".
    """

    name: str
    family: str
    estimator: str
    network: str | type | None
    signature: str = ""

    @property
    def notebook(self) -> str:
        """Notebook that trains this family."""
        return NOTEBOOK_OF[self.family]

    def uses_gpu(self, settings: Mapping) -> bool:
        """Return True where these settings train on an NVIDIA GPU if there is one."""
        return settings.get("device", "auto" if self.windowed else "cpu") in ("auto", "cuda")

    @property
    def windowed(self) -> bool:
        """True for models that read windows x_BTF (networks) rather than rows x_NF (boosters)."""
        return self.network is not None


NOTEBOOK_OF = {"tabular": "02_train_tabular", "sequence": "03_train_sequence", "advanced": "04_train_advanced"}
BOOSTERS = ("xgboost", "lightgbm", "catboost")
WITH_DATA = ("offset",)  # settings that are resolved with the data
_NEURAL = "ml_factory.training.estimator:NeuralClassifier"
_TRAINING, _BLOCKS = "ml_factory.training.spec:TrainSpec", "ml_factory.models.tabular:TabularSpec"
_SPECS = {
    spec.name: spec
    for spec in (
        ModelSpec("xgboost", "tabular", "ml_factory.models.tabular_xgboost:XGBoost", None),
        ModelSpec("lightgbm", "tabular", "ml_factory.models.tabular_lightgbm:LightGBM", None),
        ModelSpec("catboost", "tabular", "ml_factory.models.tabular_catboost:CatBoost", None),
        ModelSpec("linear", "tabular", "ml_factory.models.logistic_regression:LogisticRegression", None),
        ModelSpec("lstm", "sequence", _NEURAL, "ml_factory.models.sequence:LSTM"),
        ModelSpec("gru", "sequence", _NEURAL, "ml_factory.models.sequence:GRU"),
        ModelSpec("tcn", "sequence", _NEURAL, "ml_factory.models.sequence:TCN"),
        ModelSpec("patchtst", "advanced", _NEURAL, "ml_factory.models.transformer:PatchTST"),
        ModelSpec("itransformer", "advanced", _NEURAL, "ml_factory.models.transformer:ITransformer"),
        ModelSpec("tft", "advanced", _NEURAL, "ml_factory.models.tft:TFT"),
    )
}
_SHIPPED = tuple(_SPECS)


def available_models() -> list[str]:
    """Return the names that `build_model` knows."""
    return list(_SPECS)


def find_model_spec(name: str) -> ModelSpec:
    """Return the model's spec. Raises SettingsError for an unknown name, with the nearest known one."""
    if name not in _SPECS:
        step = f"{did_you_mean(name, _SPECS)} (one of your own is known once register_model has run)"
        raise SettingsError("Unknown model", where="MODEL", got=repr(name), next_step=step)
    return _SPECS[name]


def registered_source_hash(name: str) -> str:
    """Return the source hash of a registered network; "" for all others."""
    return _SPECS[name].signature if name in _SPECS else ""


def resolve_registry_entry(dotted: str | type) -> Any:
    """Import the object behind "package.module:name"; a class is returned unchanged."""
    if isinstance(dotted, type):
        return dotted
    module, _, name = dotted.partition(":")
    return getattr(import_module_or_explain(module), name)


def build_model(name: str, **settings: Any) -> ModelBase:
    """Build an unfitted model. Settings are fields of its dataclass, or names of `models.setting_names`.

    Raises SettingsError for an unknown setting, with the nearest spelling.
    """
    spec, settings = find_model_spec(name), registered_model_settings(name, settings)
    kind = resolve_registry_entry(spec.estimator)
    return kind(**settings) if spec.network is None else kind(name, resolve_registry_entry(spec.network), **settings)


def registered_model_settings(name: str, given: Mapping) -> dict:
    """Return a model's settings by this project's names. Raises SettingsError as `models.setting_names` does."""
    if find_model_spec(name).windowed:
        return rename_network_settings(name, given, resolve_registry_entry(_TRAINING).batch)
    return rename_tabular_settings(name, given, resolve_registry_entry(_BLOCKS).block)


def search_space(name: str) -> dict[str, tuple[tuple, Any]]:
    """Return the settings of a model that `auto` searches: name -> (its range as in `EstimatorSpec`, its default)."""
    spec, shared = find_model_spec(name), resolve_registry_entry(_TRAINING)
    own = resolve_registry_entry(spec.estimator if spec.network is None else spec.network).Spec
    parts = (own,) if spec.network is None else (shared, own)
    return {
        setting: (bounds, getattr(part, setting))
        for part in parts
        for setting, bounds in getattr(part, "SEARCH", {}).items()
    }


def split_settings_by_model(names: Sequence[str], given: Mapping[str, Any], where: str = "SETTINGS") -> dict[str, dict]:
    """Split settings of several models into model -> its settings.

    "lstm.batch_size" is for that model alone; "batch_size" for every network among `names`, or for all where there is
    none. Raises SettingsError for a model that is not among them.
    """
    every = [name for name in names if find_model_spec(name).windowed] or list(names)
    found: dict[str, dict] = {}
    for setting, value in given.items():
        one, dot, rest = setting.partition(".")
        if dot and one not in names:
            raise SettingsError("No such model among those used here", where=where, got=one, wanted=", ".join(names))
        for name in [one] if dot else every:
            found.setdefault(name, {})[rest if dot else setting] = value
    return found


def check_registered_model_settings(name: str, given: Mapping | None) -> dict:
    """Return the settings that a user gives the model. Raises SettingsError for those that it does not take.

    Settings that depend on the data (`WITH_DATA`) are not checked, and none of a model whose library is not installed.
    """
    given = dict(given or {})
    if "seed" in given:
        raise SettingsError(
            "Not a setting of the model", where=name, got="seed", next_step="give SEED, --seed or seed= instead"
        )
    with suppress(MissingPackageError):
        build_model(name, **{key: value for key, value in given.items() if key not in WITH_DATA})
    return given


def build_model_from_state(state: Mapping) -> ModelBase:
    """Build the fitted model of a `get_state()`."""
    what = "This is no model's state, or it is damaged, or of another version"
    with refuse_damaged_content(CheckpointError, what, next_step="train again with fresh=True"):
        return build_model(state["model"]).load_state(state)


def model_state_from_checkpoint(saved: Mapping, trained_on: Mapping) -> dict:
    """Return the model's state, as of `get_state`, in the checkpoint of a training on these rows."""
    check_state_format(saved)
    state = build_model(saved["model"], **saved["settings"]).state_from_checkpoint(saved)
    return state | ({"trained_on": dict(trained_on)} if trained_on else {})


def register_model(name: str, network: type | None = None, *, family: str = "advanced") -> Any:
    """Register a network by name for everything that takes a MODEL, once it has trained an epoch on a few made-up rows.

    network : an `nn.Module` class, built as network(features, lookback, classes, spec), with a dataclass `Spec` whose
        fields all have defaults; x_BTF -> logits_BC. Without it this is a decorator.
    family : sequence or advanced; determines the notebook.

    A name can be registered again; names of the library cannot.

        @register_model("mine")
        class Mine(nn.Module): ...
    """
    if network is None:
        return lambda given: register_model(name, given, family=family) and given
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name) or name in _SHIPPED:
        taken = "the name of a model that ships" if name in _SHIPPED else repr(name)
        wanted = "a name of its own: lower-case letters, digits, underscores"
        raise SettingsError("Cannot register this model", where="name", got=taken, wanted=wanted)
    check_known("Cannot register this model", "family", family, ("sequence", "advanced"))
    settings = getattr(network, "Spec", None)
    if not (isinstance(network, type) and isinstance(settings, type)):
        wanted = "a class with a dataclass `Spec`, whose fields have defaults (it may have none)"
        raise SettingsError("Cannot register this model", where="network", got=repr(network), wanted=wanted)
    before = _SPECS.get(name)
    _SPECS[name] = ModelSpec(name, family, _NEURAL, network, user_code_hash(network, settings))
    try:
        _train_briefly(name)
    except BaseException:
        # A failing model is not registered; an earlier one of that name stays.
        _SPECS.pop(name) if before is None else _SPECS.update({name: before})
        raise
    return _SPECS[name]


def _train_briefly(name: str) -> None:
    """Train an epoch on a few made-up rows. Raises SettingsError where that fails, whatever the network raises."""
    model = build_model(name, device="cpu", threads=1, epochs=1)
    x_NTF = seeded_generator("register", name).normal(size=(48, model.lookback, 6))
    try:
        model.fit(x_NTF, [-1, 0, 1] * 16)
        model.predict_proba(x_NTF)
    except Exception as error:
        raise SettingsError(
            "This network cannot be trained", where=name, got=f"{type(error).__name__}: {' '.join(str(error).split())}",
            wanted="x_BTF of 6 features -> logits_BC of 3 classes", next_step="fix it, and register it again",
        ) from error  # fmt: skip
