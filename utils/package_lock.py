"""Requirements with hashes for what a runtime lacks, taken from a lock file of `requirements/locked`."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = re.compile(r"^([A-Za-z0-9._-]+)==.*\n(?:[ \t].*\n?)*", re.MULTILINE)
_REQUIRED_BY = re.compile(r"^ +#(?: via)? +([A-Za-z0-9._-]+)$", re.MULTILINE)


@dataclass(frozen=True)
class LockedPackage:
    """One package of a lock file.

    Parameters
    ----------
    name : normalized name (PEP 503).
    text : its lines: version, marker and hashes.
    required_by : normalized names of the packages that require it; a file that lists it is none.
    """

    name: str
    text: str
    required_by: frozenset[str]


def read_package_lock(path: Path) -> dict[str, LockedPackage]:
    """Return the packages of a lock file by normalized name; one locked twice, for two platforms, has both texts."""
    found: dict[str, LockedPackage] = {}
    for match in _PACKAGE.finditer(path.read_text(encoding="utf-8")):
        name, before = normalize_package_name(match[1]), found.get(normalize_package_name(match[1]))
        by = {normalize_package_name(one) for one in _REQUIRED_BY.findall(match[0])} - {"via"}
        found[name] = LockedPackage(
            name, (before.text if before else "") + match[0], (before.required_by if before else frozenset()) | by
        )
    return found


def locked_closure(
    lock: dict[str, LockedPackage], wanted: Iterable[str], is_installed: Callable[[str], bool]
) -> list[LockedPackage]:
    """Return the wanted packages and all that they require, without what is installed already.

    Parameters
    ----------
    lock : packages by name, as of `read_package_lock`.
    wanted : names of packages, installed in another version or not at all.
    is_installed : whether a package of this name is installed; what only an installed package requires is left out.

    Raises KeyError for a wanted name that the lock lacks.
    """
    chosen = {normalize_package_name(name) for name in wanted}
    if absent := chosen - lock.keys():
        raise KeyError(*sorted(absent))
    size = 0
    while size < len(chosen):
        size = len(chosen)
        chosen |= {one.name for one in lock.values() if one.required_by & chosen and not is_installed(one.name)}
    return [one for name, one in sorted(lock.items()) if name in chosen]


def normalize_package_name(name: str) -> str:
    """Return the name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
