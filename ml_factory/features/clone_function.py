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
    return _copy(function, {}, {})


def _copy(value: object, made: dict[int, tuple[object, object]], memo: dict) -> object:
    """Return a copy of a value that a function reads.

    made : id -> (value, its copy), so that shared values stay shared, and alive: no other object gets their id
    memo : of `deepcopy`
    """
    if id(value) in made:
        return made[id(value)][1]
    again = functools.partial(_copy, made=made, memo=memo)
    copied = value
    if isinstance(value, FunctionType):
        return _copy_function(value, made, again) if is_user_code(value) else value
    if isinstance(value, CellType):
        copied = CellType()
        made[id(value)] = value, copied
        with suppress(ValueError):  # nothing in it yet
            copied.cell_contents = again(value.cell_contents)
    elif isinstance(value, functools._lru_cache_wrapper):
        copied = functools.lru_cache(**value.cache_parameters())(again(value.__wrapped__))
    elif not isinstance(value, ModuleType | type):
        with suppress(Exception):  # a lock or a connection is shared
            copied = copy.deepcopy(value, memo)
    made[id(value)] = value, copied
    return copied


def _copy_function(function: FunctionType, made: dict[int, tuple[object, object]], again: Callable) -> FunctionType:
    outside = function.__globals__
    _, found = made.setdefault(id(outside), (outside, dict(outside)))
    cells = tuple(map(again, function.__closure__ or ()))
    copied = FunctionType(function.__code__, found, function.__name__, None, cells)
    made[id(function)] = function, copied  # before what it reads, which may be itself
    read = globals_referenced_by_code(function.__code__) & outside.keys()
    found.update({name: again(outside[name]) for name in read})
    copied.__defaults__ = function.__defaults__ and tuple(map(again, function.__defaults__))
    copied.__kwdefaults__ = {name: again(one) for name, one in (function.__kwdefaults__ or {}).items()} or None
    copied.__dict__.update({name: again(one) for name, one in vars(function).items()})
    return copied
