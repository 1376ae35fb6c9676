"""Nested state to bytes and back, exactly: arrays in safetensors, the tree around them in JSON, no pickle.

One safetensors file holds each array under its position in the state, such as ['network']['0.weight'], and under `tree`
the JSON of the state. In it a list is a list of the state, and an object is always a tag: {"dict": {...}},
{"array": ["['loss']", "<f4", [2, 3]]}. Files of earlier versions number the arrays.
Reading runs no code: every type named in a file is looked up in a fixed list.
"""

import json
import math
import os
import re
import struct
import sys
from dataclasses import replace

import numpy as np

from ml_factory.errors import MORE_MEMORY, CheckpointError, WorkspaceError
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.safetensors_header import split_safetensors_header
from ml_factory.storage.safetensors_layout import DTYPES, SafetensorsLayout, TensorEntry

VERSION = 1
_TREE = "tree"
_MAX_DEPTH = 100
_DEEPEST_TREE = 4 * _MAX_DEPTH  # a dict of a state whose keys are numbers takes three levels of JSON
_PLAIN_DTYPE = re.compile(r"[<>|]([biufcmM])(\d{1,2})(\[\d*[A-Za-zμ]{1,7}\])?|[<>|][US]\d{1,9}")
# Dtypes that safetensors and NumPy both have; others are stored as raw bytes with their dtype's name.
_NUMPY_NAMES = {name: dtype for dtype, name in DTYPES.items()}
_SHARED = 1 << 16  # bytes of an array that is not copied
_TENSORS = {*DTYPES, "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"}
_MUST_BE_FINITE = {"float16", "bfloat16", "float32", "float64"}
# Arrays below these names are trained parameters; other arrays (forecasts, features) may hold NaN.
_TRAINED = re.compile(r"\['(network|model|module|weights|params|parameters|optimizer|ema|coef|state_dict)'\]")


def plan_state_layout(state: dict, *, finite: bool = False) -> SafetensorsLayout:
    """Compute the offset of each value of a state; nothing is copied before `Layout.fill`.

    Parameters
    ----------
    state : dict of None, bool, int, float, str, bytes, list, tuple, dict (keys str or int), NumPy arrays and scalars of
        plain dtypes, torch tensors.
    finite : torch tensors, and arrays below a name such as 'weights' or 'optimizer', must be finite; `fill` refuses
        others. A tensor with 'mask' in its name may hold infinities.

    Raises CheckpointError naming the path of any other value, such as ['opt']['fn'].
    """
    if not isinstance(state, dict):
        raise CheckpointError("A state is a dict", got=type(state).__name__, wanted="dict")
    entries: dict[str, TensorEntry] = {}
    tree = {"version": VERSION, "state": _pack(state, "state", entries, 0)}
    if not finite:
        entries = {name: replace(blob, floats="") for name, blob in entries.items()}
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    encoded = np.frombuffer(text.encode(), np.uint8)
    return SafetensorsLayout({**entries, _TREE: TensorEntry(encoded, "uint8", encoded.shape)})


def serialize_state(state: dict) -> bytes:
    """Copy the state's present values to bytes; equal states give equal bytes. Arguments and errors as of
    `plan_state_layout`.
    """
    layout = plan_state_layout(state)
    data = bytearray(layout.size)
    layout.fill(memoryview(data))
    return bytes(data)


def deserialize_state(data: bytes | bytearray | memoryview, *, tensors: bool = True) -> dict:
    """Return the state that `serialize_state` was given. Tensors come back as CPU tensors, OrderedDicts as dicts.

    data : where it can be written, large arrays of the state are views of it: the state is in memory once.
    tensors : False: torch is not needed, a tensor comes back as its bytes, uint8 (N,).

    Raises CheckpointError when the bytes are torn, are not a state, or were written by a later version.
    """
    try:
        arrays = _read_arrays(memoryview(data))
        arrays.tensors = tensors
        tree = parse_json(bytes(arrays.pop(_TREE)), largest=None, deepest=_DEEPEST_TREE)
        version = tree["version"]
        if type(version) is int and version > VERSION:
            raise CheckpointError(
                "A later version of ml_factory wrote this state", got=f"version {version}",
                wanted=f"at most {VERSION}", next_step="update ml_factory",
            )  # fmt: skip
        state = _unpack(tree["state"], arrays)
        if arrays:
            raise ValueError(f"{len(arrays)} arrays that no value names, such as {min(arrays)[:60]!r}")
    except CheckpointError:
        raise
    except (
        ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, struct.error
    ) as error:  # fmt: skip
        raise CheckpointError("These bytes are not a whole state", got=f"{type(error).__name__}: {error}") from error
    except MemoryError as error:  # no damage: an older checkpoint must not be taken for it
        raise WorkspaceError("This state needs more memory than there is", next_step=MORE_MEMORY) from error
    if not isinstance(state, dict):
        raise CheckpointError("These bytes are not a state", got=type(state).__name__, wanted="dict")
    return state


