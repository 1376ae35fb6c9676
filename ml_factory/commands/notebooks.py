"""Verbs that execute notebooks: run, suite."""

from pathlib import Path
from typing import Annotated

import typer

from ml_factory.argument_checks import DEMO, quick_from_environment
from ml_factory.cli_output import phases, print_json, stderr_console, working
from ml_factory.commands.options import (
    Columns,
    Data,
    Decimal,
    Folder,
    Fresh,
    Horizon,
    Json,
    Minutes,
    Quick,
    Seed,
    SkipBad,
    Stamp,
    Stamped,
    Strict,
    Symbol,
    Zone,
    checked_workspace,
    columns_of,
    pairs_of,
)
from ml_factory.lazy_module import LazyModule
from ml_factory.notebook_suite import find_notebook, run_notebook, run_suite
from ml_factory.storage.workspace import Workspace

pipeline, bars_of = LazyModule("ml_factory.pipeline"), LazyModule("ml_factory.data.validation")
settings_of_data = LazyModule("ml_factory.settings")


def run(
    notebook: Annotated[str, typer.Argument(help="Such as 02_train_tabular, or 02.")],
    parameter: Annotated[list[str] | None, typer.Option("-p", help="NAME=VALUE, several times.")] = None,
    workspace: Folder = "",
    out: Annotated[Path | None, typer.Option("--out", help="The executed copy; empty: results/notebooks/.")] = None,
    as_json: Json = False,
) -> None:
    """Run one notebook, headless.
    Example: `python -m ml_factory run 02_train_tabular -p MODEL=lightgbm -p HORIZON=20`
    """
    given = pairs_of(parameter or [])
    path = find_notebook(notebook)
    place = Workspace(workspace or given.get("WORKSPACE", ""))
    given["WORKSPACE"] = place.address
    with working(path.name, as_json):
        written = run_notebook(path, out or place.results / "notebooks" / path.name, given)
    place.push()
    print_json({"notebook": str(written)}) if as_json else print(written)


def suite(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    data: Data = None,
    horizon: Horizon = 20,
    seed: Seed = 0,
    quick: Quick = False,
    fresh: Fresh = False,
    stamp: Stamped = Stamp.start,
    zone: Zone = None,
    minutes: Minutes = None,
    decimal: Decimal = None,
    strict: Strict = False,
    skip_bad: SkipBad = False,
    columns: Columns = None,
    as_json: Json = False,
) -> None:
    """Run the eight notebooks in order.
    Example: `python -m ml_factory suite --data MES.parquet --symbol MES --quick`
    """
    quick = quick_from_environment(quick)
    place = checked_workspace(workspace, symbol, (horizon,), seed=seed, data=data)
    if data is not None:
        with phases(as_json, what=f"preparing {symbol}"):
            spec = bars_of.BarSpec(
                minutes=minutes, stamp=stamp.value, zone=zone, decimal=decimal, strict=strict, skip_bad=skip_bad,
                columns=columns_of(columns),
            )  # fmt: skip
            settings = settings_of_data.DataSpec(bars=spec)
            pipeline.prepare(place, symbol, (horizon,), data=data, settings=settings)
    given = {"SYMBOL": symbol, "HORIZON": str(horizon), "SEED": str(seed), "QUICK": str(quick), "FRESH": str(fresh)}
    seconds = {}

    def done(name: str, took: float) -> None:
        seconds[name] = took
        stderr_console.print(f"{name:24} {took:6.1f} s")

    with phases(as_json, what="notebooks"):
        written = run_suite(place, given, done)
        report = pipeline.evaluate(place, symbol, horizon).report_path
    if as_json:
        print_json({"notebooks": [str(path) for path in written], "seconds": seconds, "report": str(report)})
    else:
        print(f"Report: {report}")
