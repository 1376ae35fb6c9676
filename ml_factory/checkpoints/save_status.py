"""Status of the newest save, in words: for the notebook's line, and for the message when the work ends."""

import time

IN_MEMORY, REFUSED = "in memory", "not saved"
LOCAL, SAVED = "saved locally", "saved"  # on this machine's disk alone; verified in the workspace
COPIED = "copied to the mount, upload unconfirmed"
_newest: list[dict] = []


def set_save_status(saved: dict, status: str) -> None:
    """Set the status of a save's description; `save_status_line` reports the newest from IN_MEMORY on."""
    saved.update(status=status, status_at=time.time())
    if status == IN_MEMORY:
        _newest[:] = [saved]


def describe_save(saved: dict) -> str:
    """Return phase, number, status and time of a save."""
    number = f" #{saved['sequence']}" if "sequence" in saved else ""
    return f"{saved['phase']}{number} {saved['status']} {time.strftime('%H:%M:%S', time.localtime(saved['status_at']))}"


def save_status_line() -> str:
    """Return the status of this process's newest checkpoint; "" before the first."""
    return describe_save(_newest[0]) if _newest else ""
