"""Observed session lifetimes of this workspace, from which the interval between two saves is chosen.

    results/sessions/{began}-{session}.json     {"began", "seen", "ended"}: seconds since 1970, `ended` null until a
                                                clean end; {"limit"}: latest expected end of this runtime, null
                                                without one

Sessions that exit cleanly are right-censored observations; preempted sessions are complete lifetimes.
"""

import math
import time
import uuid
from pathlib import Path

from ml_factory.errors import WorkspaceError
from ml_factory.storage.files import files

# Counts as one preempted session: typical for a free runtime, until this workspace has records.
DEFAULT_LIFE = 2 * 3600.0
DEFAULT_TPU_LIFE = 1.5 * 3600.0  # of a free one with a TPU
_NEWEST = 50
# Seconds without a record after which a session counts as preempted: twice the longest save interval.
_SILENCE = 3600.0


class SessionLifetimeLog:
    """This session's record in the workspace.

    Parameters
    ----------
    folder : folder of the records (`workspace.results / "sessions"`).
    session : its id; random by default.
    now : seconds since 1970, for tests.
    """

    def __init__(self, folder: Path, session: str | None = None, now=time.time):
        self.folder, self.now = Path(folder), now
        self.session = session or uuid.uuid4().hex[:12]
        self.began, self._limit = now(), math.inf

    def record_alive(self, hours_left: float = math.inf) -> None:
        """Write that this session lives, at its start and with each checkpoint, and how long it may still live."""
        now = self.now()
        self._limit = now + 3600 * hours_left
        self._write(now, None)

    def record_end(self) -> None:
        """Write that this session exits cleanly."""
        now = self.now()
        self._write(now, now)

    def mean_life(self, default: float = DEFAULT_LIFE) -> float:
        """Return the mean seconds until a session is preempted.

        Maximum likelihood of an exponential lifetime with right-censored observations (total time lived / number
        preempted), with one default lifetime counted in.

        default : seconds of that lifetime.
        """
        lived, preempted = default, 1
        for record in self._others():
            lived += record["seen"] - record["began"]
            preempted += record["ended"] is None and self.now() - record["seen"] > _SILENCE
        return lived / preempted

    def _others(self) -> list[dict]:
        records, own_path = [], self._path()
        names = [name for name in files.names(self.folder) if name.endswith(".json") and name[0] != "."]
        for path in [self.folder / name for name in names[-_NEWEST:]]:  # names begin with the time
            try:
                record = files.read_json(path)
                if path != own_path and record["began"] <= record["seen"] and "ended" in record:
                    records.append(record)
            except (WorkspaceError, KeyError, TypeError):  # a torn record is skipped
                continue
        return records

    def _path(self) -> Path:
        return self.folder / f"{self.began:012.0f}-{self.session}.json"

    def _write(self, seen: float, ended: float | None) -> None:
        limit = self._limit if math.isfinite(self._limit) else None
        files.write_json(self._path(), {"began": self.began, "seen": seen, "ended": ended, "limit": limit})
