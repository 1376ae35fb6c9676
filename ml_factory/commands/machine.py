"""Verbs about this machine, what is stored, notebooks and the service: doctor, clean, tracking, run, suite, serve."""

import json
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ml_factory import __version__
from ml_factory.argument_checks import check_file_exists, quick_from_environment
from ml_factory.cli_output import cli_progress_bars, print_cli_result, print_json, run_verb, stderr_console
from ml_factory.commands.options import (
    BarFile,
    Config,
    Fresh,
    Horizon,
    Market,
    OwnModules,
    Place,
    Quick,
    Seed,
    Texts,
    check_symbol_stored,
    parse_settings,
)
from ml_factory.errors import FactoryError, SettingsError, check_known
from ml_factory.interrupt import Interrupted
from ml_factory.lazy_module import LazyModule
from ml_factory.models.setting_names import parse_name_value_texts
from ml_factory.notebook_suite import find_suite_notebook, run_notebook_suite, run_suite_notebook
from ml_factory.own_modules import import_own_modules
from ml_factory.storage.files import stored_path
from ml_factory.storage.workspace import Workspace, check_symbol

pipeline, validation = LazyModule("ml_factory.pipeline"), LazyModule("ml_factory.data.validation")
doctor_of, recovery = LazyModule("ml_factory.doctor"), LazyModule("ml_factory.tracking.wandb_restore")
settings_module = LazyModule("ml_factory.settings")
evaluation = LazyModule("ml_factory.workflows.evaluation")
app, following = LazyModule("ml_factory.serving.app"), LazyModule("ml_factory.serving.follow")
guard_settings, feed = LazyModule("ml_factory.inference.guard"), LazyModule("ml_factory.serving.feed")
POLL_SECONDS = 0.5
_HOST, _PORT = "127.0.0.1", 8000


def doctor(*, place: Place = Place()) -> None:
    """Check this machine and this workspace. Example: `python -m ml_factory doctor`"""
    workspace = place.open()
    if not place.as_json:  # before imports that take seconds
        print(f"ml_factory {__version__} on Python {platform.python_version()}, checking ...", flush=True)
    checks = doctor_of.run_doctor_checks(workspace)
    if place.as_json:
        print_json(checks)
    else:
        table = Table("", "what", "here", "next step")
        for name, one in checks.items():
            table.add_row("ok" if one["good"] else "!!", name, escape(one["value"]), escape(one["advice"]))
        Console(highlight=False).print(table)
    if not all(one["good"] for one in checks.values()):
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


def tracking(action: Literal["replay"], *, run: str, market: Market = Market(), offline: bool = False) -> None:
    """Upload a run's record to W&B. Example: `python -m ml_factory tracking replay --symbol MES --run RUN`

    Args:
        action: replay: upload the whole local record of a run to W&B.
        run: A folder under results/SYMBOL, as `train` names it.
        offline: Leave a folder for `wandb sync` instead.
    """
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
    given = parse_name_value_texts(parameter, "-p", "HORIZON=20")
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
        answer = evaluation.suite_answer(place, found)
    report = str(found.report_path)
    if market.as_json:
        facts = {"notebooks": [str(path) for path in written], "seconds": seconds}
        print_json(facts | {"answer": answer, "report": report})
    else:
        print(*answer, f"Report: {report}", sep="\n")


# ---- the service ---------------------------------------------------------------------------------------------------


def serve(
    bundle: Annotated[list[Path], Parameter(negative=())], *, own_modules: OwnModules = (), state: Path | None = None,
    follow: Path | None = None, no_clock: bool = False, guard: Texts = (), host: str = _HOST,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = _PORT, no_key: bool = False,
    as_json: Annotated[bool, Parameter("--json")] = False, config: Config = None,
) -> None:  # fmt: skip
    """Answer requests with bundles. Example: `python -m ml_factory serve DEMO-h20-xgboost.bundle`

    Args:
        bundle: Bundles, one of each symbol.
        state: Folder of the feeds' state; empty: it ends with the process.
        follow: Answer the bars appended to this file instead; state in FILE.state.
        no_clock: With --follow: bars are not compared with the clock.
        guard: NAME=VALUE of the guard, such as drift=abstain. Several times.
        host: Address to listen on; others than this machine's need a key.
        port: 0 takes a free one.
        no_key: Listen on --host without ML_FACTORY_API_KEY.
        as_json: Print the address and the bundles as JSON.
    """
    for path in bundle:
        check_file_exists(path, "the file of a bundle", "python -m ml_factory export writes one from the workspace")
    if no_clock if follow is None else (host, port, no_key) != (_HOST, _PORT, False):
        raise SettingsError(
            "These options do not belong together", where="--follow", got=follow or "none, with --no-clock",
            wanted="--no-clock with --follow; --host, --port and --no-key without", next_step="leave one out",
        )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that share one row wait for each other
    import_own_modules(own_modules)
    limits = parse_settings(guard, "--guard", "drift=abstain")
    for name in limits:
        check_known("There is no such setting", "--guard", name, vars(guard_settings.DEFAULT_SETTINGS))
    guarded = guard_settings.GuardSettings(**limits)
    if follow is not None:
        _follow(bundle, follow, state, guarded, live=not no_clock, as_json=as_json)
        return
    app.run_server(
        bundle, host=host, port=port, no_key=no_key, state=state, guard=guarded,
        announce=lambda facts: _print_address(facts, as_json),
    )  # fmt: skip


def _print_address(facts: dict, as_json: bool) -> None:
    names = ", ".join(f"{symbol} ({run})" for symbol, run in facts["bundles"].items())
    print(json.dumps(facts) if as_json else f"serving {names} at {facts['url']} (stop with Ctrl-C)", flush=True)


def _follow(bundles: list[Path], path: Path, state: Path | None, guard: Any, *, live: bool, as_json: bool) -> None:
    """Print an answer for each row that the bars appended to the file complete, until Ctrl-C."""
    if len(bundles) != 1:
        raise SettingsError("A file is followed with one bundle", where="--follow", got=f"{len(bundles)} bundles",
                            wanted="one", next_step="start a second process for another symbol")  # fmt: skip
    check_file_exists(path, "one Parquet or CSV file")
    served = feed.ServedBundle.load(bundles[0], guard)
    with feed.open_state_folder(state or path.with_name(f"{path.name}.state")) as folder, suppress(Interrupted):
        followed = following.FollowedFile(path, served, folder, live=live)
        following.follow_file(
            followed, poll_seconds=POLL_SECONDS,
            announce=lambda line: print(f"{served.symbol}: {line} (stop with Ctrl-C)", file=sys.stderr, flush=True),
            answer=lambda one: print(json.dumps(one) if as_json else following.answer_line(one), flush=True),
        )  # fmt: skip
