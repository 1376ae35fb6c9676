"""One checkpoint in one safetensors file, which verifies itself.

The file's metadata holds one key, `checkpoint`: JSON with run, phase, sequence, lease, metrics and a hash over these
facts, the table of arrays and the arrays. Every reader of safetensors opens the file; a bit that changed is seen here.
"""

import json
import math
import os
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from ml_factory.errors import CheckpointError
from ml_factory.storage.files import disk_errors, files, open_regular_file
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.safetensors_header import join_safetensors_header, split_safetensors_header
from ml_factory.storage.serialization import deserialize_state

KEY, _METADATA = "checkpoint", "__metadata__"
_LARGEST_HEADER = 1 << 27  # bytes; a table of a million arrays
_COUNTED = ("run", "phase", "sequence", "saved_at", "metrics", "lease")


def write_checkpoint(path: Path, info: dict, state: memoryview) -> dict:
    """Write a state, as `SafetensorsLayout.fill` makes it, with its description in one step; return the description
    with `hash`, `bytes` and `path`. Raises FileError where the disk refuses.
    """
    table, arrays = split_safetensors_header(state)
    written = {**info, "metrics": {name: _encode(value) for name, value in info["metrics"].items()}}
    written["hash"] = _hash(written, parse_json(table, largest=None), arrays)
    head = {_METADATA: {KEY: json.dumps(written, separators=(",", ":"))}}
    header = join_safetensors_header(json.dumps(head, separators=(",", ":")).encode()[:-1] + b"," + table[1:].rstrip())

    def fill(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(header)
            file.write(arrays)

    size = len(header) + len(arrays)
    files.replace(path, fill, size)
    return {**info, "hash": written["hash"], "bytes": size, "path": str(path)}


def read_checkpoint(path: Path) -> tuple[dict, dict]:
    """Return (its description, its state). Raises CheckpointError for a file that is not intact, FileError."""
    info, data = _read_verified(path)
    return info, deserialize_state(data)


def verify_checkpoint(path: Path) -> dict:
    """Return the description of an intact file. Raises as `read_checkpoint`."""
    return _read_verified(path)[0]


def read_checkpoint_info(path: Path) -> dict:
    """Return the description from the header alone; the arrays are not verified. Raises as `read_checkpoint`."""
    with disk_errors(path), open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 0 < length <= min(_LARGEST_HEADER, size - 8):
            raise _torn(path, f"{size} bytes")
        return _parse(path, file.read(length), size)[0]


def _read_verified(path: Path) -> tuple[dict, memoryview]:
    with disk_errors(path), open_regular_file(path) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data
        if file.readinto(data) != len(data):
            raise _torn(path, "a file that became shorter")
    table, arrays = split_safetensors_header(data)
    info, layout = _parse(path, table, len(data))
    stored = {name: info[name] for name in _COUNTED}
    stored["metrics"] = {name: _encode(value) for name, value in stored["metrics"].items()}
    if _hash(stored, layout, arrays) != info["hash"]:
        raise _torn(path, "another hash")
    return info, data


def _parse(path: Path, table: bytes, size: int) -> tuple[dict, dict]:
    """Return (description, table of arrays) of a header."""
    try:
        layout = parse_json(table, largest=None)
        info = parse_json(layout.pop(_METADATA)[KEY].encode())
        found = {name: info[name] for name in (*_COUNTED, "hash")}
        checked = (
            isinstance(found["run"], str), isinstance(found["phase"], str), isinstance(found["saved_at"], str),
            type(found["sequence"]) is int, type(found["lease"]["fence"]) is int,
            isinstance(found["lease"]["session"], str), isinstance(found["hash"], str),
        )  # fmt: skip
        if not all(checked):
            raise ValueError("a fact of another type")
        found["metrics"] = {name: _decode(value) for name, value in found["metrics"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _torn(path, f"{type(error).__name__}: {error}"[:200]) from error
    return {**found, "bytes": size, "path": str(path)}, layout


def _hash(info: dict, layout: dict, arrays: memoryview) -> str:
    hasher = xxh3_128(json.dumps([{name: info[name] for name in _COUNTED}, layout], sort_keys=True).encode())
    hasher.update(arrays)
    return hasher.hexdigest()


def _encode(value: object) -> object:
    """Encode NaN and infinity (a score not yet measured), which JSON lacks, as {"float": text}."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _decode(value: object) -> object:
    return float(value["float"]) if isinstance(value, dict) else value


def _torn(path: Path, got: object) -> CheckpointError:
    return CheckpointError(
        "This checkpoint is torn or was changed", where=path, got=got, wanted="the hash in its header"
    )
