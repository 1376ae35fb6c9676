"""A function as if it had never been called: a twin with its own copy of everything it could remember in.

What a function keeps from one call to the next lies in its defaults, in what it closes over, in its attributes, in the
globals it reads, or in those of the functions it calls. What it writes to a file, or into a package, stays there.
"""

import copy
import dis
import functools
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType

PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = (str(PACKAGE), *(sysconfig.get_paths()[name] for name in _LIBRARIES))


def twin(function: Callable) -> Callable:
    """Of the same code, sharing nothing that a call may change; what cannot be copied is shared."""
    return _FunctionCloner().of(function)


class _FunctionCloner:
    """Copies of what functions read, each made once, so that two that share something share its copy."""

    def __init__(self):
        self.made: dict[int, object] = {}
        self.parts: dict[int, object] = {}  # what `deepcopy` has copied inside of things
        self.kept: list = []  # what was copied stays, so that no other object gets its id

    def of(self, value: object) -> object:
        if id(value) not in self.made:
            self.kept.append(value)
            self.made[id(value)] = self.copied(value)
        return self.made[id(value)]

    def copied(self, value: object) -> object:
        if isinstance(value, FunctionType):
            return self.function(value) if is_the_users(value) else value
        if isinstance(value, functools._lru_cache_wrapper):
            return functools.lru_cache(**value.cache_parameters())(self.of(value.__wrapped__))
        if isinstance(value, ModuleType | type):
            return value
        with suppress(Exception):  # a lock, a connection: it is the same one
            return copy.deepcopy(value, self.parts)
        return value

    def function(self, function: FunctionType) -> FunctionType:
        outside = function.__globals__
        found = self.made.setdefault(id(outside), dict(outside))
        cells = tuple(self.cell(cell) for cell in function.__closure__ or ())
        made = FunctionType(function.__code__, found, function.__name__, None, cells)
        self.made[id(function)] = made  # before what it reads, which may be itself
        made.__defaults__ = function.__defaults__ and tuple(map(self.of, function.__defaults__))
        made.__kwdefaults__ = function.__kwdefaults__ and self.each(function.__kwdefaults__)
        made.__dict__.update(self.each(vars(function)))
        found.update(
            self.each({name: outside[name] for name in referenced_globals(function.__code__) & outside.keys()})
        )
        return made

    def each(self, named: dict) -> dict:
        return {name: self.of(value) for name, value in named.items()}

    def cell(self, cell: CellType) -> CellType:
        if id(cell) not in self.made:
            self.kept.append(cell)
            made = self.made[id(cell)] = CellType()
            with suppress(ValueError):  # nothing in it yet
                made.cell_contents = self.of(cell.cell_contents)
        return self.made[id(cell)]


def referenced_globals(code: CodeType) -> set[str]:
    """The globals that this code reads, and the functions inside it."""
    return {step.argval for part in _codes(code) for step in dis.get_instructions(part) if step.opname == "LOAD_GLOBAL"}


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def is_the_users(function: FunctionType) -> bool:
    """Neither installed nor this library's: a notebook's cell has no file at all."""
    return not function.__code__.co_filename.startswith(_INSTALLED)
