"""JSON values: strict reading of files, conversion to what strict JSON can hold, and a canonical text's fingerprint."""

import hashlib
import json
import math
import os
from typing import Any

_MOST_DIGITS = 20  # of an integer: 64 bits and a sign


def parse_json(text: bytes | str, *, finite: bool = True) -> Any:
    """Parse strict JSON of a file that anyone may have written.

    text : UTF-8 where it is bytes.
    finite : refuse NaN and infinities, which JSON does not have.

    Raises ValueError, in one line, also for an integer of more than 64 bits.
    """
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    try:
        return (_STRICT if finite else _WITH_NAN).decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parse_short_integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(text):,} digits")
    return int(text)


def _parse_finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not finite")
    return value


_WITH_NAN = json.JSONDecoder(parse_int=_parse_short_integer)
_STRICT = json.JSONDecoder(
    parse_int=_parse_short_integer, parse_float=_parse_finite_float, parse_constant=_parse_finite_float
)


def fingerprint_json(obj: object) -> str:
    """Return the SHA-256 (64 hex digits) of the canonical JSON of `obj`, independent of key order."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def to_json_value(obj: object) -> Any:
    """Convert `obj` to strict JSON values: NumPy numbers to Python's, NaN and infinity to None, tuples to lists,
    paths to strings. Raises TypeError for any other type.
    """
    if hasattr(obj, "item") and not hasattr(obj, "__len__"):
        obj = obj.item()
    if isinstance(obj, dict):
        return {str(key): to_json_value(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [to_json_value(value) for value in obj]
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    raise TypeError(f"JSON cannot hold a {type(obj).__name__}: {obj!r}")
