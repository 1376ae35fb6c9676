"""Verbs about this machine, what is stored and the notebooks: doctor, clean, tracking, run, suite."""

import platform
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ml_factory import __version__
from ml_factory.argument_checks import quick_from_environment
from ml_factory.cli_output import cli_progress_bars, print_cli_result, print_json, run_verb, stderr_console
from ml_factory.commands.options import (
    BarFile,
    Fresh,
    Horizon,
    Market,
    Place,
    Quick,
    Seed,
    Texts,
    check_symbol_stored,
    parse_name_value_options,
)
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.notebook_suite import find_suite_notebook, run_notebook_suite, run_suite_notebook
from ml_factory.storage.stored_paths import stored_path
from ml_factory.storage.workspace import Workspace, check_symbol

pipeline, validation = LazyModule("ml_factory.pipeline"), LazyModule("ml_factory.data.validation")
doctor_of, recovery = LazyModule("ml_factory.doctor"), LazyModule("ml_factory.tracking.wandb_restore")
settings_module = LazyModule("ml_factory.settings")
suite_answer = LazyModule("ml_factory.workflows.suite_answer")


def doctor(*, place: Place = Place()) -> None:
    """Check this machine and this workspace. Example: `python -m ml_factory doctor`"""
    workspace = place.open()
    if not place.as_json:  # before imports that take seconds
        print(f"ml_factory {__version__} on Python {platform.python_version()}, checking ...", flush=True)
    checks = doctor_of.run_doctor_checks(workspace)
    if place.as_json:
        print_json({check.name: {"value": check.value, "good": check.good, "advice": check.advice} for check in checks})
    else:
        table = Table("", "what", "here", "next step")
        for check in checks:
            table.add_row("ok" if check.good else "!!", check.name, escape(check.value), escape(check.advice))
        Console(highlight=False).print(table)
    if not all(check.good for check in checks):
        sys.exit(1)


def clean(*, market: Market = Market(), keep: int = 3, dry_run: bool = False, yes: bool = False) -> None:
    """List what nothing needs, with sizes, ask, and delete it.

    Example: `python -m ml_factory clean --symbol MES --keep 3`

    Args:
        keep: Newest models of each name and horizon that stay.
        dry_run: List sizes only.
        yes: Do not ask.
    """
    place = market.open()
    check_symbol_stored(place, market.symbol)
    listed = pipeline.clean(place, market.symbol, keep, dry_run=True)
    if dry_run or not listed.items:
        print_cli_result(listed, market.as_json)
        return
    if not yes and (market.as_json or not sys.stdin.isatty()):
        raise SettingsError(
            "There is no terminal to ask on", where="clean", next_step="add --yes, or --dry-run to list"
        )
    if not market.as_json:
        print(listed.summary())
    if not yes:
        confirm("Delete these?", "clean")
    run_verb(market.as_json, "cleaning", lambda: pipeline.clean(place, market.symbol, keep, listed=listed))


def confirm(question: str, verb: str) -> None:
    """Ask on standard error. Raises FactoryError for another answer than yes."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise FactoryError("Nothing was deleted", where=verb, next_step="answer y, or add --yes")


def tracking(action: str, *, run: str, market: Market = Market(), offline: bool = False) -> None:
    """Upload a run's record to W&B. Example: `python -m ml_factory tracking replay --symbol MES --run RUN`

    Args:
        action: replay: upload the whole local record of a run to W&B.
        run: A folder under results/SYMBOL, as `train` names it.
        offline: Leave a folder for `wandb sync` instead.
    """
    if action != "replay":
        raise SettingsError("Unknown action", where="tracking", got=action, wanted="replay")
    results = market.open().results
    folder = stored_path(results / check_symbol(market.symbol), Path(run).name, "log", inside=results)
    with cli_progress_bars("uploading to W&B"):
        sent = recovery.replay_log_to_wandb(folder, mirror="offline" if offline else "auto")
    if market.as_json:
        print_json(sent)
    else:
        print(f"{sent['steps']} steps of {sent['run']} uploaded to W&B, {sent['mode']}: {sent['folder']}")


def run(
    notebook: str, *, place: Place = Place(), parameter: Annotated[Texts, Parameter("-p")] = (), out: Path | None = None
) -> None:
    """Run one notebook, headless.

    Example: `python -m ml_factory run 02_train_tabular -p MODEL=lightgbm -p HORIZON=20`

    Args:
        notebook: Such as 02_train_tabular, or 02.
        parameter: NAME=VALUE, several times.
        out: The executed copy; empty: results/notebooks/.
    """
    given = parse_name_value_options(parameter)
    path = find_suite_notebook(notebook)
    workspace = Workspace(place.workspace or given.get("WORKSPACE", ""))
    given["WORKSPACE"] = workspace.address
    with cli_progress_bars(path.name):
        written = run_suite_notebook(path, out or stored_path(workspace.results, "notebooks", path.name), given)
    workspace.push()
    print_json({"notebook": str(written)}) if place.as_json else print(written)


def suite(
    *, market: Market = Market(), file: BarFile = BarFile(), horizon: Horizon = 20, seed: Seed = 0,
    quick: Quick = False, fresh: Fresh = False,
) -> None:  # fmt: skip
    """Run the eight notebooks in order.

    Example: `python -m ml_factory suite --data MES.parquet --symbol MES --quick`
    """
    symbol, quick, bars = market.symbol, quick_from_environment(quick), file.raw_bar_spec_fields()
    place = market.open(make=True)
    if file.data is not None:
        with cli_progress_bars(f"preparing {symbol}"):
            settings = settings_module.DataSpec(bars=validation.RawBarSpec(**bars))
            pipeline.prepare(place, symbol, (horizon,), data=file.data, settings=settings)
    given = {"SYMBOL": symbol, "HORIZON": str(horizon), "SEED": str(seed), "QUICK": str(quick), "FRESH": str(fresh)}
    seconds = {}

    def done(name: str, took: float) -> None:
        seconds[name] = took
        stderr_console.print(f"{name:24} {took:6.1f} s")

    with cli_progress_bars("notebooks"):
        written = run_notebook_suite(place, given, done)
        found = pipeline.evaluate(place, symbol, horizon)
        answer = suite_answer.suite_answer(place, found)
    report = str(found.report_path)
    if market.as_json:
        facts = {"notebooks": [str(path) for path in written], "seconds": seconds}
        print_json(facts | {"answer": answer, "report": report})
    else:
        print(*answer, f"Report: {report}", sep="\n")
