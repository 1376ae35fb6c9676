"""Status of the newest save, in words: for the notebook's line, and for the message when the work ends."""

import time
from dataclasses import dataclass

IN_MEMORY, REFUSED = "in memory", "not saved"
SAVED, LOCAL = "saved", "saved locally"
COPIED = "copied to the mount, upload unconfirmed"


@dataclass
class SaveStatus:
    """Status of a phase's newest checkpoint.

    Parameters
    ----------
    phase : its name.
    sequence : of the checkpoint, once written.
    where : IN_MEMORY; LOCAL, on this machine's disk alone; SAVED, verified in the workspace; COPIED, verified in the
        folder of a mount, which uploads it later; or REFUSED.
    at : seconds since 1970.
    """

    phase: str
    sequence: int | None = None
    where: str = IN_MEMORY
    at: float = 0.0

    def __str__(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        return f"{self.phase}{number} {self.where} {time.strftime('%H:%M:%S', time.localtime(self.at))}"


_published: list[SaveStatus] = []


def publish_save_status(status: SaveStatus) -> None:
    """Make `save_status_line` report this checkpoint from now on."""
    _published[:] = [status]


def save_status_line() -> str:
    """Return the status of this process's newest checkpoint; "" before the first."""
    return str(_published[0]) if _published else ""
