"""Command-line options from the fields of dataclasses, and from a file: `--config FILE`."""

import copy
import functools
import inspect
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ml_factory.argument_checks import check_file_exists
from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.storage.files import files
from ml_factory.storage.json_values import check_nesting, parse_json

_LARGEST, _MOST_DOTS = 1 << 16, 200  # bytes of a file of settings, dots in one of its lines


def expand_options(verb: Callable) -> Callable:
    """Return the verb as typer reads it: a parameter that is a dataclass becomes an option per field, and `--config`
    unless the verb reads a file of its own under that name.

    The docstring of a dataclass is the title of its options in the help.
    """
    groups: dict[str, Any] = {}
    options = {"context": (inspect.Parameter.empty, typer.Context)}
    for parameter in inspect.signature(verb).parameters.values():
        kind = parameter.annotation
        if is_dataclass(kind):
            groups[parameter.name] = kind
            options |= {one.name: (one.default, _titled(one.type, str(kind.__doc__))) for one in fields(kind)}
        else:
            options[parameter.name] = (parameter.default, kind)
    own_config = "config" in options
    options.setdefault("config", (None, Config))

    @functools.wraps(verb)
    def command(context: typer.Context, config: Path | None, **given: Any) -> None:
        if own_config:
            given["config"] = config
        if "setting" in given:
            given["setting"] = [*context.meta.get(__name__, ()), *(given["setting"] or ())]
        built = {name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        verb(**built, **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(one, keyword, default=default, annotation=kind)
                  for one, (default, kind) in options.items()]  # fmt: skip
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {name: kind for name, (_, kind) in options.items()}
    return command


def _titled(annotation: Any, title: str) -> Any:
    """Return the annotation with its option under this title of the help."""
    kind, option = get_args(annotation)
    option = copy.copy(option)
    option.rich_help_panel = title
    return Annotated[kind, option]


def _read_config(context: typer.Context, path: Path | None) -> None:
    """Make the values in a file the defaults of the options; its table `set` holds what `--set` adds to.

    Raises BarsError where there is no such file, SettingsError for one that is no table or names an unknown option.
    """
    if path is None:
        return
    options = {one.opts[-1].removeprefix("--"): one for one in context.command.params if one.opts[-1].startswith("--")}
    known = sorted(options.keys() - {"config", "help", "import"})  # a module is code: it is named with the command
    context.default_map = {}
    for name, value in _read_table(check_file_exists(path.expanduser())).items():
        spelled = name.replace("_", "-")
        if spelled not in known:
            raise SettingsError("There is no such option", where=path, got=name, next_step=did_you_mean(spelled, known))
        if isinstance(value, Mapping) is not (spelled == "set"):
            raise SettingsError("Only `set` is a table, of names and values", where=path, got=name)
        if spelled == "set":
            context.meta[__name__] = list(_lines(value))
        else:
            several = options[spelled].multiple and not isinstance(value, list)
            context.default_map[options[spelled].name] = [value] if several else value


def _read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file, or JSON by its suffix. Raises SettingsError."""
    text = files.read(path, _LARGEST).decode(errors="replace")
    try:
        # tomllib takes the square of the number of names in a dotted key
        if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
            raise ValueError(f"a line with more than {_MOST_DOTS} dots")
        table = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
        check_nesting(table)
    except (ValueError, RecursionError) as error:
        raise SettingsError("These settings cannot be read", where=path, got=error, wanted="TOML, or .json") from None
    if not isinstance(table, dict):
        raise SettingsError("These are no settings", where=path, got=type(table).__name__, wanted="values by name")
    return table


def _lines(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield NAME=VALUE of every value in nested tables, as `--set` takes them."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{above}{name}.")
        else:
            yield f"{above}{name}=" + json.dumps(value, default=str)  # dates as text


Config = Annotated[
    Path | None,
    typer.Option("--config", help="TOML or JSON with values by option; table `set`: those of --set.",
                 is_eager=True, callback=_read_config),
]  # fmt: skip
