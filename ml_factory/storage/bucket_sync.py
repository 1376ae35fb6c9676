"""A workspace in a bucket: a local folder that is synchronized with the bucket before and after work.

Objects are downloaded once and verified. Local changes are uploaded data first, the small JSON files that refer to them
last, so that a machine that dies in between leaves no reference to a missing object.
"""

import base64
import hashlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from ml_factory.background_thread import BackgroundThread
from ml_factory.errors import SettingsError, WorkspaceError
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.storage.files import files, local_cache_folder
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.mirror_removals import LEDGER, noted_removals
from ml_factory.storage.stored_paths import is_plain_name, stored_path

SCHEME = "gs"
_KEPT = ".kept"  # suffix of a local file in whose place the bucket's came
# Seconds for one request. The client has no timeout by default, not even for a lost response.
REQUEST_SECONDS = 600.0
_log = logging.getLogger("ml_factory")
LEASES_PREFIX = "checkpoints/leases/"  # has passes of its own, which do not wait for one over large files
_sync_locks: dict[tuple[Path, str], threading.RLock] = {}  # one pass at a time over each mirror, one over the leases


@dataclass(frozen=True)
class BucketSyncResult:
    """Names that one pass transferred or deleted, relative to the workspace."""

    pulled: tuple[str, ...] = ()
    pushed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class BucketMirror:
    """A local folder that mirrors a prefix of a bucket.

    Parameters
    ----------
    url : gs://bucket/prefix.
    folder : the local mirror; by default below the user's cache folder, the same for the same url.

    Raises SettingsError for a malformed address, WorkspaceError where the bucket does not answer or gcsfs is not
    installed.
    """

    def __init__(self, url: str, folder: str | os.PathLike | None = None):
        self.url, self._prefix = url, _prefix_of(url)
        self.folder = Path(folder or local_cache_folder("buckets") / fingerprint_json(url)[:16])
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = _open()
        self._background, self._lease_thread = BackgroundThread("bucket"), BackgroundThread("bucket-leases")
        self._push_requested: set[tuple[str, ...]] = set()  # places whose push has not begun

    def push_in_background(self, *places: str) -> None:
        """Push in a background thread. Requests for the same places that arrive while it works are
        merged into one further pass.

        A bucket that refuses costs a warning, and the next push uploads what is missing.
        """
        if places not in self._push_requested:
            self._push_requested.add(places)
            thread = self._lease_thread if places == (LEASES_PREFIX,) else self._background
            thread.submit(lambda: self._push_requested_changes(*places))

    def _push_requested_changes(self, *places: str) -> None:
        self._push_requested.discard(places)
        try:
            self.push(*places)
        except (WorkspaceError, OSError) as error:
            _log.warning("The bucket does not have the newest files yet, the run goes on: %s", error)

    def pull(self, *places: str) -> BucketSyncResult:
        """Download objects that are new or changed in the bucket; delete local files that were deleted there, unless
        they were changed locally. A local file that was never pushed and differs is kept as NAME.kept, with a warning.

        places : prefixes below the workspace, such as "models/MES/"; everything without.
        """
        return self._in_passes(self._pull, places)

    def _in_passes(
        self, sync: Callable[[tuple[str, ...]], "BucketSyncResult"], places: tuple[str, ...]
    ) -> "BucketSyncResult":
        """Run one pass over `places` without the leases, and one over the leases where they are among the places."""
        leases = (LEASES_PREFIX,)
        passes = [places, leases] if places != leases and _within(LEASES_PREFIX, places) else [places]
        results = []
        for one in passes:
            with self._pass_lock(*one):
                results.append(sync(one))
        return BucketSyncResult(
            *(sum((getattr(result, field.name) for result in results), ()) for field in fields(BucketSyncResult))
        )

    def _pull(self, places: tuple[str, ...]) -> BucketSyncResult:
        ledger, remote = self._ledger(), self._list_remote(places)
        pulled, removed = [], []
        for name, facts in sorted(remote.items(), key=_data_first):
            known = ledger.get(name)
            if known and known["version"] == facts["version"] and (self.folder / name).exists():
                continue
            if known is None or _stamp(self.folder / name) in (known["local"], None):
                if known is None:
                    self._keep_own(name, facts)
                version = self._fetch(name, facts)
                ledger[name] = {"version": version, "local": _stamp(self.folder / name)}
                pulled.append(name)
        gone = [name for name in ledger if _in_pass(name, places) and name not in remote]
        for name in gone:
            if _stamp(self.folder / name) in (ledger[name]["local"], None):
                (self.folder / name).unlink(missing_ok=True)
                removed.append(name)
        self._merge_ledger(ledger, pulled, gone)
        return BucketSyncResult(pulled=tuple(pulled), removed=tuple(removed))

    def _keep_own(self, name: str, facts: dict) -> None:
        """Move a local file away that is not the bucket's of this name, which comes in its place."""
        path = self.folder / name
        if path.is_file() and not _is_copy(path, facts):
            kept = path.with_name(path.name + _KEPT)
            os.replace(path, kept)
            _log.warning("The bucket holds another %s: the one of this machine, never uploaded, is now %s", name, kept)

    def fetch(self, name: str) -> Path:
        """Return the local path of one object: downloaded and verified, unless this version is already there."""
        with self._pass_lock():
            ledger, facts, path = self._ledger(), self._remote_info(name), self.folder / name
            known = ledger.get(name)
            if not (known and known["version"] == facts["version"] and _stamp(path) == known["local"]):
                ledger[name] = {"version": self._fetch(name, facts), "local": _stamp(path)}
                self._merge_ledger(ledger, [name])
            return path

    def push(self, *places: str) -> BucketSyncResult:
        """Upload files that are new or changed since the last pass, and delete objects whose files were deleted through
        `files`; a file that is only missing stays in the bucket. Data first, JSON last. `places` as for `pull`.
        """
        return self._in_passes(self._push, places)

    def _pass_lock(self, *places: str) -> threading.RLock:
        """Return the lock of passes over `places`: a lease is not renewed too late behind an upload of minutes."""
        name = places[0] if places in ((LEASES_PREFIX,), (LEDGER,)) else ""
        return _sync_locks.setdefault((self.folder, name), threading.RLock())

    def _push(self, places: tuple[str, ...]) -> BucketSyncResult:
        ledger = self._ledger()
        local = {name: _stamp(self.folder / name) for name in self._list_local(places)}
        changed = [name for name, stamp in local.items() if ledger.get(name, {}).get("local") != stamp]
        pushed, removed = [], []
        for name in sorted(changed, key=lambda name: _data_first((name, None))):
            try:
                ledger[name] = {"version": self._send(name), "local": local[name]}
            except WorkspaceError:
                if _stamp(self.folder / name) == local[name]:
                    raise
                continue  # a slot overwritten during its upload: the next pass uploads it
            pushed.append(name)
        noted = noted_removals(self.folder)
        for name in [name for name in ledger if _in_pass(name, places) and name not in local]:
            if (name, ledger[name]["version"]) not in noted:
                continue
            with self._errors(name):
                if self._files.exists(self._key(name)):
                    self._files.rm_file(self._key(name))
            removed.append(name)
        self._merge_ledger(ledger, pushed, removed)
        return BucketSyncResult(pushed=tuple(pushed), removed=tuple(removed))

    # ------------------------------------------------------------------ one file

    def _fetch(self, name: str, facts: dict) -> str:
        """Download an object and return its version: a later version than listed, where another process has
        overwritten it since.
        """
        try:
            self._copy(name, facts)
        except WorkspaceError:
            now = self._remote_info(name)
            if now["version"] == facts["version"]:
                raise
            return self._fetch(name, now)
        return facts["version"]

    def _copy(self, name: str, facts: dict) -> None:
        """Download an object to a temporary file, compare size and MD5 with the bucket's, then rename it into place."""

        def fill(temporary: Path) -> None:
            with self._errors(name):
                self._files.get_file(self._key(name), str(temporary))
            _check(temporary, facts, f"{self.url}/{name}")

        files.replace(stored_path(self.folder, *name.split("/")), fill, facts["size"])

    def _send(self, name: str) -> str:
        """Upload a file, compare size and MD5 with the bucket's, and return the new version."""
        path = self.folder / name
        with self._errors(name):
            self._files.put_file(str(path), self._key(name))
        facts = self._remote_info(name)
        _check(path, facts, f"{self.url}/{name}")
        return facts["version"]

    # ------------------------------------------------------------------ listings

    def _remote_info(self, name: str) -> dict:
        with self._errors(name):
            self._files.invalidate_cache()
            return _facts(self._files.info(self._key(name)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _list_remote(self, places: tuple[str, ...]) -> dict[str, dict]:
        with self._errors(""):
            self._files.invalidate_cache()
            folder = places[0].rstrip("/") if len(places) == 1 and places[0].endswith("/") else ""
            found = self._files.find(f"{self._prefix}/{folder}".rstrip("/"), detail=True)
        names = {path.removeprefix(self._prefix + "/"): _facts(facts) for path, facts in found.items()}
        usable = {name: facts for name, facts in names.items() if self._is_usable(name) and _in_pass(name, places)}
        spellings = Counter(map(str.casefold, usable)) if _ignores_case(self.folder) else {}
        for name in [name for name in usable if spellings.get(name.casefold(), 1) > 1]:  # one would overwrite the other
            _log.warning("An object of the bucket is skipped, another differs in upper and lower case alone: %s", name)
            del usable[name]
        return usable

    def _is_usable(self, name: str) -> bool:
        """Return True for an object name that is a path of plain names; another one costs a warning."""
        *folders, last = name.split("/")
        if all(map(is_plain_name, (*folders, last.lstrip(".")))):
            return not last.startswith(".")
        _log.warning("An object of the bucket is skipped, its name cannot be a file's: %r", name[:200])
        return False

    def _list_local(self, places: tuple[str, ...]) -> Iterator[str]:
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            temporary = path.name.startswith(".") or path.suffix in (".lock", ".tmp", _KEPT)
            if path.is_file() and not path.is_symlink() and not temporary and _in_pass(name, places):
                yield name

    # ------------------------------------------------------------------ ledger of synchronized versions

    def _ledger(self) -> dict[str, dict]:
        """Return the versions of the last pass; {} where the file is damaged: all objects are then compared again."""
        stored = files.read_json_or_none(self.folder / LEDGER)
        entries = stored.items() if isinstance(stored, dict) else ()
        return {name: one for name, one in entries if _is_ledger_entry(one) and self._is_usable(name)}

    def _merge_ledger(self, ledger: dict, changed: Iterable[str], removed: Iterable[str] = ()) -> None:
        """Write the entries that a pass has changed in `ledger` into the stored one, which another pass may change."""
        changed, removed = list(changed), list(removed)
        if changed or removed:
            with self._pass_lock(LEDGER):
                stored = self._ledger() | {name: ledger[name] for name in changed}
                for name in removed:
                    stored.pop(name, None)
                files.write_json(self.folder / LEDGER, stored)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn any exception of the client library (HTTP, tokens, event loops) into one WorkspaceError."""
        try:
            yield
        except WorkspaceError:
            raise
        except Exception as error:
            raise WorkspaceError(
                "The bucket refused or did not answer", where=f"{self.url}/{name}".rstrip("/"),
                got=f"{type(error).__name__}: {error}"[:300],
                next_step="check its name, your sign-in (auth.authenticate_user() on Colab) and your right to write",
            ) from error  # fmt: skip


def _is_ledger_entry(entry: object) -> bool:
    return isinstance(entry, dict) and {"version", "local"} <= set(entry)


def download_bucket_file(address: str) -> Path:
    """Download the object at gs://bucket/folder/name once and return its local path. Raises SettingsError,
    WorkspaceError.
    """
    folder, _, name = address.rpartition("/")
    return BucketMirror(folder).fetch(name)


def _open():
    """Create the client; for the emulator that STORAGE_EMULATOR_HOST names, where there is one.

    `GCSFileSystem` itself is used: the class that fsspec picks queries each bucket over gRPC for special storage
    layouts and waits a minute for every reply where only HTTP is available. The client also logs each failure with a
    full stack trace; those logs are silenced because every error is raised here in one sentence.
    """
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    options = {"token": "anon", "endpoint_url": emulator} if emulator else {}
    client = import_module_or_explain("gcsfs.core").GCSFileSystem
    return client(skip_instance_cache=True, requests_timeout=REQUEST_SECONDS, use_listings_cache=False, **options)


def _prefix_of(url: str) -> str:
    scheme, _, rest = url.partition("://")
    parts = rest.rstrip("/").split("/")
    if scheme != SCHEME or any(part in ("", ".", "..") for part in parts):
        raise SettingsError(
            "This is not the address of a bucket", where="WORKSPACE", got=repr(url), wanted=f"{SCHEME}://bucket/prefix"
        )
    return "/".join(parts)


def _facts(info: dict) -> dict:
    version = info.get("generation") or info.get("etag") or info.get("updated")
    return {"size": int(info["size"]), "md5": info.get("md5Hash"), "version": str(version)}


def _check(path: Path, facts: dict, where: str) -> None:
    """Raise WorkspaceError for a copy that differs from the object. A composed object has no MD5; then only sizes
    are compared.
    """
    size, digest = _size_and_digest(path, facts)
    if (size, digest) != (facts["size"], facts["md5"]):
        raise WorkspaceError(
            "This copy is not what the bucket holds", where=where, got=f"{size} bytes, MD5 {digest}",
            wanted=f"{facts['size']} bytes, MD5 {facts['md5']}", next_step="run again: nothing was replaced"
        )  # fmt: skip


def _is_copy(path: Path, facts: dict) -> bool:
    return _size_and_digest(path, facts) == (facts["size"], facts["md5"])


def _size_and_digest(path: Path, facts: dict) -> tuple[int, str | None]:
    with open(path, "rb") as file:
        digest = base64.b64encode(hashlib.file_digest(file, "md5").digest()).decode() if facts["md5"] else None
    return path.stat().st_size, digest


def _stamp(path: Path) -> list[int] | None:
    """Return size, time and inode, which change whenever the file does; None when it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _ignores_case(folder: Path) -> bool:
    """Return True on a file system where names in capital and small letters are the same."""
    return os.path.exists(os.path.join(folder.parent, folder.name.swapcase())) and folder.name.swapcase() != folder.name


def _within(name: str, places: Iterable[str]) -> bool:
    places = tuple(places)
    return not places or name.startswith(places)


def _in_pass(name: str, places: tuple[str, ...]) -> bool:
    """Return True for a name below `places` that a pass over them takes: leases only in a pass of their own."""
    return _within(name, places) and name.startswith(LEASES_PREFIX) == (places == (LEASES_PREFIX,))


def _data_first(item: tuple[str, object]) -> tuple[bool, str]:
    return item[0].endswith(".json"), item[0]
