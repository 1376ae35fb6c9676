"""What processes of their own do at W&B: follow a run's log, each step once and in order, upload its checkpoints and
artifacts, and download them.
"""

import fnmatch
import importlib
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ml_factory.checkpoints.checkpoint_folder import CheckpointFolder
from ml_factory.errors import CheckpointError, FactoryError, FileError
from ml_factory.redaction import redact_secrets
from ml_factory.storage.checkpoint_file import verify_checkpoint
from ml_factory.storage.files import files, stored_path
from ml_factory.storage.json_values import parse_json
from ml_factory.tracking.run_log import read_log_steps
from ml_factory.tracking.wandb_process import NO_ANSWER, READY

POLL_SECONDS = 0.5
# Until the first checkpoint is uploaded to a service that answers, and between two; offline only the last one.
FIRST_SECONDS, CHECKPOINT_SECONDS = 120.0, 600.0
SECONDS_PER_MB = 4.0  # deadline of an upload or a download: 250 kB/s
CHECKPOINTS = "checkpoints"  # artifact type, and prefix of its name, of a run's checkpoints
KEPT_VERSIONS = 2  # of a run's checkpoints at W&B, in addition to the one being uploaded
QUERY_SECONDS = 20
PROJECT = "ohlcv-ml-factory"
TAKEN_OVER = "taken over"
_ILLEGAL_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class RunSnapshot:
    """Files from which an unfinished run resumes.

    Parameters
    ----------
    run : its id.
    checkpoints : folder of all runs' checkpoints.
    parts, pattern : folder and names of the files that finished parts leave (fold-lstm-1-of-5.state ...).
    """

    run: str
    checkpoints: str
    parts: str
    pattern: str

    def files(self) -> dict[str, Path]:
        """Return name -> path of the newest checkpoint of each phase, and of all parts. Raises WorkspaceError where the
        disk refuses.
        """
        folder = CheckpointFolder(self.checkpoints, 1)
        newest = {phase: folder.infos(self.run, phase)[:1] for phase in folder.phases(self.run)}
        found = {f"{phase}.ckpt": Path(info["path"]) for phase, infos in newest.items() for info in infos}
        names = fnmatch.filter(files.names(self.parts), self.pattern)
        return found | {name: Path(self.parts) / name for name in names}

    def restore(self, folder: Path) -> None:
        """Copy downloaded files to their places, where nothing is yet.

        Everything is verified first. Raises CheckpointError where a checkpoint is damaged or another run's.
        """
        copies = {}
        for path in folder.iterdir():
            if path.match(self.pattern):
                copies[stored_path(self.parts, path.name)] = path
                continue
            info = verify_checkpoint(path)
            if info["run"] != self.run:
                raise CheckpointError("This is the checkpoint of another run", where=path.name, got=info["run"])
            copies[stored_path(Path(self.checkpoints) / self.run, f"{info['phase']}.0.ckpt")] = path
        for target, path in copies.items():
            if not files.is_file(target):
                files.write(target, files.read(path))


class WandbSync:
    """Sync of one attempt's log to W&B as it grows.

    Parameters
    ----------
    wandb : the module, or a stand-in.
    spec : description of the run, as `tracker.Tracker` passes it to its mirror.
    set_deadline : (seconds or 0, reason), as of `set_deadline`, for the next operations.
    """

    def __init__(self, wandb, spec: dict, set_deadline: Callable = lambda seconds, reason: None):
        self._wandb, self._spec, self._set_deadline = wandb, spec, set_deadline
        self._folder, self._attempt = Path(spec["folder"]), spec["attempt"]
        self._online = spec["mode"] == "online"
        self._sent: dict = {}
        self._send_at = time.monotonic() + FIRST_SECONDS
        snapshot = spec["snapshot"]
        self._snapshot = RunSnapshot(**snapshot) if snapshot else None
        name, self._checkpoints = _wandb_name(spec["run_id"]), artifact_name(CHECKPOINTS, spec["run_id"])
        settings = wandb.Settings(console="off", silent=True, init_timeout=spec["init_seconds"], x_disable_stats=True)
        self.run = wandb.init(
            project=spec.get("project", PROJECT), dir=spec["local"], config=spec["settings"], mode=spec["mode"],
            settings=settings, id=name, name=name, **({"resume": "allow"} if self._online else {}),
        )  # fmt: skip

    def follow_log(self, over: Callable[[], bool]) -> None:
        """Log the valid steps of this attempt and earlier ones that the service lacks, in order, until the run is
        `over`.

        A step is logged when a later one has begun, because until then more metrics may be added to it; nothing before
        this attempt's first step, which makes later ones of earlier attempts void. A service that is ahead of it has
        steps that a resume repeats to the bit: they are not logged again.
        """
        last_step = self.run.starting_step - 1 if self._online else -sys.maxsize
        own = self._folder / self._attempt
        while True:
            ended = over()
            begun = ended or (own.is_file() and own.stat().st_size > 0)
            rows = read_log_steps(self._folder, through=self._attempt)
            for row in rows[: None if ended else -1] if begun else ():
                if row["step"] > last_step:
                    self.run.log(row["metrics"], step=row["step"])
                    last_step = row["step"]
            if ended:
                return
            if self._online and time.monotonic() > self._send_at:
                self.upload_checkpoints()
            time.sleep(POLL_SECONDS)

    def log_artifact(self, name: str, kind: str, files: Mapping[str, str | Path], metadata: dict) -> None:
        """Log an artifact of these files, name -> path."""
        artifact = self._wandb.Artifact(name, type=kind, metadata=metadata)
        for file, path in files.items():
            artifact.add_file(str(path), name=file)
        self.run.log_artifact(artifact)

    def upload_checkpoints(self) -> None:
        """Log the run's snapshot as a new version of one artifact, unless its content is unchanged. A file that cannot
        be read is left for the next time.
        """
        self._send_at = time.monotonic() + (CHECKPOINT_SECONDS if self._sent else FIRST_SECONDS)
        with suppress(FactoryError, OSError), tempfile.TemporaryDirectory(dir=self._spec["local"]) as folder:
            found = self._snapshot.files() if self._snapshot is not None else {}
            stamps = {name: (path, os.stat(path).st_mtime_ns) for name, path in found.items()}
            if found and stamps != self._sent:
                copies = {name: shutil.copyfile(path, Path(folder) / name) for name, path in found.items()}
                for copy in Path(folder).glob("*.ckpt"):  # a slot may be overwritten meanwhile
                    verify_checkpoint(copy)
                self.set_transfer_deadline(copies.values())
                self.delete_old_checkpoints(KEPT_VERSIONS)
                self.log_artifact(self._checkpoints, CHECKPOINTS, copies, {"run": self._spec["run_id"]})
                self._set_deadline(0, "")
                self._sent, self._send_at = stamps, time.monotonic() + CHECKPOINT_SECONDS

    def delete_old_checkpoints(self, keep: int) -> None:
        """Delete all but the newest `keep` versions of the run's checkpoints at W&B, which keeps every one: a night's
        training would leave forty. One with an alias of the user stays; what the service refuses is left there.
        """
        with suppress(self._wandb.Error, ValueError, RuntimeError, OSError):
            api = self._wandb.Api(overrides={"project": PROJECT}, timeout=QUERY_SECONDS)
            found = list(api.artifacts(CHECKPOINTS, f"{PROJECT}/{self._checkpoints}")) if self._online else []
            found.sort(key=lambda version: int(version.version.removeprefix("v")), reverse=True)
            for version in found[keep:]:
                if not set(version.aliases) - {"latest"}:
                    version.delete(delete_aliases=keep == 0)

    def set_transfer_deadline(self, paths: Iterable[str | Path]) -> None:
        """Let the process end where W&B does not take these files in time."""
        seconds = self._spec["finish_seconds"] + sum(map(os.path.getsize, paths)) / 1e6 * SECONDS_PER_MB
        self._set_deadline(seconds, "W&B did not take the last data in time")


