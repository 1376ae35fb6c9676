"""What is left of this session: a Colab runtime ends a fixed time after it began, not after the notebook began."""

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from ml_factory.checkpoints.schedule import reserved_seconds
from ml_factory.checkpoints.session_history import DEFAULT_LIFE, DEFAULT_TPU_LIFE, SessionLog
from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.storage.workspace import on_colab

# Hours a runtime may live at most, by tier; Colab promises none of them, so they are upper bounds.
TIER_HOURS = {"free": 12.0, "pro": 24.0, "pro+": 24.0, "enterprise": 24.0}
_END_SECONDS = 2.0  # that a process waits at its end for a line of the record
_log = logging.getLogger("ml_factory")


def runtime_started(proc: Path = Path("/proc")) -> float:
    """When this runtime (its process 1) began, in seconds since 1970; this very moment where /proc does not tell."""
    try:
        stat = (proc / "1" / "stat").read_text()
        boot = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime "))
        # The command's name, in brackets, may hold spaces; field 22 is counted from behind it.
        ticks = int(stat.rpartition(")")[2].split()[19])
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError, IndexError):
        return time.time()


def hours_remaining(tier: str = "free", limit_hours: float | None = None, now: float | None = None) -> float:
    """Hours until this runtime may be taken away at the latest; infinite off Colab without a limit given.

    tier : a key of TIER_HOURS; an unknown one counts as free. A runtime that has outlived it is of a larger one.
    limit_hours : overrides the tier.  now : seconds since 1970, for tests.
    """
    if limit_hours is None and not on_colab():
        return math.inf
    lived = ((time.time() if now is None else now) - runtime_started()) / 3600
    if limit_hours is None:
        limit_hours = _limit_of(tier if tier in TIER_HOURS else "free", lived)
    return max(0.0, limit_hours - lived)


def _limit_of(tier: str, lived: float) -> float:
    """Hours a runtime of this tier may live; of one that has lived longer, and so is of another, the next limit."""
    if lived < TIER_HOURS[tier]:
        return TIER_HOURS[tier]
    limit = min((hours for hours in TIER_HOURS.values() if hours > lived), default=math.inf)
    _say_outlived(tier, limit)
    return limit


@lru_cache
def _say_outlived(tier: str, limit: float) -> None:
    _log.warning(
        "This runtime has outlived the %.0f h of the tier %s: it is taken to live %s. "
        "Set ML_FACTORY_COLAB_TIER (%s) to say which it is",
        TIER_HOURS[tier], tier, "on, with no end in sight" if math.isinf(limit) else f"up to {limit:.0f} h",
        ", ".join(TIER_HOURS),
    )  # fmt: skip


def hours_left(tier: str | None = None, limit_hours: float | None = None) -> float:
    """As `hours_remaining`, for what the user and the environment say: ML_FACTORY_COLAB_TIER, or
    ML_FACTORY_SESSION_HOURS, a limit that counts off Colab too. Raises SettingsError for an unknown tier."""
    given = limit_hours if limit_hours is not None else os.environ.get("ML_FACTORY_SESSION_HOURS") or None
    if given is not None:
        return hours_remaining(limit_hours=_positive_hours(given))
    tier = str(tier or os.environ.get("ML_FACTORY_COLAB_TIER") or "free").lower()
    if tier not in TIER_HOURS:
        raise SettingsError(
            "Unknown Colab tier", where="tier", got=repr(tier), next_step=did_you_mean(tier, TIER_HOURS)
        )
    return hours_remaining(tier)


class Session:
    """This session, for the checkpoints of a workspace: when it ends, and how long one lives here.

    records : folder of the workspace's record of sessions (`results/sessions`); not touched where nothing ends one.
    However many units of work a process does, it is one session of the record.
    """

    def __init__(self, records: Path):
        self.bounded = on_colab() or not math.isinf(hours_left())
        self._record = _record_of(Path(records).absolute(), os.getpid()) if self.bounded else None
        self.mean_life = self._record.mean_life if self.bounded else math.inf

    def ending(self, save_seconds: float) -> bool:
        """Whether only the time for the last save is left. Cheap: asked at every step."""
        return self.bounded and hours_left() * 3600 < reserved_seconds(save_seconds)

    def record_alive(self) -> None:
        """It lives; told beside each checkpoint. Never waits for the disk and never raises."""
        if self.bounded:
            self._record.record_alive(hours_left())


def default_life() -> float:
    """Seconds that a session lives, before this workspace knows better: a free one with a TPU lives shorter."""
    return DEFAULT_TPU_LIFE if on_free_tpu() else DEFAULT_LIFE


def on_free_tpu() -> bool:
    """Whether this is a TPU runtime of Colab's free tier."""
    tpu = os.environ.get("COLAB_TPU_1VM") == "1" or bool(os.environ.get("TPU_ACCELERATOR_TYPE"))
    return tpu and str(os.environ.get("ML_FACTORY_COLAB_TIER") or "free").lower() == "free"


def hours_expected(records: Path) -> float:
    """Hours that work should be planned for: `hours_left`; on a free TPU at most a session's mean life.

    The life is exponential, so what a session has lived already does not count.

    records : folder of the workspace's record of sessions; the mean life is 1.5 h until it holds sessions.
    """
    limit = SessionLog(records).mean_life(DEFAULT_TPU_LIFE) / 3600 if on_free_tpu() else math.inf
    return min(hours_left(), limit)


class SessionWriter:
    """This process's line in the record of one workspace, written by threads that may be left behind: a mount that
    hangs stops no save, and keeps no process alive."""

    def __init__(self, folder: Path):
        self._log, self._process = SessionLog(folder), os.getpid()
        self._usual = default_life()
        self.mean_life = self._usual
        self._told = False
        self._write(self._learn)
        self._writer.join(_END_SECONDS)
        atexit.register(self._end)

    def _learn(self) -> None:
        self.mean_life = self._log.mean_life(self._usual)

    def record_alive(self, hours_left: float) -> None:
        if not self._writer.is_alive():  # one that hangs is not joined by others
            self._told = True
            self._write(lambda: self._log.record_alive(hours_left))

    def _end(self) -> None:
        if not self._told or self._process != os.getpid():
            return
        self._writer.join(_END_SECONDS)
        if not self._writer.is_alive():
            self._write(self._log.record_end)
            self._writer.join(_END_SECONDS)

    def _write(self, job: Callable[[], None]) -> None:
        self._writer = threading.Thread(target=_quietly, args=(job,), name="session", daemon=True)
        self._writer.start()


@lru_cache(maxsize=8)
def _record_of(folder: Path, process: int) -> SessionWriter:
    """The record of this process; a child made by fork has its own."""
    return SessionWriter(folder)


def _quietly(job: Callable[[], None]) -> None:
    try:
        job()
    except FactoryError:  # the record is a hint for the next session, not worth a word
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
