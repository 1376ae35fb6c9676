"""Removals in the mirror of a workspace: noted by the library's own deletions, made on the remote by the next push.

A file that is only missing stays there.
"""

import json
from contextlib import suppress
from pathlib import Path

from ml_factory.storage.json_values import parse_json

LEDGER, REMOVALS = ".mirror.json", ".mirror-removals"  # in the mirror's folder


def note_removal(path: Path) -> None:
    """Note the objects at or below this path, with their versions in the mirror's ledger; elsewhere do nothing."""
    path = path.absolute()
    mirror = next((folder for folder in path.parents if (folder / LEDGER).is_file()), None)
    if mirror is None:
        return
    with suppress(ValueError):  # a damaged ledger: nothing is removed
        name, ledger = path.relative_to(mirror).as_posix(), parse_json((mirror / LEDGER).read_bytes())
        with open(mirror / REMOVALS, "a", encoding="utf-8") as file:
            for one, facts in ledger.items():
                if one == name or one.startswith(f"{name}/"):
                    file.write(json.dumps([one, facts["version"]]) + "\n")


def noted_removals(mirror: Path) -> set[tuple[str, str]]:
    """Return (name, version) of the objects whose removal was noted in this mirror."""
    path = mirror / REMOVALS
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return {tuple(parse_json(line)) for line in lines}