def run_task(task: str, text: str) -> None:
    """Run "mirror" or "fetch" in a child process. text : arguments of the task as JSON."""
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))  # with what this process has started
    (_mirror if task == "mirror" else _fetch)(json.loads(text))


def _mirror(spec: dict) -> None:
    """Follow the log into W&B until the run has ended or the parent is gone."""
    status, end = Path(spec["status"]), Path(spec["end"])
    sys.excepthook = lambda kind, error, trace: status.write_text(redact_secrets(f"{kind.__name__}: {error}")[:500])

    def set_deadline(seconds: float, reason: str) -> None:
        """End this process after `seconds`, also where the client hangs; 0: no more."""
        status.write_text(reason or READY)
        signal.alarm(math.ceil(seconds))

    set_deadline(spec["init_seconds"], NO_ANSWER)
    with suppress(OSError):
        os.nice(10)
    sync = WandbSync(importlib.import_module("wandb"), spec, set_deadline)
    set_deadline(0, "")
    sync.follow_log(lambda: end.exists() or os.getppid() != spec["parent"])
    try:
        record = parse_json(files.read(end), finite=False)
    except (FileError, ValueError):
        record = {"status": "killed", "summary": {}}
    payloads = record.get("artifacts", [])
    if not payloads and record["status"] != TAKEN_OVER:  # another session uploads its own checkpoints
        sync.upload_checkpoints()
    sync.set_transfer_deadline(path for payload in payloads for path in payload["files"].values())
    for payload in payloads:
        sync.log_artifact(**payload)
    sync.run.summary.update(record["summary"])
    sync.run.finish(exit_code=0 if record["status"] == "finished" else 1)
    if payloads:
        sync.delete_old_checkpoints(0)


def _fetch(spec: dict) -> None:
    """Download the first of these artifacts that W&B has; write {"found": its name or ""}, or {"error": ...}, to the
    file `answer`.
    """
    try:
        signal.alarm(math.ceil(spec["answer_seconds"]))
        api = importlib.import_module("wandb").Api(overrides={"project": PROJECT}, timeout=int(spec["answer_seconds"]))
        found = next((name for name in spec["names"] if api.artifact_exists(f"{PROJECT}/{name}:latest")), "")
        if found:
            signal.alarm(math.ceil(spec["fetch_seconds"]))
            artifact = api.artifact(f"{PROJECT}/{found}:latest")
            for name in artifact.manifest.entries:
                stored_path(spec["folder"], name)  # raises FileError for one that leads out of the folder
            artifact.download(root=spec["folder"])
        answer = {"found": found}
    except Exception as error:  # noqa: BLE001 - any failure is reported to the parent
        answer = {"error": redact_secrets(f"{type(error).__name__}: {error}")[:500]}
    Path(spec["answer"]).write_text(json.dumps(answer))


def _wandb_name(text: str) -> str:
    """Return the text as a legal W&B name of a run or an artifact."""
    return _ILLEGAL_CHARACTERS.sub("-", text)[:120]


def artifact_name(kind: str, run_id: str) -> str:
    """Return the W&B artifact name of a run's "model" or "stack", or of its "checkpoints"."""
    return _wandb_name(f"{kind}-{run_id}")
