"""Folder of a run under results/SYMBOL: its record, its attempts and its checkpoints."""

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.checkpoints.compute_session import is_session_ending
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.schedule import SaveSchedule
from ml_factory.code_fingerprint import code_commit
from ml_factory.errors import SettingsError
from ml_factory.hardware import cores
from ml_factory.lazy_module import check_packages_installed
from ml_factory.models.base import fit_environment
from ml_factory.models.registry import BOOSTERS, find_model_spec
from ml_factory.settings import RunSettings
from ml_factory.storage.files import files
from ml_factory.storage.stored_paths import stored_path
from ml_factory.storage.workspace import check_symbol

LIBRARIES = ("numpy", "pandas", "scipy")


def run_machine_facts(spec: RunSettings) -> dict:
    """Return the facts of this machine that the bits of this run depend on; boosters do not on the processor's name."""
    networks = [name for name in spec.models if find_model_spec(name).windowed]
    used = {name for name in spec.models if name not in networks} | ({"torch"} if networks else set())
    settings = dict(spec.settings)
    graphics = {"gpu": _graphics()} if any(find_model_spec(name).uses_gpu(settings) for name in spec.models) else {}
    facts = machine_and_library_versions(used, settings.get("threads") or cores()) | graphics
    if used <= set(BOOSTERS):
        del facts["processor"]
    return facts


def machine_and_library_versions(libraries: Iterable[str], threads: int) -> dict:
    """Return processor, threads, Python, and the versions of numpy, pandas, scipy and of these libraries."""
    versions = {name: _version(name) for name in sorted({*LIBRARIES, *libraries})}
    there = {name: version for name, version in versions.items() if version}
    return fit_environment(threads=threads, python=platform.python_version(), **there)


def _graphics() -> str:
    """Return the names of NVIDIA GPUs by the driver; "none"."""
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


def checkpoint_minutes_from_environment(usual: float = 30.0) -> float:
    """Return the minutes between two checkpoints: `usual`, overridden by ML_FACTORY_SAVE_MINUTES.

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
class RunFolder:
    """One attempt at a run: its id and its folder under results/{SYMBOL}."""

    run_id: str
    folder: Path

    def begin(self, spec: RunSettings) -> None:
        """Make the folder and write `run.json`: settings, machine, time, sources and their commit; only the first time.

        Called when the settings have proved usable. Raises MissingPackageError where the extra train is not installed.
        """
        check_packages_installed("sklearn", "matplotlib")  # metrics and report come after hours of training
        record = self.folder / "run.json"
        if not files.is_file(record):
            begun = datetime.now(UTC).isoformat(timespec="microseconds")
            made = {"run_id": self.run_id, "begun_at": begun, "environment": run_machine_facts(spec)}
            files.write_json(record, spec.to_dict() | made | {"sources": spec.all_sources, "commit": code_commit()})

    def end(self) -> None:
        """Mark the run as finished."""
        if not self.ended:
            files.write_json(self.folder / "done.json", {"run_id": self.run_id})

    @property
    def ended(self) -> bool:
        """True after `end`."""
        return files.is_file(self.folder / "done.json")


def open_run_folder(results: Path, symbol: str, spec: RunSettings, fresh: bool, named: str = "") -> RunFolder:
    """Return the newest attempt at this run, or with `fresh` a new one; nothing is written before `begin`."""
    parent = results / check_symbol(symbol)
    return RunFolder(named, run_path(parent, named)) if named else newest_run_folder(parent, spec.run_id, fresh)


def newest_run_folder(parent: Path, base: str, fresh: bool) -> RunFolder:
    """Return the newest attempt at the run `base` that has a folder in `parent`, or with `fresh` a new one."""
    attempt = 1
    while files.is_folder(parent / _attempt(base, attempt + 1)):
        attempt += 1
    if fresh and files.is_folder(parent / _attempt(base, attempt)):
        attempt += 1
    return RunFolder(_attempt(base, attempt), run_path(parent, _attempt(base, attempt)))


def run_path(parent: Path, run_id: str) -> Path:
    """Return the folder of a run in `parent`, results/SYMBOL. Raises FileError where a link stands there."""
    return stored_path(parent, run_id, inside=parent.parent)


def open_run_checkpoints(folder: Path, run: RunFolder) -> CheckpointManager:
    """Open the checkpoints of this run, saved on the environment's schedule, and before this session ends."""
    return CheckpointManager(
        folder, checkpoint_minutes_from_environment(), run=run.run_id, schedule=SaveSchedule(ending=is_session_ending)
    )


def _attempt(base: str, attempt: int) -> str:
    return base if attempt == 1 else f"{base}-{attempt}"
