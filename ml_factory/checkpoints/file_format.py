"""One checkpoint as one file that verifies alone.

    header   magic, version, sizes of the info and of the payload
    info     JSON: run, phase, sequence, saved_at, metrics, lease; first, so that a torn file still says whose it is
    payload  the state's bytes, from a multiple of 64 on
    footer   hash of everything above, sequence, size of the file, end mark

The hash is XXH3 with 128 bits: it is there to find damage, and at the speed of memory it is not what a save waits for.
A file overwritten in place and cut off anywhere fails at least one of: end mark, sizes, sequence, hash.
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
# First bytes of files people mistake for a checkpoint, and that must never be opened as one.
_FOREIGN = {b"PK": "a zip archive, as torch.save writes", b"\x89HDF": "an HDF5 file", b"\x1f\x8b": "a gzip archive"}


class ForeignFileError(CheckpointError):
    """A whole file of another program or version: left alone, never overwritten."""


@dataclass(frozen=True)
class ContainerHeader:
    """What a container says of itself, before its content is read and hashed.

    info : its description; {} when its beginning says nothing.  start, payload : where the payload begins, its size.
    size : of the file.  hash : of the footer.  fault : why it is no whole container, if that can be seen already.
    """

    info: dict
    start: int = 0
    payload: int = 0
    size: int = 0
    hash: str = ""
    fault: CheckpointError | None = None


def write_container(disk: Disk, path: Path, info: dict, payload: memoryview | bytes) -> dict:
    """Overwrite the slot at `path`, up to the disk itself; returns the info with `bytes` and `hash`.

    Raises WorkspaceError; the slot is then empty, so that a full disk gets its space back.
    """
    payload = memoryview(payload).cast("B")
    head = _head(info, len(payload))
    size = len(head) + len(payload) + _FOOTER.size
    with disk_errors(path, lambda: size), _opened(disk, path, write=True) as file, _emptied_on_error(disk, file):
        seen, offset = xxh3_128(), 0
        for part in (memoryview(head), payload):
            for start in range(0, len(part), _CHUNK):
                seen.update(part[start : start + _CHUNK])
                offset += _write(disk, file, part[start : start + _CHUNK], offset)
        digest = seen.digest()
        _write(disk, file, _FOOTER.pack(digest, info["sequence"], size, _END), size - _FOOTER.size)
        _settle(disk, file, size)
    return {**info, "bytes": size, "hash": digest.hex()}


def copy_container(disk: Disk, path: Path, source_disk: Disk, source: Path) -> dict:
    """Overwrite the slot at `path` with a verified copy of the container at `source`; returns its info.

    Raises CheckpointError where the source is not whole, WorkspaceError where a disk refuses; the slot is then empty.
    """
    with disk_errors(source), _opened(source_disk, source) as old:
        found = _frame(source_disk, old)
        _check(found)
        with disk_errors(path, lambda: found.size), _opened(disk, path, True) as new, _emptied_on_error(disk, new):
            seen, offset = xxh3_128(), 0
            for chunk in _chunks(source_disk, old, 0, found.size - _FOOTER.size):
                seen.update(chunk)
                offset += _write(disk, new, chunk, offset)
            if seen.digest().hex() != found.hash:
                disk.truncate(new, 0)
                raise _torn()
            _write(disk, new, _FOOTER.pack(seen.digest(), found.info["sequence"], found.size, _END), offset)
            _settle(disk, new, found.size)
    return {**found.info, "bytes": found.size, "hash": found.hash}


def read_header(disk: Disk, path: Path) -> ContainerHeader:
    """What the container at `path` says of itself: reads its two ends. Raises WorkspaceError where the disk refuses."""
    with disk_errors(path), _opened(disk, path) as file:
        return _frame(disk, file)


def read_container(disk: Disk, path: Path, into: bytearray | None = None) -> dict:
    """The info of a whole, verified container, with its `bytes` and `hash`; the payload goes to `into`.

    Raises CheckpointError with the reason when torn, and ForeignFileError when it is whole but of something else. Marks
    and sizes are checked first, so that a huge or foreign file is refused without being read.
    """
    with disk_errors(path), _opened(disk, path) as file:
        found = _frame(disk, file)
        _check(found)
        seen = _read_and_hash(disk, file, found, into)
    if seen != found.hash:
        raise _torn()
    return {**found.info, "bytes": found.size, "hash": found.hash}


def empty_container(disk: Disk, path: Path) -> None:
    """Give the slot's space back without deleting it."""
    with disk_errors(path), _opened(disk, path, write=True) as file:
        disk.truncate(file, 0)


