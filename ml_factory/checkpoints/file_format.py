"""File format of one checkpoint: a container that verifies itself.

    header   magic, version, sizes of the info and of the payload
    info     JSON: run, phase, sequence, saved_at, metrics, lease; first, so that a torn file still names its owner
    payload  the state's bytes, at a multiple of 64
    footer   hash of everything above, sequence, size of the file, end mark

The hash is XXH3 with 128 bits: it detects damage, and at the speed of memory no save waits for it. A file overwritten
in place and cut off anywhere fails at least one of: end mark, sizes, sequence, hash.
"""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128

from ml_factory.errors import CheckpointError
from ml_factory.storage.atomic_files import Disk, disk_errors

VERSION = 3
_MAGIC, _END = b"mlfckpt\n", b"mlfcend\n"
_HEADER = struct.Struct("<8sIIQ")
_FOOTER = struct.Struct("<16sQQ8s")
_ALIGN = 64
_CHUNK = 1 << 22
_LARGEST_INFO = 1 << 24
# First bytes of files that are mistaken for checkpoints and must never be opened as one.
_FOREIGN = {b"PK": "a zip archive, as torch.save writes", b"\x89HDF": "an HDF5 file", b"\x1f\x8b": "a gzip archive"}


class ForeignFileError(CheckpointError):
    """An intact file of another program or version: never overwritten."""


@dataclass(frozen=True)
class ContainerHeader:
    """Description of a container, read from its two ends before its content is read and hashed.

    Parameters
    ----------
    info : its JSON description; {} when its beginning cannot be read.
    start : offset of the payload, bytes.
    payload : size of the payload, bytes.
    size : of the file, bytes.
    hash : as stored in the footer.
    fault : reason why the container is not intact, if the ends show one.
    """

    info: dict
    start: int = 0
    payload: int = 0
    size: int = 0
    hash: str = ""
    fault: CheckpointError | None = None


def write_container(disk: Disk, path: Path, info: dict, payload: memoryview | bytes) -> dict:
    """Overwrite the slot at `path` and flush it to the disk; return the info with `bytes` and `hash`.

    Raises WorkspaceError; the slot is then empty, so that a full disk gets its space back.
    """
    payload = memoryview(payload).cast("B")
    head = _head(info, len(payload))
    size = len(head) + len(payload) + _FOOTER.size
    with disk_errors(path, lambda: size), _opened(disk, path, write=True) as file, _emptied_on_error(disk, file):
        hasher, offset = xxh3_128(), 0
        for part in (memoryview(head), payload):
            for start in range(0, len(part), _CHUNK):
                hasher.update(part[start : start + _CHUNK])
                offset += _write(disk, file, part[start : start + _CHUNK], offset)
        digest = hasher.digest()
        _write(disk, file, _FOOTER.pack(digest, info["sequence"], size, _END), size - _FOOTER.size)
        _flush(disk, file, size)
    return {**info, "bytes": size, "hash": digest.hex()}


def copy_container(disk: Disk, path: Path, source_disk: Disk, source: Path) -> dict:
    """Overwrite the slot at `path` with a verified copy of the container at `source`; return its info.

    Raises CheckpointError where the source is torn, WorkspaceError where a disk refuses; the slot is then empty.
    """
    with disk_errors(source), _opened(source_disk, source) as source_file:
        header = _read_ends(source_disk, source_file)
        _raise_fault(header)
        with (
            disk_errors(path, lambda: header.size),
            _opened(disk, path, True) as target_file,
            _emptied_on_error(disk, target_file),
        ):
            hasher, offset = xxh3_128(), 0
            for chunk in _chunks(source_disk, source_file, 0, header.size - _FOOTER.size):
                hasher.update(chunk)
                offset += _write(disk, target_file, chunk, offset)
            if hasher.digest().hex() != header.hash:
                disk.truncate(target_file, 0)
                raise _torn()
            _write(disk, target_file, _FOOTER.pack(hasher.digest(), header.info["sequence"], header.size, _END), offset)
            _flush(disk, target_file, header.size)
    return {**header.info, "bytes": header.size, "hash": header.hash}


def read_header(disk: Disk, path: Path) -> ContainerHeader:
    """Read the two ends of the container at `path`. Raises WorkspaceError where the disk refuses."""
    with disk_errors(path), _opened(disk, path) as file:
        return _read_ends(disk, file)


def read_container(disk: Disk, path: Path, into: bytearray | None = None) -> dict:
    """Return the info of a verified container, with its `bytes` and `hash`; the payload is appended to `into`.

    Marks and sizes are checked first, so that a huge or foreign file is refused without being read.
    Raises CheckpointError with the reason when torn, ForeignFileError when it is an intact file of another kind.
    """
    with disk_errors(path), _opened(disk, path) as file:
        header = _read_ends(disk, file)
        _raise_fault(header)
        digest = _read_and_hash(disk, file, header, into)
    if digest != header.hash:
        raise _torn()
    return {**header.info, "bytes": header.size, "hash": header.hash}


def empty_container(disk: Disk, path: Path) -> None:
    """Truncate the slot to free its space without deleting it."""
    with disk_errors(path), _opened(disk, path, write=True) as file:
        disk.truncate(file, 0)


def write_small(disk: Disk, path: Path, data: bytes) -> None:
    """Overwrite a small file in place. Not atomic: only for content that can be made again."""
    with disk_errors(path, lambda: len(data)), _opened(disk, path, write=True) as file:
        disk.truncate(file, _write(disk, file, data, 0))