def write_state_file(path: str | os.PathLike, state: dict) -> None:
    """Write the state to one file in one step. Raises CheckpointError, or WorkspaceError when the disk is full."""
    files.write(path, serialize_state(state))


def read_state_file(path: str | os.PathLike) -> dict:
    """Read a state that `write_state_file` wrote. Raises CheckpointError naming the file, WorkspaceError when it does
    not exist.
    """
    data = files.read(path)
    try:
        return deserialize_state(data)
    except CheckpointError as error:
        raise CheckpointError("This state cannot be loaded", where=path, got=error) from error


def _pack(value: object, path: str, entries: dict[str, TensorEntry], depth: int) -> object:
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
    if kind is bytes or kind is bytearray:
        return {kind.__name__: _add_entry(np.frombuffer(value, np.uint8), path, entries)}
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
        return {"tensor": _pack_tensor(value, path, entries)}
    raise _unsupported_type(path, f"{kind.__module__}.{kind.__qualname__}")


def _pack_dict(value: dict, path: str, entries: dict[str, TensorEntry], depth: int) -> dict:
    for key in value:
        if type(key) is not str and type(key) is not int:
            raise _unsupported_type(path, f"the key {key!r} of type {type(key).__name__}")
    items = {key: _pack(item, f"{path}[{key!r}]", entries, depth + 1) for key, item in value.items()}
    if all(type(key) is str for key in items):
        return {"dict": items}
    return {"items": [[_pack(key, path, entries, 0), item] for key, item in items.items()]}


def _pack_array(array: np.ndarray, path: str, entries: dict[str, TensorEntry]) -> list:
    """Return [entry, dtype, shape]. Dtypes that safetensors lacks (dates, texts, big-endian) are stored as raw
    bytes.
    """
    if not _PLAIN_DTYPE.fullmatch(array.dtype.str) or array.dtype.itemsize == 0:
        raise _unsupported_type(path, f"an array of dtype {array.dtype}")
    flat, shape, name = np.ascontiguousarray(array).reshape(-1), list(array.shape), array.dtype.name
    if name not in DTYPES or not array.dtype.isnative:
        flat, name = np.frombuffer(flat.tobytes(), np.uint8), ""
    floats = name if name in _MUST_BE_FINITE and _TRAINED.search(path) else ""
    return [_add_entry(flat, path, entries, name, shape, floats), array.dtype.str, shape]


def _pack_tensor(tensor, path: str, entries: dict[str, TensorEntry]) -> list:
    name, shape, torch = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), sys.modules["torch"]
    if name not in _TENSORS or tensor.layout is not torch.strided:
        raise _unsupported_type(path, f"a tensor of {name}, {tensor.layout}")
    floats = name if name in _MUST_BE_FINITE and "mask" not in path.rpartition("[")[2] else ""
    on_device = tensor.device.type == "cuda"  # stays on the device until it is copied into pinned pages
    flat = (tensor if on_device else tensor.cpu()).detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat if on_device else flat.view(torch.uint8).numpy()
    return [_add_entry(data, path, entries, name if name in DTYPES else "", shape, floats), name, shape]


def _add_entry(
    data, path: str, entries: dict[str, TensorEntry], dtype: str = "", shape: list[int] = (), floats: str = ""
) -> str:
    """Add an array or a device tensor under its position in the state; return that name.

    dtype, shape : as other readers see the values; raw bytes without a dtype.
    """
    name = path.removeprefix("state")
    entries[name] = TensorEntry(data, dtype or "uint8", tuple(shape) if dtype else (data.nbytes,), floats)
    return name


class _Arrays(dict[str, np.ndarray]):
    """Bytes uint8[N] of a file's arrays by name; each is taken once. tensors : whether torch makes tensors of
    theirs.
    """

    tensors = True


