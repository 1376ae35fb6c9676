"""How long sessions live here, from what earlier ones left: what the time between two saves is chosen by.

    results/sessions/{began}-{session}.json     {"began", "seen", "ended"}: seconds since 1970, `ended` null until a
                                                clean end; {"limit"}: when this runtime was expected to be taken away
                                                at the latest, null without an end in sight

A session that ended by itself tells only that it lived at least so long; one that was taken away tells its life.
"""

import math
import time
import uuid
from pathlib import Path

from ml_factory.errors import WorkspaceError
from ml_factory.storage.atomic_files import names_in, read_json, write_json

# Counts as one session taken away: a free runtime's usual fate, until this workspace knows better.
DEFAULT_LIFE = 2 * 3600.0
DEFAULT_TPU_LIFE = 1.5 * 3600.0  # of a free one with a TPU
_NEWEST = 50
# A session not seen for longer than this is taken for dead: twice the longest time between two saves.
_SILENCE = 3600.0


class SessionLog:
    """This session's line in the workspace's record.

    folder : where the records are (`workspace.results / "sessions"`).  now : seconds since 1970, for tests.
    """

    def __init__(self, folder: Path, session: str | None = None, now=time.time):
        self.folder, self.now = Path(folder), now
        self.session = session or uuid.uuid4().hex[:12]
        self.began, self._limit = now(), math.inf

    def record_alive(self, hours_left: float = math.inf) -> None:
        """Write that this session lives, when it begins and beside each checkpoint, and how long it still may."""
        now = self.now()
        self._limit = now + 3600 * hours_left
        self._write(now, None)

    def record_end(self) -> None:
        """Write that this session ends by itself."""
        now = self.now()
        self._write(now, now)

    def mean_life(self, usual: float = DEFAULT_LIFE) -> float:
        """Mean seconds that a session lives before it is taken away, by maximum likelihood of an exponential life with
        censored ones (total time lived / number taken away), one usual life (seconds) counted in."""
        lived, taken = usual, 1
        for record in self._others():
            lived += record["seen"] - record["began"]
            taken += record["ended"] is None and self.now() - record["seen"] > _SILENCE
        return lived / taken

    def _others(self) -> list[dict]:
        records, mine = [], self._path()
        names = [name for name in names_in(self.folder) if name.endswith(".json") and name[0] != "."]
        for path in [self.folder / name for name in names[-_NEWEST:]]:  # names begin with the time
            try:
                record = read_json(path)
                if path != mine and record["began"] <= record["seen"] and "ended" in record:
                    records.append(record)
            except (WorkspaceError, KeyError, TypeError):  # half a line of the past is no reason to stop
                continue
        return records

    def _path(self) -> Path:
        return self.folder / f"{self.began:012.0f}-{self.session}.json"

    def _write(self, seen: float, ended: float | None) -> None:
        limit = self._limit if math.isfinite(self._limit) else None
        write_json(self._path(), {"began": self.began, "seen": seen, "ended": ended, "limit": limit})
