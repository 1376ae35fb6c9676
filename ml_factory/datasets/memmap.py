"""Arrays as `.npy` files: written once, verified by content, and memory-mapped instead of read."""

import hashlib
import io
import tokenize
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ml_factory.hardware import cores
from ml_factory.storage.files import files

BLOCK_BYTES = 8 << 20
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
    "" for a part that is not an array or cannot be read.
    """
    try:
        state = _state(path)
        if state not in _hash_cache:
            _hash_cache[state] = files.sha256(path) if path.suffix != ".npy" else npy_content_hash(map_npy(path))
    except (OSError, ValueError):
        return ""
    return _hash_cache[state]


def cache_file_hash(path: Path, digest: str) -> None:
    """Remember the hash of a file just written."""
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


def _state(path: Path) -> tuple:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def map_npy(path: Path) -> np.ndarray:
    """Map an array, read-only. Raises ValueError for a file that is no array of numbers, OSError as `open` does."""
    try:
        return np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    except (tokenize.TokenError, SyntaxError, OverflowError) as error:  # of numpy's own parser of the header
        raise ValueError(f"the header of the array cannot be read: {error}") from error


def _header(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    return file.getvalue()


def _blocks(array: np.ndarray) -> Iterator[memoryview]:
    data = memoryview(array.reshape(-1).view(np.uint8))
    return (data[first : first + BLOCK_BYTES] for first in range(0, len(data), BLOCK_BYTES))
