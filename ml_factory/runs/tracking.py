"""A run's record: lines of JSON on the local disk are the truth, closed segments go to the workspace, W&B mirrors.

The mirror is a process of its own (see `mirror`) that reads the local record, so that W&B is never on the run's path.
"""

import importlib
import json
import os
import re
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.errors import FactoryError, WorkspaceError
from ml_factory.runs.mirror import MirrorProcess, Watchdog, mirror_mode, redact, tell_once
from ml_factory.runs.records import parse_lines, read_log, read_rows, record_line, segment_name, segments
from ml_factory.runs.storage import disk_errors, fingerprint, flush_to_disk, plain, write_bytes_atomic

__all__ = ["Tracker", "mirror_main", "read_log"]

PROJECT = "ohlcv-ml-factory"
POLL_SECONDS = 0.5
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

    A disk that refuses costs one line in the log, never the run.
    """

    def __init__(
        self,
        run_id: str,
        settings: dict,
        folder: str | os.PathLike,
        local_folder: str | os.PathLike | None = None,
        mirror: str = "auto",
    ):
        self.run_id, self.folder = run_id, Path(folder).absolute()
        self.local_folder = Path(local_folder or _cache_folder(self.folder, run_id)).absolute()
        mode = mirror_mode(mirror)
        self._file = self._mirror = None
        self._logged = self._finished = False
        with disk_errors(self.local_folder):
            self.local_folder.mkdir(parents=True, exist_ok=True)
        taken = segments(self.local_folder, self.folder)
        self.attempt, self._number = 1 + max((attempt for attempt, _ in taken), default=0), 0
        self._publish()  # what a killed attempt left on this disk
        self._open_segment()
        record = {"run_id": run_id, "settings": plain(settings), "started_at": _now(), "attempt": self.attempt}
        self._write_json("run.json", record)
        if mode != "off":
            spec = {"run_id": run_id, "folder": str(self.folder), "settings": record["settings"]}
            self._mirror = MirrorProcess.start(_MIRROR, mode, self.local_folder, self.attempt, spec)

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
            tell_once(f"A step of {self.run_id} is not in its record: {error}")
        if self._mirror is not None:
            self._mirror.check()

    def close_segment(self) -> None:
        """Close what was logged so far and copy it to the workspace. Call it right before a checkpoint is saved: then
        no checkpoint is ever ahead of the record, and what is ahead of the checkpoint is void after a resume."""
        if self._logged:
            self._close_file()
        self._publish()

    def finish(self, summary: dict | None = None, status: str = "finished", mirror_seconds: float = 1.0) -> None:
        """Close the record, keep the summary, and give the mirror `mirror_seconds`; after that it goes on alone."""
        if self._finished:
            return
        self._finished = True
        self._close_file()
        self._publish()
        record = {"run_id": self.run_id, "status": status, "finished_at": _now(), "summary": plain(summary or {})}
        self._write_json("summary.json", record)
        if self._mirror is not None:
            self._mirror.end(record, mirror_seconds)

    def wait_mirror(self, seconds: float) -> bool:
        """Whether the mirror has everything, after waiting for it at most so long; True without a mirror."""
        return self._mirror is None or self._mirror.wait(seconds)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.finish(status="finished" if kind is None else "failed")

    def _open_segment(self) -> None:
        path = self.local_folder / segment_name(self.attempt, self._number)
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

    def _publish(self) -> None:
        """Copy every closed local segment that the workspace does not have whole."""
        if self.folder == self.local_folder:
            return
        writing = (self.attempt, self._number) if self._file is not None else None
        try:
            with disk_errors(self.folder):
                for key, path in segments(self.local_folder).items():
                    there = self.folder / path.name
                    if key == writing or (there.exists() and there.stat().st_size >= path.stat().st_size):
                        continue
                    data = path.read_bytes()
                    if data:
                        write_bytes_atomic(there, data)
        except WorkspaceError as error:
            tell_once(f"The record of {self.run_id} stays on the local disk for now: {error}")

    def _write_json(self, name: str, record: dict) -> None:
        text = redact(json.dumps(record, indent=2, allow_nan=False) + "\n")
        try:
            write_bytes_atomic(self.folder / name, text.encode())
        except WorkspaceError as error:
            tell_once(f"{name} of {self.run_id} is not written: {error}")


def mirror_main(text: str) -> None:
    """The mirror process: follow the local record into W&B until the run has ended or our parent is gone."""
    spec = json.loads(text)
    status, end = Path(spec["status"]), Path(spec["end"])
    sys.excepthook = lambda kind, error, trace: status.write_text(redact(f"{kind.__name__}: {error}")[:500])
    watchdog = Watchdog(status)
    watchdog.allow(spec["init_seconds"], "W&B did not answer")
    with suppress(OSError):
        os.nice(10)
    wandb = importlib.import_module("wandb")
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", spec["run_id"])[:100]
    run = wandb.init(
        project=PROJECT,
        id=name,
        name=name,
        dir=spec["local"],
        config=spec["settings"],
        mode=spec["mode"],
        resume="allow" if spec["mode"] == "online" else None,
        settings=wandb.Settings(console="off", silent=True, init_timeout=spec["init_seconds"], x_disable_stats=True),
    )
    watchdog.allow(None, "")
    status.write_text("ready")
    _follow(spec, run, end)
    watchdog.allow(spec["finish_seconds"], "W&B did not take the last data in time")
    record = json.loads(end.read_bytes()) if end.exists() else {"status": "killed", "summary": {}}
    run.summary.update(record["summary"])
    run.finish(exit_code=0 if record["status"] == "finished" else 1)


def _follow(spec: dict, run, end: Path) -> None:
    """Log each step once, in order: first what earlier attempts leave valid, then ours as it comes. A step is told
    when a later one is there, because until then more may be said about it."""
    local, folder, attempt = Path(spec["local"]), Path(spec["folder"]), spec["attempt"]
    offsets: dict[Path, int] = {}
    waiting: dict[int, dict] = {}
    told = None
    while True:
        over = end.exists() or os.getppid() != spec["parent"]
        for (number, _), path in segments(local).items():
            if number != attempt:
                continue
            with open(path, "rb") as file:
                file.seek(offsets.get(path, 0))
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            offsets[path] = offsets.get(path, 0) + len(data)
            for record in parse_lines(data, path):
                waiting.setdefault(record["step"], {}).update(record["metrics"])
        if told is None and (waiting or over):
            told = -sys.maxsize
            first = min(waiting, default=sys.maxsize)
            for row in read_rows(local, folder, before_attempt=attempt):
                if row["step"] < first:
                    run.log(row["metrics"], step=row["step"])
                    told = row["step"]
        for step in sorted(waiting)[: None if over else -1]:
            metrics = waiting.pop(step)
            if step > told:
                run.log(metrics, step=step)
                told = step
        if over:
            return
        time.sleep(POLL_SECONDS)


def _cache_folder(folder: Path, run_id: str) -> Path:
    """On a local disk, the same for the same run of the same workspace."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ml_factory" / "runs" / fingerprint([str(folder), run_id])[:16]


def _now() -> str:
    return datetime.now(UTC).isoformat()
