"""Verbs that bring data in, prepare and prove it: export-data, prepare, audit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from typer import Option

from ml_factory.argument_checks import CALENDARS, DEFAULT_HORIZONS, LABEL_KINDS
from ml_factory.cli_output import cli_progress_bars, cli_status_printer, print_cli_result, print_json
from ml_factory.commands.options import (
    BarFileOptions,
    FeatureMarketOptions,
    check_data_prepared,
    check_raw_bars_exist,
    parse_settings,
)
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule

pipeline = LazyModule("ml_factory.pipeline")
custom = LazyModule("ml_factory.features.custom")
validation, rolls = LazyModule("ml_factory.data.validation"), LazyModule("ml_factory.data.rolls")
settings_module = LazyModule("ml_factory.settings")
address = LazyModule("ml_factory.data.databases.address")
database_selection = LazyModule("ml_factory.data.databases.selection")


@dataclass(frozen=True)
class BaseBars:
    """Base bars"""

    calendar: Annotated[str | None, Option(help="One of " + ", ".join(CALENDARS) + "; empty: by symbol.")] = None
    tick: Annotated[float | None, Option(help="Price step; empty: by symbol.")] = None
    roll: Annotated[str | None, Option(help="Join the contracts in --data: volume or date.")] = None


@dataclass(frozen=True)
class Labels:
    """Labels"""

    target: Annotated[str, Option(help="Kind of labels: " + ", ".join(LABEL_KINDS) + ".")] = LABEL_KINDS[0]
    primary: Annotated[str, Option(help="Primary side of --target meta: the sign of this column.")] = ""
    span: Annotated[bool, Option("--span", help="Labels and windows go on over session ends and holes.")] = False
    search: Annotated[bool, Option("--search", help="Search barriers, then prepare with them.")] = False
    searched: Annotated[list[str] | None, Option(help="Barriers found before, such as h20-v1.")] = None

    def __post_init__(self) -> None:
        if self.search and self.target != LABEL_KINDS[0]:
            raise SettingsError(
                "Only barriers are searched for", where="--target", got=self.target, wanted=LABEL_KINDS[0]
            )
        if self.search and self.searched:
            raise SettingsError("Barriers are either searched or given", where="--search", got="--searched too",
                                next_step="leave one of them out")  # fmt: skip


Settings = Annotated[
    list[str] | None,
    Option("--set", help="NAME=VALUE of DataSpec or RollSpec, such as labels.k_up=1.2 or roll.months=[3,6]. "
           "Several times; it wins over the other options."),
]  # fmt: skip


@dataclass(frozen=True)
class DatabaseRows:
    """Rows of the database"""

    table: Annotated[str | None, Option(help="Also schema.table; empty: the only table with prices.")] = None
    symbol: Annotated[str | None, Option(help="Rows of this symbol; empty: all, of a table with one.")] = None
    start: Annotated[str | None, Option(help="First time, such as 2024-01-31T14:30Z; without a zone: UTC.")] = None
    end: Annotated[str | None, Option(help="First time that is left out.")] = None
    columns: Annotated[list[str] | None, Option(help="Several times, or with commas; empty: all.")] = None
    time_column: Annotated[str | None, Option(help="Empty: timestamp, ts, time, ...")] = None
    symbol_column: Annotated[str | None, Option(help="Empty: symbol, ticker, instrument, ...")] = None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `pipeline.export_data`."""
        names = [name.strip() for text in self.columns or () for name in text.split(",") if name.strip()]
        return vars(self) | {"columns": names or None}


def export_data(
    rows: DatabaseRows,
    source: Annotated[
        str, Option(envvar="DATABASE_URL", help="postgresql://user@host/database, or http://host:9000 of QuestDB.")
    ],
    output: Annotated[str, Option(help=".parquet or .csv; also gs://bucket/folder/name.parquet.")],
    as_json: Annotated[bool, Option("--json", help="Print the facts as JSON on standard output.")] = False,
) -> None:
    """Bars of a database to one file.

    Example: `python -m ml_factory export-data --source postgresql://user@host/db --symbol MES --output MES.parquet`
    """
    address.parse_database_address(source)
    database_selection.check_output_format(output)
    arguments = rows.arguments()
    database_selection.RowSelection(**arguments)
    with cli_progress_bars(as_json, what="exporting"):
        result = pipeline.export_data(source, output, **arguments)
    print_cli_result(result, as_json)


