"""Where a mirrored workspace is kept: a mounted folder (Drive, NFS) or a prefix of a bucket, behind the same methods.

Each copy is compared: what arrived is read back from a mount, and by size and MD5 from a bucket. Every access to a
mount runs in a child process with a deadline (`files`); a request to a bucket has a timeout.
"""

import base64
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ml_factory.errors import SettingsError, WorkspaceError
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.storage.files import files

SCHEME = "gs"
# Seconds for one request. The client has no timeout by default, not even for a lost response.
REQUEST_SECONDS = 600.0
# On Google Drive each rename over a file and each deletion fills the Trash: what is written often is overwritten there.
_OVERWRITTEN = ".ckpt"


class Remote(Protocol):
    """Files by name; facts of a file: {"size", "version"} and what else its copy is compared with.

    Methods raise WorkspaceError where the remote refuses or does not answer.
    """

    may_drop_files: bool  # absence of one file does not mean that somebody removed it

    def list(self, folder: str) -> dict[str, dict]: ...  # name -> facts, of all files below the folder
    def facts(self, name: str) -> dict: ...
    def get(self, name: str, path: Path, facts: dict) -> None: ...
    def put(self, path: Path, name: str) -> str: ...  # returns the version
    def remove(self, name: str) -> None: ...
    def is_copy(self, path: Path, name: str, facts: dict) -> bool: ...


def open_remote(address: str) -> Remote:
    """Open gs://bucket/prefix, or a folder on a mount."""
    return Bucket(address) if "://" in address else MountedFolder(address)


class MountedFolder:
    """A folder on a mount, which is made where it is missing."""

    may_drop_files = True

    def __init__(self, folder: str):
        self._folder = Path(folder)
        files.make_folder(self._folder)
        if not files.is_writable(self._folder):
            raise WorkspaceError("This workspace cannot be written", where=folder, next_step="choose another folder")

    def list(self, folder: str) -> dict[str, dict]:
        below = f"{folder}/" if folder else ""
        return {below + name: _mounted_facts(one) for name, one in files.tree(self._folder / folder).items()}

    def facts(self, name: str) -> dict:
        return _mounted_facts(files.size_and_time(self._folder / name))

    def get(self, name: str, path: Path, facts: dict) -> None:
        files.download(self._folder / name, str(path))
        _require_same(path.stat().st_size, facts["size"], self._folder / name)

    def put(self, path: Path, name: str) -> str:
        place = self._folder / name
        if name.endswith(_OVERWRITTEN) or "/leases/" in name:
            files.overwrite(place, str(path))
        else:
            files.upload(place, str(path))
        _require_same(files.sha256(place, False), files.sha256(path), place)
        return self.facts(name)["version"]

    def remove(self, name: str) -> None:
        if files.is_file(self._folder / name):
            files.overwrite(self._folder / name, os.devnull)
            files.remove(self._folder / name)
        for folder in list(Path(name).parents)[:-2]:  # those that are empty now; data, models, results stay
            if folder.parts[0] == "data" or files.names(self._folder / folder):
                break
            files.remove_folder(self._folder / folder)

    def is_copy(self, path: Path, name: str, facts: dict) -> bool:
        return path.stat().st_size == facts["size"] and files.sha256(path) == files.sha256(self._folder / name)


class Bucket:
    """A prefix of a bucket. Raises SettingsError for a malformed address, WorkspaceError without gcsfs."""

    may_drop_files = False

    def __init__(self, address: str):
        self._address, self._prefix = address, _prefix_of(address)
        self._files = _open_client()

    def list(self, folder: str) -> dict[str, dict]:
        with self._errors(""):
            self._files.invalidate_cache()
            found = self._files.find(f"{self._prefix}/{folder}".rstrip("/"), detail=True)
        return {path.removeprefix(self._prefix + "/"): _facts(facts) for path, facts in found.items()}

    def facts(self, name: str) -> dict:
        with self._errors(name):
            self._files.invalidate_cache()
            return _facts(self._files.info(self._key(name)))

    def get(self, name: str, path: Path, facts: dict) -> None:
        with self._errors(name):
            self._files.get_file(self._key(name), str(path))
        _require_same(_size_and_digest(path, facts), (facts["size"], facts["md5"]), f"{self._address}/{name}")

    def put(self, path: Path, name: str) -> str:
        with self._errors(name):
            self._files.put_file(str(path), self._key(name))
        facts = self.facts(name)
        _require_same(_size_and_digest(path, facts), (facts["size"], facts["md5"]), f"{self._address}/{name}")
        return facts["version"]

    def remove(self, name: str) -> None:
        with self._errors(name):
            if self._files.exists(self._key(name)):
                self._files.rm_file(self._key(name))

    def is_copy(self, path: Path, name: str, facts: dict) -> bool:
        return _size_and_digest(path, facts) == (facts["size"], facts["md5"])

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn any exception of the client library (HTTP, tokens, event loops) into one WorkspaceError."""
        try:
            yield
        except Exception as error:
            raise WorkspaceError(
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
    version = info.get("generation") or info.get("etag") or info.get("updated")
    return {"size": int(info["size"]), "md5": info.get("md5Hash"), "version": str(version)}


def _mounted_facts(size_and_time: list[int]) -> dict:
    return {"size": size_and_time[0], "version": "-".join(map(str, size_and_time))}


def _require_same(found: object, wanted: object, where: str | Path) -> None:
    """Raise WorkspaceError for a copy that differs from the file on the other side."""
    if found != wanted:
        raise WorkspaceError(
            "This copy is not what the workspace holds", where=where, got=found, wanted=wanted,
            next_step="run again: nothing was replaced",
        )  # fmt: skip


def _size_and_digest(path: Path, facts: dict) -> tuple[int, str | None]:
    """Return (size, MD5). A composed object has no MD5; then only sizes are compared."""
    with open(path, "rb") as file:
        digest = base64.b64encode(hashlib.file_digest(file, "md5").digest()).decode() if facts["md5"] else None
    return path.stat().st_size, digest