def read_small(disk: Disk, path: Path) -> bytes:
    """Read the content that `write_small` wrote. Raises WorkspaceError when the disk refuses."""
    with disk_errors(path), _opened(disk, path) as file:
        return _read(disk, file, min(disk.size(file), _LARGEST_INFO), 0)


def _head(info: dict, payload_size: int) -> bytes:
    text = json.dumps(info, allow_nan=False).encode()
    text += b" " * (-(_HEADER.size + len(text)) % _ALIGN)
    return _HEADER.pack(_MAGIC, VERSION, len(text), payload_size) + text


def _read_and_hash(disk: Disk, file: int, header: ContainerHeader, into: bytearray | None) -> str:
    """Return the hash of the file's content; the payload goes to `into`, straight from the disk."""
    hasher, target = xxh3_128(), None
    if into is not None:
        into += bytes(header.payload)
        target = memoryview(into)
    for chunk in _chunks(disk, file, 0, header.start):
        hasher.update(chunk)
    for chunk in _chunks(disk, file, header.start, header.payload, target):
        hasher.update(chunk)
    return hasher.hexdigest()


def _flush(disk: Disk, file: int, size: int) -> None:
    """Flush to the disk and drop the page cache, so that the next read returns what the disk holds."""
    disk.truncate(file, size)
    disk.fsync(file)
    disk.forget(file)


def _read_ends(disk: Disk, file: int) -> ContainerHeader:
    """Run every check that needs only the two ends of the file."""
    size = disk.size(file)
    if size == 0:
        return ContainerHeader({}, fault=CheckpointError("it is empty: its save did not finish"))
    head = _read(disk, file, min(size, _HEADER.size), 0)
    if not head.startswith(_MAGIC):
        return ContainerHeader({}, size=size, fault=_foreign(head))
    if size < _HEADER.size + _FOOTER.size:
        return ContainerHeader({}, size=size, fault=CheckpointError("it is cut off", got=f"{size} bytes"))
    _, version, info_size, payload_size = _HEADER.unpack(head)
    if version != VERSION:
        kind = "a later" if version > VERSION else "an earlier"
        got = f"version {version}"
        fault = ForeignFileError(f"{kind} version of ml_factory wrote it", got=got, wanted=f"version {VERSION}")
        return ContainerHeader({}, size=size, fault=fault)
    info, start = {}, _HEADER.size + info_size
    with suppress(ValueError, RecursionError):
        info = json.loads(_read(disk, file, min(info_size, size, _LARGEST_INFO), _HEADER.size))
    if not isinstance(info, dict) or type(info.get("sequence")) is not int:
        return ContainerHeader({}, size=size, fault=CheckpointError("its description is not whole"))
    digest, sequence, stated_size, end = _FOOTER.unpack(_read(disk, file, _FOOTER.size, size - _FOOTER.size))
    fault, expected = None, start + payload_size + _FOOTER.size
    if end != _END:
        fault = CheckpointError("its end mark is missing: it is cut off, or something was added to it")
    elif stated_size != size or expected != size:
        fault = CheckpointError("its sizes disagree", got=f"{size} bytes", wanted=f"{stated_size} and {expected}")
    elif sequence != info["sequence"]:
        fault = CheckpointError("its end is of another save: it is torn", got=sequence, wanted=info["sequence"])
    return ContainerHeader(info, start, payload_size, size, digest.hex(), fault)


def _foreign(head: bytes) -> CheckpointError:
    kind = next((text for start, text in _FOREIGN.items() if head.startswith(start)), None)
    if kind is None and head[:1] == b"\x80" and head[1:2] <= b"\x05":
        kind = "a pickle, which could run code"
    if kind is None:
        return CheckpointError("it does not start like a checkpoint")
    return ForeignFileError(f"it is {kind}, and is never opened")


def _raise_fault(header: ContainerHeader) -> None:
    if header.fault is not None:
        raise header.fault


def _torn() -> CheckpointError:
    return CheckpointError("its content does not match its hash: it is torn or damaged")


def _chunks(disk: Disk, file: int, start: int, size: int, into: memoryview | None = None) -> Iterator[memoryview]:
    """Yield `size` bytes from `start` on, stored consecutively in `into`, or in a buffer that the next chunk
    overwrites.
    """
    buffer, count = memoryview(bytearray(0 if into is not None else min(size, _CHUNK))), 0
    while count < size:
        target = buffer[: size - count] if into is None else into[count : min(count + _CHUNK, size)]
        received = disk.read(file, target, start + count)
        if not received:
            raise CheckpointError("it became shorter while it was read")
        yield target[:received]
        count += received


def _read(disk: Disk, file: int, size: int, offset: int) -> bytes:
    """Read these bytes, or as many as the file has."""
    buffer, count = memoryview(bytearray(size)), 0
    while count < size and (more := disk.read(file, buffer[count:], offset + count)):
        count += more
    return bytes(buffer[:count])


def _write(disk: Disk, file: int, data: memoryview | bytes, offset: int) -> int:
    """Write all data; return the number of bytes."""
    data, count = memoryview(data), 0
    while count < len(data):
        count += disk.write(file, data[count : count + _CHUNK], offset + count)
    return count


@contextmanager
def _opened(disk: Disk, path: Path, write: bool = False) -> Iterator[int]:
    descriptor = disk.open(path, write)
    try:
        yield descriptor
    except BaseException:
        with suppress(OSError):
            disk.close(descriptor)
        raise
    disk.close(descriptor)  # a mount may keep an error back until now


@contextmanager
def _emptied_on_error(disk: Disk, descriptor: int) -> Iterator[None]:
    try:
        yield
    except OSError:
        with suppress(OSError):
            disk.truncate(descriptor, 0)
        raise
