"""What the mirror's process tells W&B: each step once and in order, and the files that are to outlive the machine.

It follows the local record. `wandb` itself is handed in: it has its home in `tracking`.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ml_factory.errors import FactoryError
from ml_factory.tracking.artifact_versions import ArtifactVersions, artifact_name, wandb_name
from ml_factory.tracking.run_log import Attempt, parse_lines, read_steps, segments
from ml_factory.tracking.run_snapshot import RunSnapshot

POLL_SECONDS = 0.5
# Until the first checkpoint is sent to a service that answers, and between two; offline the last one is kept.
FIRST_SECONDS, CHECKPOINT_SECONDS = 120.0, 600.0
SECONDS_PER_MB = 4.0  # what an upload or a download is given: 250 kB/s
CHECKPOINTS = "checkpoints"  # type, and begin of the name, of what lets a run go on


class WandbSync:
    """One attempt's record, told to W&B as it grows.

    wandb : the module, or what stands in for it.
    spec : what `tracking.Tracker` told its mirror.
    begin : (keywords of wandb.init beside the usual ones) -> a run.
    allow : (seconds or None, reason), as of `mirror.Watchdog`: what may hang ends by then.
    """

    def __init__(self, wandb, spec: dict, begin_run: Callable, allow: Callable = lambda seconds, reason: None):
        self._wandb, self._spec, self._begin_run, self._allow = wandb, spec, begin_run, allow
        self._local, self._folder = Path(spec["local"]), Path(spec["folder"])
        self._attempt, self._online = Attempt(*spec["attempt"]), spec["mode"] == "online"
        self._name = wandb_name(spec["run_id"])
        self._offsets: dict[Path, int] = {}
        self._sent, self._send_at = None, time.monotonic() + FIRST_SECONDS
        self._snapshot = RunSnapshot.from_dict(spec["snapshot"]) if spec["snapshot"] else None
        self._versions = ArtifactVersions(wandb, CHECKPOINTS, artifact_name(CHECKPOINTS, spec["run_id"]))
        self.run = begin_run(id=self._name, name=self._name, **({"resume": "allow"} if self._online else {}))

    def follow(self, over: Callable[[], bool]) -> None:
        """Tell first what earlier attempts leave valid, then ours as it comes, until the run is `over`. A step is told
        when a later one is there, because until then more may be said about it."""
        waiting: dict[int, dict] = {}
        told = None
        while True:
            ended = over()
            for record in self._new_records():
                waiting.setdefault(record["step"], {}).update(record["metrics"])
            if told is None and (waiting or ended):
                told = self.sync_earlier(min(waiting, default=sys.maxsize))
            for step in sorted(waiting)[: None if ended else -1]:
                metrics = waiting.pop(step)
                if step > told:
                    self.run.log(metrics, step=step)
                    told = step
            if ended:
                return
            if self._online and time.monotonic() > self._send_at:
                self._allow(CHECKPOINT_SECONDS, "W&B did not say which checkpoints it has")
                self.upload_checkpoints()
                self._allow(None, "")
            time.sleep(POLL_SECONDS)

    def sync_earlier(self, first: int) -> int:
        """Tell the steps below `first` that are valid and that the service lacks; the last step told.

        A service that is ahead of `first` holds steps that are void since the run was resumed from an older checkpoint:
        it is asked to go back. Where it cannot, all of it is told to a new run beside the old one.
        """
        known = self.run.starting_step if self._online else 0
        if known > first:
            known = self._rewind(first)
        return self.log_rows(row for row in read_steps(self._local, self._folder, before=self._attempt)
                         if known <= row["step"] < first)  # fmt: skip

    def log_rows(self, rows: Iterable[dict]) -> int:
        """Log these rows; the last step, or one below every step."""
        told = -sys.maxsize
        for row in rows:
            self.run.log(row["metrics"], step=row["step"])
            told = row["step"]
        return told

    def log_artifact(self, name: str, kind: str, files: Iterable[Path], metadata: dict) -> None:
        """Log an artifact of these files."""
        artifact = self._wandb.Artifact(name, type=kind, metadata=metadata)
        for file in files:
            artifact.add_file(str(file), name=Path(file).name)
        self.run.log_artifact(artifact)

    def upload_checkpoints(self) -> None:
        """Log what the run can go on from, as one artifact of a name that stays, unless nothing of it is new. A folder
        that does not answer is left for the next time.

        Of the versions before only the newest stay. Where a later session than ours has sent its own, nothing is sent:
        ours has been taken over, and may not know.
        """
        self._send_at = time.monotonic() + (FIRST_SECONDS if self._sent is None else CHECKPOINT_SECONDS)
        if self._snapshot is None:
            return
        with suppress(FactoryError, OSError), tempfile.TemporaryDirectory(dir=self._local) as aside:
            content = self._snapshot.content()
            if not content or content == self._sent:
                return
            facts = self._snapshot.pack(Path(aside))
            if self._online and is_outdated(facts, self._versions.metadata()):
                return
            if self._online:
                self._versions.delete_old()
            name = artifact_name(CHECKPOINTS, self._spec["run_id"])
            self.log_artifact(name, CHECKPOINTS, sorted(Path(aside).iterdir()), facts)
            self._sent, self._send_at = content, time.monotonic() + CHECKPOINT_SECONDS

    def checkpoints_size(self) -> int:
        """Bytes that `send_checkpoints` may have to send."""
        with suppress(FactoryError, OSError):
            return self._snapshot.size() if self._snapshot is not None else 0
        return 0

    def delete_checkpoints(self, payloads: Iterable[dict]) -> None:
        """The run is finished: once W&B has what it left, nobody goes on from its checkpoints."""
        if self._online and all(ArtifactVersions(self._wandb, one["kind"], one["name"]).metadata() for one in payloads):
            self._versions.delete_old(0)

    def _rewind(self, first: int) -> int:
        """The first step that the run, gone back, does not have."""
        self.run.finish()
        try:
            self.run = self._begin_run(id=self._name, name=self._name, resume_from=f"{self._name}?_step={first - 1}")
            return first
        except (self._wandb.Error, ValueError, RuntimeError, OSError):  # this server or plan cannot: lose no point
            beside = wandb_name(f"{self._name}-{self._attempt.number}-{self._attempt.session}")
            self.run = self._begin_run(id=beside, name=beside, resume="allow")
            return 0

    def _new_records(self) -> Iterator[dict]:
        """What our segments hold and was not read yet, up to the last whole line."""
        for (attempt, _), path in segments(self._local).items():
            if attempt != self._attempt:
                continue
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(data)
            yield from parse_lines(data, path)


def is_outdated(facts: dict, there: dict) -> bool:
    """Whether W&B has a checkpoint that a later session saved of a unit that we have, too."""
    fences = there.get("fences")
    known = fences if isinstance(fences, dict) else {}
    return any(known.get(unit, 0) > fence for unit, fence in facts["fences"].items())


def read_exit_record(end: Path) -> dict:
    """What the run said at its end; "killed" when it said nothing."""
    try:
        return json.loads(end.read_bytes())
    except (OSError, ValueError):
        return {"status": "killed", "summary": {}}


def has_ended(end: Path, parent: int) -> bool:
    """Whether the run has ended, or is gone."""
    return end.exists() or os.getppid() != parent
