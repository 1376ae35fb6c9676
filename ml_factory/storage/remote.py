"""Where a mirrored workspace is kept: a mounted folder (Drive, NFS) or a prefix of a bucket, behind the same methods.

Each copy is compared: an upload to a mount is read back, a download from there has the listed size; in a bucket both
have size and MD5. A child process alone touches the remote: it sends a sign of life with each piece of a file, and
where it is silent for too long, it is killed and abandoned, since nothing gets a process out of a mount that hangs.
"""

import base64
import errno
import hashlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ml_factory import errors
from ml_factory.background import start_python_process
from ml_factory.errors import FactoryError, SettingsError, UnresponsiveMountError, WorkspaceError
from ml_factory.lazy_module import check_packages_installed, import_module_or_explain
from ml_factory.process_identity import process_id
from ml_factory.storage.files import disk_errors, flush_to_disk, raise_error

SCHEME = "gs"
LEASES = "leases"  # folder of the checkpoints that has a mirror of its own: a lease does not wait behind large files
SILENCE_SECONDS = 20.0  # of a child in a mount
# Seconds for one request to a bucket. The client has no timeout by default, not even for a lost response.
REQUEST_SECONDS = 600.0
_PIECE, _FLUSHED = 1 << 18, 1 << 24  # bytes between two signs of life; bytes after which a mount is asked to keep them
_ROOT = Path(__file__).resolve().parents[2]
_START = (
    f"import sys; sys.path[:0] = sys.argv[1].split({os.pathsep!r}); "
    f"from {__name__} import answer_parent; answer_parent(int(sys.argv[2]), sys.argv[3])"
)
_LARGE = 1 << 26  # bytes of an object that is fetched by several requests at once
_ALIVE_SECONDS = 0.2  # between two signs of life
_MOST_ABANDONED = 4  # children of one address that hang
_abandoned: list[tuple[str, subprocess.Popen]] = []
_DISCONNECTED = frozenset({errno.ENOTCONN, errno.ESTALE, errno.EHOSTDOWN})
# On Google Drive each rename over a file and each deletion fills the Trash: what is written often is overwritten there.
_OVERWRITTEN = (".ckpt", ".jsonl")


class Remote:
    """The methods of `MountedFolder` or `Bucket`, run in child processes: an idle one, or a new one where each is at
    work. They raise WorkspaceError where the remote refuses, UnresponsiveMountError where it does not answer.

    Parameters
    ----------
    address : gs://bucket/prefix, or a folder on a mount. Raises SettingsError for a malformed one, MissingPackageError
        for a bucket without gcsfs.

    Attribute: `is_mount`; there the absence of one file does not mean that it was removed.
    """

    def __init__(self, address: str):
        self._address, self.is_mount = address, "://" not in address
        if not self.is_mount:
            _prefix_of(address)
            check_packages_installed("gcsfs")
        self._idle: list[_Child] = []
        self._process, self._silent_until = process_id(), 0.0

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method)

    def _call(self, method: str, *args: Any) -> Any:
        if self._process != process_id():  # after a fork: the children are the parent's
            self._idle, self._process = [], process_id()
        child = None
        with suppress(IndexError):
            child = self._idle.pop()
        try:
            if time.monotonic() < self._silent_until:  # who waited for the one before does not wait as long again
                raise OSError("it did not answer just now")
            if child is None or child.process.poll() is not None:
                child = _Child(self._address, SILENCE_SECONDS + (0.0 if self.is_mount else REQUEST_SECONDS))
            answer = child.call([method, *args])
        except (OSError, RuntimeError) as error:  # silent, dead, or not to be started
            if isinstance(error, TimeoutError):
                self._silent_until = time.monotonic() + SILENCE_SECONDS / 4
            raise _no_answer("/".join([self._address, *args[:1]]).rstrip("/"), error) from error
        self._idle.append(child)
        if "error" in answer:
            raise getattr(errors, answer["kind"])(answer.pop("error"), **answer["facts"])
        return answer["result"]


