"""Arrays as `.npy` part files: written once, verified by content, and memory-mapped instead of read.

A file on a mount (Drive, NFS) is copied once to the local cache, verified there, and mapped from there. Several parts
are mapped as one array through a concatenated file in the cache; new parts extend it, so that the cost is that of the
new rows.
"""

import hashlib
import io
import os
import time
import tokenize
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from ml_factory.errors import UnresponsiveMountError
from ml_factory.hardware import cores
from ml_factory.storage.files import files, local_cache_folder

BLOCK_BYTES = 8 << 20
KEEP_DAYS = 14
_hash_cache: dict[tuple, str] = {}  # state of a file -> its hash; a file is hashed once in a process


# ---- content ---------------------------------------------------------------------------------------------------


def npy_content_hash(array: np.ndarray) -> str:
    """Return 64 hex digits for shape, dtype and content: SHA-256 over the `.npy` header and the SHA-256 of each 8 MiB.

    array : C-contiguous; its blocks are hashed in parallel
    """
    digest = hashlib.sha256(_header(array))
    with ThreadPoolExecutor(cores()) as pool:
        for block in pool.map(lambda block: hashlib.sha256(block).digest(), _blocks(array)):
            digest.update(block)
    return digest.hexdigest()


def cached_file_hash(path: Path) -> str:
    """Return the file's hash (`npy_content_hash` of a part, else SHA-256), computed once for each state of the file;
    "" for a part that is not an array or cannot be read. Raises UnresponsiveMountError.
    """
    try:
        state = _state(path)
        if state not in _hash_cache:
            _hash_cache[state] = files.sha256(path) if path.suffix != ".npy" else npy_content_hash(_map(path))
    except (OSError, ValueError) as error:
        if not isinstance(error, UnresponsiveMountError):  # a file on a mount that does not answer is not damaged
            return ""
        raise
    return _hash_cache[state]


def cache_file_hash(path: Path, digest: str) -> None:
    """Remember the hash of a file just written; a file on a mount is verified when it is read."""
    if not files.is_remote(path):
        _hash_cache[_state(path)] = digest


def write_npy_part(path: Path, array: np.ndarray) -> dict:
    """Write the array as `.npy` in one step, hashed during the write; return {"hash", "bytes"}."""
    array = np.ascontiguousarray(array)
    header = _header(array)

    def write(temporary: Path) -> None:
        with open(temporary, "wb", buffering=0) as file:
            for block in (memoryview(header), *_blocks(array)):
                while block:
                    block = block[file.write(block) :]

    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(npy_content_hash, array)
        # Not flushed: a file lost in a power cut fails its hash and is written again.
        files.replace(path, write, len(header) + array.nbytes, flush=False)
    cache_file_hash(path, digest.result())
    return {"hash": digest.result(), "bytes": len(header) + array.nbytes}


# ---- mapping ---------------------------------------------------------------------------------------------------


def verified_local_copy(path: Path, digest: str) -> Path:
    """Return the file itself on a local disk; else its verified copy in the cache, made if it is absent.

    The caller checks the content against `digest`: a damaged copy is replaced once.
    """
    if not files.is_remote(path):
        return path
    copy = local_cache_folder("parts") / f"{digest[:32]}{path.suffix}"
    if not copy.is_file() or cached_file_hash(copy) != digest:
        files.replace(copy, lambda temporary: files.download(path, str(temporary)), flush=False)
        _remove_old_copies(copy.parent)
    return copy


def memmap_joined_parts(paths: Sequence[Path], hashes: Sequence[str]) -> np.ndarray:
    """Map the parts, one below the other, as one read-only array; a single part is mapped directly."""
    parts = [_map(path) for path in paths]
    if len(parts) == 1:
        return parts[0]
    try:
        return _joined_file(parts, hashes)
    except OSError:  # no space for the cache: use memory
        return np.concatenate(parts)


def _joined_file(parts: list[np.ndarray], hashes: Sequence[str]) -> np.ndarray:
    names = [hashlib.sha256("".join(hashes[:count]).encode()).hexdigest()[:32] for count in range(len(parts) + 1)]
    folder = local_cache_folder("parts")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{names[-1]}.rows"
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    if path.is_file() and _holds_parts(path, parts, hashes):
        return _map_raw(path, parts[0].dtype, shape)
    temporary = folder / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    done = _reuse_prefix([folder / f"{name}.rows" for name in names], temporary, parts, hashes)
    with open(temporary, "r+b" if done else "wb") as file:
        file.seek(sum(part.nbytes for part in parts[:done]))
        for part in parts[done:]:
            for block in _blocks(part):
                file.write(block)
        file.truncate()
    os.replace(temporary, path)
    _hash_cache[_state(path)] = "".join(hashes)
    _remove_old_copies(folder)
    return _map_raw(path, parts[0].dtype, shape)


def _reuse_prefix(beginnings: list[Path], temporary: Path, parts: list[np.ndarray], hashes: Sequence[str]) -> int:
    """Move the longest cached prefix to `temporary`; return its number of parts.

    Of two processes only one gets it.
    """
    for count in range(len(parts) - 1, 1, -1):
        with suppress(FileNotFoundError):
            if _holds_parts(beginnings[count], parts[:count], hashes):
                os.rename(beginnings[count], temporary)
                return count
    return 0


def _holds_parts(path: Path, parts: list[np.ndarray], hashes: Sequence[str]) -> bool:
    """Return whether the file holds these parts; hashed once for each state of the file."""
    if path.stat().st_size != sum(part.nbytes for part in parts):
        return False
    state, expected = _state(path), "".join(hashes[: len(parts)])
    if _hash_cache.get(state) != expected:
        whole = _map_raw(path, parts[0].dtype, (sum(map(len, parts)), *parts[0].shape[1:]))
        edges = np.cumsum([0, *map(len, parts)])
        found = [npy_content_hash(whole[a:b]) for a, b in pairwise(edges)]
        _hash_cache[state] = "".join(found)
    return _hash_cache[state] == expected


# ---- cache -----------------------------------------------------------------------------------------------------


def _remove_old_copies(folder: Path) -> None:
    """Remove copies unused for two weeks; processes that have one mapped keep it."""
    for path in folder.iterdir():
        with suppress(OSError):
            facts = path.stat()
            if time.time() - max(facts.st_atime, facts.st_mtime) > KEEP_DAYS * 86_400:
                path.unlink()


def _state(path: Path) -> tuple:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _map(path: Path) -> np.ndarray:
    """Map a part. Raises ValueError for a file that is no array of numbers, OSError as `open` does."""
    try:
        return np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    except (tokenize.TokenError, SyntaxError, OverflowError) as error:  # of numpy's own parser of the header
        raise ValueError(f"the header of the array cannot be read: {error}") from error


def _map_raw(path: Path, dtype: np.dtype, shape: tuple) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=shape).view(np.ndarray)


def _header(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    return file.getvalue()


def _blocks(array: np.ndarray) -> Iterator[memoryview]:
    data = memoryview(array.reshape(-1).view(np.uint8))
    return (data[first : first + BLOCK_BYTES] for first in range(0, len(data), BLOCK_BYTES))
