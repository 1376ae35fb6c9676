"""File format of one checkpoint: a safetensors file that verifies itself.

    header   length and JSON, to a multiple of 64 bytes: first `__metadata__` (format, run, phase, sequence, saved_at,
             metrics, lease), so that a torn file still names its owner, then the table of the tensors
    tensors  of the state, as `storage.serialization` encodes it
    seal     the tensor `__seal__`: hash of everything above, sequence, size of the file, end mark

The hash is XXH3 with 128 bits: it detects damage, and at the speed of memory no save waits for it. A file overwritten
in place and cut off anywhere fails at least one of: end mark, size, sequence, hash.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128

from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.slot_description import check_container_info
from ml_factory.errors import MORE_MEMORY, CheckpointError, WorkspaceError
from ml_factory.storage.files import disk_errors
from ml_factory.storage.json_values import parse_json, parse_json_start
from ml_factory.storage.regular_files import RefusedFileError, half_of_memory
from ml_factory.storage.safetensors_header import join_safetensors_header, split_safetensors_header

VERSION = 4
_FORMAT = "ml_factory.checkpoint/"
_METADATA = b'{"__metadata__":'
_START = _METADATA + b'{"format":"' + _FORMAT.encode()
_TEXTS = ("format", "run", "phase", "saved_at")  # other values of the metadata are JSON
_SEAL = struct.Struct("<16sQQ8s")
_END = b"mlfcend\n"
_CHUNK = 1 << 22
_FLUSH_BYTES = 1 << 26  # flushed at once: no single call waits long for a slow disk, which would count as a dead one
_LARGEST_HEADER = 1 << 24
_EARLIER = b"mlfckpt\n"  # first bytes of a checkpoint before version 4
# First bytes of files that are mistaken for checkpoints and must never be opened as one.
_FOREIGN = {b"PK": "a zip archive, as torch.save writes", b"\x89HDF": "an HDF5 file", b"\x1f\x8b": "a gzip archive"}


class ForeignFileError(CheckpointError):
    """An intact file of another program or version: never overwritten."""


@dataclass(frozen=True)
class CheckpointFileHeader:
    """Description of a checkpoint file, read from its two ends before its content is read and hashed.

    Parameters
    ----------
    info : its metadata; {} when its beginning cannot be read.
    size : of the file, bytes.
    hash : as stored in the seal.
    fault : reason why the file is not intact, if the ends show one.
    """

    info: dict
    size: int = 0
    hash: str = ""
    fault: CheckpointError | None = None


def write_checkpoint_file(disk: Disk, path: Path, info: dict, state: memoryview | bytes) -> dict:
    """Overwrite the slot at `path` and flush it to the disk; return the info with `bytes` and `hash`.

    state : a safetensors file, as `serialize_state` returns.
    Raises WorkspaceError; the slot is then empty, so that a full disk gets its space back.
    """
    head, tensors = _head(info, memoryview(state).cast("B"))
    chunks = (part[at : at + _CHUNK] for part in (memoryview(head), tensors) for at in range(0, len(part), _CHUNK))
    size = len(head) + len(tensors) + _SEAL.size
    return {**info, "bytes": size, "hash": _write_sealed(disk, path, chunks, size, info["sequence"])}


def copy_checkpoint_file(disk: Disk, path: Path, source_disk: Disk, source: Path) -> dict:
    """Overwrite the slot at `path` with a verified copy of the checkpoint at `source`; return its info.

    Raises CheckpointError where the source is torn, WorkspaceError where a disk refuses; the slot is then empty.
    """
    with disk_errors(source), _refused_as_foreign(), _opened(source_disk, source) as file:
        header = _intact_ends(source_disk, file)
        content = _source_content(source_disk, source, file, header)
        _write_sealed(disk, path, content, header.size, header.info["sequence"])
    return {**header.info, "bytes": header.size, "hash": header.hash}


def _write_sealed(disk: Disk, path: Path, chunks: Iterable[memoryview], size: int, sequence: int) -> str:
    """Overwrite the slot with the chunks and their seal; return the hash. The slot is empty after an error."""
    with disk_errors(path, lambda: size), _opened(disk, path, write=True) as file:
        try:
            hasher, offset, flushed = xxh3_128(), 0, 0
            for chunk in chunks:
                hasher.update(chunk)
                offset += _write(disk, file, chunk, offset)
                if offset - flushed >= _FLUSH_BYTES:
                    disk.fsync(file)
                    flushed = offset
            _write(disk, file, _SEAL.pack(hasher.digest(), sequence, size, _END), offset)
            disk.truncate(file, size)
            disk.fsync(file)
            disk.drop_cached_pages(file)  # the next read returns what the disk holds
        except (OSError, CheckpointError, WorkspaceError):
            with suppress(OSError):
                disk.truncate(file, 0)
            raise
    return hasher.hexdigest()


def read_checkpoint_file_header(disk: Disk, path: Path) -> CheckpointFileHeader:
    """Read the two ends of the checkpoint at `path`. Raises WorkspaceError where the disk refuses."""
    try:
        with disk_errors(path), _refused_as_foreign(), _opened(disk, path) as file:
            return _read_ends(disk, file)
    except ForeignFileError as fault:
        return CheckpointFileHeader({}, fault=fault)


def read_checkpoint_file(disk: Disk, path: Path, into: bytearray | None = None) -> dict:
    """Return the info of a verified checkpoint, with its `bytes` and `hash`; `into` gets its content.

    Marks and sizes are checked first, so that a huge or foreign file is refused without being read.
    Raises CheckpointError with the reason when torn, ForeignFileError when it is an intact file of another kind.
    """
    with disk_errors(path), _refused_as_foreign(), _opened(disk, path) as file:
        header = _intact_ends(disk, file)
        if into is not None:
            if header.size > half_of_memory():
                raise WorkspaceError(
                    "This checkpoint is larger than half of this machine's memory", where=path,
                    got=f"{header.size:,} bytes", next_step=MORE_MEMORY,
                )  # fmt: skip
            into += bytes(header.size)  # the seal stays zero: no reader needs it any more
        for _ in _verified_content(disk, file, header, into):
            pass
    return {**header.info, "bytes": header.size, "hash": header.hash}


def write_small_file(disk: Disk, path: Path, data: bytes) -> None:
    """Overwrite a small file in place. Not atomic: only for content that can be made again."""
    with disk_errors(path, lambda: len(data)), _opened(disk, path, write=True) as file:
        disk.truncate(file, _write(disk, file, data, 0))


def read_small_file(disk: Disk, path: Path) -> bytes:
    """Read the content that `write_small_file` wrote. Raises WorkspaceError when the disk refuses."""
    with disk_errors(path), _opened(disk, path) as file:
        return _read(disk, file, min(disk.size(file), _LARGEST_HEADER), 0)


def _head(info: dict, state: memoryview) -> tuple[bytes, memoryview]:
    """Return the file's header, which is the state's with the metadata and the seal, and the state's tensors."""
    table, tensors = split_safetensors_header(state)
    try:
        check_container_info(info)
    except ValueError as error:
        raise CheckpointError("This checkpoint cannot be described", got=error) from error
    fields = {"format": f"{_FORMAT}{VERSION}", **info}
    texts = {key: value if key in _TEXTS else json.dumps(value, allow_nan=False) for key, value in fields.items()}
    offsets = [len(tensors), len(tensors) + _SEAL.size]
    added = {"__metadata__": texts, "__seal__": {"dtype": "U8", "shape": [_SEAL.size], "data_offsets": offsets}}
    return join_safetensors_header(json.dumps(added, separators=(",", ":"))[:-1].encode() + b"," + table[1:]), tensors


