"""Shared options of the verbs, and the checks that run before heavy imports."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ml_factory.argument_checks import DEMO, check_file, check_horizon, check_seed
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.models.registry import available_models, spec_of
from ml_factory.models.setting_names import read_value
from ml_factory.storage.atomic_files import is_file, names_in
from ml_factory.storage.workspace import Workspace, check_symbol, require_raw_bars


class Stamp(StrEnum):
    start = "start"
    end = "end"


PREPARED = "current.json"  # of data/processed/{symbol}/

Folder = Annotated[str, typer.Option("--workspace", help="Folder of the workspace; empty: the default.")]
Symbol = Annotated[
    str, typer.Option("--symbol", help=f"Market, as in data/raw/SYMBOL_1m.parquet; {DEMO} is synthetic.")
]
Horizon = Annotated[int, typer.Option("--horizon", help="Bars of the 5-minute frame until the vertical barrier.")]
Model = Annotated[str, typer.Option("--model", help="One of " + ", ".join(available_models()) + ".")]
Seed = Annotated[int, typer.Option("--seed", help="Same seed, same data, same result.")]
Quick = Annotated[bool, typer.Option("--quick", help="Limit training (never data or labels).")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Open a new run; the old one stays.")]
RunOption = Annotated[str, typer.Option("--run", help="Resume the run with this id, or fail with the reason.")]
Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON on standard output.")]
Data = Annotated[str | None, typer.Option("--data", help="Parquet or CSV with bars; also gs://bucket/file.")]
Stamped = Annotated[Stamp, typer.Option("--stamp", help="Whether the bars of --data are stamped at start or end.")]
Uncertified = Annotated[bool, typer.Option("--uncertified", help="Accept data not proved free of look-ahead.")]
Minutes = Annotated[
    int | None, typer.Option("--minutes", help="Length of the bars, such as 5; empty: as the file has it.")
]
Zone = Annotated[str | None, typer.Option("--zone", help="Zone of naive timestamps, such as America/Chicago.")]
Decimal = Annotated[str | None, typer.Option("--decimal", help="Decimal mark of text prices, . or ,")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse what is otherwise only reported.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be bars, and list them.")]
Setting = Annotated[
    list[str] | None, typer.Option("--set", help="NAME=VALUE of the model, such as batch_size=64. Several times.")
]
SettingOfOne = Annotated[
    list[str] | None, typer.Option("--set", help="MODEL.NAME=VALUE of one model, or NAME=VALUE of every network.")
]
Columns = Annotated[
    list[str] | None, typer.Option("--columns", help="Names in --data: close=Schluss,open=Start. Several times.")
]


def columns_of(texts: Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """Parse (ours, theirs) from texts such as "close=Schluss,open=Start". Raises SettingsError for another text."""
    parts = [part.strip() for text in texts or () for part in text.split(",") if part.strip()]
    return tuple(
        (ours.strip(), theirs.strip()) for ours, theirs in pairs_of(parts, "--columns", "close=Schluss").items()
    )


def checked_workspace(
    workspace: str, symbol: str, horizons: Sequence[int] = (), *, models: Sequence[str] = (), seed: int = 0,
    data: str | None = None,
) -> Workspace:  # fmt: skip
    """Return the workspace after cheap checks of the arguments. Raises SettingsError, BarsError, WorkspaceError.

    models : names; "stack" is accepted.
    data : a file that must exist.
    """
    place = Workspace(workspace)
    check_symbol(symbol)
    for horizon in horizons:
        check_horizon(horizon)
    for model in models:
        if model != "stack":
            spec_of(model)
    check_seed(seed)
    if data is not None and "://" not in data:
        check_file(Path(data).expanduser())
    return place


def check_raw(workspace: Workspace, symbol: str) -> None:
    """Raise NotPreparedError unless the workspace has raw bars of this symbol; the synthetic market needs none."""
    if symbol != DEMO:
        require_raw_bars(workspace, symbol)


def check_prepared(workspace: Workspace, symbol: str) -> None:
    """Raise NotPreparedError unless prepared data exist for this symbol; the reader checks whether they are valid."""
    if is_file(workspace.processed(symbol) / PREPARED):
        return
    check_raw(workspace, symbol)
    raise NotPreparedError(
        "Nothing is prepared for this symbol yet", where=workspace.processed(symbol), wanted="features and labels",
        next_step=f"run: python -m ml_factory prepare --symbol {symbol} (notebook 01)",
    )  # fmt: skip


def check_trained(workspace: Workspace, symbol: str) -> None:
    """Raise NotPreparedError unless some model is finished for this symbol."""
    if not names_in(workspace.models / symbol):
        raise NotPreparedError(
            "No model is finished for this symbol yet", where=workspace.models / symbol,
            next_step=f"run: python -m ml_factory train --symbol {symbol} (notebook 02)",
        )  # fmt: skip


def settings_of(texts: list[str] | None) -> dict[str, Any]:
    """Parse settings from texts NAME=VALUE. Raises SettingsError for another text."""
    return {name: read_value(text) for name, text in pairs_of(texts or [], "--set", "dropout=0.2").items()}


def pairs_of(texts: list[str], where: str = "-p", example: str = "HORIZON=20") -> dict[str, str]:
    """Parse values by name from texts NAME=VALUE. Raises SettingsError for another text."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise SettingsError(
                "A parameter is NAME=VALUE", where=where, got=repr(text), next_step=f"{where} {example}"
            )
        found[name] = value
    return found
