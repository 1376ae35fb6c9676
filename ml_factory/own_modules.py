"""Modules of the user, which define features or networks: code that runs, named with a command, never by a file."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ml_factory.argument_checks import check_file_exists
from ml_factory.errors import FactoryError, SettingsError


def import_own_modules(names: Sequence[str]) -> None:
    """Import modules by name, as Python finds them, or from .py files, whose file name is the module's name.

    Raises FileError where there is no such file, SettingsError for a module that cannot be imported, and what its own
    features and networks are refused with.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(check_file_exists(Path(name).expanduser(), "one .py file").resolve())
            else:
                importlib.import_module(name)
        except FactoryError:
            raise
        except (Exception, SystemExit) as error:
            raise SettingsError(
                "This module cannot be imported", where=f"--import {name}",
                got=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                wanted="a module that defines features with @feature, or networks",
                next_step="give its .py file, or run from the folder it is in",
            ) from error  # fmt: skip


def _import_file(path: Path) -> None:
    """Import a file as the module of its name, its folder first in the search, unless it was imported before."""
    importlib.invalidate_caches()
    sys.path.insert(0, str(path.parent))
    try:
        module = importlib.import_module(path.stem) if path.stem.isidentifier() else None
    finally:
        sys.path.remove(str(path.parent))
    if module is None or Path(module.__file__ or "").resolve() != path:
        raise SettingsError(
            "A module cannot be called as this file is", where="--import", got=path.stem,
            wanted="letters, digits and underscores, and the name of no other module", next_step="rename the file",
        )  # fmt: skip
