"""All settings of an experiment together: as JSON, as a fingerprint, as presets."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ml_factory.data.bars import BarSpec
from ml_factory.datasets.preprocessing import check_steps
from ml_factory.errors import SettingsError
from ml_factory.features.build import FeatureSpec
from ml_factory.models.contract import cores, differences, environment
from ml_factory.models.registry import spec_of
from ml_factory.runs.checkpoints import CheckpointManager
from ml_factory.runs.storage import file_hash, fingerprint, plain, read_json, write_json
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.search_spec import SearchedLabels
from ml_factory.targets.splits import SplitSpec

PACKAGE = Path(__file__).resolve().parent
DATA_ROOMS = ("data", "features", "targets", "datasets")
# What a run's numbers come from besides its data. Reports and pictures change without training anew.
RUN_SOURCES = (
    "models", "training", "datasets", "ensemble", "targets/bootstrap.py", "targets/weights.py",
    "evaluation/calibration.py", "evaluation/metrics.py", "inference/predict.py", "units/dataset.py",
    "units/folds.py", "units/holdout.py", "units/nested.py", "units/stacked.py", "seeding.py",
)  # fmt: skip
DEFAULT_HORIZONS = (5, 10, 15, 20)


@dataclass(frozen=True)
class DataSpec:
    """Everything that decides what `prepare` writes. Labels take their horizon from the call.

    preprocess : names out of `STEPS`, or {"step": name, setting: value}; the last one scales.
    searched : label specs that a search for barriers found, at most one a horizon; they stand in the place of `labels`.
    """

    bars: BarSpec = field(default_factory=BarSpec)
    features: FeatureSpec = field(default_factory=FeatureSpec)
    labels: LabelSpec = field(default_factory=LabelSpec)
    splits: SplitSpec = field(default_factory=SplitSpec)
    preprocess: tuple[str | dict, ...] = ("robust",)
    calendar: str | None = None
    tick: float | None = None
    searched: tuple[SearchedLabels, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "preprocess", check_steps(self.preprocess))
        found = [SearchedLabels.from_json(json.dumps(one)) if isinstance(one, dict) else one for one in self.searched]
        for one in found:
            if not isinstance(one, SearchedLabels):
                raise SettingsError(
                    "This is no searched label spec", where="DataSpec.searched", got=repr(one),
                    wanted="SearchedLabels", next_step="give names and files to prepare(searched=…) instead",
                )  # fmt: skip
        object.__setattr__(self, "searched", tuple(sorted(found, key=lambda one: one.labels.horizon)))
        horizons = [one.labels.horizon for one in self.searched]
        if len(set(horizons)) < len(horizons):
            raise SettingsError(
                "A horizon has one label spec", where="DataSpec.searched", got=f"specs for {horizons} bars",
                wanted="at most one a horizon", next_step="leave out all but one",
            )  # fmt: skip

    def labels_for(self, horizon: int) -> LabelSpec:
        found = self.searched_for(horizon)
        return found.labels if found else replace(self.labels, horizon=horizon)

    def searched_for(self, horizon: int) -> SearchedLabels | None:
        """The searched label spec of this horizon; None where the given barriers stand."""
        return next((one for one in self.searched if one.labels.horizon == horizon), None)

    def to_dict(self) -> dict:
        """As JSON; without a search it says nothing of one."""
        return {name: value for name, value in asdict(self).items() if value or name != "searched"}


@dataclass(frozen=True)
class QuickLimits:
    """What QUICK limits: training only, never checks, features, labels or splits."""

    train_rows: int = 4_000
    epochs: int = 2
    rounds: int = 40

    def settings_for(self, family: str) -> dict:
        return {"rounds": self.rounds} if family == "tabular" else {"epochs": self.epochs}


@dataclass(frozen=True)
class RunSpec:
    """One run: data, settings and sources. Its id names its folder, its checkpoints and its log."""

    symbol: str
    horizon: int
    model: str
    task: str
    seed: int
    quick: bool
    data: str
    settings: tuple[tuple[str, object], ...] = ()

    def to_dict(self) -> dict:
        return asdict(self) | {"settings": dict(self.settings)}

    @property
    def run_id(self) -> str:
        decided = {"sources": source_hash(RUN_SOURCES), "limits": asdict(QuickLimits()) if self.quick else {}}
        digest = fingerprint(self.to_dict() | decided)[:10]
        return f"{self.task}-{self.model}-h{self.horizon}-s{self.seed}{'-quick' if self.quick else ''}-{digest}"


def run_spec(
    symbol: str, horizon: int, model: str, *, task: str, seed: int, quick: bool, data: str, settings: Mapping | None
) -> RunSpec:
    """A RunSpec with the model's QUICK limits under the user's own settings."""
    limited = QuickLimits().settings_for(spec_of(model).family) if quick else {}
    merged = tuple(sorted(plain(limited | dict(settings or {})).items()))
    return RunSpec(symbol, check_horizon(horizon), model, task, check_seed(seed), quick, data, merged)


def source_hash(rooms: tuple[str, ...]) -> str:
    """One hash over the sources of these rooms (or single files): a changed computation is another run."""
    places = [PACKAGE / room for room in rooms]
    files = sorted(file for place in places for file in ([place] if place.suffix else place.glob("*.py")))
    return fingerprint({file.relative_to(PACKAGE).as_posix(): file_hash(file) for file in files})


def check_horizon(horizon: int) -> int:
    """The horizon as an int of at least 1 bar, else SettingsError."""
    return _whole_number("HORIZON", horizon, 1, "a whole number of bars, 1 or more", "give for example 20")


def check_seed(seed: int) -> int:
    """The seed as a non-negative int, else SettingsError."""
    return _whole_number("SEED", seed, 0, "a whole number, 0 or more", "give for example 0")


def _whole_number(name: str, value: int, least: int, wanted: str, step: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{name} cannot be used", where=name, got=repr(value), wanted=wanted, next_step=step)
    return value


def quick_from_environment(quick: bool) -> bool:
    """`quick`, unless ML_FACTORY_QUICK says otherwise (1 or 0), as CI and nbval do."""
    return {"1": True, "0": False}.get(os.environ.get("ML_FACTORY_QUICK", ""), quick)


def save_minutes_from_environment(usual: float = 30.0) -> float:
    """Minutes between two checkpoints: `usual`, unless ML_FACTORY_SAVE_MINUTES says otherwise.

    0 saves after every epoch or booster block: for a machine that may vanish at any moment, and for tests.
    """
    text = os.environ.get("ML_FACTORY_SAVE_MINUTES", "").strip()
    try:
        minutes = float(text) if text else usual
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes < float("inf"):
        raise SettingsError(
            "The time between checkpoints cannot be used", where="ML_FACTORY_SAVE_MINUTES", got=repr(text),
            wanted="minutes, 0 or more", next_step="set it to for example 10, or unset it",
        )  # fmt: skip
    return minutes


@dataclass(frozen=True)
class Run:
    """One attempt at a run: its id and its folder under results/{SYMBOL}."""

    run_id: str
    folder: Path

    def begin(self, spec: RunSpec) -> tuple[str, ...]:
        """Make the folder and write down the settings and this machine: only when the settings have proved usable.

        Returns how this machine differs from the one the run began on, in words; nothing when it is the first.
        """
        record, here = self.folder / "run.json", environment(threads=cores(), python=platform.python_version())
        if record.is_file():
            return differences(read_json(record).get("environment"), here)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(record, spec.to_dict() | {"run_id": self.run_id, "environment": here})
        return ()


def open_run(results: Path, symbol: str, spec: RunSpec, fresh: bool) -> Run:
    """The newest attempt at this run, or with `fresh` a new one beside it; nothing is written before `begin`."""
    base, parent = spec.run_id, results / symbol
    attempt = 1
    while (parent / _attempt(base, attempt + 1)).is_dir():
        attempt += 1
    if fresh and (parent / _attempt(base, attempt)).is_dir():
        attempt += 1
    return Run(_attempt(base, attempt), parent / _attempt(base, attempt))


def open_checkpoints(folder: Path, run: Run) -> CheckpointManager:
    """The checkpoints of this run, saved as often as the environment asks."""
    return CheckpointManager(folder, auto_save_minutes=save_minutes_from_environment(), run=run.run_id)


def _attempt(base: str, attempt: int) -> str:
    return base if attempt == 1 else f"{base}-{attempt}"
