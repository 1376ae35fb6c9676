"""Arrays in the safetensors format, copied straight into a buffer that is there already.

`safetensors.numpy.save` builds new bytes, and a checkpoint of 600 MB would wait for their pages. Here the header is
made first, and each array is copied once to its place: at the speed of memory, or from the device into pinned pages.
Floats that must be finite are looked at block by block while the block is still in the cache.
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
    """A weight or an optimizer's tensor that is not finite: such a state is never kept as a good one."""


@dataclass(frozen=True)
class TensorEntry:
    """One array of a state.

    data : flat and contiguous, a NumPy array or a torch tensor on a CUDA device; not yet copied.
    shape : as the file tells it.  path : where it stands in the state.
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
    """Where each array goes in the bytes of one file.

    blobs : name -> array.  size : bytes of the file.
    """

    def __init__(self, blobs: dict[str, TensorEntry]):
        # Wide items first, so that each array stands at a multiple of its item; the format allows no holes.
        order = sorted(blobs, key=lambda name: -_itemsize(blobs[name]))
        table, offset, places = {}, 0, []
        for name in order:
            blob = blobs[name]
            end = offset + _bytes(blob)
            dtype = "U8" if blob.on_device else _NAMES[blob.data.dtype.str[1:]]
            table[name] = {"dtype": dtype, "shape": list(blob.shape), "data_offsets": [offset, end]}
            places.append((blob, offset, end))
            offset = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        self._head = len(text).to_bytes(8, "little") + text
        self._places = [(blob, len(self._head) + start, len(self._head) + end) for blob, start, end in places]
        self.size = len(self._head) + offset

    @property
    def on_device(self) -> bool:
        """Whether something is still on an accelerator, so that pinned pages pay."""
        return any(blob.on_device for blob, *_ in self._places)

    def fill(self, buffer: memoryview) -> None:
        """Copy everything to the first `size` bytes. Raises NonFiniteError naming the first array that must be finite
        and is not; the buffer then holds nothing to keep."""
        buffer[: len(self._head)] = self._head
        flat, bad = np.frombuffer(buffer, np.uint8), []
        for blob, start, end in self._places:
            if not blob.on_device and not _copy(blob, flat[start:end]):
                bad.append(blob.path)
        bad += list(self._from_device(buffer))
        if bad:
            raise NonFiniteError(
                "This state is not kept: a weight or an optimizer's tensor is not finite",
                where=min(bad), got=f"NaN or infinity in {len(bad)} of {len(self._places)} arrays",
                next_step="go on from the last checkpoint, which is from before; lower lr if it comes again",
            )  # fmt: skip

    def _from_device(self, buffer: memoryview) -> Iterator[str]:
        """Queue every copy, wait once; the paths of what is not finite."""
        places = [(blob, start, end) for blob, start, end in self._places if blob.on_device]
        if not places:
            return
        torch = sys.modules["torch"]
        for blob, start, end in places:
            if end > start:
                target = torch.frombuffer(buffer, dtype=torch.uint8, count=end - start, offset=start)
                target.copy_(blob.data.view(torch.uint8), non_blocking=True)
        checked = [(blob.path, torch.isfinite(blob.data).all()) for blob, *_ in places if blob.floats]
        fine = torch.stack([one.to(checked[0][1].device) for _, one in checked]).tolist() if checked else []
        for device in {blob.data.device for blob, *_ in places}:
            torch.cuda.synchronize(device)
        yield from (path for (path, _), good in zip(checked, fine, strict=True) if not good)


def _itemsize(blob: TensorEntry) -> int:
    return blob.data.element_size() if blob.on_device else blob.data.itemsize


def _bytes(blob: TensorEntry) -> int:
    return blob.data.numel() * blob.data.element_size() if blob.on_device else blob.data.nbytes


def _copy(blob: TensorEntry, target: np.ndarray) -> bool:
    """Whether what was copied is as finite as it must be."""
    source = blob.data.reshape(-1).view(np.uint8)
    if not blob.floats:
        target[:] = source
        return True
    fine = True
    for start in range(0, len(source), _BLOCK):
        block = target[start : start + _BLOCK]
        block[:] = source[start : start + _BLOCK]
        fine = fine and _finite(block, blob.floats)
    return fine


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
