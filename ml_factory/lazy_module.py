"""Modules that are imported when they are first used, so that a command answers before it loads what its work needs."""

import importlib
from typing import Any


class LazyModule:
    """Stands for the module `dotted` and imports it when a name of it is first read."""

    def __init__(self, dotted: str):
        self._dotted = dotted

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._dotted), name)
