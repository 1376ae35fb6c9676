"""The command line: python -m ml_factory VERB, out of the signatures and docstrings in commands/.

Exit code 0, 1 (could not be done), 2 (wrong usage), 130 (interrupted by Ctrl-C) or 143 (by SIGTERM).
"""

import json
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cyclopts import App, CycloptsError, Parameter

from ml_factory.argument_checks import check_file_exists
from ml_factory.cli_output import StderrHandler, stderr_console
from ml_factory.commands import machine, pipeline_verbs, recipes, serving, tpu
from ml_factory.commands.options import CONFIG_HELP
from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.interrupt import Interrupted, interrupt_message, interruptible
from ml_factory.redaction import RedactedStream
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json

NAME = "python -m ml_factory"


def _app(name: str, help_text: str, functions: Sequence[Callable]) -> App:
    defaults = Parameter(negative=(), show_default=lambda value: value if value not in ("", (), False) else None)
    made = App(name=name, help=help_text, help_format="plaintext", default_parameter=defaults, version_flags=())
    for function in functions:
        made.command(function, name=function.__name__.replace("_", "-"))
    return made


app = _app(
    NAME, "From 1-minute bars to probabilities of the next move, on preemptible machines.",
    (machine.doctor, *pipeline_verbs.VERBS, serving.serve, machine.clean, machine.tracking, machine.run,
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


def verbs() -> list[str]:
    """Return the names of the verbs."""
    return [name for name in app if not name.startswith("-")]


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
        print(interrupt_message(stop.number, sys.argv[1:]), file=sys.stderr)
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
    app(_with_config(words), print_error=False, exit_on_error=False, result_action="return_value")


def _fail(error: object, code: int) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


def _with_config(words: list[str]) -> list[str]:
    """Return the words with those of `--config FILE` put in; typed options replace the file's, and `--set` adds to it.

    A module is code: `import` is named with the command alone.
    Raises BarsError where there is no such file, SettingsError for one that is no table or names an unknown option.
    """
    chain, apps, rest = app.parse_commands(words)
    at = next((number for number, word in enumerate(rest) if word.partition("=")[0] == "--config"), None)
    verb = apps[-1]
    if at is None or verb.default_command is None:
        return words
    arguments = {one.names[0].removeprefix("--"): one for one in verb.assemble_argument_collection() if one.names}
    config = arguments.get("config")
    if config is None or config.parameter.help != CONFIG_HELP:  # the verb reads a file of its own
        return words
    sign, value = rest[at].partition("=")[1:]
    path, after = (value, rest[at + 1 :]) if sign else ("".join(rest[at + 1 : at + 2]), rest[at + 2 :])
    others = rest[:at] + after
    known = sorted(name for name in arguments if name not in ("config", "import") and not name.startswith(("-", "*")))
    typed = {word.partition("=")[0].removeprefix("--").replace("_", "-") for word in others}
    return [*chain, *_words_of_file(check_file_exists(Path(path).expanduser()), known, typed), *others]


def _words_of_file(path: Path, known: Sequence[str], typed: Collection[str]) -> Iterator[str]:
    """Yield the words of the options in a file, but those that are typed too. Raises SettingsError."""
    for name, value in _read_table(path).items():
        option = name.replace("_", "-")
        if option not in known:
            raise SettingsError("There is no such option", where=path, got=name, next_step=did_you_mean(option, known))
        if isinstance(value, Mapping) is not (option == "set"):
            raise SettingsError("Only `set` is a table, of names and values", where=path, got=name)
        if option == "set":
            yield from (f"--set={line}" for line in _lines(value))
        elif option not in typed and value is not False:
            yield from (f"--{option}" + ("" if one is True else f"={one}")
                        for one in (value if isinstance(value, list) else [value]))  # fmt: skip


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