def _intact_ends(disk: Disk, file: int) -> CheckpointFileHeader:
    """Return the header of a file whose two ends show no fault, which is raised otherwise."""
    header = _read_ends(disk, file)
    if header.fault is not None:
        raise header.fault
    return header


def _read_ends(disk: Disk, file: int) -> CheckpointFileHeader:
    """Run every check that needs only the two ends of the file."""
    size, info = disk.size(file), {}
    try:
        info = _read_info(disk, file, size)
        return CheckpointFileHeader(info, size, _read_seal(disk, file, size, info["sequence"]))
    except CheckpointError as fault:
        return CheckpointFileHeader(info, size, fault=fault)


def _read_info(disk: Disk, file: int, size: int) -> dict:
    """Return the metadata; the rest of the header may be of another save."""
    start = _read(disk, file, min(size, 8 + len(_START)), 0)
    if not start[8:].startswith(_START):
        raise _foreign(start)
    header = _read(disk, file, min(int.from_bytes(start[:8], "little"), size, _LARGEST_HEADER), 8)
    try:
        texts = parse_json_start(header[len(_METADATA) :].decode("ascii", "replace"))
        version = int(str(texts.pop("format")).removeprefix(_FORMAT))
        if version != VERSION:
            raise _other_version(version)
        info = {key: text if key in _TEXTS else parse_json(text) for key, text in texts.items()}
        check_container_info(info)
    except ForeignFileError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError("its description is not whole", got=str(error)[:200]) from error
    return info


