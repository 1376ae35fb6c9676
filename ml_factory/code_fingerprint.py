"""Identity of the code of a computation: hashes of the library's files that it uses, and of the user's code.

A file counts by its code: comments, docstrings and blank lines do not make another run (docs/decisions, "identity").
The closure of some files is all of the package that they import, and so on, except packages that compute nothing: the
storage of a checkpoint or the drawing of a plot does not change a number.
"""

import ast
import dis
import hashlib
import inspect
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType

import numpy as np

from ml_factory.storage.files import disk_errors
from ml_factory.storage.json_values import fingerprint_json

PACKAGE = Path(__file__).resolve().parent
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple(os.path.join(top, "") for top in (PACKAGE, *(sysconfig.get_paths()[name] for name in _LIBRARIES)))
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
# Modules that no stored result depends on (each call makes its evaluation again), as paths from the package's root,
# without ".py".
COMPUTES_NOTHING = (
    "storage", "checkpoints", "tracking", "errors", "progress", "numba_cache", "process_identity", "code_fingerprint",
    "settings", "runs", "result", "notebook", "evaluation/plot_style", "evaluation/data_plots", "evaluation/plots",
    "evaluation/html_report", "models/registry", "workflows/inspect_data", "workflows/load_prepared",
    "workflows/evaluation", "workflows/report", "leakage",
)  # fmt: skip


# Strings, which may hold a "#", or a comment. Python 3.11 has no f-string with its own quotes inside; a newer release
# may write one in these files only when the library asks for 3.12.
_STRING_OR_COMMENT = re.compile(
    r"""(?s:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^\\"\n])*"|'(?:\\.|[^\\'\n])*')|(#[^\n]*)"""
)


def _without_comments(source: str) -> str:
    """Return the source without comments. `tokenize` finds the same ones, in seven times the time."""
    return _STRING_OR_COMMENT.sub(lambda found: "" if found[1] is not None else found[0], source)


def _code_of(source: str) -> str:
    """Return the source without comments, docstrings, blank lines and trailing spaces; the same on every Python."""
    lines = _without_comments(source).splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                # Blank lines are dropped; a body of a docstring alone leaves its header.
                lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


@lru_cache(maxsize=1024)
def _hash_of(content: bytes) -> str:
    try:
        code = _code_of(content.decode("utf-8")).encode()
    except (SyntaxError, UnicodeDecodeError):  # not valid Python here: hash the raw content
        code = content
    return hashlib.sha256(code).hexdigest()


def code_hash(path: Path) -> str:
    """Return the hash of a file's code."""
    with disk_errors(path):
        return _hash_of(path.read_bytes())


def package_files(packages: Iterable[str]) -> list[Path]:
    """Return the files of these packages; a single file is named with ".py"."""
    places = [PACKAGE / package for package in packages]
    return sorted(file for place in places for file in ([place] if place.suffix else place.glob("*.py")))


def import_closure(names: Iterable[str]) -> list[Path]:
    """Return the files "workflows/train.py" … and all of the package that their code imports, directly or not,
    sorted.
    """
    waiting, found = [PACKAGE / name for name in names], set()
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        waiting += [PACKAGE / name for name in _imported(path.read_bytes()) if _computes(name)]
    return sorted(path for path in found if path.is_file())


def source_hashes(files: Iterable[Path]) -> dict[str, str]:
    """Return path from the package's root -> 16 hex digits of its code."""
    return {path.relative_to(PACKAGE).as_posix(): code_hash(path)[:16] for path in files}


def source_hash(packages: tuple[str, ...], exclude: tuple[str, ...] = ()) -> str:
    """Return one hash over the code of these packages (or single files), without the excluded files."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in package_files(packages)}
    return fingerprint_json({name: code_hash(path) for name, path in files.items() if name not in exclude})


def changed_code_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return files whose code differs, or that only one of the two has."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def code_commit() -> str:
    """Return the commit of this checkout, with "+changes" where sources differ from it; "" without git."""
    has_git, head = _git("rev-parse", "HEAD")
    if not has_git:
        return ""
    _, dirty = _git("status", "--porcelain", "--untracked-files=no", "--", PACKAGE.name)
    return head + ("+changes" if dirty else "")


def _git(*words: str) -> tuple[bool, str]:
    try:
        done = subprocess.run(["git", "-C", PACKAGE.parent, *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False, ""
    return done.returncode == 0, done.stdout.strip()


def _computes(name: str) -> bool:
    stem = name.removesuffix(".py")
    return not any(stem == package or stem.startswith(f"{package}/") for package in COMPUTES_NOTHING)


@lru_cache(maxsize=1024)
def _imported(content: bytes) -> tuple[str, ...]:
    """Return files of the package that this code imports, as paths from its root; importlib with a constant name
    too.
    """
    return tuple(dict.fromkeys(_files(ast.parse(content))))


def _files(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (found for item in node.names for found in _file_of(item.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = [found for item in node.names for found in _file_of(f"{node.module}.{item.name}")]
            yield from inside or _file_of(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                found for text in node.args[:1] if isinstance(text, ast.Constant) for found in _file_of(text.value)
            )


def _file_of(dotted: object) -> list[str]:
    """Return ["data/validation.py"] for "ml_factory.data.validation"; [] for other modules."""
    top, _, rest = str(dotted).partition(".")
    name = f"{rest.replace('.', '/')}.py"
    return [name] if top == PACKAGE.name and rest and (PACKAGE / name).is_file() else []


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
