"""Restore a run from W&B where the workspace has no local state, and replay a local log to W&B.

Every query of the service runs in a child process with a deadline. Downloads are verified like untrusted input: an
artifact by its content's hash, checkpoints file by file.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ml_factory.errors import FactoryError, SettingsError, WorkspaceError
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.tracking.run_log import read_log_steps
from ml_factory.tracking.run_snapshot import RunSnapshot
from ml_factory.tracking.wandb_process import (
    FINISH_SECONDS,
    INIT_SECONDS,
    disable_wandb,
    run_wandb_query,
    wandb_mirror_mode,
)
from ml_factory.tracking.wandb_sync import CHECKPOINTS, artifact_name

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
    names = {artifact_name(kind, run_id): kind for kind in (*kinds, *([CHECKPOINTS] if snapshot else []))}
    with tempfile.TemporaryDirectory() as folder:
        spec = {"folder": folder, "answer_seconds": ANSWER_SECONDS, "files": False, "names": list(names)}
        found = run_wandb_query("fetch", spec, Path(folder), ANSWER_SECONDS, "online")["found"]
        if not found:
            return ""
        run_wandb_query("fetch", {**spec, "files": True, "names": [found]}, Path(folder), FETCH_SECONDS, "online")
        if names[found] == CHECKPOINTS:
            snapshot.restore(Path(folder))
        else:
            registry.import_artifact(Path(folder))
    return names[found]


def try_restore_from_wandb(
    run_id: str, registry: ArtifactRegistry, kinds: Sequence[str], snapshot: RunSnapshot | None = None
) -> str:
    """Restore as `restore_from_wandb`. A service that does not answer costs its deadline once per process, and one
    warning.
    """
    try:
        return restore_from_wandb(run_id, registry, kinds, snapshot)
    except FactoryError as error:
        disable_wandb(
            f"Nothing is restored from W&B, and this process does not query it again; runs are logged locally: {error}"
        )
        return ""


def replay_log_to_wandb(folder: Path, run_id: str = "", mirror: str = "auto") -> dict:
    """Log the whole local log of a run's `log` folder to W&B, each step once and in order.

    Parameters
    ----------
    folder : the run's `log` folder.
    run_id : the W&B run; empty: the run's own.
    mirror : as of `Tracker`; "offline" leaves a folder for `wandb sync`.

    Returns {"run", "steps", "mode", "folder"}. Raises FactoryError where there is no log, or W&B refuses it.
    """
    mode = wandb_mirror_mode(mirror)
    if mode == "off":
        raise SettingsError("W&B is switched off", where="ML_FACTORY_WANDB or WANDB_MODE", next_step="unset it")
    folder = Path(folder).absolute()
    rows = read_log_steps(folder)
    if not rows:
        raise WorkspaceError("This run has no log", where=folder, next_step="name a folder under results/{SYMBOL}")
    stored = [files.read_json_or_none(folder / name) for name in ("run.json", "summary.json")]
    run, end = (one if isinstance(one, dict) else {} for one in stored)
    spec = {
        "run_id": run_id or run.get("run_id") or folder.parent.name, "settings": run.get("settings", {}),
        "summary": end.get("summary", {}), "folder": str(folder), "local": str(folder), "attempt": [sys.maxsize, ""],
        "mode": mode, "init_seconds": INIT_SECONDS, "snapshot": None,
    }  # fmt: skip
    answer = run_wandb_query("replay", spec, folder, INIT_SECONDS + FINISH_SECONDS, mode)
    return {"run": answer["run"], "steps": len(rows), "mode": mode, "folder": answer["folder"]}
