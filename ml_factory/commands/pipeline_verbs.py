"""Verbs of the pipeline, from bars to predictions and exported models; each calls the function of its name."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ml_factory.argument_checks import (
    AUTO_MODELS,
    BASE_MODELS,
    CALENDARS,
    DEFAULT_HORIZONS,
    LABEL_KINDS,
    quick_from_environment,
)
from ml_factory.cli_output import (
    cli_progress_bars,
    cli_training_progress,
    print_cli_result,
    print_json,
    print_status,
    run_verb,
)
from ml_factory.commands.options import (
    BarFile,
    Config,
    FeatureMarket,
    Finished,
    Folds,
    Fresh,
    Horizon,
    Horizons,
    Json,
    Model,
    Models,
    OwnModules,
    Place,
    Quick,
    RunFlags,
    RunId,
    Seed,
    Setting,
    Texts,
    parse_settings,
    split_commas,
)
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import available_models, split_settings_by_model
from ml_factory.own_modules import import_own_modules
from ml_factory.storage.files import files
from ml_factory.storage.workspace import check_symbol

pipeline, custom = LazyModule("ml_factory.pipeline"), LazyModule("ml_factory.features.custom")
validation, rolls = LazyModule("ml_factory.data.validation"), LazyModule("ml_factory.data.rolls")
settings_module, schemes = LazyModule("ml_factory.settings"), LazyModule("ml_factory.workflows.folds")
trading = LazyModule("ml_factory.evaluation.backtest.simulation")


# ---- data ------------------------------------------------------------------------------------------------------------


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
    rows = {
        "table": table, "symbol": symbol, "start": start, "end": end, "columns": split_commas(columns) or None,
        "time_column": time_column, "symbol_column": symbol_column,
    }  # fmt: skip
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
    if search and searched:
        raise SettingsError("Barriers are either searched or given", where="--search", got="--searched too",
                            next_step="leave one of them out")  # fmt: skip
    symbol, found, bars = check_symbol(market.symbol), [], file.raw_bar_spec_fields()
    values = {f"bars.{name}": value for name, value in bars.items()} | {
        "features.spans": span, "labels.kind": target, "labels.primary": primary,
        "labels.session_end": "span" if span else None, "calendar": calendar, "tick": tick, "roll.by": roll,
    }  # fmt: skip
    values = {name: value for name, value in values.items() if value is not None} | parse_settings(setting)
    with cli_progress_bars(f"preparing {symbol}"):
        of_roll = {name: values.pop(name) for name in list(values) if name.startswith("roll.")}
        import_own_modules(market.own_modules)  # which may define features that are named
        settings, rolled = settings_module.settings_with_values(settings_module.DataSpec(), values), _roll_spec(of_roll)
        if search and settings.labels.kind != LABEL_KINDS[0]:
            raise SettingsError("Only barriers are searched for", where="--search", got=settings.labels.kind,
                                wanted=LABEL_KINDS[0], next_step="leave --search out")  # fmt: skip
        place = market.open(make=True)
        _print_own_features(settings.features.custom, market)
        result = pipeline.prepare(
            place, symbol, horizon, data=file.data, settings=settings, roll=rolled, searched=searched
        )
        if search:
            found = [pipeline.search_barriers(place, symbol, one) for one in dict.fromkeys(horizon)]
            if file.data is not None:
                settings = replace(settings, bars=validation.RawBarSpec(strict=settings.bars.strict))
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
    place = market.open()
    result = run_verb(market.as_json, f"proving {market.symbol}", lambda: pipeline.audit(
        place, market.symbol, horizon or None, cuts=cuts, fresh=fresh, models=model or None
    ))  # fmt: skip
    if not result.passed:
        sys.exit(1)


# ---- models ----------------------------------------------------------------------------------------------------------


def train(
    *,
    market: FeatureMarket = FeatureMarket(),
    run: RunFlags = RunFlags(),
    horizon: Horizon = 20,
    model: Model = "xgboost",
) -> None:
    """Train, resume, or load the finished run. Example: `python -m ml_factory train --symbol MES --model lstm`"""
    place = market.open()
    settings = parse_settings(run.setting)
    with cli_training_progress(model) as on_epoch:
        result = pipeline.train(
            place, market.symbol, horizon, model, model_settings=settings, callbacks=(on_epoch,),
            **run.pipeline_arguments(),
        )  # fmt: skip
    if result is not None:  # of several processes rank 0 prints
        print_cli_result(result, market.as_json)


def cross_validate(
    *, market: FeatureMarket = FeatureMarket(), run: RunFlags = RunFlags(), horizon: Horizon = 20,
    model: Model = "xgboost", scheme: str = "purged_kfold", folds: Folds = 5, test_blocks: int = 2,
    window: int | None = None,
) -> None:  # fmt: skip
    """Evaluate on many test blocks. Example: `python -m ml_factory cross-validate --scheme combinatorial`

    Args:
        scheme: purged_kfold, walk_forward_expanding, walk_forward_rolling or combinatorial.
        test_blocks: Test blocks of one combinatorial fold.
        window: Rows of a rolling window; empty: as the first fold has.
    """
    place = market.open()
    settings = parse_settings(run.setting)
    run_verb(market.as_json, f"cross-validating {model}", lambda: pipeline.cross_validate(
        place, market.symbol, horizon, model, model_settings=settings,
        scheme=schemes.FoldSchemeSpec(scheme, folds, test_blocks, window), **run.pipeline_arguments(),
    ))  # fmt: skip


def stack(
    *, market: FeatureMarket = FeatureMarket(), run: RunFlags = RunFlags(), horizon: Horizon = 20,
    base_model: Annotated[Texts, Parameter(help="Several times; empty: " + ", ".join(BASE_MODELS) + ".")] = BASE_MODELS,
    folds: Folds = 5,
) -> None:  # fmt: skip
    """Combine models by weights fitted out of fold.

    Example: `python -m ml_factory stack --base-model xgboost --base-model lstm`
    """
    place = market.open()
    settings = split_settings_by_model(base_model, parse_settings(run.setting), "--set")
    run_verb(market.as_json, f"stacking {', '.join(base_model)}", lambda: pipeline.stack(
        place, market.symbol, horizon, base_model, folds=folds, model_settings=settings,
        **run.pipeline_arguments(),
    ))  # fmt: skip


def auto(
    *, market: FeatureMarket = FeatureMarket(), horizon: Horizon = 20, trials: int | None = None,
    hours: float | None = None,
    model: Annotated[Texts, Parameter(help="Several times; empty: " + ", ".join(AUTO_MODELS) + ".")] = AUTO_MODELS,
    folds: Folds = 5, seed: Seed = 0, quick: Quick = False, fresh: Fresh = False, uncertified: bool = False,
    setting: Setting = (), ray: str | None = None,
) -> None:  # fmt: skip
    """Search models and settings, and train the best. Example: `python -m ml_factory auto --symbol MES --trials 40`

    Args:
        trials: Trials of the search in all, those of earlier calls among them.
        hours: Time of this call; where it ends depends on the machine.
        uncertified: Accept data not proved free of look-ahead.
        ray: Address of a Ray cluster whose cores search together; local: the cores of this machine.
    """
    place = market.open()
    settings = split_settings_by_model(model, parse_settings(setting), "--set")
    run_verb(market.as_json, "searching", lambda: pipeline.auto(
        place, market.symbol, horizon, hours, trials, models=model, folds=folds, model_settings=settings, seed=seed,
        quick=quick_from_environment(quick), fresh=fresh, uncertified=uncertified, on_status=print_status,
        ray=ray, own_modules=market.own_modules,
    ))  # fmt: skip


def distribute(
    sweep: Path, *, place: Place = Place(), ray: str | None = None, dry_run: bool = False, own_modules: OwnModules = (),
) -> None:  # fmt: skip
    """Work for many symbols, horizons, models and seeds, on this machine or a Ray cluster; exit code 1 if a unit fails.

    Example: `python -m ml_factory distribute sweep.yaml --dry-run`

    Args:
        sweep: YAML file: symbols, horizons, models, seeds, make; see docs/distribute.md.
        ray: Address of a cluster, such as ray://host:10001; empty: this machine.
        dry_run: List what is finished and what is to do.
    """
    workspace = place.open()
    result = run_verb(place.as_json, "distributing", lambda: pipeline.distribute(
        workspace, sweep, ray, dry_run=dry_run, own_modules=own_modules
    ))  # fmt: skip
    if result.failed:
        sys.exit(1)


def evaluate(
    *,
    market: FeatureMarket = FeatureMarket(),
    horizon: Horizon = 20,
    model: Models = (),
    title: str = "",
    run: Texts = (),
) -> None:
    """Compare finished models on the same test rows. Example: `python -m ml_factory evaluate --symbol MES`

    Args:
        title: Title of the report.
        run: Id of a run to compare; several times. Empty: each model's newest.
    """
    place = market.open()
    run_verb(market.as_json, "evaluating", lambda: pipeline.evaluate(
        place, market.symbol, horizon, model or None, title=title, runs=run
    ))  # fmt: skip


def leaderboard(*, place: Place = Place(), symbol: Texts = (), horizon: Horizons = (), out: Path | None = None) -> None:
    """List all finished models with their verdicts. Example: `python -m ml_factory leaderboard --symbol MES`

    Args:
        symbol: Several times; empty: all.
        out: CSV file to write the table to.
    """

    def compared() -> Any:
        result = pipeline.leaderboard(place.open(), symbol or None, horizon or None)
        if out is not None:
            files.write(out, result.frame.to_csv(index=False).encode())
        return result

    run_verb(place.as_json, "comparing", compared)


def backtest(
    *, market: FeatureMarket = FeatureMarket(), horizon: Horizon = 20, model: Finished = "xgboost", run: RunId = "",
    contracts: str | None = None, spread: float = 1.0, slippage: float = 0.5, least_edge: float | None = None,
    daily_loss_limit: float | None = None, overnight: bool = False,
) -> None:  # fmt: skip
    """Trade the stored test predictions after costs. Example: `python -m ml_factory backtest --symbol MES`

    Args:
        contracts: JSON file: money facts by symbol.
        spread: Spread in ticks.
        slippage: Slippage of a fill in ticks.
        least_edge: Least |p_long - p_short| that opens a position; empty: chosen on validation rows.
        daily_loss_limit: Loss of a session that stops it, in currency.
        overnight: Hold positions over the end of a session.
    """
    place = market.open()
    by_hand = least_edge is not None or daily_loss_limit is not None or overnight
    run_verb(market.as_json, f"trading {model}", lambda: pipeline.backtest(
        place, market.symbol, horizon, model, costs=trading.CostSpec(spread, slippage), run=run,
        contract=trading.contract_spec(market.symbol, file=contracts) if contracts else None,
        rule=trading.TradingRule(
            least_edge=least_edge, daily_loss_limit=daily_loss_limit, flat_at_session_end=not overnight
        ) if by_hand else None,
    ))  # fmt: skip


def plan(
    *, market: FeatureMarket = FeatureMarket(), horizon: Horizon = 20, model: Models = (), task: Texts = ("train",),
    folds: Folds = 5, seed: Seed = 0, quick: Quick = False, setting: Setting = (), units_per_hour: float | None = None,
) -> None:  # fmt: skip
    """Plan this session: work that fits, and its order.

    Example: `python -m ml_factory plan --model lstm --model tcn`

    Args:
        task: train, folds, stack; several times.
        units_per_hour: Compute units that this runtime takes per hour, for a price.
    """
    place = market.open()
    settings = split_settings_by_model(model or available_models(), parse_settings(setting), "--set")
    run_verb(market.as_json, "warming up", lambda: pipeline.plan(
        place, market.symbol, horizon, model or None, seed=seed, quick=quick_from_environment(quick), tasks=task,
        folds=folds, model_settings=settings, units_per_hour=units_per_hour,
    ))  # fmt: skip


def predict(
    *, market: FeatureMarket = FeatureMarket(), file: BarFile = BarFile(), horizon: Horizon = 20,
    model: Finished = "xgboost", out: Path | None = None, run: RunId = "",
    all_rows: Annotated[bool, Parameter("--all")] = False,
) -> None:  # fmt: skip
    """Predict out of sample, as Parquet. Example: `python -m ml_factory predict --symbol MES --model stack`

    Args:
        out: Where to write; empty: results/.
        all_rows: Also rows the model was fitted or chosen on.
    """
    place = market.open()
    run_verb(market.as_json, f"predicting with {model}", lambda: pipeline.predict(
        place, market.symbol, horizon, model, data=file.data, out=out, run=run, all_rows=all_rows,
        bars=validation.RawBarSpec(**file.raw_bar_spec_fields()),
    ))  # fmt: skip


def export(
    *, market: FeatureMarket = FeatureMarket(), horizon: Horizon = 20, model: Finished = "xgboost",
    formats: Annotated[Texts, Parameter("--format")] = (), out: Path | None = None, run: RunId = "",
) -> None:  # fmt: skip
    """Export a finished model for use elsewhere. Example: `python -m ml_factory export --symbol MES --model stack`

    Args:
        formats: Several times: bundle, one file that predicts raw bars; onnx; of networks pth. Empty: bundle,
            and onnx where the model has it.
        out: Folder to write to; empty: the run's in results/.
    """
    place = market.open()
    run_verb(market.as_json, f"exporting {model}", lambda: pipeline.export(
        place, market.symbol, horizon, model, formats or None, run=run, out=out
    ))  # fmt: skip


VERBS = (
    export_data, prepare, audit, train, cross_validate, stack, auto, distribute, evaluate, leaderboard, backtest, plan,
    predict, export,
)  # fmt: skip
