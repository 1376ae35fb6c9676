"""One checkpoint as one file that verifies alone.

    header   magic, version, size of the payload
    payload  the state's bytes
    info     JSON: run, phase, sequence, saved_at, metrics
    footer   SHA-256 of everything above, size of the info, size of the file, end mark

A file overwritten in place and cut off anywhere fails at least one of: end mark, sizes, hash.
"""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import BinaryIO

from ml_factory.errors import CheckpointError
from ml_factory.runs.storage import disk_errors, overwrite_file

VERSION = 1
_MAGIC, _END = b"mlfckpt\n", b"mlfcend\n"
_HEADER = struct.Struct("<8sIQ")
_FOOTER = struct.Struct("<32sQQ8s")
_CHUNK = 1 << 22
_LARGEST_INFO = 1 << 24
# First bytes of files people mistake for a checkpoint, and that must never be opened as one.
_FOREIGN = {b"PK": "a zip archive, as torch.save writes", b"\x89HDF": "an HDF5 file", b"\x1f\x8b": "a gzip archive"}


class NotOurs(CheckpointError):
    """A whole file of another program, version, run or phase: left alone, never overwritten."""


def write_container(path: Path, info: dict, payload: bytes) -> None:
    """Overwrite the slot at `path`. Raises WorkspaceError; the slot is then empty."""
    text = json.dumps(info).encode()
    header = _HEADER.pack(_MAGIC, VERSION, len(payload))
    digest = hashlib.sha256(header)
    digest.update(payload)
    digest.update(text)
    size = _HEADER.size + len(payload) + len(text) + _FOOTER.size
    overwrite_file(path, [header, payload, text, _FOOTER.pack(digest.digest(), len(text), size, _END)])


def inspect_container(path: Path, seen_hash: str | None = None) -> dict:
    """The info of a whole, verified container, with its `bytes` and `hash`.

    seen_hash : content with this hash was verified before and is not hashed again.
    Raises CheckpointError with the reason when torn, and NotOurs when it is whole but of something else.
    """
    with disk_errors(path), open(path, "rb") as file:
        return _verify(file, None, seen_hash)


def read_container(path: Path) -> tuple[dict, bytes]:
    """The info and the payload of a verified container; raises as `inspect_container` does."""
    with disk_errors(path), open(path, "rb") as file:
        payload = bytearray()
        info = _verify(file, payload)
        return info, bytes(payload)


def _verify(file: BinaryIO, into: bytearray | None, seen_hash: str | None = None) -> dict:
    """Check marks and sizes first, so that a huge or foreign file is refused without being read."""
    payload_size, info_size, digest, size = _frame(file)
    if digest.hex() == seen_hash:
        file.seek(_HEADER.size + payload_size)
        text = file.read(info_size)
    else:
        text = _read_and_hash(file, payload_size, info_size, digest, into)
    try:
        info = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("its description is not JSON", got=error) from error
    if not isinstance(info, dict) or type(info.get("sequence")) is not int:
        raise CheckpointError("its description carries no sequence number")
    return {**info, "bytes": size, "hash": digest.hex()}


def _read_and_hash(file: BinaryIO, payload_size: int, info_size: int, digest: bytes, into: bytearray | None) -> bytes:
    """The info's text, after the hash over everything before the footer proved right; the payload goes to `into`."""
    file.seek(0)
    seen = hashlib.sha256(file.read(_HEADER.size))
    left = payload_size
    while left:
        chunk = file.read(min(left, _CHUNK))
        if not chunk:
            raise CheckpointError("it became shorter while it was read")
        left -= len(chunk)
        seen.update(chunk)
        if into is not None:
            into += chunk
    text = file.read(info_size)
    seen.update(text)
    if seen.digest() != digest:
        raise CheckpointError("its content does not match its hash: it is torn or damaged")
    return text


def _frame(file: BinaryIO) -> tuple[int, int, bytes, int]:
    """(payload size, info size, digest, file size) after every check that needs only the two ends."""
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise CheckpointError("it is empty: its save did not finish")
    head = file.read(_HEADER.size)
    if not head.startswith(_MAGIC):
        kind = next((text for start, text in _FOREIGN.items() if head.startswith(start)), None)
        if kind is None and head[:1] == b"\x80" and head[1:2] <= b"\x05":
            kind = "a pickle, which could run code"
        if kind is None:
            raise CheckpointError("it does not start like a checkpoint")
        raise NotOurs(f"it is {kind}, and is never opened")
    if size < _HEADER.size + _FOOTER.size:
        raise CheckpointError("it is cut off", got=f"{size} bytes")
    _, version, payload_size = _HEADER.unpack(head)
    if version > VERSION:
        raise NotOurs("a later version of ml_factory wrote it", got=f"version {version}", wanted=f"at most {VERSION}")
    file.seek(size - _FOOTER.size)
    digest, info_size, told_size, end = _FOOTER.unpack(file.read(_FOOTER.size))
    if end != _END:
        raise CheckpointError("its end mark is missing: it is cut off, or something was added to it")
    whole = _HEADER.size + payload_size + info_size + _FOOTER.size
    if told_size != size or whole != size or info_size > _LARGEST_INFO:
        raise CheckpointError("its sizes disagree", got=f"{size} bytes", wanted=f"{told_size} and {whole}")
    return payload_size, info_size, digest, size
