"""Verbs that prepare data and prove it: prepare, audit."""

from dataclasses import replace
from typing import Annotated

import typer

from ml_factory.argument_checks import BARS, CALENDARS, DEFAULT_HORIZONS, DEMO, LABEL_KINDS
from ml_factory.cli_output import phases, print_json, print_result
from ml_factory.commands.options import (
    Columns,
    Data,
    Decimal,
    Folder,
    Json,
    Minutes,
    SkipBad,
    Stamp,
    Stamped,
    Strict,
    Symbol,
    Zone,
    check_prepared,
    check_raw,
    checked_workspace,
    columns_of,
    pairs_of,
)
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule

pipeline = LazyModule("ml_factory.pipeline")
bars_of, contracts = LazyModule("ml_factory.data.validation"), LazyModule("ml_factory.data.rolls")
features_of, labels_of = LazyModule("ml_factory.features.build"), LazyModule("ml_factory.targets.labels")
settings_of_data = LazyModule("ml_factory.settings")


def prepare(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    data: Data = None,
    horizon: Annotated[list[int] | None, typer.Option("--horizon", help="May be given several times.")] = None,
    stamp: Stamped = Stamp.start,
    zone: Zone = None,
    minutes: Minutes = None,
    decimal: Decimal = None,
    calendar: Annotated[str | None, typer.Option(help="One of " + ", ".join(CALENDARS) + "; empty: by symbol.")] = None,
    tick: Annotated[float | None, typer.Option(help="Price step; empty: by symbol.")] = None,
    roll: Annotated[str | None, typer.Option(help="Join the contracts in --data: volume or date.")] = None,
    adjust: Annotated[str, typer.Option(help="Prices at a roll: ratio, difference or none.")] = "ratio",
    roll_at: Annotated[list[str] | None, typer.Option(help="Force one: ESH4=2013-12-18T15:00Z. Several times.")] = None,
    roll_first: Annotated[str | None, typer.Option(help="Contract to begin with; empty: the first session's.")] = None,
    roll_months: Annotated[str | None, typer.Option(help="Delivery months, such as 3,6,9,12.")] = None,
    expiry: Annotated[list[str] | None, typer.Option(help="Last day of a contract: CLZ4=2024-11-20.")] = None,
    strict: Strict = False,
    skip_bad: SkipBad = False,
    columns: Columns = None,
    searched: Annotated[list[str] | None, typer.Option(help="Barriers found before, such as h20-v1.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Search barriers, then prepare with them.")] = False,
    target: Annotated[str, typer.Option(help="Kind of labels: " + ", ".join(LABEL_KINDS) + ".")] = LABEL_KINDS[0],
    primary: Annotated[str, typer.Option(help="Primary side of --target meta: the sign of this column.")] = "",
    primary_least: Annotated[float, typer.Option(help="It bets where the column is so far from 0.")] = 0.0,
    against: Annotated[bool, typer.Option("--against", help="It bets on the other side.")] = False,
    span: Annotated[bool, typer.Option("--span", help="Labels and windows go on over session ends and holes.")] = False,
    by: Annotated[str | None, typer.Option("--bars", help="Base bars by: " + ", ".join(BARS) + ".")] = None,
    bar_size: Annotated[float | None, typer.Option(help="Amount per bar; empty: from the first 20 sessions.")] = None,
    as_json: Json = False,
) -> None:
    """Bars to features, labels and splits. Example: `python -m ml_factory prepare --data MES.csv --symbol MES`"""
    horizons, found = tuple(horizon or DEFAULT_HORIZONS), []
    place = checked_workspace(workspace, symbol, horizons, data=data)
    _check_search(search, searched, target)
    if data is None:
        check_raw(place, symbol)
    with phases(as_json, what=f"preparing {symbol}"):
        bars = bars_of.BarSpec(
            minutes=minutes, stamp=stamp.value, zone=zone, decimal=decimal, strict=strict, skip_bad=skip_bad,
            columns=columns_of(columns),
        )  # fmt: skip
        features = features_of.FeatureSpec(bars=by, bar_size=bar_size, spans=span)
        bets = {"primary": primary, "primary_least": primary_least, "against": against}
        labels = labels_of.LabelSpec(kind=target, session_end="span" if span else "session", **bets)
        settings = settings_of_data.DataSpec(bars=bars, features=features, calendar=calendar, tick=tick, labels=labels)
        rolled = roll_of(roll, adjust, roll_at, roll_first, roll_months, expiry)
        result = pipeline.prepare(
            place, symbol, horizons, data=data, settings=settings, roll=rolled, searched=searched or ()
        )
        if search:
            found = [pipeline.search_barriers(place, symbol, one) for one in dict.fromkeys(horizons)]
            settings = settings if data is None else replace(settings, bars=bars_of.BarSpec(strict=strict))
            result = pipeline.prepare(place, symbol, horizons, settings=settings, searched=[one.path for one in found])
    if as_json:
        print_json(result.to_dict() | ({"search": [one.to_dict() for one in found]} if found else {}))
    else:
        print("\n".join(one.summary() for one in (*found, result)))


def _check_search(search: bool, searched: list[str] | None, target: str) -> None:
    """Raise SettingsError for a search of anything but barriers, or where barriers are given too."""
    if search and target != LABEL_KINDS[0]:
        raise SettingsError("Only barriers are searched for", where="--target", got=target, wanted=LABEL_KINDS[0])
    if search and searched:
        raise SettingsError("Barriers are either searched or given", where="--search", got="--searched too",
                            next_step="leave one of them out")  # fmt: skip


def audit(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Annotated[list[int] | None, typer.Option("--horizon", help="Several times; empty: all prepared.")] = None,
    cuts: Annotated[int | None, typer.Option(help="Number of cuts; empty: 50, the full form.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore earlier proofs.")] = False,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Trained on a sample; empty: xgboost, lstm.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove that nothing looks ahead; exit code 1 on a leak. Example: `python -m ml_factory audit --symbol MES`"""
    place = checked_workspace(workspace, symbol, horizon or (), models=model or ())
    check_prepared(place, symbol)
    with phases(as_json, what=f"proving {symbol}"):
        result = pipeline.audit(place, symbol, horizon, cuts=cuts, fresh=fresh, models=model)
    print_result(result, as_json)
    if not result.passed:
        raise typer.Exit(1)


def roll_of(
    by: str | None, adjust: str, at: list[str] | None, first: str | None, months: str | None, expiry: list[str] | None
) -> "contracts.RollSpec | None":
    """Return the roll settings. Raises SettingsError for details without --roll."""
    details = {"--roll-at": at, "--roll-first": first, "--roll-months": months, "--expiry": expiry}
    given = [name for name, value in details.items() if value]
    if by is None:
        if given:
            raise SettingsError("Nothing is to be rolled", where=given[0], next_step="add --roll volume or --roll date")
        return None
    try:
        held = tuple(int(month) for month in months.split(",")) if months else None
    except ValueError:
        held = (0,)
    if held is not None and not all(1 <= month <= 12 for month in held):
        raise SettingsError(
            "No such delivery months", where="--roll-months", got=repr(months), wanted="numbers from 1 to 12",
            next_step="--roll-months 3,6,9,12",
        )  # fmt: skip
    forced = pairs_of(at or [], "--roll-at", "ESH4=2013-12-18T15:00Z")
    expiries = pairs_of(expiry or [], "--expiry", "CLZ4=2024-11-20")
    return contracts.RollSpec(
        by=by, adjust=adjust, months=held, expiries=tuple(expiries.items()), first=first, forced=tuple(forced.items())
    )
