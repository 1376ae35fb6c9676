"""Modules with the user's own features and networks, named on the command line: `--import`.

Such a module is code that runs. Its name is therefore typed with the command, and never read from a workspace, a
bundle or a file of options.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path

from ml_factory.argument_checks import check_file_exists
from ml_factory.errors import FactoryError, SettingsError


def import_own_modules(names: Sequence[str]) -> None:
    """Import modules by name, as Python finds them, or from .py files, whose file name is the module's name.

    Raises BarsError where there is no such file, SettingsError for a module that cannot be imported, and what its own
    features and networks are refused with.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(check_file_exists(Path(name).expanduser()).resolve())
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
    """Import a file as a module called as the file is, unless it was before."""
    name = path.stem
    if name in sys.modules and _file_of(sys.modules[name].__spec__) == path:
        return
    usable = name.isidentifier() and name not in sys.modules
    found = importlib.util.find_spec(name) if usable else None
    if not usable or (found is not None and _file_of(found) != path):
        raise SettingsError(
            "A module cannot be called as this file is", where="--import", got=name,
            wanted="letters, digits and underscores, and the name of no other module", next_step="rename the file",
        )  # fmt: skip
    loader = SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None  # of a loader that is given
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _file_of(spec: ModuleSpec | None) -> Path | None:
    return Path(spec.origin).resolve() if spec and spec.origin else None
