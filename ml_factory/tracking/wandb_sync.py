"""Replay of a run's local log to W&B, each step once and in order, and upload of its checkpoints and artifacts.

It runs in the mirror process and follows the local log. The `wandb` module is passed in; only `tracker` imports it.
"""

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ml_factory.errors import FactoryError
from ml_factory.tracking.run_log import (
    RunLogAttempt,
    log_segment_name,
    parse_log_lines,
    read_log_segments,
    read_log_steps,
)
from ml_factory.tracking.run_snapshot import RunSnapshot

POLL_SECONDS = 0.5
# Until the first checkpoint is uploaded to a service that answers, and between two; offline only the last one.
FIRST_SECONDS, CHECKPOINT_SECONDS = 120.0, 600.0
SECONDS_PER_MB = 4.0  # deadline of an upload or a download: 250 kB/s
CHECKPOINTS = "checkpoints"  # artifact type, and prefix of its name, of a run's checkpoints
PROJECT = "ohlcv-ml-factory"
KEPT_VERSIONS = 2  # versions of a run's checkpoints at W&B, in addition to the one being uploaded
QUERY_SECONDS = 20
_ILLEGAL_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")


class WandbSync:
    """Sync of one attempt's log to W&B as it grows.

    Parameters
    ----------
    wandb : the module, or a stand-in.
    spec : description of the run, as `tracker.Tracker` passes it to its mirror.
    begin_run : (keywords of wandb.init in addition to the usual ones) -> a W&B run.
    set_deadline : (seconds or None, reason), as of `wandb_process.DeadlineWatchdog`, for the next operations.
    """

    def __init__(self, wandb, spec: dict, begin_run: Callable, set_deadline: Callable = lambda seconds, reason: None):
        self._wandb, self._spec, self._begin_run, self._set_deadline = wandb, spec, begin_run, set_deadline
        self._local, self._folder = Path(spec["local"]), Path(spec["folder"])
        self._attempt, self._online = RunLogAttempt(*spec["attempt"]), spec["mode"] == "online"
        self._name = _wandb_name(spec["run_id"])
        self._number, self._offset = 0, 0  # the segment that is read, and the bytes of it that were
        self._sent, self._send_at = None, time.monotonic() + FIRST_SECONDS
        self._snapshot = RunSnapshot.from_dict(spec["snapshot"]) if spec["snapshot"] else None
        self._versions = _ArtifactVersions(wandb, CHECKPOINTS, artifact_name(CHECKPOINTS, spec["run_id"]))
        self.run = begin_run(id=self._name, name=self._name, **({"resume": "allow"} if self._online else {}))

    def follow_log(self, over: Callable[[], bool]) -> None:
        """Log the valid steps of earlier attempts, then this attempt's as they come, until the run is `over`.

        A step is logged when a later one has begun, because until then more metrics may be added to it.
        """
        waiting: dict[int, dict] = {}
        last_step = None
        while True:
            ended = over()
            for record in self._new_records():
                waiting.setdefault(record["step"], {}).update(record["metrics"])
            if last_step is None and (waiting or ended):
                last_step = self.sync_earlier_steps(min(waiting, default=sys.maxsize))
            for step in sorted(waiting)[: None if ended else -1]:
                metrics = waiting.pop(step)
                if step > last_step:
                    self.run.log(metrics, step=step)
                    last_step = step
            if ended:
                return
            if self._online and time.monotonic() > self._send_at:
                self._set_deadline(CHECKPOINT_SECONDS, "W&B did not answer which checkpoints it has")
                self.upload_checkpoints()
                self._set_deadline(None, "")
            time.sleep(POLL_SECONDS)

    def sync_earlier_steps(self, first: int) -> int:
        """Log the valid steps below `first` that the service lacks; return the last step logged.

        A service that is ahead of `first` holds steps that became void when the run resumed from an older checkpoint:
        its run is rewound. Where it cannot rewind, all steps are logged to a new run.
        """
        known = self.run.starting_step if self._online else 0
        if known > first:
            known = self._rewind(first)
        return self._log_rows(row for row in read_log_steps(self._local, self._folder, before=self._attempt)
                         if known <= row["step"] < first)  # fmt: skip

    def _log_rows(self, rows: Iterable[dict]) -> int:
        """Log these rows; return the last step, or a value below every step."""
        last_step = -sys.maxsize
        for row in rows:
            self.run.log(row["metrics"], step=row["step"])
            last_step = row["step"]
        return last_step

    def log_artifact(self, name: str, kind: str, files: Iterable[Path], metadata: dict) -> None:
        """Log an artifact of these files."""
        artifact = self._wandb.Artifact(name, type=kind, metadata=metadata)
        for file in files:
            artifact.add_file(str(file), name=Path(file).name)
        self.run.log_artifact(artifact)

    def upload_checkpoints(self) -> None:
        """Log the run's snapshot as a new version of one artifact, unless its content is unchanged.

        A folder that does not answer is left for the next time. Only the newest earlier versions stay. Where a later
        session has uploaded its own snapshot, nothing is uploaded: this session has been taken over, and may not know.
        """
        self._send_at = time.monotonic() + (FIRST_SECONDS if self._sent is None else CHECKPOINT_SECONDS)
        if self._snapshot is None:
            return
        with suppress(FactoryError, OSError), tempfile.TemporaryDirectory(dir=self._local) as folder:
            content = self._snapshot.content()
            if not content or content == self._sent:
                return
            facts = self._snapshot.pack(Path(folder))
            if self._online and _is_snapshot_outdated(facts, self._versions.metadata()):
                return
            if self._online:
                self._versions.delete_old()
            name = artifact_name(CHECKPOINTS, self._spec["run_id"])
            self.log_artifact(name, CHECKPOINTS, sorted(Path(folder).iterdir()), facts)
            self._sent, self._send_at = content, time.monotonic() + CHECKPOINT_SECONDS

    def checkpoints_size(self) -> int:
        """Return the bytes that `upload_checkpoints` may have to upload."""
        with suppress(FactoryError, OSError):
            return self._snapshot.size() if self._snapshot is not None else 0
        return 0

    def delete_checkpoints(self, payloads: Iterable[dict]) -> None:
        """Delete a finished run's checkpoints at W&B once W&B has its artifacts."""
        if self._online and all(
            _ArtifactVersions(self._wandb, payload["kind"], payload["name"]).metadata() for payload in payloads
        ):
            self._versions.delete_old(0)

    def _rewind(self, first: int) -> int:
        """Rewind the W&B run, or start a new one; return the first step that it lacks."""
        self.run.finish()
        try:
            self.run = self._begin_run(id=self._name, name=self._name, resume_from=f"{self._name}?_step={first - 1}")
            return first
        except (
            self._wandb.Error,
            ValueError,
            RuntimeError,
            OSError,
        ):  # this server or plan cannot rewind: lose no step
            new_name = _wandb_name(f"{self._name}-{self._attempt.number}-{self._attempt.session}")
            self.run = self._begin_run(id=new_name, name=new_name, resume="allow")
            return 0

    def _new_records(self) -> Iterator[dict]:
        """Yield the records of this attempt's segments that were not read yet, up to the last complete line."""
        segments = read_log_segments(self._local, attempt=self._attempt, since=self._number)
        for (attempt, number), lines in segments.items():
            if number > self._number:
                self._number, self._offset = number, 0
            new, self._offset = lines[self._offset :], len(lines)
            yield from parse_log_lines(new, self._local / log_segment_name(attempt, number))