class _Child:
    """A process that serves one remote, a request at a time.

        parent -> child   [method, arguments …]
        child -> parent   {} while it works; then {"result": …} or {"error": …}

    Raises TimeoutError where four earlier ones still hang.

    seconds : without a sign of life after which it is killed and abandoned, never waited for: one inside a dead mount
        ends when the kernel lets it.
    """

    def __init__(self, address: str, seconds: float):
        self._address, self._seconds, self._received = address, seconds, b""
        self._pipes: list[Any] = []
        hanging = sum(place == address and process.poll() is None for place, process in _abandoned)
        if hanging >= _MOST_ABANDONED:
            raise TimeoutError(f"{hanging} earlier requests still hang")
        paths = [str(_ROOT), *([] if "://" not in address else filter(None, sys.path))]
        self.process = start_python_process(
            ["-I", "-S", "-c", _START, os.pathsep.join(paths), os.getpid(), address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,  # what a fork copies would be sent twice
        )  # fmt: skip
        self._pipes += [self.process.stdin, self.process.stdout]

    def call(self, request: list) -> dict:
        """Send one request; return the answer. Raises OSError where none comes."""
        try:
            self._pipes[0].write(json.dumps(request, default=str).encode() + b"\n")
            while (line := self._next_line()) == b"{}":
                pass
            return json.loads(line)
        except BaseException:  # also a signal in the middle: the pending answer belongs to no request
            self.process.kill()
            self.close()
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                _abandoned.append((self._address, self.process))
            raise

    def _next_line(self) -> bytes:
        answers = self._pipes[1].fileno()
        poll = select.poll()  # not select.select, which refuses descriptors from 1024 on
        poll.register(answers, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(1000 * self._seconds):
                raise TimeoutError(f"no answer for {self._seconds:g} s")
            more = os.read(answers, _PIECE)
            if not more:
                raise ConnectionResetError("the child process died")
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line

    def close(self) -> None:
        """Let an idle child end by itself."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()

    __del__ = close


def _no_answer(where: object, reason: object) -> UnresponsiveMountError:
    return UnresponsiveMountError(
        "The mount or bucket does not answer; nothing there was changed", where=where, got=reason,
        next_step="mount it again (on Colab: run the setup cell), then run this again"
    )  # fmt: skip


# ---------------------------------------------------------------------- in the child


def answer_parent(parent: int, address: str) -> None:
    """Do what the parent asks until it is gone: another process may own its files then."""
    answers, reported = os.fdopen(os.dup(1), "wb", buffering=0), [0.0]
    os.dup2(2, 1)  # what a library prints is no answer
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()

    def alive() -> None:
        if time.monotonic() - reported[0] > _ALIVE_SECONDS:
            reported[0] = time.monotonic()
            answers.write(b"{}\n")

    remote: MountedFolder | Bucket | None = None
    for line in sys.stdin.buffer:
        method, *args = json.loads(line)
        try:
            remote = remote or (Bucket if "://" in address else MountedFolder)(address, alive)
            answer = {"result": getattr(remote, method)(*args)}
        except FactoryError as error:
            facts = {name: getattr(error, name) for name in ("where", "got", "wanted")}
            facts = {name: None if value is None else str(value) for name, value in facts.items()}
            facts["next_step"] = error.next_step
            answer = {"error": error.what, "kind": type(error).__name__, "facts": facts}
        except Exception as error:  # noqa: BLE001 - memory, a NUL: without an answer the remote would seem dead
            what = f"{type(error).__name__}: {error}"
            answer = {"error": what, "kind": "WorkspaceError", "facts": {"where": address}}
        answers.write(json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_ALIVE_SECONDS)
    os._exit(0)


class MountedFolder:
    """A folder on a mount. Facts of a file are {"size", "version"} and what else its copy is compared with.

    alive : called after each piece of work.
    """

    def __init__(self, folder: str, alive: Callable[[], object] = lambda: None):
        self._folder, self._alive = Path(folder), alive

    def list_files(self, folder: str) -> dict[str, dict]:
        """Return name -> facts of all files below the folder."""
        found: dict[str, dict] = {}
        with self._errors(folder):
            top = os.path.join(self._folder, folder)
            for place, _, names in os.walk(top, onerror=raise_error) if os.path.lexists(top) else ():
                for path in (os.path.join(place, name) for name in names):
                    self._alive()
                    with suppress(FileNotFoundError):
                        facts = os.lstat(path)
                        if facts.st_mode & 0o170000 == 0o100000:
                            found[os.path.relpath(path, self._folder)] = _mounted_facts(facts)
        return found

    def exists(self) -> bool:
        """Return True where the address is a folder."""
        with self._errors(""), suppress(FileNotFoundError):
            return os.stat(self._folder).st_mode & 0o170000 == 0o040000
        return False

    def names(self) -> list[str]:
        """List what is right below the address."""
        with self._errors(""), suppress(FileNotFoundError):
            return sorted(os.listdir(self._folder))
        return []

    def facts(self, name: str) -> dict:
        with self._errors(name):
            return _mounted_facts(os.stat(self._folder / name))

    def get(self, name: str, path: str, facts: dict) -> None:
        """Download a file and compare it with its facts."""
        with self._errors(name), open(self._folder / name, "rb") as source, open(path, "wb") as copy:
            self._copy(source, copy)
        _require_same(os.stat(path).st_size, facts["size"], self._folder / name)

    def get_head(self, name: str, path: str, size: int) -> None:
        """Download the first bytes of a file."""
        with self._errors(name), open(self._folder / name, "rb") as source:
            Path(path).write_bytes(source.read(size))

    def put(self, name: str, path: str) -> str:
        """Upload a file, compare what is there then, and return its version."""
        place = self._folder / name
        with self._errors(name), open(path, "rb") as source:
            place.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(_OVERWRITTEN) or self._folder.name == LEASES:
                if place.is_file() and place.stat().st_nlink > 1:  # under its other name it stays as it is
                    place.unlink()
                self._write(source, place, os.O_CREAT | os.O_NOFOLLOW)
            else:
                part = place.with_name(f".{place.name}.part")
                part.unlink(missing_ok=True)
                try:
                    self._write(source, part, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
                    os.replace(part, place)
                finally:
                    with suppress(OSError):
                        part.unlink(missing_ok=True)
        _require_same(self._sha256(place, fresh=True), self._sha256(path), place)
        return self.facts(name)["version"]

    def remove(self, name: str) -> None:
        place = self._folder / name
        with self._errors(name):
            if place.is_file() and not place.is_symlink():
                if place.stat().st_nlink == 1:  # what is deleted stays in Drive's Trash for 30 days, with its size
                    os.truncate(place, 0)
                place.unlink()
            for folder in list(Path(name).parents)[:-2]:  # those that are empty now; data, models, results stay
                if folder.parts[0] == "data" or any((self._folder / folder).iterdir()):
                    break
                (self._folder / folder).rmdir()

    def make_folder(self, name: str) -> None:
        with self._errors(name):
            (self._folder / name).mkdir(parents=True, exist_ok=True)

    def _write(self, source: Any, place: Path, flags: int) -> None:
        with open(os.open(place, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666), "wb") as copy:
            self._copy(source, copy, _FLUSHED)
            copy.truncate()

    def _copy(self, source: Any, target: Any, flushed: int = 0) -> None:
        """flushed : bytes after which they are flushed to the disk, and at the end; 0: never."""
        count = 0
        while piece := source.read(_PIECE):
            target.write(piece)
            count += len(piece)
            if flushed and count % flushed == 0:
                flush_to_disk(target.fileno())
            self._alive()
        if flushed:
            target.flush()
            flush_to_disk(target.fileno())

    def _sha256(self, path: str | Path, fresh: bool = False) -> str:
        """fresh : read the disk itself, not the page cache."""
        seen, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
        with self._errors(path), open(path, "rb", buffering=0) as file:
            if fresh and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while count := file.readinto(buffer):
                seen.update(buffer[:count])
                self._alive()
        return seen.hexdigest()

    @contextmanager
    def _errors(self, name: str | Path) -> Iterator[None]:
        try:
            with disk_errors(self._folder / name):
                yield
        except WorkspaceError as error:
            if getattr(error.__cause__, "errno", None) in _DISCONNECTED:
                raise _no_answer(self._folder / name, error.got) from error
            raise


class Bucket:
    """A prefix of a bucket, with the methods of `MountedFolder` that a mirror calls. alive : as there."""

    def __init__(self, address: str, alive: Callable[[], object] = lambda: None):
        self._address, self._prefix = address, _prefix_of(address)
        self._files = _open_client()
        # The client calls these after each piece: 128 KiB of a download, 50 MiB of an upload.
        names = ("set_size", "absolute_update", "relative_update")
        self._progress = SimpleNamespace(**dict.fromkeys(names, lambda size: alive()))

    def list_files(self, folder: str) -> dict[str, dict]:
        with self._errors(""):
            self._files.invalidate_cache()
            found = self._files.find(f"{self._prefix}/{folder}".rstrip("/"), detail=True)
        return {path.removeprefix(self._prefix + "/"): _facts(facts) for path, facts in found.items()}

    def facts(self, name: str) -> dict:
        bucket, _, key = self._key(name).partition("/")
        with self._errors(name):  # not by `info`, which also lists
            return _facts(self._files.call("GET", "b/{}/o/{}", bucket, key, json_out=True))

    def get(self, name: str, path: str, facts: dict) -> None:
        one_request = {} if facts["size"] >= _LARGE else {"concurrency": 1}  # several ask for its size first
        with self._errors(name):
            self._files.get_file(self._key(name), str(path), callback=self._progress, **one_request)
        _require_same(_size_and_digest(path, facts), (facts["size"], facts["md5"]), f"{self._address}/{name}")

    def get_head(self, name: str, path: str, size: int) -> None:
        with self._errors(name):
            Path(path).write_bytes(self._files.cat_file(self._key(name), start=0, end=size)[:size])

    def put(self, name: str, path: str) -> str:
        with self._errors(name):
            self._files.put_file(str(path), self._key(name), callback=self._progress)
        facts = self.facts(name)
        _require_same(_size_and_digest(path, facts), (facts["size"], facts["md5"]), f"{self._address}/{name}")
        return facts["version"]

    def remove(self, name: str) -> None:
        with self._errors(name):
            if self._files.exists(self._key(name)):
                self._files.rm_file(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn any exception of the client library (HTTP, tokens, event loops) into one WorkspaceError, of the network
        into an UnresponsiveMountError.
        """
        try:
            yield
        except Exception as error:
            retry = import_module_or_explain("gcsfs.retry")
            sign_in = retry.google.auth.exceptions
            if isinstance(error, sign_in.RefreshError | retry.ChecksumError) or getattr(error, "code", 0) == 401:
                is_away = False  # an answer, although the client tries these again
            else:
                away = sign_in.TransportError | TimeoutError | ConnectionError
                is_away = retry.is_retriable(error) or isinstance(error, away)
            raise (UnresponsiveMountError if is_away else WorkspaceError)(
                "The bucket refused or did not answer", where=f"{self._address}/{name}".rstrip("/"),
                got=f"{type(error).__name__}: {error}"[:300],
                next_step="check its name, your sign-in (auth.authenticate_user() on Colab) and your right to write",
            ) from error  # fmt: skip


def _open_client() -> Any:
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
    return {"size": int(info["size"]), "md5": info.get("md5Hash"), "version": str(info["generation"])}


def _mounted_facts(found: os.stat_result) -> dict:
    return {"size": found.st_size, "version": f"{found.st_size}-{found.st_mtime_ns}"}


def _require_same(found: object, wanted: object, where: str | Path) -> None:
    """Raise WorkspaceError for a copy that differs from the file on the other side."""
    if found != wanted:
        raise WorkspaceError(
            "This copy is not what the workspace holds", where=where, got=found, wanted=wanted,
            next_step="run again: nothing was replaced",
        )  # fmt: skip


def _size_and_digest(path: str | Path, facts: dict) -> tuple[int, str | None]:
    """Return (size, MD5). A composed object has no MD5; then only sizes are compared."""
    with open(path, "rb") as file:
        digest = base64.b64encode(hashlib.file_digest(file, "md5").digest()).decode() if facts["md5"] else None
    return os.stat(path).st_size, digest
