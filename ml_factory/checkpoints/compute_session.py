"""Remaining time of this session: a Colab runtime ends a fixed time after the runtime's start, not the notebook's."""

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from ml_factory.checkpoints.schedule import reserved_save_seconds
from ml_factory.checkpoints.session_lifetimes import DEFAULT_LIFE, DEFAULT_TPU_LIFE, SessionLifetimeLog
from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.process_identity import process_id
from ml_factory.storage.workspace import on_colab

# Hours a runtime may live at most, by tier; Colab promises none of them, so they are upper bounds.
TIER_HOURS = {"free": 12.0, "pro": 24.0, "pro+": 24.0, "enterprise": 24.0}
_END_SECONDS = 2.0  # that a process waits at exit for its last session record
_log = logging.getLogger("ml_factory")


def runtime_start_time(proc: Path = Path("/proc")) -> float:
    """Return the start of this runtime (its process 1), seconds since 1970; the current time where /proc is not
    readable.
    """
    try:
        stat = (proc / "1" / "stat").read_text()
        boot_line = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime "))
        # The command's name, in brackets, may hold spaces; field 22 is counted from behind it.
        ticks = int(stat.rpartition(")")[2].split()[19])
        return int(boot_line.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError, IndexError):
        return time.time()


def configured_hours_remaining(tier: str | None = None, limit_hours: float | None = None) -> float:
    """Return the hours until this runtime may be ended at the latest; infinite off Colab without a limit.

    Parameters
    ----------
    tier : a key of TIER_HOURS; by default $ML_FACTORY_COLAB_TIER, else "free". A runtime that outlived its tier's limit
        belongs to a larger tier.
    limit_hours : overrides the tier, and counts off Colab too; by default $ML_FACTORY_SESSION_HOURS.

    Raises SettingsError for an unknown tier.
    """
    given = limit_hours if limit_hours is not None else os.environ.get("ML_FACTORY_SESSION_HOURS") or None
    tier = str(tier or os.environ.get("ML_FACTORY_COLAB_TIER") or "free").lower()
    if given is None and tier not in TIER_HOURS:
        raise SettingsError(
            "Unknown Colab tier", where="tier", got=repr(tier), next_step=did_you_mean(tier, TIER_HOURS)
        )
    if given is None and not on_colab():
        return math.inf
    lived = (time.time() - runtime_start_time()) / 3600
    return max(0.0, (_tier_limit(tier, lived) if given is None else _positive_hours(given)) - lived)


def _tier_limit(tier: str, lived: float) -> float:
    """Return the hours that a runtime of this tier may live; the next larger limit for one that has lived longer."""
    if lived < TIER_HOURS[tier]:
        return TIER_HOURS[tier]
    limit = min((hours for hours in TIER_HOURS.values() if hours > lived), default=math.inf)
    _warn_outlived(tier, limit)
    return limit


@lru_cache
def _warn_outlived(tier: str, limit: float) -> None:
    _log.warning(
        "This runtime has outlived the %.0f h of the tier %s: it is assumed to live %s. "
        "Set ML_FACTORY_COLAB_TIER (%s) to its tier",
        TIER_HOURS[tier], tier, "on, with no end in sight" if math.isinf(limit) else f"up to {limit:.0f} h",
        ", ".join(TIER_HOURS),
    )  # fmt: skip


class ComputeSession:
    """This session's end and expected lifetime, for the checkpoints of a workspace.

    records : folder of the workspace's session records (`results/sessions`); unused where nothing ends a session. A
        process writes one record however many units of work it runs.
    """

    def __init__(self, records: Path):
        self.bounded = on_colab() or not math.isinf(configured_hours_remaining())
        self._writer = _session_writer(Path(records).absolute(), process_id()) if self.bounded else None
        self.mean_life = self._writer.mean_life if self.bounded else math.inf

    def ending(self, save_seconds: float) -> bool:
        """Return True when only the time for the last save is left. Cheap: called at every step."""
        return self.bounded and configured_hours_remaining() * 3600 < reserved_save_seconds(save_seconds)

    def record_alive(self) -> None:
        """Record in the background, with each checkpoint, that the session lives. Never waits for the disk and never
        raises.
        """
        if self.bounded:
            self._writer.record_alive(configured_hours_remaining())


def default_session_life() -> float:
    """Return the mean seconds that a session lives, before this workspace has records; shorter for a free TPU
    session.
    """
    return DEFAULT_TPU_LIFE if is_free_tpu_session() else DEFAULT_LIFE


def is_free_tpu_session() -> bool:
    """Return True on a TPU runtime of Colab's free tier."""
    tpu = os.environ.get("COLAB_TPU_1VM") == "1" or bool(os.environ.get("TPU_ACCELERATOR_TYPE"))
    return tpu and str(os.environ.get("ML_FACTORY_COLAB_TIER") or "free").lower() == "free"


def expected_hours_left(records: Path) -> float:
    """Return the hours that work should be planned for: `hours_left`; on a free TPU at most a session's mean life.

    The lifetime is modelled as exponential, so the time already lived does not count.

    records : folder of the workspace's session records; the mean life is 1.5 h until it holds sessions.
    """
    limit = SessionLifetimeLog(records).mean_life(DEFAULT_TPU_LIFE) / 3600 if is_free_tpu_session() else math.inf
    return min(configured_hours_remaining(), limit)


class _SessionWriter:
    """Writer of this process's session record, in threads that may be abandoned: a mount that hangs delays no save
    and keeps no process alive.
    """

    def __init__(self, folder: Path):
        self._log, self._process = SessionLifetimeLog(folder), process_id()
        self._default_life = default_session_life()
        self.mean_life = self._default_life
        self._has_record = False
        self._write(self._load_mean_life)
        self._thread.join(_END_SECONDS)
        atexit.register(self._end)

    def _load_mean_life(self) -> None:
        self.mean_life = self._log.mean_life(self._default_life)

    def record_alive(self, hours_left: float) -> None:
        if not self._thread.is_alive():  # a thread that hangs is not joined by another
            self._has_record = True
            self._write(lambda: self._log.record_alive(hours_left))

    def _end(self) -> None:
        if not self._has_record or self._process != process_id():
            return
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():
            self._write(self._log.record_end)
            self._thread.join(_END_SECONDS)

    def _write(self, job: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=_ignore_errors, args=(job,), name="session", daemon=True)
        self._thread.start()


@lru_cache(maxsize=8)
def _session_writer(folder: Path, process: str) -> _SessionWriter:
    """Return the writer of this process; a forked child has its own."""
    return _SessionWriter(folder)


def _ignore_errors(job: Callable[[], None]) -> None:
    try:
        job()
    except FactoryError:  # the record only improves the next session's schedule: no warning
        return


def _positive_hours(value: object) -> float:
    try:
        hours = float(value)
    except (TypeError, ValueError):
        hours = math.nan
    if not hours > 0:
        raise SettingsError(
            "Not a length of a session", where="limit_hours", got=repr(value), wanted="hours above 0, such as 12"
        )
    return hours
