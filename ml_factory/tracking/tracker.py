"""Tracker of one run: a local JSONL log, uploaded to the workspace and mirrored to W&B.

The local log is authoritative. The mirror is a separate process (see `wandb_process`) that reads the local log, so that
W&B never delays the run.
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

from ml_factory.checkpoints.lease import LeaseTakenOverError
from ml_factory.errors import FactoryError, FileError, WorkspaceError
from ml_factory.process_identity import process_id
from ml_factory.redaction import redact_secrets, redact_values
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.files import disk_errors, files, flush_to_disk, local_cache_folder
from ml_factory.storage.json_values import LARGEST_JSON, fingerprint_json, parse_json, to_json_value
from ml_factory.tracking.log_upload import SUMMARY, LogUploader
from ml_factory.tracking.run_log import (
    RunLogAttempt,
    RunLogFile,
    count_run_log_steps,
    format_log_line,
    list_log_files,
    log_segment_name,
    parse_log_file_name,
)
from ml_factory.tracking.run_snapshot import RunSnapshot
from ml_factory.tracking.wandb_process import DeadlineWatchdog, WandbMirrorProcess, wandb_mirror_mode, warn_wandb_once
from ml_factory.tracking.wandb_sync import PROJECT, SECONDS_PER_MB, WandbSync, artifact_name

TAKEN_OVER = "taken over"
# Code of the mirror process.
_MIRROR = f"import sys; from {__name__} import run_mirror_process; run_mirror_process(sys.stdin.read())"


class Tracker:
    """Log of one run; usable as a context manager.

    Parameters
    ----------
    run_id : names the run; the same after a resume.
    settings : JSON-able; stored with the log and sent to W&B.
    folder : this run's log folder in the workspace.
    local_folder : on a local disk; by default below the user's cache folder.
    mirror : "auto" (W&B online where there is a key, else offline), "offline" or "off". The environment variable
        ML_FACTORY_WANDB can only reduce this.
    snapshot : files from which the run resumes; the mirror keeps the newest of them at W&B until the run has registered
        an artifact.
    project : W&B project of the mirror.

    A disk that refuses costs one warning, never the run.
    """

    def __init__(
        self,
        run_id: str,
        settings: dict,
        folder: str | os.PathLike,
        local_folder: str | os.PathLike | None = None,
        mirror: str = "auto",
        snapshot: RunSnapshot | None = None,
        project: str = PROJECT,
    ):
        self.run_id, self.folder = run_id, Path(folder).absolute()
        self.local_folder = Path(local_folder or _cache_folder(self.folder, run_id)).absolute()
        mode = wandb_mirror_mode(mirror)
        self._file = self._mirror = None
        self._logged = self._finished = False
        self._texts: dict[str, str] = {}
        with disk_errors(self.local_folder):
            self.local_folder.mkdir(parents=True, exist_ok=True)
        self._log_uploader = LogUploader(self.local_folder, self.folder)
        local = [file.attempt.number for file in list_log_files(self.local_folder)]
        self._attempt, self._number = RunLogAttempt(1 + max(local, default=0), process_id()[:8]), 0
        uploaded = self._upload()  # segments that a killed attempt left on this disk
        self._attempt = RunLogAttempt(
            1 + max([*local, *(file.attempt.number for file in uploaded)], default=0),
            process_id()[:8],
        )
        self._open_segment()
        record = {"run_id": run_id, "settings": to_json_value(settings), "started_at": _now(), "attempt": self.attempt}
        self._write_json("run.json", record)
        if mode != "off":
            spec = {"run_id": run_id, "folder": str(self.folder), "settings": record["settings"], "project": project}
            spec["snapshot"] = snapshot.to_dict() if snapshot is not None else None
            self._mirror = WandbMirrorProcess.start(_MIRROR, mode, self.local_folder, self._attempt, spec)

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1, over all sessions that this one knows of."""
        return self._attempt.number

    def log(self, step: int, metrics: dict) -> None:
        """Record metrics of one step. On return they are on the disk (outside this process); never waits for W&B."""
        if self._finished:
            raise FactoryError("This run's log is finished", where=self.run_id, next_step="open a new Tracker")
        line = format_log_line(int(step), time.time(), redact_values(metrics)).encode()
        try:
            with disk_errors(self.local_folder):
                if self._file is None:
                    self._open_segment()
                self._file.write(line)
            self._logged = True
        except WorkspaceError as error:
            warn_wandb_once(f"A step of {self.run_id} is not in its log: {error}", f"step {self.run_id}")
        if self._mirror is not None:
            self._mirror.check()

    def log_missing(self, history: Sequence[tuple[int, dict]]) -> None:
        """Log the steps of a checkpoint's history, (step, metrics), that the log lacks: a cloud drive may have lost
        them.

        The last step is always logged: later steps of an earlier attempt are void from there on.
        """
        known = count_run_log_steps([step for step, _ in history], self.local_folder, self.folder)
        for step, metrics in history[min(known, len(history) - 1) :] if history else ():
            self.log(step, metrics)

    def close_segment(self) -> None:
        """Close the open segment and copy it to the workspace, right before a checkpoint is saved.

        No checkpoint is then ever ahead of the log, and log entries ahead of the checkpoint are void after a resume.
        """
        if self._logged:
            self._close_file()
        self._upload()

    def finish(
        self, summary: dict | None = None, status: str = "finished", mirror_seconds: float = 1.0,
        artifact: Artifact | None = None
    ) -> None:  # fmt: skip
        """Close the log, store the summary, and wait `mirror_seconds` for the mirror, which then continues alone.

        Parameters
        ----------
        summary : JSON-able results.
        status : "finished" or "failed".
        mirror_seconds : longest wait.
        artifact : the run's registered artifact; the mirror uploads a copy to W&B.
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
        if self._mirror is not None:
            self._mirror.end(record | {"artifacts": [_artifact_payload(artifact)] if artifact else []}, mirror_seconds)

    def wait_mirror(self, seconds: float) -> bool:
        """Wait at most `seconds` for the mirror; return True when W&B has everything, and without a mirror."""
        return self._mirror is None or self._mirror.wait(seconds)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, LeaseTakenOverError):
            self._abandon()
        self.finish(status="finished" if kind is None else "failed")

    def _abandon(self) -> None:
        """Stop logging without a summary: a later session owns this run's log."""
        self._finished = True
        self._close_file()
        if self._mirror is not None:
            self._mirror.end({"status": TAKEN_OVER, "summary": {}, "artifacts": []}, 0)

    def _open_segment(self) -> None:
        path = self.local_folder / log_segment_name(self._attempt, self._number)
        with disk_errors(path):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives until the segment is closed

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(OSError):  # `_upload` reports a copy that misses a line
            flush_to_disk(file.fileno())
        file.close()
        self._number, self._logged = self._number + 1, False

    def _upload(self) -> list[RunLogFile]:
        """Upload closed segments to the workspace; return the log's files there, none where it refuses."""
        try:
            names = self._log_uploader.upload(self._attempt, self._number, self._texts)
        except WorkspaceError as error:
            warn_wandb_once(f"The log of {self.run_id} stays on the local disk for now: {error}", f"log {self.run_id}")
            return []
        self._texts.clear()
        return [file for name in names if (file := parse_log_file_name(self.folder / name))]

    def _write_json(self, name: str, record: dict) -> None:
        self._texts[name] = json.dumps(redact_values(record), indent=2, allow_nan=False) + "\n"
        self._upload()


