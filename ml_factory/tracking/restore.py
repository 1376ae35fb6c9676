"""What W&B kept of a run, brought back where the workspace has nothing; and a whole record told to W&B again.

Everything that talks to the service is a child process with a deadline. What comes back is verified as if a stranger
had sent it: an artifact by its content's hash, checkpoints file by file and as containers.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import FactoryError, SettingsError, WorkspaceError
from ml_factory.secrets import redact
from ml_factory.storage.artifact_registry import Artifact, Registry
from ml_factory.storage.atomic_files import read_json
from ml_factory.tracking.artifact_versions import PROJECT, artifact_name
from ml_factory.tracking.run_log import read_steps
from ml_factory.tracking.run_snapshot import RunSnapshot
from ml_factory.tracking.tracker import begin_run, client
from ml_factory.tracking.wandb_process import FINISH_SECONDS, INIT_SECONDS, disable_wandb, mirror_mode, run_wandb_query
from ml_factory.tracking.wandb_sync import CHECKPOINTS, WandbSync

ANSWER_SECONDS, FETCH_SECONDS = 20.0, 900.0  # until the service says whether it has it; until the files are here
_FETCH = f"import sys; from {__name__} import fetch_main; fetch_main(sys.stdin.read())"
_REPLAY = f"import sys; from {__name__} import replay_main; replay_main(sys.stdin.read())"


def restore_artifact(registry: Registry, kind: str, run_id: str) -> Artifact | None:
    """What this run left, from W&B into the registry; None when W&B does not have it.

    Raises WorkspaceError when W&B does not answer, CheckpointError for what comes back damaged.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not _fetch([artifact_name(kind, run_id)], Path(folder)):
            return None
        return registry.import_artifact(Path(folder))


def restore_run(
    manager: CheckpointManager, snapshot: RunSnapshot, registry: Registry | None = None, kinds: Sequence[str] = ()
) -> str:
    """What W&B kept of this run: the first of `kinds` that it left there, into the registry, else CHECKPOINTS, into
    the manager's slots and the files beside them; its kind, or "" for nothing. Raises as `recover_artifact` does."""
    names = {artifact_name(kind, snapshot.run): kind for kind in (*kinds, CHECKPOINTS)}
    with tempfile.TemporaryDirectory() as folder:
        kind = names.get(_fetch(list(names), Path(folder)), "")
        if kind == CHECKPOINTS:
            snapshot.restore_into(Path(folder), manager.home, manager.keep_last)
        elif kind:
            registry.import_artifact(Path(folder))
    return kind


def replay(folder: Path, run_id: str = "", mirror: str = "auto") -> dict:
    """Tell the whole local record in a run's `log` folder to W&B, each step once and in order.

    run_id : the W&B run; empty: the run's own.  mirror : as of `Tracker`; "offline" leaves a folder for `wandb sync`.
    Returns {"run", "steps", "mode", "folder"}. Raises FactoryError where there is no record, or W&B does not take it.
    """
    mode = mirror_mode(mirror)
    if mode == "off":
        raise SettingsError("W&B is switched off", where="ML_FACTORY_WANDB or WANDB_MODE", next_step="unset it")
    folder = Path(folder).absolute()
    rows = read_steps(folder)
    if not rows:
        raise WorkspaceError("This run has no record", where=folder, next_step="name a folder under results/{SYMBOL}")
    told = {}
    with suppress(WorkspaceError):
        told = read_json(folder / "run.json")
    summary = {}
    with suppress(WorkspaceError):
        summary = read_json(folder / "summary.json").get("summary", {})
    spec = {"run_id": run_id or told.get("run_id") or folder.parent.name, "settings": told.get("settings", {})}
    spec |= {"folder": str(folder), "local": str(folder), "attempt": [sys.maxsize, ""], "mode": mode}
    spec |= {"summary": summary, "init_seconds": INIT_SECONDS, "snapshot": None}
    answer = run_wandb_query(_REPLAY, spec, folder, INIT_SECONDS + FINISH_SECONDS, mode)
    return {"run": answer["run"], "steps": len(rows), "mode": mode, "folder": answer["folder"]}


def try_restore(manager: CheckpointManager, snapshot: RunSnapshot, *rest) -> str:
    """As `recover`. A service that does not answer costs its deadline once in a process, and one warning."""
    try:
        return restore_run(manager, snapshot, *rest)
    except FactoryError as error:
        disable_wandb(
            f"Nothing is restored from W&B, and it is not waited for again; runs are recorded locally: {error}"
        )
        return ""


def _fetch(names: Sequence[str], folder: Path) -> str:
    """The files of the first of these artifacts that W&B has, into the folder; its name, "" where there is none."""
    spec = {"names": list(names), "folder": str(folder), "answer_seconds": ANSWER_SECONDS}
    there = run_wandb_query(_FETCH, {**spec, "files": False}, folder, ANSWER_SECONDS, "online")["there"]
    if not there:
        return ""
    return run_wandb_query(_FETCH, {**spec, "names": [there], "files": True}, folder, FETCH_SECONDS, "online")["there"]


def fetch_main(text: str) -> None:
    """The child: say which of the artifacts W&B has, and bring its files."""
    spec = json.loads(text)
    try:
        api = client().Api(overrides={"project": PROJECT}, timeout=int(spec["answer_seconds"]))
        there = next((name for name in spec["names"] if api.artifact_exists(f"{PROJECT}/{name}:latest")), "")
        if there and spec["files"]:
            api.artifact(f"{PROJECT}/{there}:latest").download(root=spec["folder"])
        answer = {"there": there}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told
        answer = {"error": redact(f"{type(error).__name__}: {error}")[:500]}
    print(json.dumps(answer), flush=True)


def replay_main(text: str) -> None:
    """The child: tell the record."""
    spec = json.loads(text)
    try:
        wandb = client()
        sync = WandbSync(wandb, spec, lambda **named: begin_run(wandb, spec, **named))
        sync.sync_earlier(sys.maxsize)
        sync.run.summary.update(spec["summary"])
        where = str(Path(sync.run.dir).parent)
        sync.run.finish()
        answer = {"run": sync.run.id, "folder": where}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told
        answer = {"error": redact(f"{type(error).__name__}: {error}")[:500]}
    print(json.dumps(answer), flush=True)
