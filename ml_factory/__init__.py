"""ml_factory: from 1-minute bars to probabilities of the next move, on preemptible machines.

`import ml_factory` is fast: the names below import their module on first use.
"""

import importlib
import os
from typing import TYPE_CHECKING

from ml_factory.numba_cache import set_numba_cache_folder
from ml_factory.redaction import redact_logs

if TYPE_CHECKING:  # for type checkers and editors, which do not run `__getattr__`
    from ml_factory import notebook, pipeline
    from ml_factory.checkpoints.manager import CheckpointManager
    from ml_factory.inference.bundle import Bundle
    from ml_factory.inference.guard import GuardedStream, GuardSettings
    from ml_factory.inference.stream import PredictionStream
    from ml_factory.storage.workspace import Workspace

__all__ = [
    "Bundle", "CheckpointManager", "GuardSettings", "GuardedStream", "PredictionStream", "Workspace", "__version__",
    "notebook", "pipeline",
]  # fmt: skip

# Boosters and torch share two cores with notebooks and logs: busy-waiting threads made a fit 13 times
# slower on a busy machine (docs/log.md). Read when the first OpenMP library loads, so it is set before all imports.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Before anything imports numba, which reads its settings once.
set_numba_cache_folder()
redact_logs()

__version__ = "0.1.0"

_HOMES = {
    "Bundle": "ml_factory.inference.bundle",
    "GuardedStream": "ml_factory.inference.guard",
    "GuardSettings": "ml_factory.inference.guard",
    "PredictionStream": "ml_factory.inference.stream",
    "CheckpointManager": "ml_factory.checkpoints.manager",
    "Workspace": "ml_factory.storage.workspace",
}
_MODULES = {"pipeline", "notebook"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"ml_factory.{name}")
    raise AttributeError(f"module 'ml_factory' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
