"""State of a slice, as gcloud and the workers answer; nothing is kept of it here."""

from dataclasses import dataclass

# phase -> description
PHASES = {
    "NEW": "nothing is requested", "WAITING": "the request waits for a free slice",
    "ACTIVE": "the slice is there; its workers are not ready", "READY": "the workers have code and packages",
    "RUNNING": "the training runs", "FINISHED": "the training ended well on all workers",
    "TRAINING_FAILED": "the training failed", "STOPPED": "the training was stopped; the slice is there and costs",
    "PREEMPTED": "the slice was taken away", "REQUEST_FAILED": "the request failed",
    "QUOTA_REFUSED": "the project has no quota for it", "UNREACHABLE": "workers cannot be reached over ssh",
    "DELETED": "the slice is deleted; the bucket is kept",
}  # fmt: skip
_NEXT = {
    "NEW": "setup", "WAITING": "resume", "ACTIVE": "resume", "READY": "resume", "RUNNING": "monitor",
    "FINISHED": "cleanup", "TRAINING_FAILED": "logs", "STOPPED": "resume or cleanup", "PREEMPTED": "resume",
    "REQUEST_FAILED": "resume or cleanup", "QUOTA_REFUSED": "resume with another ZONE or quota",
    "UNREACHABLE": "resume", "DELETED": "setup",
}  # fmt: skip


@dataclass(frozen=True)
class SliceState:
    """State of one slice.

    phase : one of PHASES.
    detail : message of the last step, one line.
    """

    phase: str = "NEW"
    detail: str = ""

    def describe(self, name: str) -> str:
        """Return one line: the phase, its meaning, the detail and the next command."""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{name}: {self.phase}, {PHASES[self.phase]}{detail}; next: python -m ml_factory tpu {_NEXT[self.phase]}"
