"""The working copy of a workspace that is kept elsewhere: a local folder, synchronized with its remote (`remote`).

Files are downloaded once and verified. Local changes are uploaded data first, the small JSON files that refer to them
last, so that a machine that dies in between leaves no reference to a missing file. A ledger holds the versions of the
last pass: what this machine never saw verified on the remote, it never deletes there.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ml_factory.background import BackgroundThread
from ml_factory.errors import CheckpointError, UnresponsiveMountError, WorkspaceError
from ml_factory.lazy_module import LazyModule
from ml_factory.process_identity import process_id
from ml_factory.storage.files import LEDGER, REMOVALS, files, is_plain_name, local_cache_folder, stored_path
from ml_factory.storage.json_values import fingerprint_json, parse_json
from ml_factory.storage.locks import file_lock, is_lock_file_held
from ml_factory.storage.remote import LEASES, Remote

_FETCHES = 5  # of a file that changes meanwhile
_HEAD = 1 << 20  # bytes that a pull brings of a file that verifies itself, such as a checkpoint: its header
_KEPT = ".kept"  # suffix of a local file in whose place the remote's came, and of a torn checkpoint
_GONE = ".gone"  # suffix of a checkpoint that the user removed on the remote
_PULLED = ".mirror-pulled"  # name of a file that stands once a pull has ended
LOOK_AGAIN_SECONDS = 60.0  # between the two looks that must agree before
_ANNOUNCED = 50_000_000  # bytes of a transfer that gets a line
_log = logging.getLogger("ml_factory")
_CHECKPOINTS = "checkpoints/"
_pass_locks: dict[tuple, threading.RLock] = {}  # one pass at a time over each local mirror of a process
_opened: dict[tuple, "Mirror"] = {}
_VERIFIED = ".ckpt"  # suffix of the files that verify themselves
checkpoint_file = LazyModule("ml_factory.storage.checkpoint_file")  # imports numpy


class Mirror:
    """A local folder that mirrors a mounted folder or a prefix of a bucket.

    Parameters
    ----------
    address : gs://bucket/prefix, or a folder on a mount.
    folder : the local mirror; by default below the user's cache folder, the same for the same address.

    Raises SettingsError for a malformed address, MissingPackageError for a bucket without gcsfs.
    """

    def __init__(self, address: str, folder: str | os.PathLike | None = None):
        self.address = address
        self.folder = Path(folder or local_cache_folder("workspaces") / fingerprint_json(address)[:16])
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(f"{_CHECKPOINTS}*/*{_GONE}"):
            path.unlink(missing_ok=True)
        self.remote = Remote(address)
        self._background = BackgroundThread("mirror")
        self._pass_lock = _pass_locks.setdefault((self.folder, process_id()), threading.RLock())
        self._behind = False  # and the user was warned

    def push_in_background(
        self, *places: str, check: Callable[[], object] = lambda: None, done: Callable[[], object] = lambda: None
    ) -> None:
        """Push in a background thread, in the order of the requests: a later one finds nothing left to upload.

        check : called before the pass; what it raises refuses the pass.
        done : called when everything is on the remote, and was compared there.
        A remote that refuses costs one warning, and the next push uploads what is missing.
        """
        self._background.submit(lambda: self._push_then(places, check, done))

    def _push_then(self, places: tuple[str, ...], check: Callable[[], object], done: Callable[[], object]) -> None:
        try:
            check()
            self.push(*places)
        except (WorkspaceError, OSError) as error:
            if not self._behind and self.folder.name != LEASES:  # the files next to them have the line
                _log.warning("The workspace does not have the newest files yet, the run continues: %s", error)
            self._behind = True
            return
        if self._behind and self.folder.name != LEASES:
            _log.warning("The workspace has the newest files again: %s", self.address)
        self._behind = False
        done()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the pushes in the background; return False where something is on this machine alone."""
        return self._background.wait(seconds) and not self._behind

    def has_synchronized(self) -> bool:
        """Return True when this mirror holds what a pull that ended has brought."""
        return bool(self._ledger()) and (self.folder / _PULLED).exists()

    def pull(self, *places: str) -> list[str]:
        """Download files that are new or changed on the remote, and return their names; delete local files that were
        removed there, unless they were changed locally. A local file that was never pushed and differs is kept as
        NAME.kept, with a warning. Of a file that verifies itself and is not here yet, only the header comes; `fetch`
        brings the rest.

        places : prefixes below the workspace, such as "models/MES/"; everything without.
        """
        with self._pass_lock:
            folder, listed = self._list_remote(places)
            ledger, remote = self._ledger(), {name: one for name, one in listed.items() if _in_pass(name, places)}
            pulled, wanted, noted = [], [], self._noted_removals()
            for name, facts in sorted(remote.items(), key=_data_first):
                known = ledger.get(name)
                if known and known["version"] == facts["version"] and (self.folder / name).exists():
                    continue
                if (name, facts["version"]) in noted:  # removed here, and there with the next push
                    continue
                if known is None or _stamp(self.folder / name) in (known["local"], None):
                    wanted.append((name, facts, known is None))
            whole = [facts["size"] for name, facts, _ in wanted if not self._is_head_enough(name, facts)]
            self._announce("Downloading from", sum(whole))
            try:
                for name, facts, is_first in wanted:
                    try:
                        version = self._fetch(name, facts, is_first=is_first, head=self._is_head_enough(name, facts))
                    except CheckpointError as error:  # torn there since: this machine's is uploaded again
                        _log.warning("The workspace's copy is not used, this machine's stays: %s", error)
                        ledger[name] = {"version": facts["version"], "local": None}
                    else:
                        ledger[name] = {"version": version, "local": _stamp(self.folder / name)}
                    pulled.append(name)
            finally:  # what was compared is not moved again after a refusal or Ctrl-C
                self._merge_ledger(ledger, pulled)
            seen = (*places, _CHECKPOINTS) if places else ()
            gone = [name for name in ledger if name.startswith(folder) and _in_pass(name, seen) and name not in listed]
            unused = [name for name in gone if not self._is_in_use(name)]
            for name in self._removed_by_user(unused, listed, places):
                path = self.folder / name
                if _stamp(path) in (ledger[name]["local"], None):
                    if name.startswith(_CHECKPOINTS) and path.exists():  # until the next session
                        os.replace(path, path.with_name(path.name + _GONE))
                    path.unlink(missing_ok=True)
            self._merge_ledger(ledger, (), gone)
            (self.folder / _PULLED).touch()
            return pulled

    def _is_head_enough(self, name: str, facts: dict) -> bool:
        """Return True for a large file that verifies itself and is not here yet."""
        path = self.folder / name
        return path.suffix == _VERIFIED and facts["size"] > _HEAD and not path.exists()

    def _removed_by_user(self, gone: list[str], listed: dict[str, dict], places: tuple[str, ...]) -> list[str]:
        """Return the names whose absence is meant: each one in a bucket; on a mount, which may have dropped a file, a
        run's checkpoints where all of them are gone, other files are listed, and a second look a minute later agrees.
        The rest is pushed again.
        """
        if not self.remote.is_mount:
            return gone
        for look in range(2):
            runs = {os.path.dirname(name) for name in listed}
            gone = [name for name in gone if listed and name.startswith(_CHECKPOINTS)]
            gone = [name for name in gone if os.path.dirname(name) not in runs]
            if gone and not look:
                _log.warning(
                    "Checkpoints of %s are gone from %s: looking again in %.0f s, before they are removed here too",
                    ", ".join(sorted({name.split("/")[1] for name in gone})), self.address, LOOK_AGAIN_SECONDS,
                )  # fmt: skip
                time.sleep(LOOK_AGAIN_SECONDS)
                listed = self._list_remote(places)[1]
        return gone

    def _is_in_use(self, name: str) -> bool:
        """Return True for a checkpoint of a run that is training."""
        run, _, phase = name.removeprefix(_CHECKPOINTS).partition("/")
        lock = self.folder / _CHECKPOINTS / "locks" / f"{run}--{phase.rsplit('.', 2)[0]}.lock"
        return name.startswith(_CHECKPOINTS) and is_lock_file_held(lock)

    def _announce(self, what: str, size: int) -> None:
        """Log one line before a transfer that may take a while."""
        if size > _ANNOUNCED:
            _log.warning("%s %s: %.0f MB", what, self.address, size / 1e6)

    def fetch(self, name: str) -> Path:
        """Return the local path of one object: downloaded and verified, unless this version is already there."""
        with self._pass_lock:
            ledger, facts, path = self._ledger(), self.remote.facts(name), self.folder / name
            whole = ledger.get(name) == {"version": facts["version"], "local": _stamp(path)}
            if not whole or path.stat().st_size != facts["size"]:
                if path.suffix == _VERIFIED:
                    self._announce("Downloading from", facts["size"])
                ledger[name] = {"version": self._fetch(name, facts), "local": _stamp(path)}
                self._merge_ledger(ledger, [name])
            return path

    def push(self, *places: str) -> list[str]:
        """Upload files that are new or changed since the last pass, data first, JSON last, and return their names.
        `places` as for `pull`.

        A pass over everything, at last, deletes remote files that were deleted here through `files`; a file that is
        only missing stays on the remote.
        """
        with self._pass_lock:
            ledger = self._ledger()
            local = {name: _stamp(self.folder / name) for name in self._list_local(places)}
            changed = [name for name, stamp in local.items() if ledger.get(name, {}).get("local") != stamp]
            pushed, removed = [], []
            if not places:  # a verb waits for it
                self._announce("Uploading to", sum(stamp[0] for stamp in map(local.get, changed) if stamp is not None))
            try:
                for name in sorted(changed, key=lambda name: _data_first((name, None))):
                    try:
                        if name.endswith(_VERIFIED):
                            checkpoint_file.verify_checkpoint(self.folder / name)
                        ledger[name] = {"version": self.remote.put(name, self.folder / name), "local": local[name]}
                    except CheckpointError as error:
                        self._set_aside(name, f"This machine's copy is not uploaded: {error} It")
                        continue
                    except WorkspaceError:
                        if _stamp(self.folder / name) == local[name]:
                            raise
                        continue  # a slot overwritten during its upload: the next pass uploads it
                    pushed.append(name)
                noted = self._noted_removals() if not places else set()  # what replaces it may be elsewhere, not up yet
                for name in [name for name in ledger if _in_pass(name, places) and name not in local]:
                    if (name, ledger[name]["version"]) in noted:
                        self.remote.remove(name)
                        removed.append(name)
            finally:  # as in `pull`: each of these was read back
                self._merge_ledger(ledger, pushed, removed)
            return pushed

    # ------------------------------------------------------------------ one file

    def _fetch(self, name: str, facts: dict, *, is_first: bool = False, head: bool = False) -> str:
        """Download a file to a temporary one, compare it with the remote's, and rename it into place; return its
        version: a later one than listed, where another machine has overwritten it since. A file that verifies itself
        takes the place of a local one only where it is intact; raises CheckpointError else.

        is_first : a local file was never pushed; where it differs, it is moved away.
        head : bring only the first bytes.
        """
        path = self.folder / name

        def fill(temporary: Path) -> None:
            if head:
                self.remote.get_head(name, temporary, _HEAD)
                return
            self.remote.get(name, temporary, facts)
            if path.suffix == _VERIFIED and path.is_file():
                checkpoint_file.verify_checkpoint(temporary)
            if is_first and path.is_file() and files.sha256(path) != files.sha256(temporary):
                self._set_aside(name, f"The workspace holds another {name}: this machine's, never uploaded,")

        for _ in range(_FETCHES):
            try:
                files.replace(stored_path(self.folder, *name.split("/")), fill, _HEAD if head else facts["size"])
                break
            except UnresponsiveMountError:
                raise
            except WorkspaceError:
                now = self.remote.facts(name)
                if now["version"] == facts["version"]:
                    raise
                facts = now
        return facts["version"]

    def _set_aside(self, name: str, reason: str) -> None:
        path = self.folder / name
        kept = path.with_name(path.name + _KEPT)
        os.replace(path, kept)
        _log.warning("%s is now %s", reason, kept)

    # ------------------------------------------------------------------ listings

    def _list_remote(self, places: tuple[str, ...]) -> tuple[str, dict[str, dict]]:
        """Return the folder above all places, "" or with a slash, and the files in it."""
        folder = os.path.commonpath(list(map(os.path.dirname, places))) if places else ""
        names = self.remote.list_files(folder)
        return folder and f"{folder}/", {name: facts for name, facts in names.items() if self._is_usable(name)}

    def _is_usable(self, name: str) -> bool:
        """Return True for an object name that is a path of plain names; another one costs a warning."""
        *folders, last = name.split("/")
        if all(map(is_plain_name, (*folders, last.lstrip(".")))):
            return not last.startswith(".")
        _log.warning("A file of the workspace is skipped, its name cannot be a file's: %r", name[:200])
        return False

    def _list_local(self, places: tuple[str, ...]) -> Iterator[str]:
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            temporary = path.name.startswith(".") or path.suffix in (".lock", ".tmp", _KEPT, _GONE)
            if path.is_file() and not path.is_symlink() and not temporary and _in_pass(name, places):
                yield name

    # ------------------------------------------------------------------ ledger of synchronized versions

    def _noted_removals(self) -> set[tuple[str, str]]:
        """Return (name, version) of the objects whose removal was noted (`files`)."""
        path, found = self.folder / REMOVALS, set()
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            with suppress(ValueError):  # torn by a kill: what it names stays on the remote
                found.add(tuple(parse_json(line)))
        return found

    def _ledger(self) -> dict[str, dict]:
        """Return the versions of the last pass; {} where the file is damaged: all objects are then compared again."""
        stored = files.read_json_or_none(self.folder / LEDGER)
        entries = stored.items() if isinstance(stored, dict) else ()
        whole = {name: one for name, one in entries if isinstance(one, dict) and {"version", "local"} <= set(one)}
        return {name: one for name, one in whole.items() if self._is_usable(name)}

    def _merge_ledger(self, ledger: dict, changed: Iterable[str], removed: Iterable[str] = ()) -> None:
        """Write the entries that a pass has changed in `ledger` into the stored one, which another pass may change."""
        changed, removed = list(changed), list(removed)
        if changed or removed:
            with file_lock(self.folder / ".ledger.lock"):  # other processes have this mirror
                stored = self._ledger() | {name: ledger[name] for name in changed}
                for name in removed:
                    stored.pop(name, None)
                files.write_json(self.folder / LEDGER, stored)


