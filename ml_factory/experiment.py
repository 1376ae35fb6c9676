"""All settings of an experiment together: as JSON, as a fingerprint, as presets."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ml_factory.argument_checks import check_horizon, check_seed
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.session import Session
from ml_factory.cpu_count import cores
from ml_factory.data.validation import BarSpec
from ml_factory.datasets.preprocessing import check_steps
from ml_factory.errors import SettingsError
from ml_factory.features.build import FeatureSpec
from ml_factory.models.base import environment
from ml_factory.models.registry import own_settings, signature_of, spec_of
from ml_factory.provenance import closure, commit, package_files, source_hash, source_hashes
from ml_factory.storage.atomic_files import fingerprint, is_file, is_folder, to_json_value, write_json
from ml_factory.storage.compile_cache import FOLDER, upload_compile_cache
from ml_factory.storage.workspace import push_checkpoints
from ml_factory.targets.barrier_search_spec import SearchedLabels
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.splits import SplitSpec

DATA_PACKAGES = ("data", "features", "targets", "datasets")
# What preparing, training and judging execute, and the proof itself: a certificate holds for this code alone. Pictures
# and pages are left out.
CERTIFIED_PACKAGES = (
    *DATA_PACKAGES, "leakage", "models", "training", "evaluation", "ensemble", "inference", "storage",
    "checkpoints", "tracking", "workflows",
    "experiment.py", "argument_checks.py", "provenance.py", "pipeline.py", "seeding.py",
    "cpu_count.py", "numba_cache.py", "lazy_module.py",
)  # fmt: skip
NOT_CERTIFIED = (
    "evaluation/plot_style.py", "evaluation/data_plots.py", "evaluation/plots.py", "evaluation/attention_plots.py",
    "evaluation/report.py", "workflows/report.py", "workflows/results.py", "workflows/result_summaries.py",
)  # fmt: skip
# task -> the files it begins in; what they import, and the model's own file, is what a run's numbers come from.
TASKS = {
    "train": ("workflows/train.py", "inference/predict.py"),
    "folds": ("workflows/cross_validate.py",),
    "stack": ("workflows/stack.py",),
}
LIBRARIES = ("numpy", "pandas", "scipy")


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "preprocess", check_steps(self.preprocess))
        found = [SearchedLabels.from_json(json.dumps(one)) if isinstance(one, dict) else one for one in self.searched]
        for one in found:
            if not isinstance(one, SearchedLabels):
                raise SettingsError(
                    "This is no searched label spec", where="DataSpec.searched", got=repr(one),
                    wanted="SearchedLabels", next_step="give names and files to prepare(searched=…) instead",
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

    def labels_for(self, horizon: int) -> LabelSpec:
        """The label spec of this horizon: the one a search found, else the given one."""
        found = self.searched_for(horizon)
        return found.labels if found else replace(self.labels, horizon=horizon)

    def searched_for(self, horizon: int) -> SearchedLabels | None:
        """The searched label spec of this horizon; None where the given barriers stand."""
        return next((one for one in self.searched if one.labels.horizon == horizon), None)

    def to_dict(self) -> dict:
        """As JSON; without a search it says nothing of one."""
        return {name: value for name, value in asdict(self).items() if value or name != "searched"}


def certified_code() -> str:
    """One hash over the code that a certificate is about."""
    return source_hash(CERTIFIED_PACKAGES, exclude=NOT_CERTIFIED)


@dataclass(frozen=True)
class QuickLimits:
    """What QUICK limits: training only, never checks, features, labels or splits."""

    train_rows: int = 8_000
    epochs: int = 2
    rounds: int = 40

    def settings_for(self, family: str) -> dict:
        """The limit on a model of this family, as a setting of its own."""
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
    settings: tuple[tuple[str, Any], ...] = ()

    def to_dict(self) -> dict:
        return asdict(self) | {"settings": dict(self.settings)}

    @property
    def models(self) -> tuple[str, ...]:
        """The models it trains: its own, or those of a stack."""
        return tuple(dict(self.settings).get("base_models") or (self.model,))

    @property
    def sources(self) -> dict[str, str]:
        """File -> hash of its code, for every source its computation uses."""
        return source_hashes(closure([*TASKS[self.task], *(file for name in self.models for file in _files_of(name))]))

    @property
    def all_sources(self) -> dict[str, str]:
        """`sources`, and those that made the data, which the run's id knows by the data's fingerprint."""
        return source_hashes(package_files(DATA_PACKAGES)) | self.sources

    @property
    def run_id(self) -> str:
        """Names task, model, horizon and seed, and ends in 10 hex digits of all that decides its numbers."""
        decided = {"sources": self.sources, "limits": asdict(QuickLimits()) if self.quick else {}}
        own = {name: signature for name in self.models if (signature := signature_of(name))}
        digest = fingerprint(self.to_dict() | decided | ({"networks": own} if own else {}))[:10]
        return f"{self.task}-{self.model}-h{self.horizon}-s{self.seed}{'-quick' if self.quick else ''}-{digest}"


def _files_of(model: str) -> list[str]:
    """Files of the package that hold a model: its estimator and its network."""
    spec = spec_of(model)
    dotted = [where.partition(":")[0] for where in (spec.estimator, spec.network) if isinstance(where, str)]
    return [f"{name.partition('.')[2].replace('.', '/')}.py" for name in dotted]


def run_spec(
    symbol: str, horizon: int, model: str, *, task: str, seed: int, quick: bool, data: str, settings: Mapping | None
) -> RunSpec:
    """A RunSpec with the model's QUICK limits under the user's own settings."""
    limits = QuickLimits().settings_for(spec_of(model).family) if quick else {}
    settings_of_run = tuple(sorted(to_json_value(limits | own_settings(model, settings or {})).items()))
    return RunSpec(symbol, check_horizon(horizon), model, task, check_seed(seed), quick, data, settings_of_run)


def machine(spec: RunSpec) -> dict:
    """What the bits of this run depend on besides data, settings and code: where they differ, they may differ."""
    networks = [name for name in spec.models if spec_of(name).windowed]
    used = {name for name in spec.models if name not in networks} | ({"torch"} if networks else set())
    settings = dict(spec.settings)
    graphics = {"gpu": _graphics()} if any(spec_of(name).on_graphics(settings) for name in spec.models) else {}
    return machine_with(used, settings.get("threads") or cores()) | graphics


def machine_with(libraries: Iterable[str], threads: int) -> dict:
    """The processor, threads, Python, and the versions of numpy, pandas, scipy and of those libraries that are here."""
    versions = {name: _version(name) for name in sorted({*LIBRARIES, *libraries})}
    there = {name: version for name, version in versions.items() if version}
    return environment(threads=threads, python=platform.python_version(), **there)


def _graphics() -> str:
    """The names of NVIDIA's cards here, as the driver tells them; "none"."""
    texts = [
        path.read_text(errors="replace") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    ]
    names = [line.split(":", 1)[1].strip() for text in texts for line in text.splitlines() if line.startswith("Model:")]
    return ", ".join(names) or "none"


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


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

    def begin(self, spec: RunSpec) -> None:
        """Make the folder and write down the settings, this machine, the moment, the sources and their commit: only
        when the settings have proved usable, and only the first time."""
        record = self.folder / "run.json"
        if not is_file(record):
            begun = datetime.now(UTC).isoformat(timespec="microseconds")
            made = {"run_id": self.run_id, "begun_at": begun, "environment": machine(spec)}
            write_json(record, spec.to_dict() | made | {"sources": spec.all_sources, "commit": commit()})

    def end(self) -> None:
        """Mark it as finished, for whoever looks at the runs beside it."""
        if not self.ended:
            write_json(self.folder / "done.json", {"run_id": self.run_id})

    @property
    def ended(self) -> bool:
        """Whether `end` was reached before."""
        return is_file(self.folder / "done.json")


