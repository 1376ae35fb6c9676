"""Options that several verbs share, as dataclasses, and the checks that run before heavy imports."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ml_factory.argument_checks import DEMO, DEMOS, check_file_exists, check_horizon, check_seed, quick_from_environment
from ml_factory.cli_output import cli_status_printer
from ml_factory.commands.own_modules import OwnModules, import_own_modules
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.models.setting_names import parse_setting_value
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace, check_symbol, require_raw_bars, workspace_symbols


class StampOption(StrEnum):
    start = "start"
    end = "end"


PREPARED = "current.json"  # of data/processed/{symbol}/

Horizon = Annotated[int, Option("--horizon", help="Bars of the 5-minute frame until the vertical barrier.")]
Model = Annotated[str, Option("--model", help="One of " + ", ".join(available_models()) + ".")]
Models = Annotated[list[str] | None, Option("--model", help="Several times; empty: all.")]
Folds = Annotated[int, Option("--folds", help="Number of test blocks, or of blocks to combine.")]
Seed = Annotated[int, Option("--seed", help="Same seed, same data, same result.")]
Quick = Annotated[bool, Option("--quick", help="Limit training (never data or labels).")]
Fresh = Annotated[bool, Option("--fresh", help="Open a new run; the old one stays.")]
Run = Annotated[str, Option("--run", help="Id of the run whose model; empty: the newest.")]
Setting = Annotated[
    list[str] | None,
    Option("--set", help="NAME=VALUE, or MODEL.NAME=VALUE of one of several, such as batch_size=64. Several times."),
]


@dataclass(frozen=True)
class WorkspaceOptions:
    """Workspace and output"""

    workspace: Annotated[str, Option("--workspace", help="Folder of the workspace; empty: the default.")] = ""
    as_json: Annotated[bool, Option("--json", help="Print the facts as JSON on standard output.")] = False


@dataclass(frozen=True)
class MarketOptions(WorkspaceOptions):
    """Workspace, market and output"""

    symbol: Annotated[
        str,
        Option(
            "--symbol",
            help=f"Market, as in data/raw/SYMBOL_1m.parquet; {' and '.join(DEMOS)} are synthetic.",
        ),
    ] = DEMO

    def check(
        self, horizons: Sequence[int] = (), *, models: Sequence[str] = (), seed: int = 0, data: str | None = None
    ) -> Workspace:
        """Return the workspace after cheap checks of the arguments. Raises SettingsError, BarsError, WorkspaceError.

        models : names; "stack" is accepted.
        data : a file that must exist.
        """
        place = Workspace(self.workspace)
        check_symbol(self.symbol)
        for horizon in horizons:
            check_horizon(horizon)
        for model in models:
            if model != "stack":
                find_model_spec(model)
        check_seed(seed)
        if data is not None and "://" not in data:
            check_file_exists(Path(data).expanduser())
        return place


@dataclass(frozen=True)
class FeatureMarketOptions(MarketOptions):
    """Workspace, market and output"""

    own_modules: OwnModules = None

    def check(
        self, horizons: Sequence[int] = (), *, models: Sequence[str] = (), seed: int = 0, data: str | None = None
    ) -> Workspace:
        """Import the user's modules, which may define models, and check as `MarketOptions` does."""
        import_own_modules(self.own_modules)
        return super().check(horizons, models=models, seed=seed, data=data)


@dataclass(frozen=True)
class RunFlagOptions:
    """Run and model"""

    seed: Seed = 0
    quick: Quick = False
    fresh: Fresh = False
    uncertified: Annotated[bool, Option("--uncertified", help="Accept data not proved free of look-ahead.")] = False
    run: Annotated[str, Option("--run", help="Resume the run with this id, or fail with the reason.")] = ""
    setting: Setting = None

    def pipeline_arguments(self, as_json: bool) -> dict[str, Any]:
        """Return the keyword arguments of a pipeline function, without the model's settings."""
        return {
            "seed": self.seed, "quick": quick_from_environment(self.quick), "fresh": self.fresh, "run": self.run,
            "uncertified": self.uncertified, "on_status": cli_status_printer(as_json),
        }  # fmt: skip