class _ArtifactVersions:
    """The versions of the artifact of this type and name: lookup of the newest, deletion of old ones.

    Each upload of checkpoints is a new version of one name, and W&B keeps them all: at one every ten minutes a night's
    training would leave forty. A service that does not answer, or refuses a deletion, costs space there and has no
    other effect: refused deletions are left for the next time.
    """

    def __init__(self, wandb, kind: str, name: str):
        self._wandb, self._kind, self._name = wandb, kind, name

    def metadata(self) -> dict:
        """Return the metadata of the newest version; {} without one, or without an answer."""
        found = self._list()
        return dict(found[0].metadata or {}) if found else {}

    def delete_old(self, keep: int = KEPT_VERSIONS) -> int:
        """Delete all but the newest `keep` versions and those with an alias of the user; return the number deleted."""
        deleted = 0
        for version in self._list()[keep:]:
            own = set(version.aliases) - {"latest"}
            try:
                if not own:
                    version.delete(delete_aliases=keep == 0)
                    deleted += 1
            except self._refusals():
                continue
        return deleted

    def _list(self) -> list:
        """List the versions, newest first."""
        try:
            api = self._wandb.Api(overrides={"project": PROJECT}, timeout=QUERY_SECONDS)
            if not api.artifact_exists(f"{PROJECT}/{self._name}:latest"):
                return []
            found = list(api.artifacts(self._kind, f"{PROJECT}/{self._name}"))
        except self._refusals():
            return []
        return sorted(found, key=lambda version: int(version.version.removeprefix("v")), reverse=True)

    def _refusals(self) -> tuple[type[Exception], ...]:
        return self._wandb.Error, ValueError, RuntimeError, OSError


def _wandb_name(text: str) -> str:
    """Return the text as a legal W&B name of a run or an artifact."""
    return _ILLEGAL_CHARACTERS.sub("-", text)[:120]


def artifact_name(kind: str, run_id: str) -> str:
    """Return the W&B artifact name of a run's "model" or "stack", or of its "checkpoints"."""
    return _wandb_name(f"{kind}-{run_id}")


def _is_snapshot_outdated(local: dict, metadata: dict) -> bool:
    """Return True when W&B has a checkpoint of a later session for a unit in this snapshot."""
    fences = metadata.get("fences")
    remote = fences if isinstance(fences, dict) else {}
    return any(remote.get(unit, 0) > fence for unit, fence in local["fences"].items())
