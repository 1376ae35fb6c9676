"""Clone a user function together with its defaults, closure and globals, so that calls share no state.

State between calls lies in a function's defaults, closure, attributes, in the globals it reads, or in those of the
functions it calls. Files and packages that it writes to are shared.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import suppress
from types import CellType, FunctionType, ModuleType

from ml_factory.code_fingerprint import globals_referenced_by_code, is_user_code


def clone_function_without_state(function: Callable) -> Callable:
    """Return a function of the same code that shares nothing a call may change; uncopyable values are shared."""
    return _FunctionCloner().of(function)


class _FunctionCloner:
    """Copies of the values that functions read, each made once, so that shared values stay shared."""

    def __init__(self):
        self.copies: dict[int, object] = {}
        self.parts: dict[int, object] = {}  # memo of `deepcopy`
        self.alive: list = []  # originals stay alive, so that no other object gets their id

    def of(self, value: object) -> object:
        if id(value) not in self.copies:
            self.alive.append(value)
            self.copies[id(value)] = self.make_copy(value)
        return self.copies[id(value)]

    def make_copy(self, value: object) -> object:
        if isinstance(value, FunctionType):
            return self.function(value) if is_user_code(value) else value
        if isinstance(value, functools._lru_cache_wrapper):
            return functools.lru_cache(**value.cache_parameters())(self.of(value.__wrapped__))
        if isinstance(value, ModuleType | type):
            return value
        with suppress(Exception):  # a lock or a connection is shared
            return copy.deepcopy(value, self.parts)
        return value

    def function(self, function: FunctionType) -> FunctionType:
        outside = function.__globals__
        found = self.copies.setdefault(id(outside), dict(outside))
        cells = tuple(self.cell(cell) for cell in function.__closure__ or ())
        copies = FunctionType(function.__code__, found, function.__name__, None, cells)
        self.copies[id(function)] = copies  # before what it reads, which may be itself
        copies.__defaults__ = function.__defaults__ and tuple(map(self.of, function.__defaults__))
        copies.__kwdefaults__ = function.__kwdefaults__ and self.copy_values(function.__kwdefaults__)
        copies.__dict__.update(self.copy_values(vars(function)))
        found.update(
            self.copy_values(
                {name: outside[name] for name in globals_referenced_by_code(function.__code__) & outside.keys()}
            )
        )
        return copies

    def copy_values(self, values: dict) -> dict:
        return {name: self.of(value) for name, value in values.items()}

    def cell(self, cell: CellType) -> CellType:
        if id(cell) not in self.copies:
            self.alive.append(cell)
            copies = self.copies[id(cell)] = CellType()
            with suppress(ValueError):  # nothing in it yet
                copies.cell_contents = self.of(cell.cell_contents)
        return self.copies[id(cell)]
