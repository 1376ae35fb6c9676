"""Rows of numbers as `.npy` part files: written once, verified by content, and mapped into memory instead of read.

A file on a mount (Drive, NFS) is copied once to the local cache, verified there, and mapped from there. Several parts
are mapped as one array through a joined file in the cache; new parts extend it, so that new rows cost what they are.
"""

import hashlib
import io
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from ml_factory.cpu_count import cores
from ml_factory.storage import atomic_files, file_access, mount_table

BLOCK_BYTES = 8 << 20
KEEP_DAYS = 14
_known: dict[tuple, str] = {}  # state of a file -> its hash; a file is hashed once in a process


# ---- content ---------------------------------------------------------------------------------------------------


def content_hash(array: np.ndarray) -> str:
    """64 hex digits for shape, dtype and content: SHA-256 over the `.npy` header and the SHA-256 of each 8 MiB.

    array : C-contiguous. The blocks are hashed side by side on the processor's cores.
    """
    digest = hashlib.sha256(_header(array))
    with ThreadPoolExecutor(cores()) as pool:
        for block in pool.map(lambda block: hashlib.sha256(block).digest(), _blocks(array)):
            digest.update(block)
    return digest.hexdigest()


def file_state_hash(path: Path) -> str:
    """The file's hash (`content_hash` of a part, else SHA-256), computed once for each state the disk tells apart."""
    state = _state(path)
    if state not in _known:
        _known[state] = content_hash(_map(path)) if path.suffix == ".npy" else atomic_files.file_hash(path)
    return _known[state]


def remember(path: Path, digest: str) -> None:
    """This process has just written the file and knows its hash; what a mount made of it is seen when it is read."""
    if not mount_table.on_mount(path):
        _known[_state(path)] = digest


def write_part(path: Path, array: np.ndarray) -> dict:
    """Put the array down as `.npy` in one step, hashed while it is written. {"hash", "bytes"}"""
    array = np.ascontiguousarray(array)
    header = _header(array)

    def write(aside: Path) -> None:
        with open(aside, "wb", buffering=0) as file:
            for block in (memoryview(header), *_blocks(array)):
                while block:
                    block = block[file.write(block) :]

    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(content_hash, array)
        # Not flushed: what a power cut takes is missed by its hash, and made again.
        atomic_files.replace_file(path, write, len(header) + array.nbytes, flush=False)
    remember(path, digest.result())
    return {"hash": digest.result(), "bytes": len(header) + array.nbytes}


# ---- mapping ---------------------------------------------------------------------------------------------------


def local(path: Path, digest: str) -> Path:
    """The file itself where it is on a disk of this machine; else its verified copy in the cache, made if it is not
    there.

    Whether the content is what `digest` says is for the caller to check: a copy that is not is made anew once.
    """
    if not mount_table.on_mount(path):
        return path
    copy = atomic_files.cache_folder("parts") / f"{digest[:32]}{path.suffix}"
    if not copy.is_file() or file_state_hash(copy) != digest:
        atomic_files.replace_file(copy, lambda aside: _copy(path, aside), flush=False)
        _sweep(copy.parent)
    return copy


def joined(paths: Sequence[Path], hashes: Sequence[str]) -> np.ndarray:
    """The parts one below the other as one read-only array, mapped; a single part is mapped as it is."""
    parts = [_map(path) for path in paths]
    if len(parts) == 1:
        return parts[0]
    try:
        return _joined_file(parts, hashes)
    except OSError:  # no room for the cache: memory has to do
        return np.concatenate(parts)


def _joined_file(parts: list[np.ndarray], hashes: Sequence[str]) -> np.ndarray:
    names = [hashlib.sha256("".join(hashes[:count]).encode()).hexdigest()[:32] for count in range(len(parts) + 1)]
    folder = atomic_files.cache_folder("parts")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{names[-1]}.rows"
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    if path.is_file() and _sound(path, parts, hashes):
        return _map_raw(path, parts[0].dtype, shape)
    aside = folder / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    done = _take_over([folder / f"{name}.rows" for name in names], aside, parts, hashes)
    with open(aside, "r+b" if done else "wb") as file:
        file.seek(sum(part.nbytes for part in parts[:done]))
        for part in parts[done:]:
            for block in _blocks(part):
                file.write(block)
        file.truncate()
    os.replace(aside, path)
    _known[_state(path)] = "".join(hashes)
    _sweep(folder)
    return _map_raw(path, parts[0].dtype, shape)


def _take_over(beginnings: list[Path], aside: Path, parts: list[np.ndarray], hashes: Sequence[str]) -> int:
    """Move the longest beginning that the cache holds to `aside`; how many parts it has. One of two takers gets it."""
    for count in range(len(parts) - 1, 1, -1):
        with suppress(FileNotFoundError):
            if _sound(beginnings[count], parts[:count], hashes):
                os.rename(beginnings[count], aside)
                return count
    return 0


def _sound(path: Path, parts: list[np.ndarray], hashes: Sequence[str]) -> bool:
    """Does the file hold these parts? Hashed once for each state of the file."""
    if path.stat().st_size != sum(part.nbytes for part in parts):
        return False
    state, told = _state(path), "".join(hashes[: len(parts)])
    if _known.get(state) != told:
        whole = _map_raw(path, parts[0].dtype, (sum(map(len, parts)), *parts[0].shape[1:]))
        edges = np.cumsum([0, *map(len, parts)])
        found = [content_hash(whole[a:b]) for a, b in pairwise(edges)]
        _known[state] = "".join(found)
    return _known[state] == told


# ---- places ----------------------------------------------------------------------------------------------------


def _copy(source: Path, target: Path) -> None:
    with atomic_files.disk_errors(source):
        file_access.download(source, str(target))


def _sweep(folder: Path) -> None:
    """Copies nobody wrote or read for two weeks go; who has one mapped keeps it."""
    for path in folder.iterdir():
        with suppress(OSError):
            facts = path.stat()
            if time.time() - max(facts.st_atime, facts.st_mtime) > KEEP_DAYS * 86_400:
                path.unlink()


def _state(path: Path) -> tuple:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _map(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def _map_raw(path: Path, dtype: np.dtype, shape: tuple) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=shape).view(np.ndarray)


def _header(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    return file.getvalue()


def _blocks(array: np.ndarray) -> Iterator[memoryview]:
    data = memoryview(array.reshape(-1).view(np.uint8))
    return (data[first : first + BLOCK_BYTES] for first in range(0, len(data), BLOCK_BYTES))
