"""Damage: of a file's bytes, and of the values in a file whose hash is then made right again."""

import copy
import os
import pickle
import subprocess

import numpy as np

MARKER = "ML_FACTORY_FUZZ_MARKER"  # names the file that a pickle among the damage would make, were it ever opened


class _Command:
    """Unpickled, it makes the marker."""

    def __reduce__(self):
        return subprocess.call, (["touch", os.environ.get(MARKER, "/dev/null")],)


TOKENS = (
    b"NaN", b"1e999", b"-1", b"null", b"[" * 5_000, b'{"a":' * 5_000, b"9" * 4_300, b'"../../x"', b"\x00", b"true",
    b'"a":1,"a":2', b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"PK\x03\x04", b"-9223372036854775808",
)  # fmt: skip
ODD = (
    None, True, False, -1, 0, 1, 2**31, 10**18, -(10**18), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "",
    "x", "../../x", "\ud800", "a" * 5_000, "NaN", [], {}, [[]], [None], [1, 2, 3], {"a": 1}, ["a", "b"],
)  # fmt: skip
ODD_ARRAYS = (
    np.zeros(0), np.zeros((0, 3), np.float32), np.full(3, np.nan), np.array(5), np.array(["a", "b"]),
    np.zeros((2, 2), bool),
    np.array([-1, 2**31 - 1], np.int32), np.array([2**62], np.int64), np.full((3, 3), np.inf, np.float32), b"x" * 30,
)  # fmt: skip


def damaged_bytes(data: bytes, generator: np.random.Generator) -> bytes:
    """Return a changed copy of a file's bytes."""
    place, length = int(generator.integers(len(data) + 1)), int(generator.integers(1, 64))
    part = generator.bytes(length)
    token = TOKENS[int(generator.integers(len(TOKENS)))]
    return [
        lambda: data[:place],
        lambda: data[:place] + part + data[place + length :],
        lambda: data[:place] + part + data[place:],
        lambda: data[:place] + data[place + length :],
        lambda: data[:place] + data[max(0, place - length) : place] * 3 + data[place:],
        lambda: data[:place] + bytes(length) + data[place + length :],
        lambda: data[:place] + token + data[place + min(length, 4) :],
        lambda: data[:place] + bytes([data[place % len(data)] ^ (1 << int(generator.integers(8)))]) + data[place + 1 :],
        lambda: pickle.dumps(_Command()) if place % 4 == 0 else data[:place] + pickle.dumps(_Command()) + data[place:],
    ][int(generator.integers(9))]()


def damaged_value(value: object, generator: np.random.Generator, odd: tuple = ODD) -> object:
    """Return a deep copy of plain values with one of them changed, removed or put in twice."""
    value = copy.deepcopy(value)
    holders = list(_holders(value))
    if not holders:
        return odd[int(generator.integers(len(odd)))]
    holder, key = holders[int(generator.integers(len(holders)))]
    old, kind = holder[key], int(generator.integers(6))
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = [-old, old + 1, old * 10**6, old - 1, old / 3][int(generator.integers(5))]
    elif kind == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(old))
    elif kind == 3 and isinstance(holder, dict):
        holder[f"{key}x"[:40]] = holder.pop(key)
    elif isinstance(old, bytes) and generator.random() < 0.8:
        holder[key] = damaged_bytes(old, generator)
    elif isinstance(old, np.ndarray) or hasattr(old, "detach"):
        holder[key] = _damaged_array(old, generator)
    else:
        holder[key] = odd[int(generator.integers(len(odd)))]
    return value


def _holders(value: object):
    """Yield (dict or list, key) of every value inside."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _holders(value[key])


def _damaged_array(array, generator: np.random.Generator):
    """Return another array, or this one with other elements, a row more or less, or another type."""
    kind = int(generator.integers(6))
    if kind == 0:
        return ODD_ARRAYS[int(generator.integers(len(ODD_ARRAYS)))]
    if kind == 1:
        return array[:-1] if array.ndim else array
    if kind == 2:
        return array.reshape(-1)
    if kind == 3 and isinstance(array, np.ndarray) and array.dtype.kind in "iuf":
        return array.astype([np.float64, np.int64, np.int8, np.uint8][int(generator.integers(4))])
    changed = array.copy() if isinstance(array, np.ndarray) else array.clone()
    flat = changed.reshape(-1)
    for _ in range(int(generator.integers(1, 4))):
        if len(flat):
            place, odd = int(generator.integers(len(flat))), [0, 1, -1, 100, 2**20, 1e30]
            try:
                flat[place] = odd[int(generator.integers(len(odd)))]
            except (OverflowError, ValueError, RuntimeError, TypeError):
                flat[place] = 0
    return changed