def _read_arrays(file: memoryview) -> _Arrays:
    """Return the arrays of a safetensors file. Raises ValueError where its table does not account for each byte once.

    A large array is a view of the file, a small one a copy: one that is kept longer must not keep the whole file.
    """
    header, tensors = split_safetensors_header(file)
    table, flat, end = parse_json(header, largest=None), np.frombuffer(tensors, np.uint8), 0
    table.pop("__metadata__", None)
    arrays = _Arrays()
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        (start, stop), itemsize = entry["data_offsets"], np.dtype(_NUMPY_NAMES[entry["dtype"]]).itemsize
        if start != end or stop - start != math.prod(_check_shape(entry["shape"])) * itemsize:
            raise ValueError(f"bytes {start} to {stop} for {entry['shape']} {entry['dtype']}")
        arrays[name] = flat[start:stop] if stop - start >= _SHARED else flat[start:stop].copy()
        end = stop
    if end != len(flat):
        raise ValueError(f"{len(flat)} bytes of arrays, {end} in the table")
    return arrays


def _unpack(node: object, arrays: _Arrays) -> object:
    if isinstance(node, list):
        return [_unpack(item, arrays) for item in node]
    if not isinstance(node, dict):
        return node
    [(tag, value)] = node.items()
    if tag not in _DECODERS:
        raise CheckpointError("A state holds an unknown kind of value", got=repr(tag), next_step="update ml_factory")
    return _DECODERS[tag](value, arrays)


def _unpack_array(value: list, arrays: _Arrays) -> np.ndarray:
    name, dtype, shape = value
    if not _PLAIN_DTYPE.fullmatch(dtype):
        raise CheckpointError("A state holds an array of a kind that is never loaded", got=repr(dtype))
    return _check_values(_writable(arrays.pop(name)).view(np.dtype(dtype))).reshape(_check_shape(shape))


def _unpack_tensor(value: list, arrays: _Arrays):
    name, dtype, shape = value
    if dtype not in _TENSORS:
        raise CheckpointError("A state holds a tensor of an unknown kind", got=dtype)
    if not arrays.tensors:
        return _writable(arrays.pop(name))
    try:
        torch = import_module_or_explain("torch")
        kind = getattr(torch, dtype)
    except AttributeError as error:
        raise CheckpointError("This state holds torch tensors", got=error, next_step="install a newer torch") from error
    raw, shape = _writable(arrays.pop(name)), _check_shape(shape)
    if raw.size != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{raw.size} bytes for a tensor of {shape} {dtype}")
    return torch.frombuffer(raw, dtype=kind).reshape(shape) if raw.size else torch.empty(shape, dtype=kind)


def _writable(raw: np.ndarray) -> np.ndarray:
    """Return the bytes, copied where they cannot be written."""
    return raw if raw.flags.writeable else raw.copy()


def _check_values(array: np.ndarray) -> np.ndarray:
    """Return the array. Raises ValueError for bytes that are no truth value or no letter: using them would fail."""
    if array.dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise ValueError("a truth value that is neither 0 nor 1")
    if array.dtype.kind == "U" and array.size:
        letters = array.view(array.dtype.byteorder.replace("|", "=") + "u4") if array.dtype.itemsize else array
        if letters.max() > sys.maxunicode:
            raise ValueError("a letter that does not exist")
    return array


def _check_shape(shape: list) -> tuple[int, ...]:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"a shape of {shape}")
    return tuple(shape)


_DECODERS = {
    "dict": lambda value, arrays: {key: _unpack(item, arrays) for key, item in value.items()},
    "items": lambda value, arrays: {_unpack(key, arrays): _unpack(item, arrays) for key, item in value},
    "tuple": lambda value, arrays: tuple(_unpack(item, arrays) for item in value),
    "int": lambda value, arrays: int(value, 16),
    "float": lambda value, arrays: struct.unpack(">d", bytes.fromhex(value))[0],
    # Each array is named once: a small file that names one again and again would fill the memory.
    "bytes": lambda value, arrays: arrays.pop(value).tobytes(),
    "bytearray": lambda value, arrays: bytearray(arrays.pop(value).tobytes()),
    "array": _unpack_array,
    "scalar": lambda value, arrays: _unpack_array(value, arrays)[()],
    "tensor": _unpack_tensor,
}


def _unsupported_type(path: str, got: str) -> CheckpointError:
    return CheckpointError(
        "A state holds only numbers, texts, bytes, lists, dicts, NumPy arrays and tensors",
        where=path, got=got,
        next_step="keep its numbers, not the object (an estimator's get_state(), an array's .to_numpy())",
    )  # fmt: skip
