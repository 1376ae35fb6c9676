"""Tracker of one run: a JSONL log in the workspace, mirrored to W&B.

The log is authoritative. The mirror is a separate process (`wandb_process`, `wandb_sync`) that reads it, so that W&B
never delays the run.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.checkpoints.lease import LeaseTakenOverError
from ml_factory.errors import WorkspaceError
from ml_factory.process_identity import process_id
from ml_factory.redaction import redact_values
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.files import disk_errors, files, flush_to_disk, local_cache_folder
from ml_factory.storage.json_values import fingerprint_json, to_json_value
from ml_factory.storage.mirror import push_in_background
from ml_factory.tracking.run_log import (
    SUMMARY,
    attempt_number,
    count_run_log_steps,
    format_log_line,
    list_log_attempts,
    next_log_attempt,
)
from ml_factory.tracking.wandb_process import WandbMirrorProcess, wandb_mirror_mode, warn_wandb_once
from ml_factory.tracking.wandb_sync import PROJECT, TAKEN_OVER, RunSnapshot, artifact_name


class Tracker:
    """Log of one run; usable as a context manager.

    Parameters
    ----------
    run_id : names the run; the same after a resume.
    settings : JSON-able; stored with the log and sent to W&B.
    folder : this run's log folder in the workspace.
    local_folder : of W&B's own files; by default below the user's cache folder.
    mirror : "auto" (W&B online where there is a key, else offline), "offline" or "off". The environment variable
        ML_FACTORY_WANDB can only reduce this.
    snapshot : files from which the run resumes; the mirror keeps the newest of them at W&B until the run has registered
        an artifact.
    project : W&B project of the mirror.

    A disk that refuses costs one warning, never the run.
    """

    def __init__(
        self, run_id: str, settings: dict, folder: str | os.PathLike, local_folder: str | os.PathLike | None = None,
        mirror: str = "auto", snapshot: RunSnapshot | None = None, project: str = PROJECT,
    ):  # fmt: skip
        self.run_id, self.folder = run_id, Path(folder).absolute()
        mode = wandb_mirror_mode(mirror)
        self._mirror: WandbMirrorProcess | None = None
        self._finished = False
        self._path = self.folder / next_log_attempt(self.folder, process_id()[:8])
        record = {
            "run_id": run_id,
            "settings": to_json_value(settings),
            "started_at": _now(),
            "attempt": attempt_number(self._path.name),
        }
        self._write_json("run.json", record)
        if mode != "off":
            local = Path(local_folder or local_cache_folder("runs") / fingerprint_json([str(self.folder), run_id])[:16])
            spec = {"run_id": run_id, "folder": str(self.folder), "settings": record["settings"], "project": project}
            spec |= {"attempt": self._path.name, "snapshot": vars(snapshot) if snapshot is not None else None}
            self._mirror = WandbMirrorProcess.start(mode, local.absolute(), self._path.stem, spec)

    def log(self, step: int, metrics: dict) -> None:
        """Record metrics of one step. On return they are on the disk (outside this process); never waits for W&B."""
        line = format_log_line(int(step), redact_values(metrics)).encode()
        try:
            with disk_errors(self.folder):
                self._append(line)
        except WorkspaceError as error:
            warn_wandb_once(f"A step of {self.run_id} is not in its log: {error}", f"step {self.run_id}")
        if self._mirror is not None:
            self._mirror.wait(0)

    def _append(self, line: bytes) -> None:
        """Append a whole line or nothing. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise

    def log_missing(self, history: Sequence[tuple[int, dict]]) -> None:
        """Log the steps of a checkpoint's history, (step, metrics), that the log lacks: a cloud drive may have lost
        them.

        The last step is always logged: later steps of an earlier attempt are void from there on.
        """
        known = count_run_log_steps([step for step, _ in history], self.folder)
        for step, metrics in history[min(known, len(history) - 1) :] if history else ():
            self.log(step, metrics)

    def flush(self) -> None:
        """Put the log on the disk, right before a checkpoint is saved, and have it uploaded where the workspace is
        elsewhere.

        A checkpoint is then ahead of the log by the epoch that it ends, at most, which is logged from its history; log
        entries ahead of the checkpoint are void after a resume.
        """
        # A line that is missing later is logged again from the checkpoint's history.
        with suppress(OSError), open(self._path, "rb") as file:
            flush_to_disk(file.fileno())
        push_in_background(self.folder)

    def finish(self, summary: dict | None = None, status: str = "finished", artifact: Artifact | None = None) -> None:
        """Close the log, store the summary, and wait a second for the mirror, which then continues alone.

        Parameters
        ----------
        summary : JSON-able results.
        status : "finished" or "failed".
        artifact : the run's registered artifact; the mirror uploads a copy to W&B.
        """
        if self._finished:
            return
        record = {
            "run_id": self.run_id, "status": status, "finished_at": _now(), "summary": to_json_value(summary or {}),
        }  # fmt: skip
        self._close()
        if self._path.name == max([self._path.name, *list_log_attempts(self.folder)]):  # else a later one's stays
            self._write_json(SUMMARY, record)
        if self._mirror is not None:
            self._mirror.end(record | {"artifacts": [_artifact_payload(artifact)] if artifact else []}, 1.0)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, LeaseTakenOverError):  # a later session owns this run's log: no summary
            self._close()
            if self._mirror is not None:
                self._mirror.end({"status": TAKEN_OVER, "summary": {}, "artifacts": []}, 0)
        self.finish(status="finished" if kind is None else "failed")

    def _close(self) -> None:
        self.flush()
        self._finished = True

    def _write_json(self, name: str, record: dict) -> None:
        try:
            files.write_json(self.folder / name, record)
        except WorkspaceError as error:
            warn_wandb_once(f"The log of {self.run_id} is not complete: {error}", f"log {self.run_id}")


def _artifact_payload(artifact: Artifact) -> dict:
    """Return the arguments of `WandbSync.log_artifact` for an artifact of the registry."""
    facts = {name: value for name, value in artifact.facts.items() if name in ("model", "horizon", "data", "run_id")}
    return {
        "name": artifact_name(artifact.kind, artifact.facts.get("run_id") or artifact.hash[:12]), "kind": artifact.kind,
        "files": {name: str(artifact.path / name) for name in ("state.safetensors", "artifact.json")},
        "metadata": {"symbol": artifact.symbol, "hash": artifact.hash, "made_from": artifact.made_from, **facts}
    }  # fmt: skip


def _now() -> str:
    return datetime.now(UTC).isoformat()
