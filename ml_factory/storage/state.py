"""A nested state as bytes and back, exactly: arrays in safetensors, the tree around them in JSON, no pickle.

One safetensors file holds each array under a running number, and under `tree` the JSON that says where each belongs.
In that JSON a list is a list of the state, and an object is always a tag: {"dict": {...}}, {"array": ["3", "<f4"]}.
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
from safetensors import SafetensorError
from safetensors.numpy import load

from ml_factory.errors import CheckpointError
from ml_factory.lazy_module import import_module
from ml_factory.storage.atomic_files import read_file, write_bytes_atomic
from ml_factory.storage.safetensors_layout import Layout, TensorEntry

VERSION = 1
_TREE = "tree"
_DEEPEST = 100
_PLAIN_DTYPE = re.compile(r"[<>|]([biufcmM])(\d{1,2})(\[\d*[A-Za-zμ]{1,7}\])?|[<>|][US]\d{1,9}")
# What safetensors and NumPy both have; the rest travels as raw bytes under its name.
_NATIVE_TENSORS = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
_RAW_TENSORS = {"uint16", "uint32", "uint64", "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"}
_MUST_BE_FINITE = {"float16", "bfloat16", "float32", "float64"}
# Arrays below these names are what training changes; other arrays (forecasts, features) may hold NaN.
_TRAINED = re.compile(r"\['(network|model|module|weights|params|parameters|optimizer|ema|coef|state_dict)'\]")


def plan_layout(state: dict, *, finite: bool = False) -> Layout:
    """Where the state's values go in its bytes; nothing is copied before `Layout.fill`.

    state : dict of None, bool, int, float, str, bytes, list, tuple, dict (keys str or int), NumPy arrays and scalars
    of plain dtypes, torch tensors. Raises CheckpointError naming the path of anything else, such as ['opt']['fn'].
    finite : torch tensors, and arrays under a name such as 'weights' or 'optimizer', must be; `fill` refuses them.
    A tensor with 'mask' in its name may hold infinities.
    """
    if not isinstance(state, dict):
        raise CheckpointError("A state is a dict", got=type(state).__name__, wanted="dict")
    blobs: dict[str, TensorEntry] = {}
    tree = {"version": VERSION, "state": _pack(state, "state", blobs, 0)}
    if not finite:
        blobs = {name: replace(blob, floats="") for name, blob in blobs.items()}
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    words = np.frombuffer(text.encode(), np.uint8)
    return Layout({**blobs, _TREE: TensorEntry(words, words.shape, _TREE)})


def encode_state(state: dict) -> bytes:
    """The state's values, copied as they are now; equal states give equal bytes. As `plan_layout` takes and refuses."""
    layout = plan_layout(state)
    data = bytearray(layout.size)
    layout.fill(memoryview(data))
    return bytes(data)


