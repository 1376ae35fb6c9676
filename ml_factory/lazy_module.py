"""Modules that are imported when they are first used: a command answers before it loads what its work needs, and a
package of an extra that is not installed is an error of one line."""

import importlib
from types import ModuleType
from typing import Any

from ml_factory.errors import MissingPackageError

# Package -> the extra of this library that installs it (requirements/EXTRA.txt).
EXTRAS = {
    "torch": "train", "xgboost": "train", "lightgbm": "train", "catboost": "train", "optuna": "train",
    "papermill": "notebooks", "nbformat": "notebooks", "ipykernel": "notebooks", "ipywidgets": "notebooks",
    "IPython": "notebooks", "wandb": "track", "gcsfs": "gs", "fsspec": "gs",
}  # fmt: skip


class LazyModule:
    """Stands for the module `dotted` and imports it when a name of it is first read."""

    def __init__(self, dotted: str):
        self._dotted = dotted

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._dotted), name)


def import_module(dotted: str) -> ModuleType:
    """Import a module. Raises MissingPackageError naming the extra, where it needs a package that is not installed."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise missing_package(package) from error


def missing_package(package: str) -> MissingPackageError:
    """The error for a package of an extra that is not installed."""
    extra = EXTRAS[package]
    return MissingPackageError(
        f"The package {package} is not installed",
        next_step=f"pip install 'ml_factory[{extra}]' (in a checkout: pip install '.[{extra}]', or make setup)",
    )
