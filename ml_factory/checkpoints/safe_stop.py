"""Safe stop: wait until every checkpoint is in the workspace, write the logs, and confirm the mount's upload."""

import threading
import time
from collections.abc import Callable, Iterable

from ml_factory.checkpoints.manager import (
    COPIED,
    IN_MEMORY,
    LOCAL,
    REFUSED,
    describe_save,
    open_checkpoint_managers,
)


def safe_stop(
    seconds: float = 300, *, logs: Iterable[Callable[[], object]] = (),
    flush: Callable[[], object] | None = None, on_status: Callable[[str], object] = print,
) -> bool:  # fmt: skip
    """Wait for every write of this process, run `logs`, and `flush` the mount (on Colab: flush and unmount). Return
    True only if every checkpoint is in the workspace and the upload was confirmed.

    Parameters
    ----------
    seconds : time for everything.
    logs : callables that write their logs.
    flush : confirms the mount's upload; on a mount without `flush` the upload stays unconfirmed, and it is not safe.
    on_status : receives what is waited for, each checkpoint's status, and the result, as text.
    """
    ends, managers = time.monotonic() + seconds, open_checkpoint_managers()
    saves = [saved for manager in managers for saved in manager.last_saves]
    if any(saved["status"] in (IN_MEMORY, LOCAL) for saved in saves):
        on_status(f"Stopping safely: waiting up to {seconds:.0f} s for the checkpoints")
    written = [manager.wait(max(0.0, ends - time.monotonic())) for manager in managers]
    for saved in saves:
        on_status(f"  {describe_save(saved)}")
    reached = {saved["status"] for saved in saves}
    if not all(written):
        failure = f"a checkpoint is not in the workspace yet ({'; '.join(map(describe_save, saves))})"
    elif REFUSED in reached:
        failure = "the last save was refused, only the checkpoint before it stands"
    else:
        failure = _run_in_time([*logs, *([flush] if flush else [])], ends)
        if not failure and flush is None and COPIED in reached:
            failure = "copied to the mount, and the upload is not confirmed"
    on_status(f"Not confirmed: {failure}" if failure else "Safe to stop: every checkpoint is in the workspace")
    return not failure


def _run_in_time(steps: list[Callable[[], object]], ends: float) -> str:
    """Run the steps in order in a thread that may be abandoned; return the failure, or ""."""
    found = []

    def work() -> None:
        try:
            for step in steps:
                step()
            found.append("")
        except Exception as error:  # noqa: BLE001 - whatever a log or the mount raises, it is not confirmed
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="safe-stop", daemon=True)
    thread.start()
    thread.join(max(0.0, ends - time.monotonic()))
    return found[0] if found else "writing the logs and flushing took too long"