def decode_state(data: bytes) -> dict:
    """The state `encode_state` was given. Tensors come back as torch tensors on the CPU, OrderedDicts as dicts.

    Raises CheckpointError when the bytes are torn, are not a state, or were written by a later version.
    """
    try:
        blobs = load(bytes(data))
        tree = json.loads(bytes(blobs.pop(_TREE)))
        version = tree["version"]
        if type(version) is int and version > VERSION:
            raise CheckpointError(
                "A later version of ml_factory wrote this state",
                got=f"version {version}",
                wanted=f"at most {VERSION}",
                next_step="update ml_factory",
            )
        state = _unpack(tree["state"], blobs)
    except CheckpointError:
        raise
    except (SafetensorError, ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise CheckpointError("These bytes are not a whole state", got=f"{type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError("These bytes are not a state", got=type(state).__name__, wanted="dict")
    return state


def save_state(path: str | os.PathLike, state: dict) -> None:
    """Write the state to one file in one step. Raises CheckpointError, or WorkspaceError when the disk is full."""
    write_bytes_atomic(path, encode_state(state))


def load_state(path: str | os.PathLike) -> dict:
    """Read a state that `save_state` wrote. Raises CheckpointError naming the file, WorkspaceError when absent."""
    data = read_file(path)
    try:
        return decode_state(data)
    except CheckpointError as error:
        raise CheckpointError("This state cannot be loaded", where=path, got=error) from error


def _pack(value: object, path: str, blobs: dict[str, TensorEntry], depth: int) -> object:
    """The JSON node for one value; what JSON cannot hold exactly goes to `blobs`. Types are exact: a subclass would
    come back as something else."""
    if depth > _DEEPEST:
        raise CheckpointError("A state is nested too deeply; does a container hold itself?", where=path)
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < 1 << 63 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is bytes or kind is bytearray:
        return {kind.__name__: _keep(np.frombuffer(value, np.uint8), path, blobs)}
    if kind is list or kind is tuple:
        items = [_pack(item, f"{path}[{i}]", blobs, depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, dict):
        return _pack_dict(value, path, blobs, depth)
    if isinstance(value, np.generic):
        return {"scalar": _pack_array(np.asarray(value), path, blobs)}
    if kind is np.ndarray or kind is np.memmap:
        return {"array": _pack_array(value, path, blobs)}
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        return {"tensor": _pack_tensor(value, path, blobs)}
    raise _refusal(path, f"{kind.__module__}.{kind.__qualname__}")


def _pack_dict(value: dict, path: str, blobs: dict[str, TensorEntry], depth: int) -> dict:
    for key in value:
        if type(key) is not str and type(key) is not int:
            raise _refusal(path, f"the key {key!r} of type {type(key).__name__}")
    items = {key: _pack(item, f"{path}[{key!r}]", blobs, depth + 1) for key, item in value.items()}
    if all(type(key) is str for key in items):
        return {"dict": items}
    return {"items": [[_pack(key, path, blobs, 0), item] for key, item in items.items()]}


def _pack_array(array: np.ndarray, path: str, blobs: dict[str, TensorEntry]) -> list:
    """[blob, dtype, shape]. Dtypes that safetensors lacks (dates, texts, big-endian) are kept as raw bytes."""
    if not _PLAIN_DTYPE.fullmatch(array.dtype.str) or array.dtype.itemsize == 0:
        raise _refusal(path, f"an array of dtype {array.dtype}")
    flat = np.ascontiguousarray(array).reshape(-1)
    native = array.dtype.kind in "biuf" and array.dtype.itemsize <= 8 and array.dtype.isnative
    if not native:
        flat = np.frombuffer(flat.tobytes(), np.uint8)
    floats = array.dtype.name if native and array.dtype.kind == "f" and _TRAINED.search(path) else ""
    kept = flat.reshape(array.shape) if native else flat
    return [_keep(kept, path, blobs, floats), array.dtype.str, list(array.shape)]


def _pack_tensor(tensor, path: str, blobs: dict[str, TensorEntry]) -> list:
    name = str(tensor.dtype).removeprefix("torch.")
    torch = sys.modules["torch"]
    if name not in _NATIVE_TENSORS | _RAW_TENSORS or tensor.layout is not torch.strided:
        raise _refusal(path, f"a tensor of {name}, {tensor.layout}")
    floats = name if name in _MUST_BE_FINITE and "mask" not in path.rpartition("[")[2] else ""
    if tensor.device.type == "cuda":  # stays there until it is copied into pinned pages
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        blob = str(len(blobs))
        blobs[blob] = TensorEntry(flat, (flat.numel() * flat.element_size(),), path, floats)
        return [blob, name, list(tensor.shape)]
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    array = flat.numpy().reshape(tuple(tensor.shape)) if name in _NATIVE_TENSORS else flat.view(torch.uint8).numpy()
    return [_keep(array, path, blobs, floats), name, list(tensor.shape)]


def _keep(array: np.ndarray, path: str, blobs: dict[str, TensorEntry], floats: str = "") -> str:
    name = str(len(blobs))
    blobs[name] = TensorEntry(array.reshape(-1), tuple(array.shape), path, floats)
    return name


def _unpack(node: object, blobs: dict[str, np.ndarray]) -> object:
    if isinstance(node, list):
        return [_unpack(item, blobs) for item in node]
    if not isinstance(node, dict):
        return node
    [(tag, value)] = node.items()
    if tag == "dict":
        return {key: _unpack(item, blobs) for key, item in value.items()}
    if tag == "items":
        return {_unpack(key, blobs): _unpack(item, blobs) for key, item in value}
    if tag == "tuple":
        return tuple(_unpack(item, blobs) for item in value)
    if tag == "int":
        return int(value, 16)
    if tag == "float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if tag == "bytes":
        return blobs[value].tobytes()
    if tag == "bytearray":
        return bytearray(blobs[value].tobytes())
    if tag == "array":
        return _unpack_array(value, blobs)
    if tag == "scalar":
        return _unpack_array(value, blobs)[()]
    if tag == "tensor":
        return _unpack_tensor(value, blobs)
    raise CheckpointError("A state holds an unknown kind of value", got=repr(tag), next_step="update ml_factory")


def _unpack_array(value: list, blobs: dict[str, np.ndarray]) -> np.ndarray:
    name, dtype, shape = value
    if not _PLAIN_DTYPE.fullmatch(dtype):
        raise CheckpointError("A state holds an array of a kind that is never loaded", got=repr(dtype))
    return _as_bytes(blobs[name]).view(np.dtype(dtype)).reshape(_counts(shape))


def _unpack_tensor(value: list, blobs: dict[str, np.ndarray]):
    name, dtype, shape = value
    if dtype not in _NATIVE_TENSORS | _RAW_TENSORS:
        raise CheckpointError("A state holds a tensor of an unknown kind", got=dtype)
    try:
        torch = import_module("torch")
        kind = getattr(torch, dtype)
    except AttributeError as error:
        raise CheckpointError("This state holds torch tensors", got=error, next_step="install a newer torch") from error
    raw, shape = _as_bytes(blobs[name]), _counts(shape)
    if raw.size != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{raw.size} bytes for a tensor of {shape} {dtype}")
    return torch.frombuffer(raw, dtype=kind).reshape(shape) if raw.size else torch.empty(shape, dtype=kind)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """uint8[N], writable, sharing memory where it can."""
    flat = array.reshape(-1).view(np.uint8)
    return flat if flat.flags.writeable else flat.copy()


def _counts(shape: list) -> tuple[int, ...]:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"a shape of {shape}")
    return tuple(shape)


def _refusal(path: str, got: str) -> CheckpointError:
    return CheckpointError(
        "A state holds only numbers, texts, bytes, lists, dicts, NumPy arrays and tensors",
        where=path,
        got=got,
        next_step="keep its numbers, not the object (an estimator's get_state(), an array's .to_numpy())",
    )
