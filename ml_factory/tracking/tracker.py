"""A run's record: lines of JSON on the local disk are the truth, closed segments go to the workspace, W&B mirrors.

The mirror is a process of its own (see `mirror`) that reads the local record, so that W&B is never on the run's path.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.checkpoints.leases import TakenOverError, session_id
from ml_factory.errors import FactoryError, WorkspaceError
from ml_factory.secrets import redact
from ml_factory.storage import file_access
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.atomic_files import cache_folder, disk_errors, fingerprint, to_json_value
from ml_factory.storage.atomic_rename import flush_to_disk
from ml_factory.tracking.artifact_versions import PROJECT, artifact_name
from ml_factory.tracking.log_upload import PATIENCE, SUMMARY, LogUploader
from ml_factory.tracking.run_log import (
    Attempt,
    attempt_of,
    first_missing,
    read_log,
    record_line,
    segment_name,
    segments,
)
from ml_factory.tracking.run_snapshot import RunSnapshot
from ml_factory.tracking.wandb_process import DeadlineWatchdog, MirrorProcess, mirror_mode, warn_once
from ml_factory.tracking.wandb_sync import SECONDS_PER_MB, WandbSync, has_ended, read_exit_record

__all__ = ["Tracker", "mirror_main", "read_log"]

TAKEN_OVER = "taken over"
FIRST_SECONDS = 10.0  # that a mount is given to say what it has of this run
# By name: the mirror is a process of its own.
_MIRROR = f"import sys; from {__name__} import mirror_main; mirror_main(sys.stdin.read())"


class Tracker:
    """The record of one run; usable as a context manager.

    Parameters
    ----------
    run_id : names the run; the same after a resume.
    settings : JSON-able; kept beside the record and given to W&B.
    folder : this run's folder in the workspace, where closed segments go and `read_log` reads.
    local_folder : on a local disk; by default below the user's cache folder.
    mirror : "auto" (W&B online where there is a key, else offline), "offline" or "off". The environment variable
        ML_FACTORY_WANDB can only ask for less.
    keepsake : what the run goes on from; the mirror keeps the newest of it at W&B until the run has left an artifact.

    A disk that refuses costs one line in the log, never the run.
    """

    def __init__(
        self,
        run_id: str,
        settings: dict,
        folder: str | os.PathLike,
        local_folder: str | os.PathLike | None = None,
        mirror: str = "auto",
        snapshot: RunSnapshot | None = None,
    ):
        self.run_id, self.folder = run_id, Path(folder).absolute()
        self.local_folder = Path(local_folder or _cache_folder(self.folder, run_id)).absolute()
        mode = mirror_mode(mirror)
        self._file = self._mirror = None
        self._logged = self._finished = False
        self._texts: dict[str, str] = {}
        with disk_errors(self.local_folder):
            self.local_folder.mkdir(parents=True, exist_ok=True)
        self._log_uploader = LogUploader(self.local_folder, self.folder)
        here = [one.number for one, _ in segments(self.local_folder)]
        self._attempt, self._number = Attempt(1 + max(here, default=0), session_id()[:8]), 0
        there = self._upload(FIRST_SECONDS)  # what a killed attempt left on this disk
        self._attempt = Attempt(
            1 + max([*here, *(attempt_of(name).number for name in there)], default=0), session_id()[:8]
        )
        self._open_segment()
        record = {"run_id": run_id, "settings": to_json_value(settings), "started_at": _now(), "attempt": self.attempt}
        self._write_json("run.json", record)
        if mode != "off":
            spec = {"run_id": run_id, "folder": str(self.folder), "settings": record["settings"]}
            spec["snapshot"] = snapshot.to_dict() if snapshot is not None else None
            self._mirror = MirrorProcess.start(_MIRROR, mode, self.local_folder, self._attempt, spec)

    @property
    def attempt(self) -> int:
        """Counted from 1 over all sessions that this one knows of."""
        return self._attempt.number

    def log(self, step: int, metrics: dict) -> None:
        """Record numbers of one step. On disk (past our process) when this returns; never waits for W&B."""
        if self._finished:
            raise FactoryError("This run's record is finished", where=self.run_id, next_step="open a new Tracker")
        line = redact(record_line(int(step), time.time(), metrics)).encode()
        try:
            with disk_errors(self.local_folder):
                if self._file is None:
                    self._open_segment()
                self._file.write(line)
            self._logged = True
        except WorkspaceError as error:
            warn_once(f"A step of {self.run_id} is not in its record: {error}")
        if self._mirror is not None:
            self._mirror.check()

    def log_missing(self, history: Sequence[tuple[int, dict]]) -> None:
        """Log again what a checkpoint's history, (step, metrics), has and the record lacks: a cloud may have lost what
        was logged before. The last one always: what an earlier attempt told of later ones is void from there on."""
        known = first_missing([step for step, _ in history], self.local_folder, self.folder)
        for step, metrics in history[min(known, len(history) - 1) :] if history else ():
            self.log(step, metrics)

    def close_segment(self) -> None:
        """Close what was logged so far and copy it to the workspace. Call it right before a checkpoint is saved: then
        no checkpoint is ever ahead of the record, and what is ahead of the checkpoint is void after a resume."""
        if self._logged:
            self._close_file()
        self._upload()

    def finish(
        self, summary: dict | None = None, status: str = "finished", mirror_seconds: float = 1.0,
        artifact: Artifact | None = None,
    ) -> None:  # fmt: skip
        """Close the record, keep the summary, and give the mirror `mirror_seconds`; after that it goes on alone.

        artifact : what the run has left in the registry; the mirror keeps a copy at W&B.
        """
        if self._finished:
            return
        self._finished = True
        self._close_file()
        record = {
            "run_id": self.run_id,
            "status": status,
            "finished_at": _now(),
            "summary": to_json_value(summary or {}),
        }
        self._write_json(SUMMARY, record)
        self._log_uploader.close()
        if self._mirror is not None:
            self._mirror.end(record | {"artifacts": [_artifact_payload(artifact)] if artifact else []}, mirror_seconds)

    def wait_mirror(self, seconds: float) -> bool:
        """Whether the mirror has everything, after waiting for it at most so long; True without a mirror."""
        return self._mirror is None or self._mirror.wait(seconds)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, TakenOverError):
            self._abandon()
        self.finish(status="finished" if kind is None else "failed")

    def _abandon(self) -> None:
        """A later session tells of this run from here on: nothing is written over what it says."""
        self._finished = True
        self._close_file()
        self._log_uploader.close()
        if self._mirror is not None:
            self._mirror.end({"status": TAKEN_OVER, "summary": {}, "artifacts": []}, 0)

    def _open_segment(self) -> None:
        path = self.local_folder / segment_name(self._attempt, self._number)
        with disk_errors(path):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives until the segment is closed

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(OSError):  # a copy that misses a line is told by _publish
            flush_to_disk(file.fileno())
        file.close()
        self._number, self._logged = self._number + 1, False

    def _upload(self, patience: float = PATIENCE) -> list[str]:
        """Bring what is closed to the workspace; the names of the segments there, none where it refuses."""
        writing = segment_name(self._attempt, self._number) if self._file is not None else ""
        try:
            names = self._log_uploader.upload(self._attempt, writing, self._texts, patience)
        except WorkspaceError as error:
            warn_once(f"The record of {self.run_id} stays on the local disk for now: {error}", f"record {self.run_id}")
            return []
        self._texts.clear()
        return names

    def _write_json(self, name: str, record: dict) -> None:
        self._texts[name] = redact(json.dumps(record, indent=2, allow_nan=False) + "\n")
        self._upload()


def mirror_main(text: str) -> None:
    """The mirror process: follow the local record into W&B until the run has ended or our parent is gone."""
    spec = json.loads(text)
    status, end = Path(spec["status"]), Path(spec["end"])
    sys.excepthook = lambda kind, error, trace: status.write_text(redact(f"{kind.__name__}: {error}")[:500])
    watchdog = DeadlineWatchdog(status)
    watchdog.allow(spec["init_seconds"], "W&B did not answer")
    with suppress(OSError):
        os.nice(10)
    wandb = client()
    sync = WandbSync(wandb, spec, lambda **named: begin_run(wandb, spec, **named), watchdog.allow)
    watchdog.allow(None, "")
    status.write_text("ready")
    sync.follow(lambda: has_ended(end, spec["parent"]))
    record = read_exit_record(end)
    payloads = record.get("artifacts", [])
    keeps = not payloads and record["status"] != TAKEN_OVER  # what another session goes on with is its to send
    watchdog.allow(spec["finish_seconds"], "the workspace did not say what is left to send")
    size = sum(sum(file_access.sizes(file)) for payload in payloads for file in payload["files"])
    size += sync.checkpoints_size() if keeps else 0
    watchdog.allow(spec["finish_seconds"] + size / 1e6 * SECONDS_PER_MB, "W&B did not take the last data in time")
    for payload in payloads:
        sync.log_artifact(**payload)
    if keeps:
        sync.upload_checkpoints()
    sync.run.summary.update(record["summary"])
    sync.run.finish(exit_code=0 if record["status"] == "finished" else 1)
    if payloads:
        sync.delete_checkpoints(payloads)


def client():
    """The wandb module: for child processes only, which may hang."""
    return importlib.import_module("wandb")


def begin_run(wandb, spec: dict, **named):
    """A W&B run of ours, quiet and with deadlines."""
    settings = wandb.Settings(console="off", silent=True, init_timeout=spec["init_seconds"], x_disable_stats=True)
    return wandb.init(
        project=PROJECT, dir=spec["local"], config=spec["settings"], mode=spec["mode"], settings=settings, **named
    )


def _artifact_payload(artifact: Artifact) -> dict:
    """An artifact of the registry as the mirror sends it."""
    facts = {name: value for name, value in artifact.facts.items() if name in ("model", "horizon", "data", "run_id")}
    return {
        "name": artifact_name(artifact.kind, artifact.facts.get("run_id") or artifact.hash[:12]), "kind": artifact.kind,
        "files": [str(artifact.path / name) for name in ("state.safetensors", "artifact.json")],
        "metadata": {"symbol": artifact.symbol, "hash": artifact.hash, "made_from": artifact.made_from, **facts},
    }  # fmt: skip


def _cache_folder(folder: Path, run_id: str) -> Path:
    """On a local disk, the same for the same run of the same workspace."""
    return cache_folder("runs") / fingerprint([str(folder), run_id])[:16]


def _now() -> str:
    return datetime.now(UTC).isoformat()
