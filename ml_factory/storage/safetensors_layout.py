"""Arrays in the safetensors format, copied straight into an existing buffer.

`safetensors.numpy.save` allocates new bytes, and a checkpoint of 600 MB would wait for their pages. Here the header is
made first, and each array is copied once to its offset: at the speed of memory, or from the device into pinned pages.
Floats that must be finite are checked block by block while the block is still in the cache.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ml_factory.errors import CheckpointError

_NAMES = {
    "b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "u4": "U32", "i4": "I32", "u8": "U64", "i8": "I64",
    "f2": "F16", "f4": "F32", "f8": "F64",
}  # fmt: skip
_ALIGN = 64
_BLOCK = 1 << 19  # bytes, a good part of a core's own cache


class NonFiniteError(CheckpointError):
    """A weight or an optimizer tensor is not finite: such a state is never saved."""


@dataclass(frozen=True)
class TensorEntry:
    """One array of a state.

    Parameters
    ----------
    data : flat and contiguous NumPy array, or torch tensor on a CUDA device; not copied yet.
    shape : as written to the file.
    path : position in the state, such as ['opt']['step'].
    floats : "" or the dtype whose values must all be finite (`data` may hold it as raw bytes).
    """

    data: object
    shape: tuple[int, ...]
    path: str
    floats: str = ""

    @property
    def on_device(self) -> bool:
        return not isinstance(self.data, np.ndarray)


class Layout:
    """Offset of each array in the bytes of one safetensors file.

    Parameters
    ----------
    entries : name -> array.

    Attributes: `size`, bytes of the file.
    """

    def __init__(self, entries: dict[str, TensorEntry]):
        # Wide items first, so that each array stands at a multiple of its item; the format allows no holes.
        order = sorted(entries, key=lambda name: -_itemsize(entries[name]))
        table, offset, positions = {}, 0, []
        for name in order:
            entry = entries[name]
            end = offset + _bytes(entry)
            dtype = "U8" if entry.on_device else _NAMES[entry.data.dtype.str[1:]]
            table[name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
            positions.append((entry, offset, end))
            offset = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        self._head = len(text).to_bytes(8, "little") + text
        self._positions = [(entry, len(self._head) + start, len(self._head) + end) for entry, start, end in positions]
        self.size = len(self._head) + offset

    @property
    def on_device(self) -> bool:
        """True when an array is still on an accelerator, so that pinned pages are faster."""
        return any(entry.on_device for entry, *_ in self._positions)

    def fill(self, buffer: memoryview) -> None:
        """Copy every array into the first `size` bytes of the buffer.

        Raises NonFiniteError naming the first array that must be finite and is not; the buffer's content is then
        invalid.
        """
        buffer[: len(self._head)] = self._head
        flat, bad = np.frombuffer(buffer, np.uint8), []
        for entry, start, end in self._positions:
            if not entry.on_device and not _copy(entry, flat[start:end]):
                bad.append(entry.path)
        bad += list(self._from_device(buffer))
        if bad:
            raise NonFiniteError(
                "This state is not saved: a weight or an optimizer tensor is not finite",
                where=min(bad), got=f"NaN or infinity in {len(bad)} of {len(self._positions)} arrays",
                next_step="go on from the last checkpoint, which is from before; lower lr if it comes again",
            )  # fmt: skip

    def _from_device(self, buffer: memoryview) -> Iterator[str]:
        """Queue every device copy, wait once; yield the paths of arrays that are not finite."""
        positions = [(entry, start, end) for entry, start, end in self._positions if entry.on_device]
        if not positions:
            return
        torch = sys.modules["torch"]
        for entry, start, end in positions:
            if end > start:
                target = torch.frombuffer(buffer, dtype=torch.uint8, count=end - start, offset=start)
                target.copy_(entry.data.view(torch.uint8), non_blocking=True)
        checked = [(entry.path, torch.isfinite(entry.data).all()) for entry, *_ in positions if entry.floats]
        finite = torch.stack([check.to(checked[0][1].device) for _, check in checked]).tolist() if checked else []
        for device in {entry.data.device for entry, *_ in positions}:
            torch.cuda.synchronize(device)
        yield from (path for (path, _), ok in zip(checked, finite, strict=True) if not ok)


def _itemsize(entry: TensorEntry) -> int:
    return entry.data.element_size() if entry.on_device else entry.data.itemsize


def _bytes(entry: TensorEntry) -> int:
    return entry.data.numel() * entry.data.element_size() if entry.on_device else entry.data.nbytes


def _copy(entry: TensorEntry, target: np.ndarray) -> bool:
    """Copy one array; return False when it must be finite and is not."""
    source = entry.data.reshape(-1).view(np.uint8)
    if not entry.floats:
        target[:] = source
        return True
    finite = True
    for start in range(0, len(source), _BLOCK):
        block = target[start : start + _BLOCK]
        block[:] = source[start : start + _BLOCK]
        finite = finite and _finite(block, entry.floats)
    return finite


def _finite(block: np.ndarray, dtype: str) -> bool:
    if dtype == "bfloat16":  # NumPy has none: an exponent of only ones is NaN or infinity
        return not ((block.view(np.uint16) & 0x7F80) == 0x7F80).any()
    values = block.view(dtype)
    if dtype != "float16":
        # The sum of squares is finite when they all are, at the speed of BLAS; it may overflow without them.
        with np.errstate(all="ignore"):
            if math.isfinite(np.dot(values, values)):
                return True
    return bool(np.isfinite(values).all())