def open_mirror(address: str, folder: Path | None = None) -> Mirror:
    """Return this process's mirror of a workspace or a folder: one for each address. folder : as of `Mirror`."""
    key = (address, folder or local_cache_folder("workspaces"), process_id())
    if key not in _opened:
        _opened[key] = Mirror(address, folder)
    return _opened[key]


def opened_mirror(path: Path) -> Mirror | None:
    """Return the mirror that this process has open around a local path; None without one."""
    mine = (one for (_, _, process), one in list(_opened.items()) if process == process_id())
    return next((one for one in mine if path.is_relative_to(one.folder)), None)


def push_in_background(folder: Path) -> None:
    """Upload a folder of an opened workspace in the background; no effect where the workspace is local."""
    if (mirror := opened_mirror(folder)) is not None:
        mirror.push_in_background(f"{folder.relative_to(mirror.folder).as_posix()}/")


def fetch_file(address: str) -> Path:
    """Download the file at gs://bucket/folder/name, or of a folder on a mount, once for each version, and return its
    local path. Raises SettingsError, WorkspaceError.
    """
    folder, _, name = address.rpartition("/")
    return open_mirror(folder).fetch(name)


def _stamp(path: Path) -> list[int] | None:
    """Return size, time and inode, which change whenever the file does; None when it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _in_pass(name: str, places: tuple[str, ...]) -> bool:
    """Return True for a name below `places` (everywhere without) that is no lease."""
    return name.split("/")[-2:-1] != [LEASES] and (not places or name.startswith(places))


def _data_first(item: tuple[str, object]) -> tuple[bool, str]:
    return item[0].endswith(".json"), item[0]
