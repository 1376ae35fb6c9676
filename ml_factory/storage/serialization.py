"""Nested state to bytes and back, exactly: arrays in safetensors, the tree around them in JSON, no pickle.

One safetensors file holds each array under its position in the state, such as ['network']['0.weight'], and under `tree`
the JSON of the state. In it a list is a list of the state, and an object is always a tag: {"dict": {...}},
{"array": ["['loss']", "<f4", [2, 3]]}. Reading runs no code: every type named in a file is looked up in a fixed list.
"""

import json
import math
import os
import re
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from ml_factory.errors import MORE_MEMORY, CheckpointError, FactoryError, NonFiniteError, WorkspaceError
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json

VERSION = 1
_TREE = "tree"
_MAX_DEPTH = 100
_ALIGN = 64  # bytes; the arrays begin at a multiple of it
_BLOCK = 1 << 19  # bytes, a good part of a core's own cache
_SHARED = 1 << 16  # bytes of an array that is not copied
_PLAIN_DTYPE = re.compile(r"[<>|]([biufcmM])(\d{1,2})(\[\d*[A-Za-zμ]{1,7}\])?|[<>|][US]\d{1,9}")
# Name in NumPy and torch -> name in the file, of the types that each of the three has; others are stored as raw bytes.
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_ITEM_BYTES = {label: np.dtype(name).itemsize for name, label in _DTYPES.items()}
_TENSORS = {*_DTYPES, "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"}
_MUST_BE_FINITE = {"float16", "bfloat16", "float32", "float64"}
# Arrays below these names are trained parameters; other arrays (forecasts, features) may hold NaN.
_TRAINED = re.compile(r"\['(network|model|module|weights|params|parameters|optimizer|ema|coef|state_dict)'\]")


class _Entry(NamedTuple):
    """An array or tensor of a state. floats : "" or the dtype whose values must all be finite."""

    data: Any
    label: str
    shape: list[int]
    floats: str


def pack_state(
    state: dict, *, finite: bool = False, pages: Callable[[int], np.ndarray] = lambda size: np.empty(size, np.uint8)
) -> tuple[dict, memoryview]:
    """Return (the table of a safetensors file, the bytes of its arrays): a copy of the state's present values.

    Parameters
    ----------
    state : dict of None, bool, int, float, str, bytes, list, tuple, dict (keys str or int), NumPy arrays and scalars of
        plain dtypes, torch tensors.
    finite : torch tensors, and arrays below a name such as 'weights' or 'optimizer', must be finite. A tensor with
        'mask' in its name may hold infinities.
    pages : returns as many bytes, uint8 (N,), which are overwritten and returned.

    Raises CheckpointError naming the path of any other value, such as ['opt']['fn'], NonFiniteError naming the first
    array that must be finite and is not.
    """
    if not isinstance(state, dict):
        raise CheckpointError("A state is a dict", got=type(state).__name__, wanted="dict")
    entries: dict[str, _Entry] = {}
    tree = {"version": VERSION, "state": _pack(state, "state", entries, 0)}
    text = np.frombuffer(json.dumps(tree, separators=(",", ":"), allow_nan=False).encode(), np.uint8)
    entries[_TREE] = _Entry(text, "U8", [len(text)], "")
    # Wide items first, so that each array stands at a multiple of its item; the format allows no holes.
    order = sorted(entries, key=lambda name: -_ITEM_BYTES[entries[name].label])
    spans = list(pairwise(accumulate((entries[name].data.nbytes for name in order), initial=0)))
    copy, bad = pages(spans[-1][1]), []
    for name, (start, end) in zip(order, spans, strict=True):
        if not _copy(_flat_bytes(entries[name].data), copy[start:end], entries[name].floats if finite else ""):
            bad.append(name)
    if bad:
        raise NonFiniteError(
            "This state is not saved: a weight or an optimizer tensor is not finite", where=f"state{min(bad)}",
            got=f"NaN or infinity in {len(bad)} of {len(order)} arrays",
            next_step="go on from the last checkpoint, which is from before; lower lr if it comes again",
        )  # fmt: skip
    table = {
        name: {"dtype": entries[name].label, "shape": entries[name].shape, "data_offsets": list(span)}
        for name, span in zip(order, spans, strict=True)
    }
    return table, copy.data


def safetensors_header(table: dict) -> bytes:
    """Return the header with this table: its length, the table in JSON, and spaces up to the arrays."""
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def serialize_state(state: dict) -> bytes:
    """Copy the state's present values to bytes; equal states give equal bytes. Arguments and errors as of
    `pack_state`.
    """
    table, arrays = pack_state(state)
    return b"".join((safetensors_header(table), arrays))


