"""The command line: python -m ml_factory VERB, out of the signatures and docstrings in commands/.

Exit code 0, 1 (could not be done), 2 (wrong usage), 130 (interrupted by Ctrl-C) or 143 (by SIGTERM).
"""

import json
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cyclopts import App, ArgumentCollection, CycloptsError, Parameter, Token

from ml_factory.argument_checks import check_file_exists
from ml_factory.cli_output import StderrHandler, stderr_console
from ml_factory.commands import machine, pipeline_verbs, recipes, tpu
from ml_factory.commands.options import CONFIG_HELP
from ml_factory.errors import FactoryError, SettingsError, check_known
from ml_factory.interrupt import Interrupted, interrupt_message, interruptible
from ml_factory.redaction import RedactedStream
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json

NAME = "python -m ml_factory"


def _take_config(_: object, __: object, arguments: ArgumentCollection) -> None:
    """Add the values of `--config FILE` to the typed ones, which replace them; `--set` has both. A hook of cyclopts.

    A module is code: `import` is named with the command alone.
    Raises FileError where there is no such file, SettingsError for one that is no table or names an unknown option.
    """
    named = {one.name.removeprefix("--"): one for one in arguments if one.names and one.name.startswith("--")}
    config = named.pop("config", None)
    if config is None or config.parameter.help != CONFIG_HELP or not config.tokens:  # else a verb reads a file itself
        return
    path = check_file_exists(Path(config.tokens[0].value).expanduser(), "one TOML or JSON file")
    known = sorted({*named} - {"import"})
    for name, value in _read_table(path).items():
        option = name.replace("_", "-")
        check_known("There is no such option", path, option, known)
        if isinstance(value, Mapping) is not (option == "set"):
            raise SettingsError("Only `set` is a table, of names and values", where=path, got=name)
        texts = _lines(value) if option == "set" else value if isinstance(value, list) else [value]
        if option == "set" or not named[option].tokens:
            typed = [token.value.partition("=")[0].strip() for token in named[option].tokens]
            named[option].tokens[:0] = [
                Token(keyword=f"--{option}", value=str(text), source=str(path)) for text in texts
                if str(text).partition("=")[0] not in typed
            ]  # fmt: skip


def _read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file, or JSON by its suffix. Raises SettingsError."""
    text = files.read(path).decode(errors="replace")
    try:
        table = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
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


def _app(name: str, help_text: str, functions: Sequence[Callable]) -> App:
    defaults = Parameter(negative=(), show_default=lambda value: value if value not in ("", (), False) else None)
    made = App(name=name, help=help_text, help_format="plaintext", default_parameter=defaults, version_flags=(),
               config=_take_config)  # fmt: skip
    for function in functions:
        made.command(function, name=function.__name__.replace("_", "-"))
    return made


app = _app(
    NAME, "From 1-minute bars to probabilities of the next move, on preemptible machines.",
    (machine.doctor, *pipeline_verbs.VERBS, machine.serve, machine.clean, machine.tracking, machine.run,
     machine.suite),
)  # fmt: skip
app.command(_app(
    "recipe", "Train one of the recipes: their data, networks and losses on the library's own loop, devices and "
    f"checkpoints. --help after the recipe's name lists its flags. Example: `{NAME} recipe shards`",
    (recipes.shards, recipes.resnet50, recipes.sdce, recipes.t5, recipes.compress),
))  # fmt: skip
app.command(_app(
    "tpu", "Train on a Cloud TPU slice through gcloud; docs/tpu.md has the variables. "
    f"Example: `{NAME} tpu setup --config tpu.yaml --dry-run`", tpu.VERBS,
))  # fmt: skip


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error."""
    sys.stdout, sys.stderr = (
        stream if isinstance(stream, RedactedStream) else RedactedStream(stream) for stream in (sys.stdout, sys.stderr)
    )
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[StderrHandler()])
    logging.getLogger("ml_factory.training").setLevel(logging.INFO)  # the progress line
    try:
        with interruptible():
            run(sys.argv[1:])
    except Interrupted as stop:
        print(interrupt_message(stop.code - 128, sys.argv[1:]), file=sys.stderr)
        raise
    except CycloptsError as error:
        _fail(f"{' '.join(str(error).split())} Usage: {NAME} {' '.join(error.command_chain or ('VERB',))} --help", 2)
    except FactoryError as error:
        _fail(error, 2 if isinstance(error, SettingsError) else 1)


def run(words: list[str]) -> None:
    """Do what the words of a command line say; what is wrong is raised."""
    if not words or words in (["recipe"], ["tpu"]):
        app.help_print([*words])
        sys.exit(2)
    if words[0] == "recipe" and (retired := sorted(name for name in os.environ if name.startswith("XRT_"))):
        stderr_console.out(f"{', '.join(retired)}: XRT is gone, this is ignored; a TPU is used with PJRT_DEVICE=TPU")
    app(words, print_error=False, exit_on_error=False, result_action="return_value")


def _fail(error: object, code: int) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)
