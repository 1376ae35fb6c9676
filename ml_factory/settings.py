"""Settings of data and runs, and QUICK limits; as JSON, and as a fingerprint."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

from ml_factory.argument_checks import CALENDARS, check_horizon, check_seed, check_settings
from ml_factory.code_fingerprint import source_hash
from ml_factory.data.validation import RawBarSpec
from ml_factory.datasets.preprocessing import check_preprocessing_steps
from ml_factory.errors import FactoryError, SettingsError, check_known
from ml_factory.features.build import FeatureSpec
from ml_factory.models.registry import find_model_spec, registered_model_settings, registered_source_hash
from ml_factory.storage.json_values import fingerprint_json, to_json_value
from ml_factory.targets.barrier_search import SearchedLabelSpec
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.splits import SplitSpec

DATA_PACKAGES = ("data", "features", "targets", "datasets")
FIT_PACKAGES = (
    "models", "training", "evaluation", "ensemble", "seeding.py", "inference/predict.py",
    *(f"workflows/{name}.py" for name in ("prepared_dataset", "train", "train_ranks", "folds", "stack", "predictions")),
)  # fmt: skip
# What computes no number of a model or a data set: it makes no run another one, and no certificate void.
COMPUTES_NOTHING = (
    "commands", "serving", "recipes", "tpu", "tracking", "cli.py", "cli_output.py", "doctor.py",
    "interrupt.py", "notebook.py", "notebook_panel.py", "notebook_parameters.py", "notebook_suite.py",
    "evaluation/plot_style.py", "evaluation/plots.py", "evaluation/recipe_plots.py",
    "evaluation/html_report.py", "evaluation/training_criteria.py", "workflows/report.py", "workflows/clean.py",
    "workflows/plan.py", "workflows/auto.py", "workflows/distribute.py", "result.py",
)  # fmt: skip
TASKS = ("train", "folds", "stack")


@dataclass(frozen=True)
class DataSpec:
    """Settings of `prepare`. Labels take their horizon from the call.

    preprocess : names out of `STEPS`, or {"step": name, setting: value}; the last one scales.
    searched : label specs of a barrier search, at most one a horizon; they replace `labels`.
    """

    bars: RawBarSpec = field(default_factory=RawBarSpec)
    features: FeatureSpec = field(default_factory=FeatureSpec)
    labels: LabelSpec = field(default_factory=LabelSpec)
    splits: SplitSpec = field(default_factory=SplitSpec)
    preprocess: tuple[str | dict, ...] = ("robust",)
    calendar: str | None = None
    tick: float | None = None
    searched: tuple[SearchedLabelSpec, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "preprocess", check_preprocessing_steps(self.preprocess))
        check_settings(self, tick="(0, inf)")
        if self.calendar is not None:
            check_known("Unknown trading calendar", "calendar", self.calendar, CALENDARS)
        found = [
            SearchedLabelSpec.from_json(json.dumps(one)) if isinstance(one, dict) else one for one in self.searched
        ]
        for one in found:
            if not isinstance(one, SearchedLabelSpec):
                raise SettingsError(
                    "Not a searched label spec", where="DataSpec.searched", got=repr(one),
                    wanted="SearchedLabelSpec", next_step="give names and files to prepare(searched=…) instead",
                )  # fmt: skip
        object.__setattr__(self, "searched", tuple(sorted(found, key=lambda one: one.labels.horizon)))
        if self.searched and self.labels.kind != "triple_barrier":
            raise SettingsError(
                "Only barriers are searched for", where="DataSpec.searched", got=f"labels of kind {self.labels.kind}",
                wanted="triple_barrier", next_step="leave the search or the kind out",
            )  # fmt: skip
        horizons = [one.labels.horizon for one in self.searched]
        if len(set(horizons)) < len(horizons):
            raise SettingsError(
                "A horizon has one label spec", where="DataSpec.searched", got=f"specs for {horizons} bars",
                wanted="at most one a horizon", next_step="leave out all but one",
            )  # fmt: skip

    def label_spec_for(self, horizon: int) -> LabelSpec:
        """Return the label spec of this horizon: the searched one, else the given one."""
        found = self.searched_label_spec_for(horizon)
        return found.labels if found else replace(self.labels, horizon=horizon)

    def searched_label_spec_for(self, horizon: int) -> SearchedLabelSpec | None:
        """Return the searched label spec of this horizon; None without one."""
        return next((one for one in self.searched if one.labels.horizon == horizon), None)

    def to_dict(self) -> dict:
        """Return the settings as JSON values, without `searched` where there is none."""
        return {name: value for name, value in asdict(self).items() if value or name != "searched"}


def settings_with_values(spec: Any, given: Mapping[str, Any], above: str = "--set ") -> Any:
    """Return a settings dataclass with other values, by name, or by dotted name of a nested one.

    A dotted name below a field of pairs is one pair of it, such as "forced.ESM4" of a `RollSpec`.
    Raises SettingsError for an unknown name or an unfit value; `above` begins the place in its message.
    """
    nested: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        first, _, rest = name.partition(".")
        nested.setdefault(first, {})[rest] = value
    changed = {}
    for name, values in nested.items():
        check_known("There is no such setting", f"{above}{name}", name, vars(spec))
        current = getattr(spec, name)
        if is_dataclass(current):
            changed[name] = settings_with_values(current, values, f"{above}{name}.")
        else:
            changed[name] = values.get("", tuple(values.items()))
    try:
        return replace(spec, **changed)
    except FactoryError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingsError("These settings cannot be used", where=f"{above}{', '.join(changed)}", got=error) from None


def certified_code_hash() -> str:
    """Return the hash of the code that prepares, trains, evaluates and proves: a certificate holds for it alone."""
    return source_hash(exclude=COMPUTES_NOTHING)


@dataclass(frozen=True)
class QuickLimits:
    """Limits of QUICK: training only, never checks, features, labels or splits.

    Boosters and the linear model see all training rows: they find an edge in few rounds, but not in few rows.

    sequence_rows, advanced_rows : training rows of a network of the family, in contiguous blocks; folds share them.
    folds, forecast_rows : of a stack: folds, and the rows that they forecast, in contiguous blocks.
    """

    sequence_rows: int = 40_000
    advanced_rows: int = 4_000
    epochs: int = 1
    rounds: int = 30
    folds: int = 2
    forecast_rows: int = 8_000

    def settings_for(self, family: str) -> dict:
        """Return the limit on a model of this family as a setting."""
        return {"rounds": self.rounds} if family == "tabular" else {"epochs": self.epochs}

    def rows_for(self, family: str) -> int:
        """Return the limit on the training rows of a model of this family; 0 for none."""
        return {"sequence": self.sequence_rows, "advanced": self.advanced_rows}.get(family, 0)


@dataclass(frozen=True)
class RunSettings:
    """Identity of a run: data, settings and sources. Its id names its folder, its checkpoints and its log."""

    symbol: str
    horizon: int
    model: str
    task: str
    seed: int
    quick: bool
    data: str
    settings: tuple[tuple[str, Any], ...] = ()

    def to_dict(self) -> dict:
        return asdict(self) | {"settings": dict(self.settings)}

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models it trains: its own, or those of a stack."""
        return tuple(dict(self.settings).get("base_models") or (self.model,))

    @cached_property
    def sources(self) -> dict[str, str]:
        """Hashes of the code that made the data, and of the code that fits and predicts."""
        return {"data": source_hash(DATA_PACKAGES), "fit": source_hash(FIT_PACKAGES, exclude=COMPUTES_NOTHING)}

    @property
    def run_id(self) -> str:
        """Run id: task, model, horizon and seed, and 10 hex digits of everything that determines its numbers."""
        decided = {"sources": self.sources["fit"], "limits": asdict(QuickLimits()) if self.quick else {}}
        own = {name: signature for name in self.models if (signature := registered_source_hash(name))}
        digest = fingerprint_json(self.to_dict() | decided | ({"networks": own} if own else {}))[:10]
        return f"{self.task}-{self.model}-h{self.horizon}-s{self.seed}{'-quick' if self.quick else ''}-{digest}"


def make_run_settings(
    symbol: str, horizon: int, model: str, *, task: str, seed: int, quick: bool, data: str, settings: Mapping | None
) -> RunSettings:
    """Return the settings of a run with the model's QUICK limits under the user's own settings."""
    limits = QuickLimits().settings_for(find_model_spec(model).family) if quick else {}
    settings_of_run = tuple(sorted(to_json_value(limits | registered_model_settings(model, settings or {})).items()))
    return RunSettings(symbol, check_horizon(horizon), model, task, check_seed(seed), quick, data, settings_of_run)