def deserialize_state(data: bytes | bytearray | memoryview, *, tensors: bool = True) -> dict:
    """Return the state that `serialize_state` was given. Tensors come back as CPU tensors, OrderedDicts as dicts.

    data : where it can be written, large arrays of the state are views of it: the state is in memory once.
    tensors : False: torch is not needed, a tensor comes back as its bytes, uint8 (N,).

    Raises CheckpointError when the bytes are torn, are not a state, or were written by a later version.
    """
    try:
        arrays = _read_arrays(memoryview(data))
        tree = parse_json(arrays.pop(_TREE).tobytes())
        version = tree["version"]
        if type(version) is int and version > VERSION:
            raise CheckpointError(
                "A later version of ml_factory wrote this state", got=f"version {version}",
                wanted=f"at most {VERSION}", next_step="update ml_factory",
            )  # fmt: skip
        state = _unpack(tree["state"], arrays, tensors)
        if arrays or not isinstance(state, dict):
            raise ValueError(f"{len(arrays)} arrays that no value names, in a {type(state).__name__}")
        return state
    except FactoryError:
        raise
    except MemoryError as error:  # no damage: an older checkpoint must not be taken for it
        raise WorkspaceError("This state needs more memory than there is", next_step=MORE_MEMORY) from error
    except Exception as error:  # the bytes may hold anything in the place of a value
        raise CheckpointError("These bytes are not a whole state", got=f"{type(error).__name__}: {error}") from error


def write_state_file(path: str | os.PathLike, state: dict) -> None:
    """Write the state to one file in one step. Raises CheckpointError, or WorkspaceError when the disk is full."""
    table, arrays = pack_state(state)
    files.write(path, safetensors_header(table), arrays)


def read_state_file(path: str | os.PathLike) -> dict:
    """Read a state that `write_state_file` wrote. Raises CheckpointError naming the file, WorkspaceError when it does
    not exist.
    """
    data = files.read(path)
    try:
        return deserialize_state(data)
    except CheckpointError as error:
        raise CheckpointError("This state cannot be loaded", where=path, got=error) from error


# ---------------------------------------------------------------------- to bytes


def _pack(value: object, path: str, entries: dict[str, _Entry], depth: int) -> object:
    """Return the JSON node of one value; values that JSON cannot represent exactly go to `entries`.

    Types are exact: a subclass would come back as another type.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError("A state is nested too deeply; does a container hold itself?", where=path)
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < 1 << 63 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"bytes": _add_entry(np.frombuffer(value, np.uint8), path, entries, "uint8")}
    if kind is list or kind is tuple:
        items = [_pack(item, f"{path}[{i}]", entries, depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, dict):
        return _pack_dict(value, path, entries, depth)
    if isinstance(value, np.generic):
        return {"scalar": _pack_array(np.asarray(value), path, entries)}
    if kind is np.ndarray or kind is np.memmap:
        return {"array": _pack_array(value, path, entries)}
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if name not in _TENSORS or value.layout is not sys.modules["torch"].strided:
            raise _unsupported_type(path, f"a tensor of {name}, {value.layout}")
        checked = "mask" not in path.rpartition("[")[2]
        return {"tensor": [_add_entry(value, path, entries, name, checked), name, list(value.shape)]}
    raise _unsupported_type(path, f"{kind.__module__}.{kind.__qualname__}")


def _pack_dict(value: dict, path: str, entries: dict[str, _Entry], depth: int) -> dict:
    for key in value:
        if type(key) is not str and type(key) is not int:
            raise _unsupported_type(path, f"the key {key!r} of type {type(key).__name__}")
    items = {key: _pack(item, f"{path}[{key!r}]", entries, depth + 1) for key, item in value.items()}
    if all(type(key) is str for key in items):
        return {"dict": items}
    return {"items": [[_pack(key, path, entries, 0), item] for key, item in items.items()]}


def _pack_array(array: np.ndarray, path: str, entries: dict[str, _Entry]) -> list:
    """Return [entry, dtype, shape]."""
    text, name = _dtype_texts(array.dtype)
    if not text:
        raise _unsupported_type(path, f"an array of dtype {array.dtype}")
    return [_add_entry(array, path, entries, name, bool(_TRAINED.search(path))), text, list(array.shape)]


@lru_cache(maxsize=256)
def _dtype_texts(dtype: np.dtype) -> tuple[str, str]:
    """Return the text of a plain dtype, "" of another one, and its name, "" where it is not of this machine's order."""
    plain = dtype.itemsize and _PLAIN_DTYPE.fullmatch(dtype.str)
    return dtype.str if plain else "", dtype.name if dtype.isnative else ""


def _add_entry(data: Any, path: str, entries: dict[str, _Entry], dtype: str, checked: bool = False) -> str:
    """Add an array or a tensor under its position in the state; return that name.

    dtype : its name; one that safetensors lacks (dates, texts, big-endian numbers) is stored as raw bytes.
    checked : its floats must be finite.
    """
    name, floats = path.removeprefix("state"), dtype if checked and dtype in _MUST_BE_FINITE else ""
    known = dtype in _DTYPES
    entries[name] = _Entry(data, _DTYPES.get(dtype, "U8"), list(data.shape) if known else [data.nbytes], floats)
    return name


