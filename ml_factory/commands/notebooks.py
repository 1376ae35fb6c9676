"""Verbs that execute notebooks: run, suite."""

from pathlib import Path
from typing import Annotated

import typer

from ml_factory.argument_checks import quick_from_environment
from ml_factory.cli_output import cli_progress_bars, cli_progress_of_work, print_json, stderr_console
from ml_factory.commands.options import (
    BarFileOptions,
    Fresh,
    Horizon,
    MarketOptions,
    Quick,
    Seed,
    WorkspaceOptions,
    parse_name_value_options,
)
from ml_factory.lazy_module import LazyModule
from ml_factory.notebook_suite import find_suite_notebook, run_notebook_suite, run_suite_notebook
from ml_factory.storage.stored_paths import stored_path
from ml_factory.storage.workspace import Workspace

pipeline, validation = LazyModule("ml_factory.pipeline"), LazyModule("ml_factory.data.validation")
suite_answer = LazyModule("ml_factory.workflows.suite_answer")
settings_module = LazyModule("ml_factory.settings")


def run(
    notebook: Annotated[str, typer.Argument(help="Such as 02_train_tabular, or 02.")],
    place: WorkspaceOptions,
    parameter: Annotated[list[str] | None, typer.Option("-p", help="NAME=VALUE, several times.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The executed copy; empty: results/notebooks/.")] = None,
) -> None:
    """Run one notebook, headless.
    Example: `python -m ml_factory run 02_train_tabular -p MODEL=lightgbm -p HORIZON=20`
    """
    given = parse_name_value_options(parameter or [])
    path = find_suite_notebook(notebook)
    workspace = Workspace(place.workspace or given.get("WORKSPACE", ""))
    given["WORKSPACE"] = workspace.address
    with cli_progress_of_work(path.name, place.as_json):
        written = run_suite_notebook(path, out or stored_path(workspace.results, "notebooks", path.name), given)
    workspace.push()
    print_json({"notebook": str(written)}) if place.as_json else print(written)


def suite(
    market: MarketOptions,
    file: BarFileOptions,
    horizon: Horizon = 20,
    seed: Seed = 0,
    quick: Quick = False,
    fresh: Fresh = False,
) -> None:
    """Run the eight notebooks in order.
    Example: `python -m ml_factory suite --data MES.parquet --symbol MES --quick`
    """
    symbol, quick = market.symbol, quick_from_environment(quick)
    place = market.check((horizon,), seed=seed, data=file.data)
    if file.data is not None:
        with cli_progress_bars(market.as_json, what=f"preparing {symbol}"):
            settings = settings_module.DataSpec(bars=validation.RawBarSpec(**file.raw_bar_spec_fields()))
            pipeline.prepare(place, symbol, (horizon,), data=file.data, settings=settings)
    given = {"SYMBOL": symbol, "HORIZON": str(horizon), "SEED": str(seed), "QUICK": str(quick), "FRESH": str(fresh)}
    seconds = {}

    def done(name: str, took: float) -> None:
        seconds[name] = took
        stderr_console.print(f"{name:24} {took:6.1f} s")

    with cli_progress_bars(market.as_json, what="notebooks"):
        written = run_notebook_suite(place, given, done)
        found = pipeline.evaluate(place, symbol, horizon)
        answer = suite_answer.suite_answer(place, found)
    report = str(found.report_path)
    if market.as_json:
        facts = {"notebooks": [str(path) for path in written], "seconds": seconds}
        print_json(facts | {"answer": answer, "report": report})
    else:
        print(*answer, f"Report: {report}", sep="\n")