def open_run(results: Path, symbol: str, spec: RunSpec, fresh: bool, named: str = "") -> Run:
    """The newest attempt at this run, or with `fresh` a new one beside it; nothing is written before `begin`.

    named : the very attempt, checked before.
    """
    parent = results / symbol
    return Run(named, parent / named) if named else newest_attempt(parent, spec.run_id, fresh)


def newest_attempt(parent: Path, base: str, fresh: bool) -> Run:
    """The newest attempt at the run `base` that has a folder in `parent`, or with `fresh` a new one beside it."""
    attempt = 1
    while is_folder(parent / _attempt(base, attempt + 1)):
        attempt += 1
    if fresh and is_folder(parent / _attempt(base, attempt)):
        attempt += 1
    return Run(_attempt(base, attempt), parent / _attempt(base, attempt))


def open_checkpoints(folder: Path, run: Run) -> CheckpointManager:
    """The checkpoints of this run, saved as often as the environment asks, and before this session ends."""
    session = Session(folder.parent / "results" / "sessions")
    # Where training/device.py keeps what a GPU's or TPU's compiler has made; only a network there asks for it.
    os.environ.setdefault("ML_FACTORY_PROGRAMS", str(folder.parent / FOLDER))

    def saved() -> None:
        session.record_alive()
        upload_compile_cache(folder.parent)
        push_checkpoints(folder.parent)

    return CheckpointManager(
        folder, auto_save_minutes=save_minutes_from_environment(), run=run.run_id, ending=session.ending,
        mean_life_seconds=session.mean_life, on_saved=saved,
    )  # fmt: skip


def _attempt(base: str, attempt: int) -> str:
    return base if attempt == 1 else f"{base}-{attempt}"
