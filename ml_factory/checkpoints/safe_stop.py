"""Safe stop: wait until every checkpoint is in the workspace, write the logs, and confirm the mount's upload."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ml_factory.checkpoints.save_status import COPIED, IN_MEMORY, LOCAL, REFUSED

if TYPE_CHECKING:
    from ml_factory.checkpoints.manager import CheckpointManager


@dataclass(frozen=True)
class SafeStopResult:
    """Result of a safe stop: `safe` only if every checkpoint is in the workspace and the upload was confirmed."""

    safe: bool
    text: str


def safe_stop(
    seconds: float = 300, *, logs: Iterable[Callable[[], object]] = (), flush: Callable[[], object] | None = None,
    on_status: Callable[[str], object] = print, managers: "Sequence[CheckpointManager]",
) -> SafeStopResult:  # fmt: skip
    """Wait for every write, run `logs`, and `flush` the mount (on Colab: flush and unmount).

    Parameters
    ----------
    seconds : time for everything.
    logs : callables that write their logs.
    flush : confirms the mount's upload; on a mount without `flush` the upload stays unconfirmed, and the result is not
        safe.
    on_status : receives what is waited for, each checkpoint's status, and the result, as text.
    managers : those to wait for.
    """
    ends = time.monotonic() + seconds
    saves = [status for manager in managers for status in manager.last_saves]
    if any(status.where in (IN_MEMORY, LOCAL) for status in saves):
        on_status(f"Stopping safely: waiting up to {seconds:.0f} s for the checkpoints")
    written = [manager.wait(max(0.0, ends - time.monotonic())) for manager in managers]
    for status in saves:
        on_status(f"  {status}")
    failure = "" if all(written) else "a checkpoint is not in the workspace yet"
    if not failure and any(status.where == REFUSED for status in saves):
        failure = "the last save was refused, only the checkpoint before it stands"
    failure = failure or _in_time([*logs, *([flush] if flush else [])], ends)
    if not failure and flush is None and any(status.where == COPIED for status in saves):
        failure = "copied to the mount, and the upload is not confirmed"
    reached = "; ".join(map(str, saves))
    text = "Safe to stop: every checkpoint is in the workspace"
    if failure:
        text = f"Not confirmed: {failure}" + (f" ({reached})" if reached and not all(written) else "")
    on_status(text)
    return SafeStopResult(not failure, text)


def _in_time(steps: list[Callable[[], object]], ends: float) -> str:
    """Run the steps in order in a thread that may be abandoned; return the failure, or ""."""
    found: list[str] = []

    def work() -> None:
        try:
            for step in steps:
                step()
            found.append("")
        except (OSError, ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="safe-stop", daemon=True)
    thread.start()
    thread.join(max(0.0, ends - time.monotonic()))
    if found:
        return found[0]
    return "writing the logs and flushing " + ("took too long" if thread.is_alive() else "failed")
