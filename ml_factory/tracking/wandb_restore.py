"""Restore a run from W&B where the workspace has no local state, and replay a local log to W&B.

Every query of the service runs in a child process with a deadline. Downloads are verified like untrusted input: an
artifact by its content's hash, checkpoints file by file and as containers.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import FactoryError, SettingsError, WorkspaceError
from ml_factory.redaction import redact_secrets
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.storage.stored_paths import stored_path
from ml_factory.tracking.run_log import read_log_steps
from ml_factory.tracking.run_snapshot import RunSnapshot
from ml_factory.tracking.wandb_process import (
    FINISH_SECONDS,
    INIT_SECONDS,
    disable_wandb,
    run_wandb_query,
    wandb_mirror_mode,
)
from ml_factory.tracking.wandb_sync import CHECKPOINTS, PROJECT, WandbSync, artifact_name, import_wandb

ANSWER_SECONDS, FETCH_SECONDS = 20.0, 900.0  # for the query whether an artifact exists; for its download
_CHILD = f"import sys; from {__name__} import _child_main; _child_main({{task!r}}, sys.stdin.read())"
_FETCH, _REPLAY = (_CHILD.format(task=task) for task in ("fetch", "replay"))


def restore_wandb_artifact(registry: ArtifactRegistry, kind: str, run_id: str) -> Artifact | None:
    """Download the artifact of this run from W&B into the registry; None when W&B does not have it.

    Raises WorkspaceError when W&B does not answer, CheckpointError for a damaged download.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not _fetch([artifact_name(kind, run_id)], Path(folder)):
            return None
        return registry.import_artifact(Path(folder))


def restore_artifact_or_checkpoints(
    manager: CheckpointManager,
    snapshot: RunSnapshot,
    registry: ArtifactRegistry | None = None,
    kinds: Sequence[str] = (),
) -> str:
    """Restore this run from W&B; return the kind restored, or "" for none.

    The first of `kinds` that W&B has goes into the registry, else CHECKPOINTS to the files of the snapshot.

    Parameters
    ----------
    manager : of the run's checkpoints.
    snapshot : describes the run's files.
    registry, kinds : target and types of artifacts, such as "model".

    Raises as `restore_wandb_artifact` does.
    """
    names = {artifact_name(kind, snapshot.run): kind for kind in (*kinds, CHECKPOINTS)}
    with tempfile.TemporaryDirectory() as folder:
        kind = names.get(_fetch(list(names), Path(folder)), "")
        if kind == CHECKPOINTS:
            snapshot.restore(Path(folder))
        elif kind:
            registry.import_artifact(Path(folder))
    return kind


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
    run_file, end = (_read_object(folder / name) for name in ("run.json", "summary.json"))
    summary = end.get("summary", {})
    spec = {"run_id": run_id or run_file.get("run_id") or folder.parent.name, "settings": run_file.get("settings", {})}
    spec |= {"folder": str(folder), "local": str(folder), "attempt": [sys.maxsize, ""], "mode": mode}
    spec |= {"summary": summary, "init_seconds": INIT_SECONDS, "snapshot": None}
    answer = run_wandb_query(_REPLAY, spec, folder, INIT_SECONDS + FINISH_SECONDS, mode)
    return {"run": answer["run"], "steps": len(rows), "mode": mode, "folder": answer["folder"]}


def _read_object(path: Path) -> dict:
    """Read a JSON object; {} where there is none."""
    stored = files.read_json_or_none(path)
    return stored if isinstance(stored, dict) else {}


def try_restore_from_wandb(manager: CheckpointManager, snapshot: RunSnapshot, *rest) -> str:
    """Restore as `restore_artifact_or_checkpoints`. A service that does not answer costs its deadline once per
    process, and one warning.
    """
    try:
        return restore_artifact_or_checkpoints(manager, snapshot, *rest)
    except FactoryError as error:
        disable_wandb(
            f"Nothing is restored from W&B, and this process does not query it again; runs are logged locally: {error}"
        )
        return ""


def _fetch(names: Sequence[str], folder: Path) -> str:
    """Download the files of the first of these artifacts that W&B has; return its name, "" where it has none."""
    spec = {"names": list(names), "folder": str(folder), "answer_seconds": ANSWER_SECONDS}
    found = run_wandb_query(_FETCH, {**spec, "files": False}, folder, ANSWER_SECONDS, "online")["found"]
    if not found:
        return ""
    return run_wandb_query(_FETCH, {**spec, "names": [found], "files": True}, folder, FETCH_SECONDS, "online")["found"]


def _fetch_in_child(spec: dict) -> dict:
    """Look the artifacts up and download the first one's files."""
    api = import_wandb().Api(overrides={"project": PROJECT}, timeout=int(spec["answer_seconds"]))
    found = next((name for name in spec["names"] if api.artifact_exists(f"{PROJECT}/{name}:latest")), "")
    if found and spec["files"]:
        artifact = api.artifact(f"{PROJECT}/{found}:latest")
        for name in artifact.manifest.entries:
            stored_path(spec["folder"], name)  # raises FileError for one that leads out of the folder
        artifact.download(root=spec["folder"])
    return {"found": found}


def _replay_in_child(spec: dict) -> dict:
    """Log the whole record to W&B."""
    sync = WandbSync(import_wandb(), spec)
    sync.log_earlier_steps(sys.maxsize)
    sync.run.summary.update(spec["summary"])
    where = str(Path(sync.run.dir).parent)
    sync.run.finish()
    return {"run": sync.run.id, "folder": where}


def _child_main(task: str, text: str) -> None:
    """Run "fetch" or "replay" in a child process and print the answer, or the error, as JSON.

    text : description of the task as JSON.
    """
    try:
        answer = {"fetch": _fetch_in_child, "replay": _replay_in_child}[task](json.loads(text))
    except Exception as error:  # noqa: BLE001 - any failure is reported to the parent
        answer = {"error": redact_secrets(f"{type(error).__name__}: {error}")[:500]}
    print(json.dumps(answer), flush=True)
