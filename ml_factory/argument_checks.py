"""Constants and checks of arguments that import no heavy library, so that a wrong argument is reported at once."""

import difflib
import os
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ml_factory.errors import FactoryError, FileError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.files import files

yaml = LazyModule("yaml")

DEMO = "DEMO"  # the synthetic market with a planted edge: never written under a real symbol's name
DEMO_NULL = "DEMO-NULL"  # the same market without an edge
DEMOS = (DEMO, DEMO_NULL)
BASE_MODELS = ("xgboost", "lstm", "patchtst")  # default base models of a stack
AUTO_MODELS = ("xgboost", "lightgbm", "catboost", "linear")  # that `auto` searches by default
DEFAULT_HORIZONS = (5, 10, 15, 20)
LABEL_KINDS = ("triple_barrier", "direction", "trend_scanning", "meta")
CALENDARS = ("cme", "nymex", "comex", "cme_crypto", "cme_fx", "cme_rates", "us_equity", "fx", "24h")
# scheme of cross-validation -> description of its folds
SCHEMES = {
    "purged_kfold": "purged folds",
    "walk_forward_expanding": "folds that walk forward on all that came before",
    "walk_forward_rolling": "folds that walk forward on a rolling window",
    "combinatorial": "combinatorial purged folds",
}
SOURCES = ("registry", "wandb")  # where a finished model is loaded from


def check_horizon(horizon: int) -> int:
    """Return the horizon as an int of at least 1 bar. Raises SettingsError."""
    return _whole_number("HORIZON", horizon, 1, "a whole number of bars, 1 or more", "give for example 20")


def check_horizons(horizons: int | Sequence[int]) -> tuple[int, ...]:
    """Return one horizon or several in increasing order, each once. Raises SettingsError."""
    horizons = (horizons,) if isinstance(horizons, int) else horizons
    if not horizons:
        raise SettingsError("No horizon is given", where="horizons", wanted="at least one", next_step="give 20")
    return tuple(sorted({check_horizon(horizon) for horizon in horizons}))


def check_seed(seed: int) -> int:
    """Return the seed as a non-negative int. Raises SettingsError."""
    return _whole_number("SEED", seed, 0, "a whole number, 0 or more", "give for example 0")


def _whole_number(name: str, value: int, least: int, wanted: str, step: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{name} cannot be used", where=name, got=repr(value), wanted=wanted, next_step=step)
    return value


def quick_from_environment(quick: bool) -> bool:
    """Return `quick`, overridden by ML_FACTORY_QUICK (1 or 0), which CI and nbval set."""
    return {"1": True, "0": False}.get(os.environ.get("ML_FACTORY_QUICK", ""), quick)


def check_file_exists(
    path: Path, wanted: str, step: str = "check the path", kind: type[FactoryError] = FileError
) -> Path:
    """Return the path of an existing file. Raises an error of this kind with the nearest name in its folder."""
    if files.is_file(path):
        return path
    if files.is_folder(path):
        raise kind("Not a file", where=path, wanted=wanted, next_step="name the file itself")
    near = difflib.get_close_matches(path.name, files.names(path.parent), n=1)
    step = f"did you mean {near[0]!r}?" if near else step
    raise kind("No such file", where=path, wanted=wanted, next_step=step)


def read_yaml(path: Path, wanted: str, *, texts: bool = False) -> dict:
    """Return the values by name in a YAML file; with `texts` each as it is written. Raises SettingsError, FileError.

    wanted : what the file should hold, for the message.
    """
    text = files.read(check_file_exists(path.expanduser(), "one YAML file"), 1 << 16).decode(errors="replace")
    try:
        table = yaml.load(text, Loader=yaml.BaseLoader if texts else yaml.SafeLoader) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        table = " ".join(str(error).split())[:200]
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table):
        raise SettingsError("These settings cannot be read", where=path, got=table, wanted=wanted)
    return table


_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", tuple: "several values"}


def check_field_types(settings: Any) -> None:
    """Check that each value of a settings dataclass is of the type that its field declares.

    A whole number is a float too, NaN is no number, True and False are no numbers, None is allowed where the type
    has it. What is inside a tuple, and fields of other types, are left to the class.

    Raises SettingsError with the field's name.
    """
    for name, hint in get_type_hints(type(settings)).items():
        kinds = {get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,))}
        value = getattr(settings, name, None)
        if not kinds & set(_KINDS) or kinds - set(_KINDS) - {NoneType}:
            continue
        value = value.item() if hasattr(value, "item") else value  # a number of NumPy
        kind = tuple if isinstance(value, list) else type(value)
        fits = kind in kinds or (kind is int and float in kinds)
        if not fits or value != value:
            wanted = " or ".join("None" if kind is NoneType else _KINDS[kind] for kind in kinds)
            raise SettingsError("A value of another kind", where=name, got=repr(value), wanted=wanted)


def check_settings(spec, **wanted: str | tuple) -> None:
    """Raise SettingsError for a setting that is not of its field's type, or not what is wanted of it.

    wanted : setting -> an interval, such as "[0, 1)", or the values it may have.
    """
    check_field_types(spec)
    check_values({name: getattr(spec, name) for name in wanted}, **wanted)


def check_values(values: Mapping, **wanted: str | tuple) -> None:
    """Raise SettingsError for a value that is not what is wanted of it, as of `check_settings`."""
    for name, allowed in wanted.items():
        value = values[name]
        if value is None:  # its type allows it
            continue
        if isinstance(allowed, tuple):  # all are listed: the nearest spelling of the device "gpu" would be "cpu"
            fits, allowed = value in allowed, ", ".join(map(str, allowed))
        else:
            low, high = map(float, allowed[1:-1].split(","))
            fits = isinstance(value, Real) and not isinstance(value, bool) and (
                low < value < high or (value == low and allowed[0] == "[") or (value == high and allowed[-1] == "]")
            )  # fmt: skip
            allowed = f"a number in {allowed}"
        if not fits:
            raise SettingsError("A setting is out of range", where=name, got=repr(value), wanted=allowed)
