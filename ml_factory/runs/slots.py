"""A fixed set of files overwritten in turn: nothing is ever deleted, and the newest verified one wins.

There is one slot more than checkpoints kept: the one being written. A process killed there leaves the others whole.
"""

import json
import logging
from pathlib import Path

from ml_factory.errors import CheckpointError, WorkspaceError
from ml_factory.runs.containers import NotOurs, inspect_container, read_container, write_container
from ml_factory.runs.state import decode_state
from ml_factory.runs.storage import FULL, disk_errors, overwrite_file

_FEWEST_GOOD = 2
_log = logging.getLogger("ml_factory")


class Slots:
    """The slots of one phase of one run.

    folder : where they are; it need not exist yet.  keep : how many checkpoints are kept beside the one written.
    """

    def __init__(self, folder: Path, run: str, phase: str, keep: int):
        self.folder, self.run, self.phase, self.keep = folder, run, phase, keep
        self._seen: dict[Path, str] = {}  # slot -> hash this process has verified already

    def newest(self) -> tuple[dict | None, list[str]]:
        """({"state", "sequence", …} of the highest sequence that verifies, or None; which others were skipped, why)."""
        good, bad = self.survey()
        skipped = [f"{path.name}: {error}" for path, error in bad.items()]
        for path in reversed(good):
            try:
                info, payload = read_container(path)
                return {"state": decode_state(payload), **info, "path": str(path), "skipped": skipped}, skipped
            except (CheckpointError, WorkspaceError) as error:
                skipped.append(f"{path.name}: {error}")
        return None, skipped

    def survey(self, trust_seen: bool = False) -> tuple[dict[Path, dict], dict[Path, Exception]]:
        """({path: info} of the verified slots, oldest first; {path: reason} of the others).

        trust_seen : do not hash again what this process has written or verified.
        """
        good, bad = {}, {}
        for path in sorted(self.folder.glob("slot-*.ckpt")):
            try:
                info = inspect_container(path, self._seen.get(path) if trust_seen else None)
                if (info.get("run"), info.get("phase")) != (self.run, self.phase):
                    raise NotOurs("it belongs to other work", got=f"run {info.get('run')}, phase {info.get('phase')}")
                good[path], self._seen[path] = {**info, "path": str(path)}, info["hash"]
            except (CheckpointError, WorkspaceError) as error:
                bad[path] = error
        return dict(sorted(good.items(), key=lambda item: item[1]["sequence"])), bad

    def write(self, info: dict, payload: bytes) -> dict:
        """Write the next slot and read it back. Raises WorkspaceError or CheckpointError; then at least the newest
        earlier checkpoint still stands (the newest two once there were three)."""
        good, bad = self.survey(trust_seen=True)
        info = {**info, "sequence": 1 + max([self._told_sequence(), *(one["sequence"] for one in good.values())])}
        failure = None
        for path in self._targets(list(good), bad):
            try:
                write_container(path, info, payload)
                saved = {**inspect_container(path), "path": str(path)}
            except (WorkspaceError, CheckpointError) as error:
                failure = failure or error
                if getattr(error.__cause__, "errno", None) not in FULL:
                    break
                continue
            self._seen[path] = saved["hash"]
            self._write_manifest([*(one for where, one in good.items() if where != path), saved])
            return saved
        raise failure

    def _targets(self, good: list[Path], bad: dict[Path, Exception]) -> list[Path]:
        """The slot to write: a free one, else the oldest. Then, for a full disk, the oldest good slot, whose space is
        ours already, as long as two good ones would still be left."""
        slots = [self.folder / f"slot-{i}.ckpt" for i in range(self.keep + 1)]
        for path in slots:
            if isinstance(bad.get(path), NotOurs):
                with disk_errors(path):
                    path.replace(path.with_name(f"{path.name}.refused"))
        free = [path for path in slots if path not in good][:1]
        oldest = [path for path in good if path in slots]
        targets = (free + oldest)[:2]
        left = len(good) - sum(path in good for path in targets)
        return targets if left >= _FEWEST_GOOD else targets[:1]

    def _told_sequence(self) -> int:
        """The highest sequence the manifest remembers, so that a number never comes twice; 0 without a manifest."""
        try:
            told = json.loads((self.folder / "manifest.json").read_bytes())["sequence"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return 0
        return told if type(told) is int else 0

    def _write_manifest(self, infos: list[dict]) -> None:
        rows = [{**info, "path": Path(info["path"]).name} for info in infos]
        text = json.dumps({"sequence": infos[-1]["sequence"], "oldest_first": rows}, indent=2).encode()
        try:
            overwrite_file(self.folder / "manifest.json", [text])
        except WorkspaceError as error:  # the slots verify without it
            _log.warning("The manifest of %s is behind its checkpoints: %s", self.phase, error)
