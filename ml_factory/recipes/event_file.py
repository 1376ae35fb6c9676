"""TensorBoard event files with scalars, written without TensorBoard.

A record is its length (8 bytes), the length's checksum, the content and its checksum: CRC-32C, rotated and shifted. The
content is the protocol buffer `Event`: wall_time = 1, step = 2, file_version = 3, summary = 5; in the summary one
value = 1 with tag = 1 and simple_value = 2.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_TABLE = []
for _byte in range(256):
    _value = _byte
    for _ in range(8):
        _value = _value >> 1 ^ (0x82F63B78 if _value & 1 else 0)
    _TABLE.append(_value)


class EventFile:
    """One event file in a folder; each call of `add` appends whole records, so that a killed run loses none before it.

    clock : returns seconds since 1970.
    """

    def __init__(self, folder: Path, clock=time.time):
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        name = f"events.out.tfevents.{int(clock()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.path = folder / name
        self._append(_bytes_field(3, b"brain.Event:2"))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one record for each scalar."""
        for tag, value in scalars.items():
            scalar = _bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
            self._append(b"\x10" + _varint(step) + _bytes_field(5, _bytes_field(1, scalar)))

    def _append(self, fields: bytes) -> None:
        content = b"\x09" + struct.pack("<d", self._clock()) + fields
        length = struct.pack("<Q", len(content))
        record = length + _masked_crc(length) + content + _masked_crc(content)
        with self.path.open("ab") as file:
            file.write(record)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of bytes."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _bytes_field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])
