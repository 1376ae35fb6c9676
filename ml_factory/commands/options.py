"""Options that several verbs share; a horizon and a seed are checked before a verb does anything."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ml_factory.argument_checks import DEMO, check_file_exists, check_horizon, check_seed, quick_from_environment
from ml_factory.cli_output import print_status
from ml_factory.errors import NotPreparedError, UnresponsiveMountError
from ml_factory.models.registry import available_models
from ml_factory.models.setting_names import parse_name_value_texts, parse_setting_value
from ml_factory.own_modules import import_own_modules
from ml_factory.storage.files import files, remote_address
from ml_factory.storage.mirror import open_mirror
from ml_factory.storage.workspace import Workspace, check_symbol, workspace_symbols


def _check_horizons(_: object, given: int | Sequence[int]) -> None:
    """Check a horizon, or several. Raises SettingsError."""
    for horizon in [given] if isinstance(given, int) else given:
        check_horizon(horizon)


Texts = tuple[str, ...]
HORIZON_HELP = "Bars of the base frame (5 minutes, or as prepared) until the vertical barrier."
Horizon = Annotated[int, Parameter(help=HORIZON_HELP, validator=_check_horizons)]
Horizons = Annotated[tuple[int, ...], Parameter("--horizon", help="Several times.", validator=_check_horizons)]
Model = Annotated[str, Parameter(help="One of " + ", ".join(available_models()) + ".")]
Models = Annotated[Texts, Parameter("--model", help="Several times; empty: all.")]
Finished = Annotated[str, Parameter(help="A finished model, or stack.")]
Folds = Annotated[int, Parameter(help="Number of test blocks (combinatorial: of the blocks to combine).")]
Seed = Annotated[int, Parameter(help="Same seed, same data, same result.", validator=lambda _, seed: check_seed(seed))]
Quick = Annotated[bool, Parameter(help="Limit training (never data or labels).")]
Fresh = Annotated[bool, Parameter(help="Open a new run; the old one stays.")]
RunId = Annotated[str, Parameter(help="Id of the run whose model; empty: the newest.")]
OwnModules = Annotated[
    Texts,
    Parameter("--import", help="Module or .py file that defines features or networks of your own. It is run. "
              "Several times."),
]  # fmt: skip
Json = Annotated[bool, Parameter("--json", help="Print the facts as JSON on standard output.")]
CONFIG_HELP = "TOML or JSON with values by option, which typed ones replace; table `set`: those of --set."
Config = Annotated[Path | None, Parameter("--config", help=CONFIG_HELP)]  # the command line puts in what the file holds
Setting = Annotated[
    Texts,
    Parameter("--set", help="NAME=VALUE, such as batch_size=64; for one of several models MODEL.NAME=VALUE."),
]


@Parameter(name="*")
@dataclass(frozen=True)
class Place:
    """Workspace and output.

    Args:
        workspace: Folder of the workspace; empty: the default.
    """

    workspace: str = ""
    as_json: Json = False
    config: Config = None

    def open(self, make: bool = False) -> Workspace:
        """Return the workspace. Raises NotPreparedError where the named folder does not exist, unless `make`."""
        if self.workspace and not make and not _is_there(self.workspace):
            raise NotPreparedError("No such workspace", where=self.workspace, next_step="check --workspace; "
                                   "python -m ml_factory prepare makes one")  # fmt: skip
        return Workspace(self.workspace)


def _is_there(workspace: str) -> bool:
    """Return False for a folder that does not exist; a mount is queried by a child process, a bucket not at all."""
    address = remote_address(workspace)
    if address is None:
        return files.is_folder(Path(workspace).expanduser())
    with suppress(UnresponsiveMountError):  # `Workspace` uses its copy then, or raises
        return "://" in address or open_mirror(address).remote.exists()
    return True


@Parameter(name="*")
@dataclass(frozen=True)
class Market(Place):
    """Workspace, market and output.

    Args:
        symbol: Market, as in data/raw/SYMBOL_1m.parquet; DEMO and DEMO-NULL are synthetic.
    """

    symbol: str = DEMO

    def open(self, make: bool = False) -> Workspace:
        """Return the workspace, as `Place` does, for a symbol that can be a folder's name."""
        check_symbol(self.symbol)
        return super().open(make)


@Parameter(name="*")
@dataclass(frozen=True)
class FeatureMarket(Market):
    """Market whose features and networks may be the user's own."""

    own_modules: OwnModules = ()

    def open(self, make: bool = False) -> Workspace:
        """Import the user's modules, which may define models, and open the workspace."""
        import_own_modules(self.own_modules)
        return super().open(make)


@Parameter(name="*")
@dataclass(frozen=True)
class RunFlags:
    """Run and model.

    Args:
        uncertified: Accept data not proved free of look-ahead.
        run: Resume the run with this id, or fail with the reason.
    """

    seed: Seed = 0
    quick: Quick = False
    fresh: Fresh = False
    uncertified: bool = False
    run: str = ""
    setting: Setting = ()

    def pipeline_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a pipeline function, without the model's settings."""
        return {
            "seed": self.seed, "quick": quick_from_environment(self.quick), "fresh": self.fresh, "run": self.run,
            "uncertified": self.uncertified, "on_status": print_status,
        }  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True)
class BarFile:
    """File of bars.

    Args:
        data: Parquet or CSV with bars; also gs://bucket/file.
        stamp: Whether bars are stamped at start or end.
        zone: Zone of naive timestamps, such as America/Chicago.
        minutes: Length of a bar; empty: as the file has it.
        decimal: Decimal mark of text prices, . or ,
        strict: Refuse what is otherwise only reported.
        skip_bad: Leave out rows that cannot be bars, and list them.
        columns: Names in --data: close=Schluss,open=Start. Several times.
    """

    data: str | None = None
    stamp: Literal["start", "end"] = "start"
    zone: str | None = None
    minutes: int | None = None
    decimal: str | None = None
    strict: bool = False
    skip_bad: bool = False
    columns: Texts = ()

    def raw_bar_spec_fields(self) -> dict[str, Any]:
        """Return the fields of a `RawBarSpec`. Raises SettingsError for columns that are not NAME=NAME, and FileError
        where there is no such file.
        """
        if self.data is not None and remote_address(self.data) is None:  # else it is missed when it is fetched
            check_file_exists(Path(self.data).expanduser(), "one Parquet or CSV file")
        pairs = parse_name_value_texts(split_commas(self.columns), "--columns", "close=Schluss")
        return {name: value for name, value in vars(self).items() if name != "data"} | {"columns": tuple(pairs.items())}


def split_commas(texts: Sequence[str]) -> list[str]:
    """Return the names in these texts, of which one may hold several with commas between."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


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


def parse_settings(texts: Sequence[str], where: str = "--set", example: str = "dropout=0.2") -> dict[str, Any]:
    """Parse settings from texts NAME=VALUE. Raises SettingsError for another text, or a repeated name."""
    given = parse_name_value_texts(texts, where, example)
    return {name: parse_setting_value(text, f"{where} {name}") for name, text in given.items()}
