"""Verbs about this machine and what is stored: doctor, clean, tracking."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ml_factory import __version__
from ml_factory.cli_output import cli_progress_of_work, print_cli_result, print_json
from ml_factory.commands.options import MarketOptions, WorkspaceOptions, check_symbol_stored
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.stored_paths import stored_path
from ml_factory.storage.workspace import Workspace, check_symbol

pipeline = LazyModule("ml_factory.pipeline")
doctor_of, recovery = LazyModule("ml_factory.doctor"), LazyModule("ml_factory.tracking.wandb_restore")


def doctor(place: WorkspaceOptions) -> None:
    """Check this machine and this workspace. Example: `python -m ml_factory doctor`"""
    checks = doctor_of.run_doctor_checks(Workspace(place.workspace))
    if place.as_json:
        print_json({check.name: {"value": check.value, "good": check.good, "advice": check.advice} for check in checks})
    else:
        table = Table("", "what", "here", "next step", title=f"ml_factory {__version__}")
        for check in checks:
            table.add_row("ok" if check.good else "!!", check.name, escape(check.value), escape(check.advice))
        Console(highlight=False).print(table)
    if not all(check.good for check in checks):
        raise typer.Exit(1)


def clean(
    market: MarketOptions,
    keep: Annotated[int, typer.Option(help="Newest models of each name and horizon that stay.")] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List sizes only.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """List what nothing needs, with sizes, ask, and delete it.
    Example: `python -m ml_factory clean --symbol MES --keep 3`
    """
    place = market.check()
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
        typer.confirm("Delete these?", abort=True)
    with cli_progress_of_work("cleaning", market.as_json):
        result = pipeline.clean(place, market.symbol, keep, listed=listed)
    if market.as_json:
        print_json(result.to_dict())
    else:
        print(result.total())


def tracking(
    action: Annotated[str, typer.Argument(help="replay: upload the whole local record of a run to W&B.")],
    run: Annotated[str, typer.Option("--run", help="A folder under results/SYMBOL, as `train` names it.")],
    market: MarketOptions,
    offline: Annotated[bool, typer.Option("--offline", help="Leave a folder for `wandb sync` instead.")] = False,
) -> None:
    """Upload a run's record to W&B. Example: `python -m ml_factory tracking replay --symbol MES --run RUN`"""
    if action != "replay":
        raise SettingsError("Unknown action", where="tracking", got=action, wanted="replay")
    results = Workspace(market.workspace).results
    folder = stored_path(results / check_symbol(market.symbol), Path(run).name, "log", inside=results)
    with cli_progress_of_work("uploading to W&B", market.as_json):
        sent = recovery.replay_log_to_wandb(folder, mirror="offline" if offline else "auto")
    if market.as_json:
        print_json(sent)
    else:
        print(f"{sent['steps']} steps of {sent['run']} uploaded to W&B, {sent['mode']}: {sent['folder']}")
