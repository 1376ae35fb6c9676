"""One checkpoint in one safetensors file, which verifies itself.

The file's metadata holds one key, `checkpoint`: JSON with run, phase, sequence, lease, metrics and a hash over these
facts, the table of arrays and the arrays. Every reader of safetensors opens the file; a bit that changed is seen here.
"""

import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from xxhash import xxh3_128

from ml_factory.errors import CheckpointError
from ml_factory.storage.files import disk_errors, files, open_regular_file
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.serialization import deserialize_state, safetensors_header

_KEY, _METADATA = "checkpoint", "__metadata__"
_LARGEST_HEADER = 1 << 27  # bytes; a table of a million arrays
_PIECE = 1 << 20
_FACTS = {"run": str, "phase": str, "sequence": int, "saved_at": str, "metrics": dict, "lease": dict}


def write_checkpoint(path: Path, info: dict, table: dict, arrays: memoryview) -> dict:
    """Write a state, as `pack_state` returns it, with its description in one step; return the description with
    `hash`, `bytes` and `path`. Raises FileError where the disk refuses.
    """
    written = {**info, "hash": _hash(info, table, [arrays])}
    header = safetensors_header({_METADATA: {_KEY: json.dumps(written, separators=(",", ":"))}, **table})
    files.write(path, header, arrays)
    return {**written, "bytes": len(header) + len(arrays), "path": str(path)}


def read_checkpoint(path: Path) -> tuple[dict, dict]:
    """Return (its description, its state). Raises CheckpointError for a file that is not intact, FileError."""
    with disk_errors(path), open_regular_file(path) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data
        if file.readinto(data) != len(data):
            raise _torn(path, "a file that became shorter")
    end = 8 + int.from_bytes(data[:8], "little")
    info, table = _parse_header(path, bytes(data[8:end]), len(data))
    if _hash(info, table, [data[end:]]) != info["hash"]:
        raise _torn(path, "another hash")
    return info, deserialize_state(data)


def verify_checkpoint(path: Path) -> dict:
    """Return the description of an intact file, which is read in pieces. Raises as `read_checkpoint`."""
    with disk_errors(path), open_regular_file(path) as file:
        info, table = _read_header(path, file)
        found = _hash(info, table, iter(partial(file.read, _PIECE), b""))
    if found != info["hash"]:
        raise _torn(path, "another hash")
    return info


def read_checkpoint_info(path: Path) -> dict:
    """Return the description from the header alone; the arrays are not verified. Raises as `read_checkpoint`."""
    with disk_errors(path), open_regular_file(path) as file:
        return _read_header(path, file)[0]


def _read_header(path: Path, file: BinaryIO) -> tuple[dict, dict]:
    length = int.from_bytes(file.read(8), "little")
    return _parse_header(path, file.read(min(length, _LARGEST_HEADER)), os.fstat(file.fileno()).st_size)


def _parse_header(path: Path, text: bytes, size: int) -> tuple[dict, dict]:
    """Return (description, table of arrays)."""
    try:
        table = parse_json(text)
        info = parse_json(table.pop(_METADATA)[_KEY], finite=False)  # a score not yet measured is NaN
        wrong = [name for name, kind in _FACTS.items() if type(info[name]) is not kind]
        if wrong or type(info["lease"]["fence"]) is not int or not isinstance(info["lease"]["session"], str):
            raise ValueError("a fact of another type")
        return {name: info[name] for name in (*_FACTS, "hash")} | {"bytes": size, "path": str(path)}, table
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _torn(path, f"{type(error).__name__}: {error}"[:200]) from error


def _hash(info: dict, table: dict, arrays: Iterable[bytes | memoryview]) -> str:
    """Return the hash of a file's facts, table, and arrays in pieces."""
    hasher = xxh3_128(json.dumps([{name: info[name] for name in _FACTS}, table], sort_keys=True).encode())
    for piece in arrays:
        hasher.update(piece)
    return hasher.hexdigest()


def _torn(path: Path, got: object) -> CheckpointError:
    return CheckpointError(
        "This checkpoint is torn or was changed", where=path, got=got, wanted="the hash in its header"
    )