@dataclass(frozen=True)
class BarFileOptions:
    """File of bars"""

    data: Annotated[str | None, Option("--data", help="Parquet or CSV with bars; also gs://bucket/file.")] = None
    stamp: Annotated[StampOption, Option("--stamp", help="Whether bars are stamped at start or end.")] = (
        StampOption.start
    )
    zone: Annotated[str | None, Option("--zone", help="Zone of naive timestamps, such as America/Chicago.")] = None
    minutes: Annotated[int | None, Option("--minutes", help="Length of a bar; empty: as the file has it.")] = None
    decimal: Annotated[str | None, Option("--decimal", help="Decimal mark of text prices, . or ,")] = None
    strict: Annotated[bool, Option("--strict", help="Refuse what is otherwise only reported.")] = False
    skip_bad: Annotated[bool, Option("--skip-bad", help="Leave out rows that cannot be bars, and list them.")] = False
    columns: Annotated[
        list[str] | None, Option("--columns", help="Names in --data: close=Schluss,open=Start. Several times.")
    ] = None

    def raw_bar_spec_fields(self) -> dict[str, Any]:
        """Return the fields of a `RawBarSpec`. Raises SettingsError for columns that are not NAME=NAME."""
        parts = [part.strip() for text in self.columns or () for part in text.split(",") if part.strip()]
        pairs = parse_name_value_options(parts, "--columns", "close=Schluss")
        return {
            "minutes": self.minutes, "stamp": self.stamp.value, "zone": self.zone, "decimal": self.decimal,
            "strict": self.strict, "skip_bad": self.skip_bad,
            "columns": tuple((ours.strip(), theirs.strip()) for ours, theirs in pairs.items()),
        }  # fmt: skip


def check_raw_bars_exist(workspace: Workspace, symbol: str) -> None:
    """Raise NotPreparedError unless the workspace has raw bars of this symbol; the synthetic market needs none."""
    if symbol not in DEMOS:
        require_raw_bars(workspace, symbol)


def check_symbol_stored(workspace: Workspace, symbol: str) -> None:
    """Raise NotPreparedError, naming the symbols there are, where the workspace has nothing of this one."""
    folders = (workspace.results, workspace.models, workspace.processed(symbol).parent)
    found = {name for folder in folders for name in files.names(folder) if not name.startswith(".")}
    found |= set(workspace_symbols(workspace))
    if symbol not in found:
        raise NotPreparedError(
            "Nothing is stored of this symbol", where=workspace.root, got=symbol,
            wanted=", ".join(sorted(found)) or "any: the workspace is empty", next_step="name another with --symbol",
        )  # fmt: skip


def check_data_prepared(workspace: Workspace, symbol: str) -> None:
    """Raise NotPreparedError unless prepared data exist for this symbol; the reader checks whether they are valid."""
    if files.is_file(workspace.processed(symbol) / PREPARED):
        return
    check_raw_bars_exist(workspace, symbol)
    raise NotPreparedError(
        "Nothing is prepared for this symbol yet", where=workspace.processed(symbol), wanted="features and labels",
        next_step=f"run: python -m ml_factory prepare --symbol {symbol} (notebook 01)",
    )  # fmt: skip


def check_model_trained(workspace: Workspace, symbol: str) -> None:
    """Raise NotPreparedError unless some model is finished for this symbol."""
    if not workspace.files.names(workspace.models / symbol):
        raise NotPreparedError(
            "No model is finished for this symbol yet", where=workspace.models / symbol,
            next_step=f"run: python -m ml_factory train --symbol {symbol} (notebook 02)",
        )  # fmt: skip


def parse_settings(texts: list[str] | None) -> dict[str, Any]:
    """Parse settings from texts NAME=VALUE. Raises SettingsError for another text."""
    return {
        name: parse_setting_value(text)
        for name, text in parse_name_value_options(texts or [], "--set", "dropout=0.2").items()
    }


def parse_name_value_options(texts: list[str], where: str = "-p", example: str = "HORIZON=20") -> dict[str, str]:
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
