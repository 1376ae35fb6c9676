"""Modules that are imported on first use, so that a command starts before its heavy imports."""

import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ml_factory.errors import MissingPackageError

# Package -> the extra of this library that installs it (requirements/EXTRA.txt).
EXTRAS = {
    "torch": "train", "xgboost": "train", "lightgbm": "train", "catboost": "train",
    "sklearn": "train", "threadpoolctl": "train", "matplotlib": "train", "jinja2": "train",
    "papermill": "notebooks", "ipykernel": "notebooks", "ipywidgets": "notebooks",
    "IPython": "notebooks", "wandb": "track", "gcsfs": "gs",
    "onnx": "onnx", "onnxmltools": "onnx", "onnxscript": "onnx", "onnxruntime": "serve",
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "prometheus_client"), "serve"),
    "adbc_driver_postgresql": "database",
    **dict.fromkeys(("torchvision", "webdataset", "PIL", "tensorboardX"), "vision"),
    "torchao": "compress", "optuna": "auto", "ray": "ray",
    **dict.fromkeys(("transformers", "tokenizers", "datasets", "yaml"), "language"),
}  # fmt: skip

# Of the base, and not needed to predict: a small image leaves them out.
_REMOVABLE = ("pyarrow", "scipy")


class LazyModule:
    """A stand-in for the module `dotted` that imports it when one of its names is first read."""

    def __init__(self, dotted: str):
        self._dotted = dotted

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module_or_explain(self._dotted), name)


def import_module_or_explain(dotted: str) -> ModuleType:
    """Import a module. Raises MissingPackageError naming the extra, where it needs a package that is not installed."""
    try:
        return importlib.import_module(dotted)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in (*EXTRAS, *_REMOVABLE):
            raise
        if isinstance(error, ModuleNotFoundError):
            raise missing_package_error(package) from error
        raise MissingPackageError(
            f"The package {package} is installed and cannot be imported", got=error,
            next_step=f"pip install --force-reinstall {package}",
        ) from error  # fmt: skip


def is_package_installed(name: str) -> bool:
    """Return True when a package can be imported, without importing it. A folder of its name (W&B leaves such ones) is
    not the package: it has no origin.
    """
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def check_packages_installed(*names: str) -> None:
    """Raise MissingPackageError for the first of these packages of extras that is not installed; imports none."""
    for name in names:
        if not is_package_installed(name):
            raise missing_package_error(name)


def missing_package_error(package: str) -> MissingPackageError:
    """The error for a package of an extra, or one that a small image leaves out, that is not installed."""
    if package in _REMOVABLE:
        return MissingPackageError(f"The package {package} is not installed", next_step=f"pip install {package}")
    extra = EXTRAS[package]
    return MissingPackageError(
        f"The package {package} is not installed",
        next_step=f"pip install 'ml_factory[{extra}]' (in a checkout: pip install '.[{extra}]', or make setup)",
    )