def _flat_bytes(data: Any) -> np.ndarray:
    """Return the bytes of an array or tensor, copied where they are not in order in this machine's memory."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    flat = data.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(sys.modules["torch"].uint8).numpy()


def _copy(source: np.ndarray, target: np.ndarray, floats: str) -> bool:
    """Copy bytes, and return whether the floats in them are finite: each block is checked while it is in the cache."""
    finite = True
    for start in range(0, len(source), _BLOCK):
        block = target[start : start + _BLOCK]
        block[:] = source[start : start + _BLOCK]
        finite = finite and (not floats or _is_finite(block, floats))
    return finite


def _is_finite(raw: np.ndarray, dtype: str) -> bool:
    if dtype == "bfloat16":  # NumPy has none: an exponent of only ones is NaN or infinity
        return not ((raw.view(np.uint16) & 0x7F80) == 0x7F80).any()
    values = raw.view(dtype)
    # The sum of squares is finite when they all are, at the speed of BLAS; it may overflow without them.
    with np.errstate(all="ignore"):
        return (dtype != "float16" and math.isfinite(np.dot(values, values))) or bool(np.isfinite(values).all())


# ---------------------------------------------------------------------- from bytes


def _read_arrays(file: memoryview) -> dict[str, np.ndarray]:
    """Return the bytes, uint8 (N,), of a file's arrays. Raises ValueError where its table does not account for each
    byte once.

    A large array is a view of the file, a small one a copy: one that is kept longer must not keep the whole file.
    """
    first = 8 + int.from_bytes(file[:8], "little")
    table = parse_json(bytes(file[8:first]))
    flat, end, arrays = np.frombuffer(file[first:], np.uint8), 0, {}
    table.pop("__metadata__", None)
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start != end or stop - start != math.prod(entry["shape"]) * _ITEM_BYTES[entry["dtype"]]:
            raise ValueError(f"bytes {start} to {stop} for {entry['shape']} {entry['dtype']}")
        arrays[name] = flat[start:stop] if stop - start >= _SHARED else flat[start:stop].copy()
        end = stop
    if end != len(flat):
        raise ValueError(f"{len(flat)} bytes of arrays, {end} in the table")
    return arrays


def _unpack(node: Any, arrays: dict[str, np.ndarray], tensors: bool) -> Any:
    """Return the value of a node of the tree. Each array is taken once: a small file that names one again and again
    would fill the memory.
    """
    if isinstance(node, list):
        return [_unpack(item, arrays, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    [(tag, value)] = node.items()
    match tag:
        case "dict":
            return {key: _unpack(item, arrays, tensors) for key, item in value.items()}
        case "items":
            return {_unpack(key, arrays, tensors): _unpack(item, arrays, tensors) for key, item in value}
        case "tuple":
            return tuple(_unpack(item, arrays, tensors) for item in value)
        case "int":
            return int(value, 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(value))[0]
        case "bytes":
            return arrays.pop(value).tobytes()
        case "array":
            return _unpack_array(value, arrays)
        case "scalar":
            return _unpack_array(value, arrays)[()]
        case "tensor":
            return _unpack_tensor(value, arrays, tensors)
    raise CheckpointError("A state holds an unknown kind of value", got=repr(tag), next_step="update ml_factory")


def _unpack_array(value: list, arrays: dict[str, np.ndarray]) -> np.ndarray:
    name, dtype, shape = value
    if not _PLAIN_DTYPE.fullmatch(dtype):
        raise CheckpointError("A state holds an array of a kind that is never loaded", got=repr(dtype))
    return _writable(arrays.pop(name)).view(np.dtype(dtype)).reshape(shape)


def _unpack_tensor(value: list, arrays: dict[str, np.ndarray], tensors: bool) -> Any:
    name, dtype, shape = value
    if dtype not in _TENSORS:
        raise CheckpointError("A state holds a tensor of an unknown kind", got=dtype)
    raw = _writable(arrays.pop(name))
    if not tensors:
        return raw
    torch = import_module_or_explain("torch")
    kind = getattr(torch, dtype)
    if raw.size != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{raw.size} bytes for a tensor of {shape} {dtype}")
    return torch.frombuffer(raw, dtype=kind).reshape(shape) if raw.size else torch.empty(shape, dtype=kind)


def _writable(raw: np.ndarray) -> np.ndarray:
    """Return the bytes, copied where they cannot be written."""
    return raw if raw.flags.writeable else raw.copy()


def _unsupported_type(path: str, got: str) -> CheckpointError:
    return CheckpointError(
        "A state holds only numbers, texts, bytes, lists, dicts, NumPy arrays and tensors",
        where=path, got=got,
        next_step="keep its numbers, not the object (an estimator's get_state(), an array's .to_numpy())",
    )  # fmt: skip
