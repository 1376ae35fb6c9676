"""Identity of the code of a computation: a hash of the library's files that it uses, and of the user's code."""

import dis
import hashlib
import inspect
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

import numpy as np

from ml_factory.storage.files import disk_errors
from ml_factory.storage.json_values import fingerprint_json

PACKAGE = Path(__file__).resolve().parent
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple(os.path.join(top, "") for top in (PACKAGE, *(sysconfig.get_paths()[name] for name in _LIBRARIES)))
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def source_hash(packages: Iterable[str] = ("",), exclude: Iterable[str] = ()) -> str:
    """Return one hash over the library's files of these packages, without excluded ones.

    packages, exclude : folders or single files, as paths from the package's root, with ".py"; "" for all.
    """
    hashes = {}
    with disk_errors(PACKAGE):
        for path in (os.path.join(place, name) for place, _, names in os.walk(PACKAGE) for name in names):
            name = path.removeprefix(os.path.join(PACKAGE, "")).replace(os.sep, "/")
            if name.endswith(".py") and _is_in(name, packages) and not _is_in(name, exclude):
                facts = os.stat(path)
                hashes[name] = _file_hash(path, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)
    return fingerprint_json(hashes)


@cache
def _file_hash(path: str, *stamp: int) -> str:
    """Return the file's hash, read once for each stamp: a verb hashes all of them several times."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _is_in(name: str, places: Iterable[str]) -> bool:
    return any(place in ("", name) or name.startswith(f"{place}/") for place in places)


def code_commit() -> str:
    """Return the commit of this checkout, with "+changes" where tracked files differ from it; "" without git."""
    words = ["git", "-C", PACKAGE.parent, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def user_code_hash(*values: object) -> str:
    """Return 64 hex digits that change with these values of a user: a function, a class, settings.

    Covers the functions of a class, its plain values, and whatever user code these read: classes and functions of a
    notebook or of user modules, closures, constants. Installed libraries, and this one, count by name: a run records
    their versions and sources elsewhere.
    """
    seen: dict[int, str] = {}
    return fingerprint_json([_describe(value, seen) for value in values])


def _describe(value: object, seen: dict[int, str], inside: tuple[int, ...] = ()) -> object:
    """Convert a value to JSON values; a class or function that was met before to its name alone.

    inside : ids of the containers around the value.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in inside:
        return "a container around this value"
    around = (*inside, id(value))
    if isinstance(value, tuple | list):
        return [_describe(one, seen, around) for one in value]
    if isinstance(value, dict):
        return [[_describe(key, seen, around), _describe(one, seen, around)] for key, one in value.items()]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value)).hexdigest()]
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if callable(value) and not isinstance(value, type):
        value = inspect.unwrap(value)
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
    if kind.__module__.partition(".")[0] in {*sys.stdlib_module_names, "torch"}:
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
    """Yield the source of a user's function and what it reads; of any other function its closure.

    The first function of all is the user's, also where it is installed.
    """
    yield [_describe(cell.cell_contents, seen) for cell in function.__closure__ or () if _filled(cell)]
    if len(seen) > 1 and not is_user_code(function):
        return
    yield _source(function)
    yield _describe([*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())], seen)
    for name in sorted(globals_referenced_by_code(function.__code__) & function.__globals__.keys()):
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


def globals_referenced_by_code(code: CodeType) -> set[str]:
    """Return the globals that this code reads, and the functions inside it."""
    return {step.argval for part in _codes(code) for step in dis.get_instructions(part) if step.opname == "LOAD_GLOBAL"}


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def is_user_code(function: FunctionType) -> bool:
    """Return whether the function is user code: neither installed nor this library's."""
    return not function.__code__.co_filename.startswith(_INSTALLED)