def write_small(disk: Disk, path: Path, data: bytes) -> None:
    """Overwrite a small file where it stands. Not atomic: only for what can be made again."""
    with disk_errors(path, lambda: len(data)), _opened(disk, path, write=True) as file:
        disk.truncate(file, _write(disk, file, data, 0))


def read_small(disk: Disk, path: Path) -> bytes:
    """What `write_small` left there. Raises WorkspaceError when the disk refuses."""
    with disk_errors(path), _opened(disk, path) as file:
        return _read(disk, file, min(disk.size(file), _LARGEST_INFO), 0)


def _head(info: dict, payload_size: int) -> bytes:
    text = json.dumps(info, allow_nan=False).encode()
    text += b" " * (-(_HEADER.size + len(text)) % _ALIGN)
    return _HEADER.pack(_MAGIC, VERSION, len(text), payload_size) + text


def _read_and_hash(disk: Disk, file: int, found: ContainerHeader, into: bytearray | None) -> str:
    """The hash of what the file holds; the payload goes to `into`, straight from the disk."""
    seen, whole = xxh3_128(), None
    if into is not None:
        into += bytes(found.payload)
        whole = memoryview(into)
    for chunk in _chunks(disk, file, 0, found.start):
        seen.update(chunk)
    for chunk in _chunks(disk, file, found.start, found.payload, whole):
        seen.update(chunk)
    return seen.hexdigest()


def _settle(disk: Disk, file: int, size: int) -> None:
    """On the disk, and out of the page cache: what is read back next is what the disk has."""
    disk.truncate(file, size)
    disk.fsync(file)
    disk.forget(file)


def _frame(disk: Disk, file: int) -> ContainerHeader:
    """Every check that needs only the two ends."""
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
    digest, sequence, told_size, end = _FOOTER.unpack(_read(disk, file, _FOOTER.size, size - _FOOTER.size))
    fault, whole = None, start + payload_size + _FOOTER.size
    if end != _END:
        fault = CheckpointError("its end mark is missing: it is cut off, or something was added to it")
    elif told_size != size or whole != size:
        fault = CheckpointError("its sizes disagree", got=f"{size} bytes", wanted=f"{told_size} and {whole}")
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


def _check(found: ContainerHeader) -> None:
    if found.fault is not None:
        raise found.fault


def _torn() -> CheckpointError:
    return CheckpointError("its content does not match its hash: it is torn or damaged")


def _chunks(disk: Disk, file: int, start: int, size: int, into: memoryview | None = None) -> Iterator[memoryview]:
    """`size` bytes from `start` on, one after the other in `into`, or in a buffer that the next piece overwrites."""
    spare, done = memoryview(bytearray(0 if into is not None else min(size, _CHUNK))), 0
    while done < size:
        target = spare[: size - done] if into is None else into[done : min(done + _CHUNK, size)]
        count = disk.read(file, target, start + done)
        if not count:
            raise CheckpointError("it became shorter while it was read")
        yield target[:count]
        done += count


def _read(disk: Disk, file: int, size: int, offset: int) -> bytes:
    """These bytes, or as many as there are."""
    buffer, count = memoryview(bytearray(size)), 0
    while count < size and (more := disk.read(file, buffer[count:], offset + count)):
        count += more
    return bytes(buffer[:count])


def _write(disk: Disk, file: int, data: memoryview | bytes, offset: int) -> int:
    """All of it; returns how many bytes."""
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
