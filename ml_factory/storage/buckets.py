"""A workspace in a bucket: a folder of its own on the local disk, brought level with the bucket before and after work.

What is read is copied once and verified; what is written here goes up, the data first and the small JSON files that
speak of them last, so that a machine that dies between them leaves nothing that names what is not there.
"""

import base64
import hashlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ml_factory.errors import SettingsError, WorkspaceError
from ml_factory.lazy_module import import_module
from ml_factory.storage.atomic_files import fingerprint, read_json, replace_file, write_json

SCHEME = "gs"
_LEDGER = ".bucket.json"
# Seconds for one request. The client waits for ever by default, also for an answer that was lost.
REQUEST_SECONDS = 600.0
_log = logging.getLogger("ml_factory")
_levels: dict[Path, threading.RLock] = {}  # one pass at a time over a mirror


@dataclass(frozen=True)
class Synced:
    """What one pass moved: names below the workspace, as the bucket spells them."""

    pulled: tuple[str, ...] = ()
    pushed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class BucketMirror:
    """A local folder that mirrors a prefix of a bucket.

    url : gs://bucket/prefix.  folder : where the mirror is; by default below the user's cache folder, the same for
        the same url.

    Raises SettingsError for an address that is none, WorkspaceError where the bucket does not answer or gcsfs is
    not installed.
    """

    def __init__(self, url: str, folder: str | os.PathLike | None = None):
        self.url, self._prefix = url, _prefix_of(url)
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = Path(folder or base / "ml_factory" / "buckets" / fingerprint(url)[:16])
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = _open()
        self._level = _levels.setdefault(self.folder, threading.RLock())
        self._asking, self._asked = threading.Lock(), False
        self._thread: threading.Thread | None = None

    def push_in_background(self, *places: str) -> None:
        """As `push`, in a thread that nobody waits for. What is asked for while it works is done after it; a bucket
        that refuses costs a line, and the next push brings what is missing."""
        with self._asking:
            self._asked = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._push_asked, args=places, name="bucket", daemon=True)
                self._thread.start()

    def _push_asked(self, *places: str) -> None:
        while True:
            with self._asking:
                if not self._asked:
                    self._thread = None
                    return
                self._asked = False
            try:
                self.push(*places)
            except (WorkspaceError, OSError) as error:
                _log.warning("The bucket does not have the newest yet, the run goes on: %s", error)

    def pull(self, *places: str) -> Synced:
        """Bring files of the bucket here that are new there or changed; those taken away there go here too, unless
        they were changed here.

        places : what to look at below the workspace, such as "models/MES/"; everything without.
        """
        with self._level:
            return self._pull(places)

    def _pull(self, places: tuple[str, ...]) -> Synced:
        ledger, there = self._ledger(), self._there(places)
        pulled, removed = [], []
        for name, facts in sorted(there.items(), key=_data_first):
            known = ledger.get(name)
            if known and known["version"] == facts["version"] and (self.folder / name).exists():
                continue
            if known is None or _stamp(self.folder / name) in (known["local"], None):
                version = self._fetch(name, facts)
                ledger[name] = {"version": version, "local": _stamp(self.folder / name)}
                pulled.append(name)
        for name in [name for name in ledger if _within(name, places) and name not in there]:
            if _stamp(self.folder / name) in (ledger[name]["local"], None):
                (self.folder / name).unlink(missing_ok=True)
                removed.append(name)
            del ledger[name]
        self._remember(ledger, pulled, removed)
        return Synced(pulled=tuple(pulled), removed=tuple(removed))

    def fetch(self, name: str) -> Path:
        """One file of the bucket, where it lies here: copied and verified, unless this version is here already."""
        with self._level:
            ledger, facts, path = self._ledger(), self._now(name), self.folder / name
            known = ledger.get(name)
            if not (known and known["version"] == facts["version"] and _stamp(path) == known["local"]):
                ledger[name] = {"version": self._fetch(name, facts), "local": _stamp(path)}
                self._remember(ledger, [name])
            return path

    def push(self, *places: str) -> Synced:
        """Bring files that are new here or changed since the last pass to the bucket; those taken away here go there
        too. Data first, JSON last. `places` as for `pull`."""
        with self._level:
            return self._push(places)

    def _push(self, places: tuple[str, ...]) -> Synced:
        ledger = self._ledger()
        here = {name: _stamp(self.folder / name) for name in self._here(places)}
        changed = [name for name, stamp in here.items() if ledger.get(name, {}).get("local") != stamp]
        pushed, removed = [], []
        for name in sorted(changed, key=lambda name: _data_first((name, None))):
            try:
                ledger[name] = {"version": self._send(name), "local": here[name]}
            except WorkspaceError:
                if _stamp(self.folder / name) == here[name]:
                    raise
                continue  # a slot that was written over on its way: the next pass brings it
            pushed.append(name)
        for name in [name for name in ledger if _within(name, places) and name not in here]:
            with self._errors(name):
                if self._files.exists(self._key(name)):
                    self._files.rm_file(self._key(name))
            del ledger[name]
            removed.append(name)
        self._remember(ledger, pushed, removed)
        return Synced(pushed=tuple(pushed), removed=tuple(removed))

    # ------------------------------------------------------------------ one file

    def _fetch(self, name: str, facts: dict) -> str:
        """Bring an object here and give the version that came: another one than was listed, where somebody has written
        it over since."""
        try:
            self._copy(name, facts)
        except WorkspaceError:
            now = self._now(name)
            if now["version"] == facts["version"]:
                raise
            return self._fetch(name, now)
        return facts["version"]

    def _copy(self, name: str, facts: dict) -> None:
        """Copy an object aside, compare its size and MD5 with what the bucket says, then put it in its place."""

        def fill(aside: Path) -> None:
            with self._errors(name):
                self._files.get_file(self._key(name), str(aside))
            _check(aside, facts, f"{self.url}/{name}")

        replace_file(self.folder / name, fill, facts["size"])

    def _send(self, name: str) -> str:
        """Copy a file up, compare what arrived, and give the bucket's name of that version."""
        path = self.folder / name
        with self._errors(name):
            self._files.put_file(str(path), self._key(name))
        facts = self._now(name)
        _check(path, facts, f"{self.url}/{name}")
        return facts["version"]

    # ------------------------------------------------------------------ what is where

    def _now(self, name: str) -> dict:
        with self._errors(name):
            self._files.invalidate_cache()
            return _facts(self._files.info(self._key(name)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _there(self, places: tuple[str, ...]) -> dict[str, dict]:
        with self._errors(""):
            self._files.invalidate_cache()
            found = self._files.find(self._prefix, detail=True)
        names = {path.removeprefix(self._prefix + "/"): _facts(facts) for path, facts in found.items()}
        return {name: facts for name, facts in names.items() if _safe(name) and _within(name, places)}

    def _here(self, places: tuple[str, ...]) -> Iterator[str]:
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            passing = path.name.startswith(".") or path.suffix in (".lock", ".tmp")
            if path.is_file() and not path.is_symlink() and not passing and _within(name, places):
                yield name

    # ------------------------------------------------------------------ what was level when

    def _ledger(self) -> dict[str, dict]:
        path = self.folder / _LEDGER
        return dict(read_json(path)) if path.exists() else {}

    def _remember(self, ledger: dict, *changes: list) -> None:
        if any(changes):
            write_json(self.folder / _LEDGER, ledger)

    def _errors(self, name: str):
        return _bucket_errors(f"{self.url}/{name}" if name else self.url)


@contextmanager
def _bucket_errors(where: str) -> Iterator[None]:
    """Whatever the client library raises (of HTTP, of tokens, of event loops), told as one clear line."""
    try:
        yield
    except WorkspaceError:
        raise
    except Exception as error:
        raise WorkspaceError(
            "The bucket refused or did not answer",
            where=where,
            got=f"{type(error).__name__}: {error}"[:300],
            next_step="check its name, your sign-in (auth.authenticate_user() on Colab) and your right to write",
        ) from error


def file_at(address: str) -> Path:
    """The file at gs://bucket/folder/name, copied to this machine once. Raises SettingsError, WorkspaceError."""
    folder, _, name = address.rpartition("/")
    return BucketMirror(folder).fetch(name)


def _open():
    """The client; at the emulator that STORAGE_EMULATOR_HOST names, where there is one.

    By its plain class: the one that fsspec names asks each bucket over gRPC whether it is a special one, and waits a
    minute for every answer where only HTTP is spoken. What it cannot do it also logs, with every frame of the stack;
    here each of its errors is told, in one sentence.
    """
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    options = {"token": "anon", "endpoint_url": emulator} if emulator else {}
    client = import_module("gcsfs.core").GCSFileSystem
    return client(skip_instance_cache=True, requests_timeout=REQUEST_SECONDS, use_listings_cache=False, **options)


def _prefix_of(url: str) -> str:
    scheme, _, rest = url.partition("://")
    parts = rest.rstrip("/").split("/")
    if scheme != SCHEME or any(part in ("", ".", "..") for part in parts):
        raise SettingsError(
            "This is no address of a bucket", where="WORKSPACE", got=repr(url), wanted=f"{SCHEME}://bucket/prefix"
        )
    return "/".join(parts)


def _facts(info: dict) -> dict:
    version = info.get("generation") or info.get("etag") or info.get("updated")
    return {"size": int(info["size"]), "md5": info.get("md5Hash"), "version": str(version)}


def _check(path: Path, facts: dict, where: str) -> None:
    """Refuse a copy that is not what the bucket holds. A composed object has no MD5; then its size must do."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        digest = base64.b64encode(hashlib.file_digest(file, "md5").digest()).decode() if facts["md5"] else None
    if (size, digest) != (facts["size"], facts["md5"]):
        raise WorkspaceError(
            "This copy is not what the bucket holds", where=where, got=f"{size} bytes, MD5 {digest}",
            wanted=f"{facts['size']} bytes, MD5 {facts['md5']}", next_step="run again: nothing was replaced",
        )  # fmt: skip


def _stamp(path: Path) -> list[int] | None:
    """Changes whenever the file does; None when it is not there."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _within(name: str, places: Iterable[str]) -> bool:
    places = tuple(places)
    return not places or name.startswith(places)


def _safe(name: str) -> bool:
    """Whether an object's name is a plain path below the workspace."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and not parts[-1].startswith(".")


def _data_first(item: tuple[str, object]) -> tuple[bool, str]:
    return item[0].endswith(".json"), item[0]