def run_mirror_process(text: str) -> None:
    """Follow the local log into W&B until the run has ended or the parent is gone, in the mirror process."""
    spec = json.loads(text)
    status, end = Path(spec["status"]), Path(spec["end"])
    sys.excepthook = lambda kind, error, trace: status.write_text(redact_secrets(f"{kind.__name__}: {error}")[:500])
    watchdog = DeadlineWatchdog(status)
    watchdog.set_deadline(spec["init_seconds"], "W&B did not answer")
    with suppress(OSError):
        os.nice(10)
    wandb = import_wandb()
    sync = WandbSync(wandb, spec, lambda **named: begin_wandb_run(wandb, spec, **named), watchdog.set_deadline)
    watchdog.set_deadline(None, "")
    status.write_text("ready")
    sync.follow_log(lambda: has_run_ended(end, spec["parent"]))
    record = read_exit_record(end)
    payloads = record.get("artifacts", [])
    unfinished = not payloads and record["status"] != TAKEN_OVER  # another session uploads its own checkpoints
    watchdog.set_deadline(spec["finish_seconds"], "the workspace did not answer how much is left to upload")
    size = sum(files.size(file) for payload in payloads for file in payload["files"])
    size += sync.checkpoints_size() if unfinished else 0
    watchdog.set_deadline(
        spec["finish_seconds"] + size / 1e6 * SECONDS_PER_MB, "W&B did not take the last data in time"
    )
    for payload in payloads:
        sync.log_artifact(**payload)
    if unfinished:
        sync.upload_checkpoints()
    sync.run.summary.update(record["summary"])
    sync.run.finish(exit_code=0 if record["status"] == "finished" else 1)
    if payloads:
        sync.delete_checkpoints(payloads)


def import_wandb():
    """Import the wandb module; only in child processes, because it may hang."""
    return importlib.import_module("wandb")


def begin_wandb_run(wandb, spec: dict, **named):
    """Start a W&B run with our settings: quiet and with deadlines."""
    settings = wandb.Settings(console="off", silent=True, init_timeout=spec["init_seconds"], x_disable_stats=True)
    return wandb.init(
        project=spec.get("project", PROJECT),
        dir=spec["local"],
        config=spec["settings"],
        mode=spec["mode"],
        settings=settings,
        **named,
    )


def _artifact_payload(artifact: Artifact) -> dict:
    """Return the arguments of `WandbSync.log_artifact` for an artifact of the registry."""
    facts = {name: value for name, value in artifact.facts.items() if name in ("model", "horizon", "data", "run_id")}
    return {
        "name": artifact_name(artifact.kind, artifact.facts.get("run_id") or artifact.hash[:12]), "kind": artifact.kind,
        "files": [str(artifact.path / name) for name in ("state.safetensors", "artifact.json")],
        "metadata": {"symbol": artifact.symbol, "hash": artifact.hash, "made_from": artifact.made_from, **facts}
    }  # fmt: skip


def _cache_folder(folder: Path, run_id: str) -> Path:
    """Return the local folder, the same for the same run of the same workspace."""
    return local_cache_folder("runs") / fingerprint_json([str(folder), run_id])[:16]


def _now() -> str:
    return datetime.now(UTC).isoformat()


def read_exit_record(end: Path) -> dict:
    """Return the run's record of its end; status "killed" without one."""
    try:
        return parse_json(files.read(end, LARGEST_JSON), finite=False)
    except (FileError, ValueError):
        return {"status": "killed", "summary": {}}


def has_run_ended(end: Path, parent: int) -> bool:
    """Return True when the run has ended, or its process is gone."""
    return end.exists() or os.getppid() != parent
