"""Verbs that bring data in, prepare and prove it: export-data, prepare, audit."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from cyclopts import Parameter

from ml_factory.argument_checks import CALENDARS, DEFAULT_HORIZONS, LABEL_KINDS
from ml_factory.cli_output import cli_progress_bars, print_json, print_status, run_verb
from ml_factory.commands.options import (
    BarFile,
    Config,
    FeatureMarket,
    Fresh,
    Horizons,
    Json,
    Texts,
    check_raw_bars_exist,
    parse_settings,
    split_commas,
)
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule

pipeline = LazyModule("ml_factory.pipeline")
custom = LazyModule("ml_factory.features.custom")
validation, rolls = LazyModule("ml_factory.data.validation"), LazyModule("ml_factory.data.rolls")
settings_module = LazyModule("ml_factory.settings")
address = LazyModule("ml_factory.data.databases.address")
selected_rows = LazyModule("ml_factory.data.databases.selected_rows")


def export_data(
    output: str, *, source: Annotated[str, Parameter(env_var="DATABASE_URL")] = "", table: str | None = None,
    symbol: str | None = None, start: str | None = None, end: str | None = None, columns: Texts = (),
    time_column: str | None = None, symbol_column: str | None = None, as_json: Json = False,
    config: Config = None,
) -> None:  # fmt: skip
    """Bars of a database to one file.

    Example: `python -m ml_factory export-data --source postgresql://user@host/db --symbol MES --output MES.parquet`

    Args:
        source: postgresql://user@host/database, or http://host:9000 of QuestDB.
        output: .parquet or .csv; also gs://bucket/folder/name.parquet.
        table: Also schema.table; empty: the only table with prices.
        symbol: Rows of this symbol; empty: all, of a table with one.
        start: First time, such as 2024-01-31T14:30Z; without a zone: UTC.
        end: First time that is left out.
        columns: Several times, or with commas; empty: all.
        time_column: Empty: timestamp, ts, time, ...
        symbol_column: Empty: symbol, ticker, instrument, ...
    """
    address.parse_database_address(source)
    selected_rows.check_output_format(output)
    rows = {
        "table": table, "symbol": symbol, "start": start, "end": end, "columns": split_commas(columns) or None,
        "time_column": time_column, "symbol_column": symbol_column,
    }  # fmt: skip
    selected_rows.RowSelection(**rows)
    run_verb(as_json, "exporting", lambda: pipeline.export_data(source, output, **rows))


def prepare(
    *, market: FeatureMarket = FeatureMarket(), file: BarFile = BarFile(), horizon: Horizons = DEFAULT_HORIZONS,
    calendar: Annotated[str | None, Parameter(help=f"One of {', '.join(CALENDARS)}; empty: by symbol.")] = None,
    tick: float | None = None, roll: str | None = None,
    target: Annotated[str, Parameter(help=f"Kind of labels: {', '.join(LABEL_KINDS)}.")] = LABEL_KINDS[0],
    primary: str = "", span: bool = False, search: bool = False, searched: Texts = (),
    setting: Annotated[Texts, Parameter("--set")] = (),
) -> None:  # fmt: skip
    """Bars to features, labels and splits. Example: `python -m ml_factory prepare --data MES.csv --symbol MES`

    Args:
        tick: Price step; empty: by symbol.
        roll: Join the contracts in --data: volume or date.
        primary: Primary side of --target meta: the sign of this column.
        span: Labels and windows go on over session ends and holes.
        search: Search barriers, then prepare with them.
        searched: Barriers found before, such as h20-v1.
        setting: NAME=VALUE of DataSpec or RollSpec, such as labels.k_up=1.2 or roll.months=[3,6]. Several times; it
            wins over the other options.
    """
    if search and target != LABEL_KINDS[0]:
        raise SettingsError("Only barriers are searched for", where="--target", got=target, wanted=LABEL_KINDS[0])
    if search and searched:
        raise SettingsError("Barriers are either searched or given", where="--search", got="--searched too",
                            next_step="leave one of them out")  # fmt: skip
    symbol, found = market.symbol, []
    place = market.check(horizon, data=file.data, make=True)
    if file.data is None:
        check_raw_bars_exist(place, symbol)
    values = {f"bars.{name}": value for name, value in file.raw_bar_spec_fields().items()} | {
        "features.spans": span, "labels.kind": target, "labels.primary": primary,
        "labels.session_end": "span" if span else None, "calendar": calendar, "tick": tick, "roll.by": roll,
    }  # fmt: skip
    values = {name: value for name, value in values.items() if value is not None} | parse_settings(setting)
    with cli_progress_bars(f"preparing {symbol}"):
        of_roll = {name: values.pop(name) for name in list(values) if name.startswith("roll.")}
        settings, rolled = settings_module.settings_with_values(settings_module.DataSpec(), values), _roll_spec(of_roll)
        _print_own_features(settings.features.custom, market)
        result = pipeline.prepare(
            place, symbol, horizon, data=file.data, settings=settings, roll=rolled, searched=searched
        )
        if search:
            found = [pipeline.search_barriers(place, symbol, one) for one in dict.fromkeys(horizon)]
            if file.data is not None:
                settings = replace(settings, bars=validation.RawBarSpec(strict=file.strict))
            result = pipeline.prepare(place, symbol, horizon, settings=settings, searched=[one.path for one in found])
    if market.as_json:
        print_json(result.to_dict() | ({"search": [one.to_dict() for one in found]} if found else {}))
    else:
        print("\n".join(one.summary() for one in (*found, result)))


def _roll_spec(given: dict[str, Any]) -> "rolls.RollSpec | None":
    """Return the settings of the roll, from values by name such as roll.by; None where there are none."""
    if given and "roll.by" not in given:
        raise SettingsError("Nothing is to be rolled", where=next(iter(given)),
                            next_step="add --roll volume or --roll date")  # fmt: skip
    named = {name.removeprefix("roll."): value for name, value in given.items()}
    return settings_module.settings_with_values(rolls.RollSpec(), named, "--set roll.") if named else None


def _print_own_features(used: Sequence[str], market: FeatureMarket) -> None:
    """Print one line on the features that are not built-in: those prepared, and those imported but left out."""
    names = [name.partition("#")[0] for name in used]
    left_out = [name for name in custom.registered_feature_names() if name not in names] if market.own_modules else []
    if names:
        print_status(custom.own_features_line(names))
    if left_out:
        example = ",".join(f'"{name}"' for name in [*names, *left_out])
        print_status(f"imported, not prepared: {', '.join(left_out)}; add --set 'features.custom=[{example}]'")


def audit(
    *, market: FeatureMarket = FeatureMarket(), horizon: Horizons = (), cuts: int | None = None, fresh: Fresh = False,
    model: Annotated[Texts, Parameter(help="Trained on a sample; empty: xgboost, lstm.")] = (),
) -> None:  # fmt: skip
    """Prove that nothing looks ahead; exit code 1 on a leak. Example: `python -m ml_factory audit --symbol MES`

    Args:
        horizon: Several times; empty: all prepared.
        cuts: Number of cuts; empty: 50, the full form.
        fresh: Ignore earlier proofs.
    """
    place = market.check(horizon, models=model, prepared=True)
    result = run_verb(market.as_json, f"proving {market.symbol}", lambda: pipeline.audit(
        place, market.symbol, horizon or None, cuts=cuts, fresh=fresh, models=model or None
    ))  # fmt: skip
    if not result.passed:
        sys.exit(1)
