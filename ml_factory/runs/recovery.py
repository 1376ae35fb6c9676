"""What W&B kept of a run, brought back where the workspace has nothing; and a whole record told to W&B again.

Everything that talks to the service is a child process with a deadline. What comes back is verified as if a stranger
had sent it: an artifact by its content's hash, a checkpoint as its container.
"""

import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from ml_factory.errors import CheckpointError, FactoryError, SettingsError, WorkspaceError
from ml_factory.keys import redact
from ml_factory.runs.checkpoints import CheckpointManager
from ml_factory.runs.containers import look_at
from ml_factory.runs.mirror import FINISH_SECONDS, INIT_SECONDS, ask, give_up, mirror_mode
from ml_factory.runs.pool import Unit
from ml_factory.runs.records import read_rows
from ml_factory.runs.registry import Artifact, Registry
from ml_factory.runs.retelling import CHECKPOINT_FILE, Retelling, artifact_name, checkpoint_name
from ml_factory.runs.storage import Disk, read_json
from ml_factory.runs.tracking import PROJECT, begin_run, client

ANSWER_SECONDS, FETCH_SECONDS = 20.0, 900.0  # until the service says whether it has it; until the files are here
_FETCH = f"import sys; from {__name__} import fetch_main; fetch_main(sys.stdin.read())"
_REPLAY = f"import sys; from {__name__} import replay_main; replay_main(sys.stdin.read())"


def recover_artifact(registry: Registry, kind: str, run_id: str) -> Artifact | None:
    """What this run left, from W&B into the registry; None when W&B does not have it.

    Raises WorkspaceError when W&B does not answer, CheckpointError for what comes back damaged.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not _fetch(artifact_name(kind, run_id), Path(folder)):
            return None
        artifact = registry.adopt(Path(folder))
    return artifact


def recover_checkpoint(manager: CheckpointManager, phase: str) -> bool:
    """The last checkpoint of this phase, from W&B into a slot of the manager's pool; whether there was one. Raises as
    `recover_artifact` does."""
    unit = Unit(manager.run, phase)
    with tempfile.TemporaryDirectory() as folder:
        if not _fetch(checkpoint_name(manager.run, phase), Path(folder)):
            return False
        file = Path(folder) / CHECKPOINT_FILE
        if not unit.of(look_at(Disk(), file).info):
            raise CheckpointError("W&B gave the checkpoint of another run", where=unit.run, next_step="remove it there")
        manager.home.copy_in(unit, manager.keep_last, str(file))
    return True


def replay(folder: Path, run_id: str = "", mirror: str = "auto") -> dict:
    """Tell the whole local record in a run's `log` folder to W&B, each step once and in order.

    run_id : the W&B run; empty: the run's own.  mirror : as of `Tracker`; "offline" leaves a folder for `wandb sync`.
    Returns {"run", "steps", "mode", "folder"}. Raises FactoryError where there is no record, or W&B does not take it.
    """
    mode = mirror_mode(mirror)
    if mode == "off":
        raise SettingsError("W&B is switched off", where="ML_FACTORY_WANDB or WANDB_MODE", next_step="unset it")
    folder = Path(folder).absolute()
    rows = read_rows(folder)
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
    spec |= {"summary": summary, "init_seconds": INIT_SECONDS, "checkpoints": None}
    answer = ask(_REPLAY, spec, folder, INIT_SECONDS + FINISH_SECONDS, mode)
    return {"run": answer["run"], "steps": len(rows), "mode": mode, "folder": answer["folder"]}


def recover_quietly(registry: Registry, kind: str, manager: CheckpointManager, phase: str) -> str:
    """What W&B kept of this run: "artifact", else "checkpoint", else "" for nothing.

    A service that does not answer costs its deadline once in a process, and one warning.
    """
    try:
        if recover_artifact(registry, kind, manager.run) is not None:
            return "artifact"
        return "checkpoint" if recover_checkpoint(manager, phase) else ""
    except FactoryError as error:
        give_up(f"Nothing is restored from W&B, and it is not waited for again; runs are recorded locally: {error}")
        return ""


def _fetch(name: str, folder: Path) -> bool:
    """The files of W&B's artifact of that name into the folder; False when there is none."""
    spec = {"name": name, "folder": str(folder), "answer_seconds": ANSWER_SECONDS}
    if not ask(_FETCH, {**spec, "files": False}, folder, ANSWER_SECONDS, "online")["there"]:
        return False
    return ask(_FETCH, {**spec, "files": True}, folder, FETCH_SECONDS, "online")["there"]


def fetch_main(text: str) -> None:
    """The child: say whether W&B has an artifact, and bring its files."""
    spec = json.loads(text)
    try:
        api = client().Api(overrides={"project": PROJECT}, timeout=int(spec["answer_seconds"]))
        name = f"{PROJECT}/{spec['name']}:latest"
        there = api.artifact_exists(name)
        if there and spec["files"]:
            api.artifact(name).download(root=spec["folder"])
        answer = {"there": bool(there)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told
        answer = {"error": redact(f"{type(error).__name__}: {error}")[:500]}
    print(json.dumps(answer), flush=True)


def replay_main(text: str) -> None:
    """The child: tell the record."""
    spec = json.loads(text)
    try:
        wandb = client()
        story = Retelling(wandb, spec, lambda **named: begin_run(wandb, spec, **named))
        story.catch_up(sys.maxsize)
        story.run.summary.update(spec["summary"])
        where = str(Path(story.run.dir).parent)
        story.run.finish()
        answer = {"run": story.run.id, "folder": where}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told
        answer = {"error": redact(f"{type(error).__name__}: {error}")[:500]}
    print(json.dumps(answer), flush=True)
