"""State of a slice in a file, written in one step, so that a closed terminal loses nothing."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ml_factory.errors import FileError
from ml_factory.storage.files import files

# phase -> description
PHASES = {
    "NEW": "nothing was requested", "WAITING": "the request waits for a free slice",
    "ACTIVE": "the slice is there; its workers are not ready", "READY": "the workers have code and packages",
    "RUNNING": "the training runs", "FINISHED": "the training ended well on all workers",
    "TRAINING_FAILED": "the training failed", "STOPPED": "the training was stopped; the slice is there and costs",
    "PREEMPTED": "the slice was taken away", "REQUEST_FAILED": "the request failed",
    "QUOTA_REFUSED": "the project has no quota for it", "UNREACHABLE": "workers cannot be reached over ssh",
    "ERROR": "gcloud refused a step", "DELETED": "the slice is deleted; the bucket is kept",
}  # fmt: skip
_NEXT = {
    "NEW": "setup", "WAITING": "resume", "ACTIVE": "resume", "READY": "resume", "RUNNING": "monitor",
    "FINISHED": "cleanup", "TRAINING_FAILED": "logs", "STOPPED": "resume or cleanup", "PREEMPTED": "resume",
    "REQUEST_FAILED": "resume or cleanup", "QUOTA_REFUSED": "resume with another ZONE or quota",
    "UNREACHABLE": "resume", "ERROR": "resume", "DELETED": "setup",
}  # fmt: skip


@dataclass(frozen=True)
class SliceState:
    """State of one slice.

    phase : one of PHASES.
    detail : message of the last step, one line.
    requests : number of requests for the slice so far.
    changed : seconds since 1970 of the last change.
    """

    phase: str = "NEW"
    detail: str = ""
    requests: int = 0
    changed: float = 0.0

    def describe(self, name: str) -> str:
        """Return one line: the phase, its meaning, the detail and the next command."""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{name}: {self.phase}, {PHASES[self.phase]}{detail}; next: python -m ml_factory tpu {_NEXT[self.phase]}"


class StateFile:
    """The file with the state of one slice."""

    def __init__(self, path: Path, keep: bool = True):
        self.path, self.keep = path, keep
        self.state = SliceState()

    def read(self) -> SliceState:
        """Return the state in the file; a new one where there is none. Raises FileError for a damaged file."""
        if files.is_file(self.path):
            found = files.read_json(self.path)
            fields = SliceState()
            if not isinstance(found, dict) or found.keys() != asdict(fields).keys():
                raise FileError(
                    "This is no state of a slice", where=self.path, next_step="delete it, then run tpu resume"
                )
            kinds = all(type(found[name]) is type(value) for name, value in asdict(fields).items())
            if not kinds or found["phase"] not in PHASES or found["requests"] < 0:
                raise FileError("This state is damaged", where=self.path, next_step="delete it, then run tpu resume")
            self.state = SliceState(**found)
        return self.state

    def enter(self, phase: str, detail: str = "", requests: int | None = None) -> SliceState:
        """Write the new phase and return the state."""
        count = self.state.requests if requests is None else requests
        self.state = replace(self.state, phase=phase, detail=detail[:500], requests=count, changed=time.time())
        if self.keep:
            files.make_folder(self.path.parent)
            files.write_json(self.path, asdict(self.state))
        return self.state
