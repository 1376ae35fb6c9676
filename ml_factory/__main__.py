"""The command line: python -m ml_factory VERB.

Exit code 0, 1 (could not be done), 2 (wrong usage), 130 (interrupted by Ctrl-C) or 143 (by SIGTERM).
"""

import logging
import sys

try:
    import typer
except ModuleNotFoundError:  # the guides' scripts under the system's Python
    sys.exit(f"error: the packages of ml_factory are not installed for this Python. Got {sys.executable}. "
             "Next: make setup, then .venv/bin/python in place of python; or pip install .")  # fmt: skip

from ml_factory.cli_output import StderrHandler
from ml_factory.commands import data, machine, notebooks, recipes, serving, tpu, training
from ml_factory.commands.dataclass_options import expand_options
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.interrupt import Interrupted, interrupt_message, interruptible
from ml_factory.redaction import RedactedStream

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False,
    help="From 1-minute bars to probabilities of the next move, on preemptible machines.",
)  # fmt: skip

VERBS = (
    machine.doctor, data.export_data, data.prepare, data.audit, training.train, training.cross_validate, training.stack,
    training.evaluate, training.leaderboard, training.backtest, training.plan, training.predict, training.export,
    serving.serve, machine.clean, machine.tracking, notebooks.run, notebooks.suite,
)  # fmt: skip
for verb in VERBS:
    app.command(verb.__name__.replace("_", "-"))(expand_options(verb))
app.add_typer(recipes.app, name="recipe")
app.add_typer(tpu.app, name="tpu")


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error."""
    sys.stdout, sys.stderr = (
        stream if isinstance(stream, RedactedStream) else RedactedStream(stream) for stream in (sys.stdout, sys.stderr)
    )
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[StderrHandler()])
    logging.getLogger("ml_factory.training").setLevel(logging.INFO)  # the progress line
    try:
        with interruptible():
            app()
    except Interrupted as stop:
        print(interrupt_message(stop.number, sys.argv[1:]), file=sys.stderr)
        raise
    except SettingsError as error:
        _fail(error, 2)
    except FactoryError as error:
        _fail(error, 1)


def _fail(error: FactoryError, code: int) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