def _read_seal(disk: Disk, file: int, size: int, wanted: int) -> str:
    """Return the hash in the seal of a file whose beginning has the sequence `wanted`."""
    seal = _read(disk, file, _SEAL.size, max(0, size - _SEAL.size))
    # padded: another process may make the file shorter just now
    digest, sequence, stated_size, end = _SEAL.unpack(seal.ljust(_SEAL.size))
    if end != _END:
        raise CheckpointError("its end mark is missing: it is cut off, or something was added to it")
    if stated_size != size:
        raise CheckpointError("its sizes disagree", got=f"{size} bytes", wanted=stated_size)
    if sequence != wanted:
        raise CheckpointError("its end is of another save: it is torn", got=sequence, wanted=wanted)
    return digest.hex()


def _foreign(start: bytes) -> CheckpointError:
    """Return the reason why a file with these first bytes is no checkpoint of this version."""
    if not start:
        return CheckpointError("it is empty: its save did not finish")
    if start.startswith(_EARLIER):
        return _other_version(VERSION - 1)
    kind = next((text for first, text in _FOREIGN.items() if start.startswith(first)), None)
    if kind is None and start[:1] == b"\x80" and start[1:2] <= b"\x05":
        kind = "a pickle, which could run code"
    if kind is None:
        return CheckpointError("it does not start like a checkpoint")
    return ForeignFileError(f"it is {kind}, and is never opened")


def _other_version(version: int) -> ForeignFileError:
    later = version > VERSION
    what = f"{'a later' if later else 'an earlier'} version of ml_factory wrote it"
    step = "update ml_factory" if later else "train again, and delete this file; that version alone resumes it"
    return ForeignFileError(what, got=f"version {version}", wanted=f"version {VERSION}", next_step=step)


def _verified_content(
    disk: Disk, file: int, header: CheckpointFileHeader, into: bytearray | None = None
) -> Iterator[memoryview]:
    """Yield the content up to the seal in chunks; raise CheckpointError at the end when its hash is another.

    into : receives the content; without it, the next chunk overwrites this one.
    """
    size, hasher, count = header.size - _SEAL.size, xxh3_128(), 0
    buffer = memoryview(bytearray(min(size, _CHUNK)) if into is None else into)
    while count < size:
        begin = 0 if into is None else count
        received = disk.read(file, buffer[begin : begin + min(_CHUNK, size - count)], count)
        if not received:
            raise CheckpointError("it became shorter while it was read")
        hasher.update(buffer[begin : begin + received])
        yield buffer[begin : begin + received]
        count += received
    if hasher.hexdigest() != header.hash:
        raise CheckpointError("its content does not match its hash: it is torn or damaged")


def _source_content(disk: Disk, source: Path, file: int, header: CheckpointFileHeader) -> Iterator[memoryview]:
    """Yield the verified content of a copy's source; a disk error here names the source, not the slot written."""
    with disk_errors(source):
        yield from _verified_content(disk, file, header)


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
def _refused_as_foreign() -> Iterator[None]:
    """Turn the refusal of a pipe, a device, a folder or a sparse file into a ForeignFileError."""
    try:
        yield
    except RefusedFileError as error:
        raise ForeignFileError("it is refused", got=error.strerror) from error


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
