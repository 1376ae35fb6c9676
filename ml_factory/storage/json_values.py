"""JSON values: conversion to what strict JSON can hold, and the fingerprint of their canonical text."""

import hashlib
import json
import math
import os
from typing import Any


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
