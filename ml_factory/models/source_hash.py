"""Hash of the sources of a user's network: a changed network is another run.

Covers its own functions, the plain values of its class and of its `Spec`, and whatever user code these read: classes
and functions of a notebook or of user modules, closures, constants. Installed libraries, and this one, count by name: a
run records their versions and sources elsewhere.
"""

import hashlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from types import FunctionType

import numpy as np

from ml_factory.features.stateless_copy import is_the_users, referenced_globals
from ml_factory.storage.atomic_files import fingerprint

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def signature(network: type) -> str:
    """Return 64 hex digits that change with the network, its settings' defaults, and all user code it reads."""
    seen: dict[int, str] = {}
    return fingerprint([_describe(network, seen), _describe(network.Spec, seen)])


def _describe(value: object, seen: dict[int, str]) -> object:
    """Convert a value to JSON values; a class or function that was met before to its name alone."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return [_describe(one, seen) for one in value]
    if isinstance(value, dict):
        return [[_describe(key, seen), _describe(one, seen)] for key, one in value.items()]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value)).hexdigest()]
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        return [_describe(one, seen) for one in (value.fget, value.fset, value.fdel)]
    if not isinstance(value, type | FunctionType):
        return f"a {type(value).__module__}.{type(value).__qualname__}"
    name = f"{value.__module__}.{value.__qualname__}"
    if id(value) in seen:
        return name
    seen[id(value)] = name
    return [name, *(_of_class(value, seen) if isinstance(value, type) else _of_function(value, seen))]


def _of_class(kind: type, seen: dict[int, str]) -> Iterator[object]:
    """Yield the bases, the members, and the default factories of a dataclass."""
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names or kind.__module__.startswith("torch"):
        return
    for base in kind.__bases__:
        yield _describe(base, seen)
    for name, value in vars(kind).items():
        if not name.startswith("__") or isinstance(value, FunctionType):
            yield [name, _describe(value, seen)]
    if is_dataclass(kind):
        for item in fields(kind):
            yield [
                item.name,
                [_describe(one, seen) for one in (item.default, item.default_factory) if one is not MISSING],
            ]


def _of_function(function: FunctionType, seen: dict[int, str]) -> Iterator[object]:
    """Yield the source of a user's function and what it reads; of any other function its closure."""
    function = inspect.unwrap(function)
    yield [_describe(cell.cell_contents, seen) for cell in function.__closure__ or () if _filled(cell)]
    if not is_the_users(function):
        return
    yield _source(function)
    yield _describe([*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())], seen)
    for name in sorted(referenced_globals(function.__code__) & function.__globals__.keys()):
        yield [name, _describe(function.__globals__[name], seen)]


def _filled(cell) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a name that is bound later
        return False
    return True


def _source(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # typed into a bare interpreter
        return function.__code__.co_code.hex()
