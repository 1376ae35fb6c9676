"""One kind of file that the library reads, and the damage of JSON."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.fuzz.damage import damaged_bytes, damaged_value

Damage = Callable[[bytes, np.random.Generator], bytes]


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    pattern : of its paths in the workspace.
    read : returns what the file gives, from the workspace.
    protected : by a hash: another result is a failure.
    damage : of its bytes.
    seal : makes the hashes of other files right after the damage; returns the files that it changed.
    """

    pattern: str
    read: Callable[[Path], object]
    protected: bool = True
    damage: Damage = damaged_bytes
    seal: Callable[[Path, Path], list[Path]] | None = None


def damaged_json(data: bytes, generator: np.random.Generator, seal: str = "") -> bytes:
    """Change a value in JSON; half of the time bytes. seal : the name under which it keeps its own fingerprint."""
    from ml_factory.storage.json_values import fingerprint_json

    if not seal and generator.random() < 0.3:
        return damaged_bytes(data, generator)
    value = damaged_value(json.loads(data), generator)
    if seal and isinstance(value, dict) and seal in value:
        content = {name: one for name, one in value.items() if name != seal}
        with suppress(ValueError):  # not finite: the file cannot have a right fingerprint
            value = {**content, seal: fingerprint_json(content)}
    return json.dumps(value).encode()
