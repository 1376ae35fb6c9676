"""Restore a run from W&B where the workspace has no local state, and replay a local log to W&B.

Downloads are verified like untrusted input: an artifact by its content's hash, checkpoints file by file.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ml_factory.errors import SettingsError, WorkspaceError
from ml_factory.lazy_module import check_packages_installed
from ml_factory.redaction import redact_secrets
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.tracking.run_log import SUMMARY, read_log_steps
from ml_factory.tracking.wandb_process import (
    FINISH_SECONDS,
    INIT_SECONDS,
    WandbMirrorProcess,
    kill_wandb_process,
    start_wandb_process,
    wandb_mirror_mode,
)
from ml_factory.tracking.wandb_sync import CHECKPOINTS, RunSnapshot, artifact_name

ANSWER_SECONDS, FETCH_SECONDS = 20.0, 900.0  # for the query whether an artifact exists; for its download


def restore_from_wandb(
    run_id: str, registry: ArtifactRegistry, kinds: Sequence[str], snapshot: RunSnapshot | None = None
) -> str:
    """Restore this run from W&B; return what W&B had, one of `kinds` or CHECKPOINTS, or "".

    Parameters
    ----------
    registry, kinds : target and types of artifacts, such as "model"; the first that W&B has is imported.
    snapshot : describes the run's files, which are restored where W&B has no artifact but checkpoints.

    Raises WorkspaceError when W&B does not answer, CheckpointError for a damaged download.
    """
    check_packages_installed("wandb")
    names = {artifact_name(kind, run_id): kind for kind in (*kinds, *([CHECKPOINTS] if snapshot else []))}
    with tempfile.TemporaryDirectory() as place:
        folder, answered = Path(place) / "files", Path(place) / "answer"
        folder.mkdir()
        spec = {"folder": str(folder), "answer": str(answered), "names": list(names)}
        spec |= {"answer_seconds": ANSWER_SECONDS, "fetch_seconds": FETCH_SECONDS}
        process = start_wandb_process("fetch", spec, Path(place), "online")
        try:
            with suppress(subprocess.TimeoutExpired):  # no answer, then
                process.wait(ANSWER_SECONDS + FETCH_SECONDS + 60)  # its own deadlines are shorter
        finally:
            kill_wandb_process(process)
        answer = files.read_json_or_none(answered) or {"error": "no answer in time"}
        if "error" in answer:
            raise WorkspaceError("W&B did not answer the query", got=redact_secrets(str(answer["error"])))
        kind = names.get(answer["found"], "")
        if kind == CHECKPOINTS and snapshot is not None:
            snapshot.restore(folder)
        elif kind:
            registry.import_artifact(folder)
        return kind


def replay_log_to_wandb(folder: Path, mirror: str = "auto") -> dict:
    """Log the whole local log of a run's `log` folder to W&B, each step once and in order.

    Parameters
    ----------
    folder : the run's `log` folder.
    mirror : as of `Tracker`; "offline" leaves a folder for `wandb sync`.

    Returns {"run", "steps", "mode", "folder"}. Raises FactoryError where there is no log, or W&B refuses it.
    """
    mode = wandb_mirror_mode(mirror)
    if mode == "off":
        raise SettingsError("W&B is switched off", where="ML_FACTORY_WANDB or WANDB_MODE", next_step="unset it")
    check_packages_installed("wandb")
    folder = Path(folder).absolute()
    rows = read_log_steps(folder)
    if not rows:
        raise WorkspaceError("This run has no log", where=folder, next_step="name a folder under results/{SYMBOL}")
    stored = [files.read_json_or_none(folder / name) for name in ("run.json", SUMMARY)]
    run, end = (one if isinstance(one, dict) else {} for one in stored)
    name = run.get("run_id") or folder.parent.name
    spec = {"run_id": name, "settings": run.get("settings", {}), "folder": str(folder), "snapshot": None}
    process = WandbMirrorProcess.start(mode, folder, "replay", spec | {"attempt": "~"})  # after every attempt
    try:
        if process is not None:
            process.end({"status": "finished", "summary": end.get("summary", {})}, 0)
        if process is None or not process.wait(INIT_SECONDS + FINISH_SECONDS):
            raise WorkspaceError("W&B did not take the log", where=folder, got=process and process.status())
    finally:
        if process is not None:
            process.kill()
    where = max(folder.glob("wandb/*run-*"), default=folder)
    return {"run": name, "steps": len(rows), "mode": mode, "folder": str(where)}
