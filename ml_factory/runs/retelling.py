"""What the mirror's process tells W&B: each step once and in order, and the files that are to outlive the machine.

It follows the local record. `wandb` itself is handed in: it has its home in `tracking`.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ml_factory.errors import FactoryError
from ml_factory.runs.containers import copy_container
from ml_factory.runs.pool import Pool, Unit
from ml_factory.runs.records import Attempt, parse_lines, read_rows, segments
from ml_factory.runs.slots import Slots
from ml_factory.runs.storage import Disk

POLL_SECONDS = 0.5
CHECKPOINT_SECONDS = 600.0  # between two checkpoints sent to a service that answers; offline the last one is kept
CHECKPOINT_FILE = "checkpoint.ckpt"
SECONDS_PER_MB = 4.0  # what an upload or a download is given: 250 kB/s
_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")


def wandb_name(text: str) -> str:
    """A name that W&B takes: of a run or of an artifact."""
    return _CHARACTERS.sub("-", text)[:120]


def checkpoint_name(run_id: str, phase: str) -> str:
    """The W&B artifact that holds the last checkpoint of a phase."""
    return wandb_name(f"checkpoint-{run_id}-{phase}")


def artifact_name(kind: str, run_id: str) -> str:
    """The W&B artifact that holds what a run left in the registry."""
    return wandb_name(f"{kind}-{run_id}")


class Retelling:
    """One attempt's record, told to W&B as it grows.

    wandb : the module, or what stands in for it.
    spec : what `tracking.Tracker` told its mirror.
    begin : (keywords of wandb.init beside the usual ones) -> a run.
    """

    def __init__(self, wandb, spec: dict, begin: Callable):
        self._wandb, self._spec, self._begin = wandb, spec, begin
        self._local, self._folder = Path(spec["local"]), Path(spec["folder"])
        self._attempt, self._online = Attempt(*spec["attempt"]), spec["mode"] == "online"
        self._name = wandb_name(spec["run_id"])
        self._offsets: dict[Path, int] = {}
        self._sent, self._sent_at = "", time.monotonic()
        self.run = begin(id=self._name, name=self._name, **({"resume": "allow"} if self._online else {}))

    def follow(self, over: Callable[[], bool]) -> None:
        """Tell first what earlier attempts leave valid, then ours as it comes, until the run is `over`. A step is told
        when a later one is there, because until then more may be said about it."""
        waiting: dict[int, dict] = {}
        told = None
        while True:
            ended = over()
            for record in self._news():
                waiting.setdefault(record["step"], {}).update(record["metrics"])
            if told is None and (waiting or ended):
                told = self.catch_up(min(waiting, default=sys.maxsize))
            for step in sorted(waiting)[: None if ended else -1]:
                metrics = waiting.pop(step)
                if step > told:
                    self.run.log(metrics, step=step)
                    told = step
            if ended:
                return
            if self._online and time.monotonic() - self._sent_at > CHECKPOINT_SECONDS:
                self.send_checkpoint()
            time.sleep(POLL_SECONDS)

    def catch_up(self, first: int) -> int:
        """Tell the steps below `first` that are valid and that the service lacks; the last step told.

        A service that is ahead of `first` holds steps that are void since the run was resumed from an older checkpoint:
        it is asked to go back. Where it cannot, all of it is told to a new run beside the old one.
        """
        known = self.run.starting_step if self._online else 0
        if known > first:
            known = self._rewind(first)
        return self.tell(row for row in read_rows(self._local, self._folder, before=self._attempt)
                         if known <= row["step"] < first)  # fmt: skip

    def tell(self, rows: Iterable[dict]) -> int:
        """Log these rows; the last step, or one below every step."""
        told = -sys.maxsize
        for row in rows:
            self.run.log(row["metrics"], step=row["step"])
            told = row["step"]
        return told

    def send(self, name: str, kind: str, files: Iterable[Path], metadata: dict) -> None:
        """Log an artifact of these files."""
        artifact = self._wandb.Artifact(name, type=kind, metadata=metadata)
        for file in files:
            artifact.add_file(str(file), name=Path(file).name)
        self.run.log_artifact(artifact)

    def send_checkpoint(self) -> None:
        """Log the newest checkpoint that verifies, unless it was sent before. One that is written over while it is
        copied, or a folder that does not answer, is left for the next time."""
        self._sent_at = time.monotonic()
        where = self._spec.get("checkpoints")
        if where is None:
            return
        with suppress(FactoryError, OSError), tempfile.TemporaryDirectory(dir=self._local) as aside:
            told = Slots(Pool(Path(where["folder"]))).told(Unit(where["run"], where["phase"]))
            if told and told[0]["hash"] != self._sent:
                copy = Path(aside) / CHECKPOINT_FILE
                info = copy_container(Disk(), copy, Disk(), Path(told[0]["path"]))
                facts = {key: info[key] for key in ("run", "phase", "sequence", "saved_at", "hash") if key in info}
                self.send(checkpoint_name(where["run"], where["phase"]), "checkpoint", [copy], facts)
                self._sent = info["hash"]

    def _rewind(self, first: int) -> int:
        """The first step that the run, gone back, does not have."""
        self.run.finish()
        try:
            self.run = self._begin(id=self._name, name=self._name, resume_from=f"{self._name}?_step={first - 1}")
            return first
        except (self._wandb.Error, ValueError, RuntimeError, OSError):  # this server or plan cannot: lose no point
            beside = wandb_name(f"{self._name}-{self._attempt.number}-{self._attempt.session}")
            self.run = self._begin(id=beside, name=beside, resume="allow")
            return 0

    def _news(self) -> Iterator[dict]:
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


def how_it_ended(end: Path) -> dict:
    """What the run said at its end; "killed" when it said nothing."""
    try:
        return json.loads(end.read_bytes())
    except (OSError, ValueError):
        return {"status": "killed", "summary": {}}


def is_over(end: Path, parent: int) -> bool:
    """Whether the run has ended, or is gone."""
    return end.exists() or os.getppid() != parent
