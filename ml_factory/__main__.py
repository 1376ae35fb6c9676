"""The command line: python -m ml_factory VERB. Exit code 0, 1 (could not be done) or 2 (wrong usage)."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ml_factory import __version__, pipeline
from ml_factory.console import (
    Data,
    Decimal,
    Folder,
    Fresh,
    Horizon,
    Json,
    Model,
    Named,
    Quick,
    Said,
    Seed,
    Stamp,
    Stamped,
    Symbol,
    Uncertified,
    Zone,
    found_line,
    phases,
    print_json,
    said,
    tell,
    training,
    working,
)
from ml_factory.data.bars import BarSpec
from ml_factory.data.contracts import RollSpec
from ml_factory.data.synthetic import DEMO
from ml_factory.doctor import examine
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.experiment import DEFAULT_HORIZONS, DataSpec, check_horizon, check_seed, quick_from_environment
from ml_factory.features.build import BARS, FeatureSpec
from ml_factory.runs.ownership import rank_here
from ml_factory.runs.recovery import replay
from ml_factory.runs.workspace import Workspace, check_symbol
from ml_factory.suite import find_notebook, run_notebook, run_suite
from ml_factory.targets.labels import KINDS, LabelSpec
from ml_factory.targets.search_spec import SearchSpec
from ml_factory.units.schemes import SCHEMES

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False,
    help="From 1-minute bars to calibrated probabilities, on machines that may vanish.",
)  # fmt: skip


@app.command()
def doctor(workspace: Folder = "", as_json: Json = False) -> None:
    """What this machine and this workspace have. Example: `python -m ml_factory doctor`"""
    checks = examine(Workspace(workspace))
    if as_json:
        print_json({check.name: {"value": check.value, "good": check.good, "advice": check.advice} for check in checks})
    else:
        table = Table("", "what", "here", "next step", title=f"ml_factory {__version__}")
        for check in checks:
            table.add_row("ok" if check.good else "!!", check.name, check.value, check.advice)
        Console(highlight=False).print(table)
    if not all(check.good for check in checks):
        raise typer.Exit(1)


@app.command()
def prepare(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    data: Data = None,
    horizon: Annotated[list[int] | None, typer.Option("--horizon", help="May be given several times.")] = None,
    stamp: Stamped = Stamp.start,
    zone: Zone = None,
    decimal: Decimal = None,
    calendar: Annotated[str | None, typer.Option(help="cme, us_equity, fx or 24h; empty: by symbol.")] = None,
    tick: Annotated[float | None, typer.Option(help="Price step; empty: by symbol.")] = None,
    roll: Annotated[str | None, typer.Option(help="Join the contracts in --data: volume or date.")] = None,
    adjust: Annotated[str, typer.Option(help="Prices at a roll: ratio, difference or none.")] = "ratio",
    roll_at: Annotated[list[str] | None, typer.Option(help="Force one: ESH4=2013-12-18T15:00Z. Several times.")] = None,
    roll_first: Annotated[str | None, typer.Option(help="Contract to begin with; empty: the first session's.")] = None,
    roll_months: Annotated[str | None, typer.Option(help="Delivery months, such as 3,6,9,12.")] = None,
    expiry: Annotated[list[str] | None, typer.Option(help="Last day of a contract: CLZ4=2024-11-20.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse what is otherwise only reported.")] = False,
    searched: Annotated[list[str] | None, typer.Option(help="Barriers found before, such as h20-v1.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Look for barriers, then prepare with them.")] = False,
    target: Annotated[str, typer.Option(help="What is asked: " + ", ".join(KINDS) + ".")] = KINDS[0],
    primary: Annotated[str, typer.Option(help="Whose bets --target meta judges: the sign of this column.")] = "",
    primary_least: Annotated[float, typer.Option(help="It bets where the column is so far from 0.")] = 0.0,
    against: Annotated[bool, typer.Option("--against", help="It bets on the other side.")] = False,
    span: Annotated[bool, typer.Option("--span", help="Labels and windows go on over session ends and holes.")] = False,
    by: Annotated[str | None, typer.Option("--bars", help="Rows stand on bars of: " + ", ".join(BARS) + ".")] = None,
    bar_size: Annotated[float | None, typer.Option(help="What fills a bar; empty: of the first 20 sessions.")] = None,
    as_json: Json = False,
) -> None:
    """Bars to features, labels and splits. Example: `python -m ml_factory prepare --data MES.csv --symbol MES`"""
    bars = BarSpec(stamp=stamp.value, zone=zone, decimal=decimal, strict=strict)
    features = FeatureSpec(bars=by, bar_size=bar_size, spans=span)
    bets = {"primary": primary, "primary_least": primary_least, "against": against}
    labels = LabelSpec(kind=target, session_end="span" if span else "session", **bets)
    settings = DataSpec(bars=bars, features=features, calendar=calendar, tick=tick, labels=labels)
    if search and target != KINDS[0]:
        raise SettingsError("Only barriers are searched for", where="--target", got=target, wanted=KINDS[0])
    rolled = _roll_of(roll, adjust, roll_at, roll_first, roll_months, expiry)
    place, horizons, found = Workspace(workspace), tuple(horizon or DEFAULT_HORIZONS), []
    if search and searched:
        raise SettingsError("Barriers are looked for or given", where="--search", got="--searched too",
                            next_step="leave one of them out")  # fmt: skip
    with phases(as_json):
        result = pipeline.prepare(
            place, symbol, horizons, data=data, settings=settings, roll=rolled, searched=searched or ()
        )
        if search:
            found = [pipeline.search_barriers(place, symbol, one) for one in dict.fromkeys(horizons)]
            settings = settings if data is None else replace(settings, bars=BarSpec(strict=strict))
            result = pipeline.prepare(place, symbol, horizons, settings=settings, searched=[one.path for one in found])
    if as_json:
        print_json(result.to_dict() | ({"search": [one.to_dict() for one in found]} if found else {}))
    else:
        print("\n".join(one.summary() for one in (*found, result)))


@app.command()
def audit(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Annotated[list[int] | None, typer.Option("--horizon", help="Several times; empty: all prepared.")] = None,
    cuts: Annotated[int | None, typer.Option(help="Moments to try; empty: 50, the full form.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Also what was proved before.")] = False,
    model: Annotated[list[str] | None, typer.Option("--model", help="Tried on a sample; empty: xgboost, lstm.")] = None,
    as_json: Json = False,
) -> None:
    """Prove that nothing looks ahead; exit code 1 on a leak. Example: `python -m ml_factory audit --symbol MES`"""
    with phases(as_json):
        result = pipeline.audit(Workspace(workspace), symbol, horizon, cuts=cuts, fresh=fresh, models=model)
    tell(result, as_json)
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def train(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Horizon = 20,
    model: Model = "xgboost",
    seed: Seed = 0,
    quick: Quick = False,
    fresh: Fresh = False,
    uncertified: Uncertified = False,
    named: Named = "",
    setting: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of the model, several times.")] = None,
    as_json: Json = False,
) -> None:
    """Train, or go on, or find the finished run. Example: `python -m ml_factory train --symbol MES --model lstm`"""
    quick = quick_from_environment(quick)
    further = rank_here() > 0  # of several processes the first one speaks
    settings = {name: _value(text) for name, text in _pairs(setting or [], "--set", "dropout=0.2").items()}
    with training(model, as_json or further) as told:
        result = pipeline.train(
            Workspace(workspace), symbol, horizon, model, seed=seed, quick=quick, fresh=fresh, uncertified=uncertified,
            run=named, tell=found_line(as_json), model_settings=settings,
            callbacks=(told,),
        )  # fmt: skip
    if not further:
        tell(result, as_json)


@app.command("cross-validate")
def cross_validate(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Horizon = 20,
    model: Model = "xgboost",
    scheme: Annotated[str, typer.Option(help="One of " + ", ".join(SCHEMES) + ".")] = "purged_kfold",
    folds: Annotated[int, typer.Option(help="Blocks that judge, or that combinatorial folds choose from.")] = 5,
    test_blocks: Annotated[int, typer.Option(help="Blocks that one combinatorial fold judges.")] = 2,
    window: Annotated[int | None, typer.Option(help="Rows of a rolling window; empty: as the first fold has.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Look for barriers in every fold, on its own rows.")] = False,
    trials: Annotated[int, typer.Option(help="Barriers that one search tries.")] = 40,
    seed: Seed = 0,
    quick: Quick = False,
    fresh: Fresh = False,
    uncertified: Uncertified = False,
    named: Named = "",
    as_json: Json = False,
) -> None:
    """Judge on many stretches of time. Example: `python -m ml_factory cross-validate --scheme combinatorial`"""
    quick = quick_from_environment(quick)
    with working(f"cross-validating {model}", as_json):
        result = pipeline.cross_validate(
            Workspace(workspace), symbol, horizon, model, scheme=scheme, folds=folds, test_blocks=test_blocks,
            window=window, seed=seed, quick=quick, fresh=fresh, uncertified=uncertified,
            run=named, tell=found_line(as_json),
            search=SearchSpec(trials=trials) if search else None,
        )  # fmt: skip
    tell(result, as_json)


@app.command()
def plan(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Horizon = 20,
    model: Annotated[list[str] | None, typer.Option("--model", help="A model, several times; empty: all.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="train (the default), folds, stack.")] = None,
    folds: Annotated[int, typer.Option("--folds", help="Of a cross-validation or a stack.")] = 5,
    seed: Seed = 0,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """What fits into this session, in which order. Example: `python -m ml_factory plan --model lstm --model tcn`"""
    with working("warming up", as_json):
        result = pipeline.plan(
            Workspace(workspace), symbol, horizon, model, seed=seed, quick=quick_from_environment(quick),
            tasks=task or ("train",), folds=folds,
        )  # fmt: skip
    tell(result, as_json)


@app.command()
def predict(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Horizon = 20,
    model: Annotated[str, typer.Option("--model", help="A finished model, or stack.")] = "xgboost",
    data: Data = None,
    stamp: Stamped = Stamp.start,
    zone: Zone = None,
    decimal: Decimal = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where to write; empty: results/.")] = None,
    run: Annotated[str, typer.Option("--run", help="The id of the run whose model; empty: the newest.")] = "",
    as_json: Json = False,
) -> None:
    """Probabilities of every bar, as Parquet. Example: `python -m ml_factory predict --symbol MES --model stack`"""
    with working(f"predicting with {model}", as_json):
        bars = BarSpec(stamp=stamp.value, zone=zone, decimal=decimal)
        result = pipeline.predict(Workspace(workspace), symbol, horizon, model, data=data, bars=bars, out=out, run=run)
    tell(result, as_json)


@app.command()
def tracking(
    action: Annotated[str, typer.Argument(help="replay: tell W&B the whole local record of a run.")],
    run: Annotated[str, typer.Option("--run", help="A folder under results/SYMBOL, as `train` names it.")],
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    offline: Annotated[bool, typer.Option("--offline", help="Leave a folder for `wandb sync` instead.")] = False,
    as_json: Json = False,
) -> None:
    """Tell W&B what a run recorded. Example: `python -m ml_factory tracking replay --symbol MES --run RUN`"""
    if action != "replay":
        raise SettingsError("Unknown action", where="tracking", got=action, wanted="replay")
    folder = Workspace(workspace).results / check_symbol(symbol) / Path(run).name / "log"
    with working("telling W&B", as_json):
        told = replay(folder, mirror="offline" if offline else "auto")
    if as_json:
        print_json(told)
    else:
        print(f"{told['steps']} steps of {told['run']} told to W&B, {told['mode']}: {told['folder']}")


@app.command()
def run(
    notebook: Annotated[str, typer.Argument(help="Such as 02_train_tabular, or 02.")],
    parameter: Annotated[list[str] | None, typer.Option("-p", help="NAME=VALUE, several times.")] = None,
    workspace: Folder = "",
    out: Annotated[Path | None, typer.Option("--out", help="The executed copy; empty: results/notebooks/.")] = None,
    as_json: Json = False,
) -> None:
    """One notebook, headless. Example: `python -m ml_factory run 02_train_tabular -p MODEL=lightgbm -p HORIZON=20`"""
    given = _pairs(parameter or [])
    path = find_notebook(notebook)
    place = Workspace(workspace or given.get("WORKSPACE", ""))
    given["WORKSPACE"] = place.address
    with working(path.name, as_json):
        written = run_notebook(path, out or place.results / "notebooks" / path.name, given)
    place.push()
    print_json({"notebook": str(written)}) if as_json else print(written)


@app.command()
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
    decimal: Decimal = None,
    as_json: Json = False,
) -> None:
    """The eight notebooks in order. Example: `python -m ml_factory suite --data MES.parquet --symbol MES --quick`"""
    place, quick = Workspace(workspace), quick_from_environment(quick)
    symbol, horizon, seed = check_symbol(symbol), check_horizon(horizon), check_seed(seed)
    if data is not None:
        with phases(as_json):
            settings = DataSpec(bars=BarSpec(stamp=stamp.value, zone=zone, decimal=decimal))
            pipeline.prepare(place, symbol, (horizon,), data=data, settings=settings)
    given = {"SYMBOL": symbol, "HORIZON": str(horizon), "SEED": str(seed), "QUICK": str(quick), "FRESH": str(fresh)}
    seconds = {}

    def done(name: str, took: float) -> None:
        seconds[name] = took
        said.print(f"{name:24} {took:6.1f} s")

    written = run_suite(place, given, done)
    report = pipeline.evaluate(place, symbol, horizon).report_path
    if as_json:
        print_json({"notebooks": [str(path) for path in written], "seconds": seconds, "report": str(report)})
    else:
        print(f"Report: {report}")


def main() -> None:
    """Run the command line; a user's mistake becomes one line on standard error."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[Said()])
    logging.getLogger("ml_factory.training").setLevel(logging.INFO)  # the progress line
    try:
        app()
    except SettingsError as error:
        _fail(error, 2)
    except FactoryError as error:
        _fail(error, 1)


def _fail(error: FactoryError, code: int) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


def _roll_of(
    by: str | None, adjust: str, at: list[str] | None, first: str | None, months: str | None, expiry: list[str] | None
) -> RollSpec | None:
    """The roll that was asked for; SettingsError for its details without it."""
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
    forced = _pairs(at or [], "--roll-at", "ESH4=2013-12-18T15:00Z")
    expiries = _pairs(expiry or [], "--expiry", "CLZ4=2024-11-20")
    return RollSpec(
        by=by, adjust=adjust, months=held, expiries=tuple(expiries.items()), first=first, forced=tuple(forced.items())
    )


def _value(text: str) -> object:
    """A number, truth value or null as JSON writes it; else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _pairs(texts: list[str], where: str = "-p", example: str = "HORIZON=20") -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise SettingsError(
                "A parameter is NAME=VALUE", where=where, got=repr(text), next_step=f"{where} {example}"
            )
        pairs[name] = value
    return pairs


if __name__ == "__main__":
    main()
