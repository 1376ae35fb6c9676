"""Files that must be refused: damaged, cut, far too large, of a later version, or made to do harm when opened."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path


class _Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (Path.write_text, (self.marker, "code ran"))


def bombs(marker: Path) -> dict[str, bytes]:
    """Return name -> content; a reader that opens one in the wrong way writes `marker`, or a file outside its
    folder.
    """
    pickled = {f"pickle {number}": pickle.dumps(_Bomb(marker), protocol=number) for number in (0, 2, 5)}
    archive, slip, tar = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:  # as torch.save writes
        file.writestr("archive/data.pkl", pickle.dumps(_Bomb(marker)))
        file.writestr("archive/version", "3\n")
    with zipfile.ZipFile(slip, "w") as file:
        file.writestr("../../" + marker.name, "slipped out")
        file.writestr("state.safetensors", b"")
    with tarfile.open(fileobj=tar, mode="w:gz") as file:
        member = tarfile.TarInfo("../../" + marker.name)
        member.size = 4
        file.addfile(member, io.BytesIO(b"evil"))
    return {
        **pickled,
        "torch.save": archive.getvalue(),
        "zip-slip": slip.getvalue(),
        "tar-slip": tar.getvalue(),
        "gzipped pickle": gzip.compress(pickle.dumps(_Bomb(marker))),
        "numpy with a pickle": b"\x93NUMPY\x01\x00"
        + struct.pack("<H", 64)
        + b"{'descr': '|O', 'shape': (1,)}".ljust(64),
    }


def damages(data: bytes) -> dict[str, bytes]:
    """name -> the same file after an accident."""
    cuts = {f"cut at {part}/16": data[: len(data) * part // 16] for part in range(16)}
    flips = {}
    for part in range(32):
        place = len(data) * part // 32
        flips[f"flipped at {part}/32"] = data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]
    half = len(data) // 2
    return {
        **cuts,
        **flips,
        "one byte short": data[:-1],
        "one byte more": data + b"\0",
        "twice": data + data,
        "zeros": bytes(len(data)),
        "second half lost": data[:half] + bytes(len(data) - half),
        "text": b"<html>quota exceeded</html>",
    }


def oversized_containers(data: bytes) -> dict[str, bytes]:
    """Return slots that state sizes that no machine has, and slots of other versions."""
    huge = (1 << 62).to_bytes(8, "little")
    return {
        "huge file": data[:-16] + huge + data[-8:],
        "huge header": huge + data[8:],
        "a later version": data.replace(b"checkpoint/4", b"checkpoint/99", 1),
        "an earlier version": b"mlfckpt\n" + (3).to_bytes(4, "little") + data,
    }


def oversized_states(data: bytes) -> dict[str, bytes]:
    """Return safetensors files whose header is, or states, more than the file holds."""
    size = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + size])
    name = next(iter(table))
    table[name] = {"dtype": "F64", "shape": [1 << 40], "data_offsets": [0, 1 << 43]}
    text = json.dumps(table).encode()
    return {
        "huge header": (1 << 60).to_bytes(8, "little") + data[8:],
        "huge tensor": len(text).to_bytes(8, "little") + text + data[8 + size :],
        "deep header": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    }


def manifests() -> dict[str, bytes]:
    """Return malformed contents of a slot's manifest."""
    texts = {
        "deep": "[" * 100_000,
        "a list": "[1, 2]",
        "a number": "7",
        "huge sequence": '{"status": "held", "run": "run", "phase": "toy", "sequence": 1' + "0" * 400 + "}",
        "endless sequence": '{"status": "held", "run": "run", "phase": "toy", "sequence": 1e999}',
        "negative sequence": '{"status": "writing", "run": "run", "phase": "toy", "sequence": -5}',
        "other types": '{"status": ["held"], "run": {}, "phase": 3, "sequence": "9", "hash": [], "lease": 1}',
        "other types of ours": '{"status": 1, "run": "run", "phase": "toy", "sequence": "9", "lease": {"fence": "x"}}',
        "a path out": '{"status": "returned", "hash": "x", "path": "../../../etc/passwd", "saved_at": {}}',
        "null": "null",
    }
    return {name: text.encode() for name, text in texts.items()}
