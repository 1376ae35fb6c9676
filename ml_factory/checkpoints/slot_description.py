"""Descriptions of slots, as anyone may have written them: every field has its type and its range, or none is used."""

import math
import re
from collections.abc import Callable

LARGEST_COUNT = 1 << 62  # of a sequence, which the seal holds in 64 bits, of a fence and of a metric
MOST_METRICS = 10_000
# Status of a slot, in its manifest.
HELD, WRITING, QUARANTINED, RETURNED = "held", "writing", "quarantined", "returned"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,254}")  # it becomes part of a file's name
_HASH = re.compile(r"[0-9a-f]{1,64}")
_NOT_FINITE = ("nan", "inf", "-inf")


def check_container_info(info: object) -> None:
    """Raise ValueError, naming the field, where this is not the metadata that `write_checkpoint_file` writes."""
    _check_fields(info, _CONTAINER, "the description")
    if "sequence" not in info:
        raise ValueError("the description has no sequence")


def check_slot_manifest(manifest: object) -> dict:
    """Return the manifest. Raises ValueError, naming the field, where it is not one that a pool writes."""
    return _check_fields(manifest, _MANIFEST, "the manifest")


def check_lease_record(record: object) -> dict:
    """Return the lease. Raises ValueError, naming the field, where it is not one that a session writes; names that are
    not known yet are ignored.
    """
    if not isinstance(record, dict):
        raise ValueError("the lease is no object")
    _check_fields({name: value for name, value in record.items() if name in _LEASE}, _LEASE, "the lease")
    if "fence" not in record or "seen" not in record:
        raise ValueError("the lease has no fence, or no time")
    return record


def _check_fields(fields: object, checks: dict[str, Callable[[object], bool]], what: str) -> dict:
    if not isinstance(fields, dict):
        raise ValueError(f"{what} is no object")
    for name, value in fields.items():
        if name not in checks:
            raise ValueError(f"{what} has an unknown field {name[:40]!r}")
        if not checks[name](value):
            raise ValueError(f"{name} in {what} is {repr(value)[:60]}")
    return fields


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 10_000


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _is_time(value: object) -> bool:
    """Seconds since 1970."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12


def _is_date(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 40 and value.isascii() and value.isprintable()


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _is_writer(value: object) -> bool:
    fields = {"session": _is_text, "fence": _is_count}
    return isinstance(value, dict) and all(name in fields and fields[name](one) for name, one in value.items())


def _is_metric(value: object) -> bool:
    if isinstance(value, dict):
        return list(value) == ["float"] and value["float"] in _NOT_FINITE
    if isinstance(value, int | float):
        return math.isfinite(value) if isinstance(value, float) else abs(value) <= LARGEST_COUNT
    return value is None or isinstance(value, str)


def _are_metrics(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= MOST_METRICS and all(map(_is_metric, value.values()))


def _is_status(value: object) -> bool:
    return value in (HELD, WRITING, QUARANTINED, RETURNED)


_CONTAINER: dict[str, Callable[[object], bool]] = {
    "run": _is_name, "phase": _is_name, "saved_at": _is_date, "sequence": _is_count, "lease": _is_writer,
    "metrics": _are_metrics,
}  # fmt: skip
_MANIFEST = _CONTAINER | {
    "status": _is_status, "hash": _is_hash, "bytes": _is_count, "session": _is_text, "reason": _is_text,
    "host": _is_text, "lock": _is_text, "returned_at": _is_time,
}  # fmt: skip
_LEASE: dict[str, Callable[[object], bool]] = {
    "run": _is_name, "phase": _is_name, "session": _is_text, "fence": _is_count, "lock": _is_text, "boot": _is_text,
    "host": _is_text, "beat": _is_count, "seen": _is_time, "kept": _is_truth, "released": _is_truth,
}  # fmt: skip