def prepare(
    market: FeatureMarketOptions,
    file: BarFileOptions,
    base: BaseBars,
    labels: Labels,
    horizon: Annotated[list[int] | None, Option(help="Several times; empty: 5, 10, 15, 20.")] = None,
    setting: Settings = None,
) -> None:
    """Bars to features, labels and splits. Example: `python -m ml_factory prepare --data MES.csv --symbol MES`"""
    symbol, horizons, found = market.symbol, tuple(horizon or DEFAULT_HORIZONS), []
    place = market.check(horizons, data=file.data)
    if file.data is None:
        check_raw_bars_exist(place, symbol)
    with cli_progress_bars(market.as_json, what=f"preparing {symbol}"):
        settings, roll = _specs(file, base, labels, parse_settings(setting))
        _print_own_features(settings.features.custom, market)
        result = pipeline.prepare(
            place, symbol, horizons, data=file.data, settings=settings, roll=roll, searched=labels.searched or ()
        )
        if labels.search:
            found = [pipeline.search_barriers(place, symbol, one) for one in dict.fromkeys(horizons)]
            if file.data is not None:
                settings = replace(settings, bars=validation.RawBarSpec(strict=file.strict))
            result = pipeline.prepare(place, symbol, horizons, settings=settings, searched=[one.path for one in found])
    if market.as_json:
        print_json(result.to_dict() | ({"search": [one.to_dict() for one in found]} if found else {}))
    else:
        print("\n".join(one.summary() for one in (*found, result)))


def _print_own_features(used: Sequence[str], market: FeatureMarketOptions) -> None:
    """Print one line on the features that are not built-in: those prepared, and those imported but left out."""
    names = [name.partition("#")[0] for name in used]
    left_out = [name for name in custom.registered_feature_names() if name not in names] if market.own_modules else []
    show = cli_status_printer(market.as_json)
    if names:
        show(custom.own_features_line(names))
    if left_out:
        example = ",".join(f'"{name}"' for name in [*names, *left_out])
        show(f"imported, not prepared: {', '.join(left_out)}; add --set 'features.custom=[{example}]'")


def _specs(
    file: BarFileOptions, base: BaseBars, labels: Labels, given: Mapping[str, Any]
) -> tuple["settings_module.DataSpec", "rolls.RollSpec | None"]:
    """Return the settings of the data and of the roll: those of the options, and over them those by dotted name."""
    of_options = {f"bars.{name}": value for name, value in file.raw_bar_spec_fields().items()} | {
        "features.spans": labels.span,
        "labels.kind": labels.target, "labels.primary": labels.primary,
        "labels.session_end": "span" if labels.span else None,
        "calendar": base.calendar, "tick": base.tick, "roll.by": base.roll,
    }  # fmt: skip
    values = {name: value for name, value in of_options.items() if value is not None} | given
    of_roll = {name: values.pop(name) for name in list(values) if name.startswith("roll.")}
    spec = settings_module.settings_with_values(settings_module.DataSpec(), values)
    if of_roll and "roll.by" not in of_roll:
        raise SettingsError(
            "Nothing is to be rolled", where=next(iter(of_roll)), next_step="add --roll volume or --roll date"
        )
    of_roll = {name.removeprefix("roll."): value for name, value in of_roll.items()}
    return spec, settings_module.settings_with_values(rolls.RollSpec(), of_roll, "--set roll.") if of_roll else None


def audit(
    market: FeatureMarketOptions,
    horizon: Annotated[list[int] | None, Option(help="Several times; empty: all prepared.")] = None,
    cuts: Annotated[int | None, Option(help="Number of cuts; empty: 50, the full form.")] = None,
    fresh: Annotated[bool, Option("--fresh", help="Ignore earlier proofs.")] = False,
    model: Annotated[list[str] | None, Option("--model", help="Trained on a sample; empty: xgboost, lstm.")] = None,
) -> None:
    """Prove that nothing looks ahead; exit code 1 on a leak. Example: `python -m ml_factory audit --symbol MES`"""
    place = market.check(horizon or (), models=model or ())
    check_data_prepared(place, market.symbol)
    with cli_progress_bars(market.as_json, what=f"proving {market.symbol}"):
        result = pipeline.audit(place, market.symbol, horizon, cuts=cuts, fresh=fresh, models=model)
    print_cli_result(result, market.as_json)
    if not result.passed:
        raise typer.Exit(1)
