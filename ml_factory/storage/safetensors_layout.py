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
from itertools import accumulate, pairwise

import numpy as np

from ml_factory.errors import NonFiniteError
from ml_factory.storage.safetensors_header import join_safetensors_header

# Name in NumPy and torch -> name in the file, of the types that each of the three has.
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_BLOCK = 1 << 19  # bytes, a good part of a core's own cache


@dataclass(frozen=True)
class TensorEntry:
    """One array of a state.

    Parameters
    ----------
    data : flat and contiguous NumPy array, or torch tensor on a CUDA device; not copied yet.
    dtype, shape : as written to the file; "uint8" for raw bytes.
    floats : "" or the dtype whose values must all be finite (`data` may hold it as raw bytes).
    """

    data: object
    dtype: str
    shape: tuple[int, ...]
    floats: str = ""

    @property
    def is_on_device(self) -> bool:
        return not isinstance(self.data, np.ndarray)


class SafetensorsLayout:
    """Offset of each array in the bytes of one safetensors file.

    Parameters
    ----------
    entries : name -> array; a name is the array's position in the state, such as ['opt']['step'].

    Attributes: `size`, bytes of the file.
    """

    def __init__(self, entries: dict[str, TensorEntry]):
        # Wide items first, so that each array stands at a multiple of its item; the format allows no holes.
        order = sorted(entries, key=lambda name: -np.dtype(entries[name].dtype).itemsize)
        ends = list(accumulate((entries[name].data.nbytes for name in order), initial=0))
        spans = dict(zip(order, pairwise(ends), strict=True))
        table = {
            name: {"dtype": DTYPES[entries[name].dtype], "shape": entries[name].shape, "data_offsets": span}
            for name, span in spans.items()
        }
        self._head = join_safetensors_header(json.dumps(table, separators=(",", ":")).encode())
        first = len(self._head)
        self._positions = [(name, entries[name], first + start, first + end) for name, (start, end) in spans.items()]
        self.size = first + ends[-1]

    @property
    def is_on_device(self) -> bool:
        """True when an array is still on an accelerator, so that pinned pages are faster."""
        return any(entry.is_on_device for _, entry, *_ in self._positions)

    def fill(self, buffer: memoryview) -> None:
        """Copy every array into the first `size` bytes of the buffer.

        Raises NonFiniteError naming the first array that must be finite and is not; the buffer's content is then
        invalid.
        """
        buffer[: len(self._head)] = self._head
        flat, bad = np.frombuffer(buffer, np.uint8), []
        for name, entry, start, end in self._positions:
            if not entry.is_on_device and not _copy(entry, flat[start:end]):
                bad.append(name)
        bad += list(self._from_device(buffer))
        if bad:
            raise NonFiniteError(
                "This state is not saved: a weight or an optimizer tensor is not finite",
                where=f"state{min(bad)}", got=f"NaN or infinity in {len(bad)} of {len(self._positions)} arrays",
                next_step="go on from the last checkpoint, which is from before; lower lr if it comes again",
            )  # fmt: skip

    def _from_device(self, buffer: memoryview) -> Iterator[str]:
        """Queue every device copy, wait once; yield the names of arrays that are not finite."""
        positions = [position for position in self._positions if position[1].is_on_device]
        if not positions:
            return
        torch = sys.modules["torch"]
        for _, entry, start, end in positions:
            if end > start:
                target = torch.frombuffer(buffer, dtype=torch.uint8, count=end - start, offset=start)
                target.copy_(entry.data.view(torch.uint8), non_blocking=True)
        checked = [(name, torch.isfinite(entry.data).all()) for name, entry, *_ in positions if entry.floats]
        finite = torch.stack([check.to(checked[0][1].device) for _, check in checked]).tolist() if checked else []
        for device in {entry.data.device for _, entry, *_ in positions}:
            torch.cuda.synchronize(device)
        yield from (name for (name, _), ok in zip(checked, finite, strict=True) if not ok)


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
