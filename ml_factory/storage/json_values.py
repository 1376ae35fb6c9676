"""JSON values: strict reading of files, conversion to what strict JSON can hold, and a canonical text's fingerprint."""

import hashlib
import json
import math
import os
import re
from typing import Any

LARGEST_JSON = 1 << 24  # bytes of a file
DEEPEST_JSON = 100
# An empty list takes three bytes in a file, and 64 in memory; a name five and 245, while its object is made.
_MOST_VALUES, _MOST_NAMES = 2_000_000, 500_000
_MOST_DIGITS = 20  # of an integer: 64 bits and a sign
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(
    text: bytes | str, *, largest: int | None = LARGEST_JSON, deepest: int = DEEPEST_JSON, finite: bool = True
) -> Any:
    """Parse strict JSON of a file that anyone may have written.

    Parameters
    ----------
    text : UTF-8 where it is bytes.
    largest : characters, and with them values; None for a state, which is as large as it is, and may hold half a
        surrogate pair.
    deepest : lists and objects inside each other.
    finite : refuse NaN and infinities, which JSON does not have.

    Raises ValueError, in one line, for text beyond these limits, a repeated name, an integer of more than 64 bits or
    half a surrogate pair, which later writing would fail on.
    """
    count = len(text)
    if largest is not None and count > largest:
        raise ValueError(f"{count:,} bytes, more than {largest:,}")
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    if largest is not None:
        _check_counts(text)
    try:
        value = (_STRICT if finite else _WITH_NAN).decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {deepest}") from None
    check_nesting(value, deepest)
    if largest is not None and _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_counts(text: str) -> None:
    values, names = text.count(",") + text.count("[") + text.count("{"), text.count(":")
    if values > _MOST_VALUES or names > _MOST_NAMES:
        raise ValueError(f"more than {_MOST_VALUES:,} values or {_MOST_NAMES:,} names")


def check_nesting(value: object, deepest: int = DEEPEST_JSON) -> None:
    """Raise ValueError where lists and dicts are nested deeper than `deepest`; without recursion."""
    level = [value]
    for _ in range(deepest):
        level = [
            item
            for holder in level if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder) if isinstance(item, dict | list)
        ]  # fmt: skip
        if not level:
            return
    raise ValueError(f"nested deeper than {deepest}")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {name[:40]!r} stands there twice")
    return found


def _parse_short_integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(text):,} digits")
    return int(text)


def _parse_finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not finite")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_STRICT = json.JSONDecoder(
    object_pairs_hook=_unique_names, parse_int=_parse_short_integer, parse_float=_parse_finite_float,
    parse_constant=_refuse_constant,
)  # fmt: skip
_WITH_NAN = json.JSONDecoder(object_pairs_hook=_unique_names, parse_int=_parse_short_integer)


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
