"""Verbs that train and use models: train, cross-validate, stack, evaluate, leaderboard, plan, predict, export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from ml_factory.argument_checks import (
    BASE_MODELS,
    SCHEMES,
    check_fold_scheme,
    check_units_per_hour,
    quick_from_environment,
)
from ml_factory.cli_output import cli_progress_of_work, cli_training_progress, print_cli_result
from ml_factory.commands.options import (
    BarFileOptions,
    FeatureMarketOptions,
    Folds,
    Horizon,
    Model,
    Models,
    Quick,
    Run,
    RunFlagOptions,
    Seed,
    Setting,
    WorkspaceOptions,
    check_data_prepared,
    check_model_trained,
    parse_settings,
)
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import available_models, split_settings_by_model
from ml_factory.process_identity import process_rank
from ml_factory.storage.files import files

pipeline, validation = LazyModule("ml_factory.pipeline"), LazyModule("ml_factory.data.validation")
trading = LazyModule("ml_factory.evaluation.backtest.simulation")
schemes = LazyModule("ml_factory.workflows.cross_validation.fold_schemes")


@dataclass(frozen=True)
class FoldFlags:
    """Folds"""

    scheme: Annotated[str, Option(help="One of " + ", ".join(SCHEMES) + ".")] = "purged_kfold"
    folds: Folds = 5
    test_blocks: Annotated[int, Option(help="Test blocks of one combinatorial fold.")] = 2
    window: Annotated[int | None, Option(help="Rows of a rolling window; empty: as the first fold has.")] = None


def train(
    market: FeatureMarketOptions,
    run: RunFlagOptions,
    horizon: Horizon = 20,
    model: Model = "xgboost",
) -> None:
    """Train, resume, or load the finished run. Example: `python -m ml_factory train --symbol MES --model lstm`"""
    place = market.check((horizon,), models=(model,), seed=run.seed)
    check_data_prepared(place, market.symbol)
    further = process_rank() > 0  # of several processes rank 0 prints
    settings = parse_settings(run.setting)
    with cli_training_progress(model, market.as_json or further) as on_epoch:
        result = pipeline.train(
            place, market.symbol, horizon, model, model_settings=settings, callbacks=(on_epoch,),
            **run.pipeline_arguments(market.as_json),
        )  # fmt: skip
    if not further:
        print_cli_result(result, market.as_json)


def cross_validate(
    market: FeatureMarketOptions, run: RunFlagOptions, folds: FoldFlags, horizon: Horizon = 20, model: Model = "xgboost"
) -> None:
    """Evaluate on many test blocks. Example: `python -m ml_factory cross-validate --scheme combinatorial`"""
    place = market.check((horizon,), models=(model,), seed=run.seed)
    scheme, settings = check_fold_scheme(folds.scheme), parse_settings(run.setting)
    check_data_prepared(place, market.symbol)
    with cli_progress_of_work(f"cross-validating {model}", market.as_json):
        result = pipeline.cross_validate(
            place, market.symbol, horizon, model, model_settings=settings,
            scheme=schemes.FoldSchemeSpec(scheme, folds.folds, folds.test_blocks, folds.window),
            **run.pipeline_arguments(market.as_json),
        )  # fmt: skip
    print_cli_result(result, market.as_json)


def stack(
    market: FeatureMarketOptions,
    run: RunFlagOptions,
    horizon: Horizon = 20,
    base_model: Annotated[
        list[str] | None, Option("--base-model", help="Several times; empty: " + ", ".join(BASE_MODELS) + ".")
    ] = None,
    folds: Folds = 5,
) -> None:
    """Combine models by weights fitted out of fold.
    Example: `python -m ml_factory stack --base-model xgboost --base-model lstm`
    """
    names = tuple(base_model or BASE_MODELS)
    place = market.check((horizon,), models=names, seed=run.seed)
    check_data_prepared(place, market.symbol)
    settings = split_settings_by_model(names, parse_settings(run.setting), "--set")
    with cli_progress_of_work(f"stacking {', '.join(names)}", market.as_json):
        result = pipeline.stack(
            place, market.symbol, horizon, names, folds=folds, model_settings=settings,
            **run.pipeline_arguments(market.as_json),
        )  # fmt: skip
    print_cli_result(result, market.as_json)


def evaluate(
    market: FeatureMarketOptions,
    horizon: Horizon = 20,
    model: Models = None,
    title: Annotated[str, Option(help="Title of the report.")] = "",
    run: Annotated[
        list[str] | None,
        Option("--run", help="Id of a run to compare; several times. Empty: each model's newest."),
    ] = None,
) -> None:
    """Compare finished models on the same test rows. Example: `python -m ml_factory evaluate --symbol MES`"""
    place = market.check((horizon,), models=model or ())
    check_data_prepared(place, market.symbol)
    with cli_progress_of_work("evaluating", market.as_json):
        result = pipeline.evaluate(place, market.symbol, horizon, model, title=title, runs=run or ())
    print_cli_result(result, market.as_json)


def leaderboard(
    place: WorkspaceOptions,
    symbol: Annotated[list[str] | None, Option("--symbol", help="Several times; empty: all.")] = None,
    horizon: Annotated[list[int] | None, Option("--horizon", help="Several times; empty: all.")] = None,
    out: Annotated[Path | None, Option("--out", help="CSV file to write the table to.")] = None,
) -> None:
    """List all finished models with their verdicts. Example: `python -m ml_factory leaderboard --symbol MES`"""
    with cli_progress_of_work("comparing", place.as_json):
        result = pipeline.leaderboard(place.workspace, symbol, horizon)
        if out is not None:
            files.write(out, result.frame.to_csv(index=False).encode())
    print_cli_result(result, place.as_json)


@dataclass(frozen=True)
class TradingFlags:
    """Costs and rule"""

    contracts: Annotated[str | None, Option(help="YAML or JSON file: money facts by symbol.")] = None
    spread: Annotated[float, Option(help="Spread in ticks.")] = 1.0
    slippage: Annotated[float, Option(help="Slippage of a fill in ticks.")] = 0.5
    least_edge: Annotated[
        float | None, Option(help="Least |p_long - p_short| that opens a position; empty: chosen on validation rows.")
    ] = None
    daily_loss_limit: Annotated[float | None, Option(help="Loss of a session that stops it, in currency.")] = None
    overnight: Annotated[bool, Option("--overnight", help="Hold positions over the end of a session.")] = False


def backtest(
    market: FeatureMarketOptions,
    flags: TradingFlags,
    horizon: Horizon = 20,
    model: Annotated[str, Option("--model", help="A finished model, or stack.")] = "xgboost",
    run: Run = "",
) -> None:
    """Trade the stored test predictions after costs. Example: `python -m ml_factory backtest --symbol MES`"""
    place = market.check((horizon,), models=(model,))
    check_model_trained(place, market.symbol)
    with cli_progress_of_work(f"trading {model}", market.as_json):
        contract = trading.contract_spec(market.symbol, file=flags.contracts) if flags.contracts else None
        rule = trading.TradingRule(
            least_edge=flags.least_edge or 0.0, daily_loss_limit=flags.daily_loss_limit,
            flat_at_session_end=not flags.overnight,
        )  # fmt: skip
        if flags.least_edge is None and rule == trading.TradingRule():
            rule = None
        result = pipeline.backtest(
            place, market.symbol, horizon, model, contract=contract,
            costs=trading.CostSpec(flags.spread, flags.slippage), rule=rule, run_id=run,
        )  # fmt: skip
    print_cli_result(result, market.as_json)


def plan(
    market: FeatureMarketOptions,
    horizon: Horizon = 20,
    model: Models = None,
    task: Annotated[list[str] | None, Option("--task", help="train (the default), folds, stack.")] = None,
    folds: Folds = 5,
    seed: Seed = 0,
    quick: Quick = False,
    setting: Setting = None,
    units_per_hour: Annotated[
        float | None, Option("--units-per-hour", help="Compute units that this runtime takes per hour, for a price.")
    ] = None,
) -> None:
    """Plan this session: work that fits, and its order.
    Example: `python -m ml_factory plan --model lstm --model tcn`
    """
    place = market.check((horizon,), models=model or (), seed=seed)
    check_units_per_hour(units_per_hour)
    check_data_prepared(place, market.symbol)
    settings = split_settings_by_model(tuple(model or available_models()), parse_settings(setting), "--set")
    with cli_progress_of_work("warming up", market.as_json):
        result = pipeline.plan(
            place, market.symbol, horizon, model, seed=seed, quick=quick_from_environment(quick),
            tasks=task or ("train",), folds=folds, model_settings=settings, units_per_hour=units_per_hour,
        )  # fmt: skip
    print_cli_result(result, market.as_json)


def predict(
    market: FeatureMarketOptions,
    file: BarFileOptions,
    horizon: Horizon = 20,
    model: Annotated[str, Option("--model", help="A finished model, or stack.")] = "xgboost",
    out: Annotated[Path | None, Option("--out", help="Where to write; empty: results/.")] = None,
    run: Run = "",
    all_rows: Annotated[bool, Option("--all", help="Also rows the model was fitted or chosen on.")] = False,
) -> None:
    """Predict out of sample, as Parquet. Example: `python -m ml_factory predict --symbol MES --model stack`"""
    place = market.check((horizon,), models=(model,), data=file.data)
    check_model_trained(place, market.symbol)
    with cli_progress_of_work(f"predicting with {model}", market.as_json):
        bars = validation.RawBarSpec(**file.raw_bar_spec_fields())
        result = pipeline.predict(
            place, market.symbol, horizon, model, data=file.data, bars=bars, out=out, run=run, all_rows=all_rows
        )
    print_cli_result(result, market.as_json)


def export(
    market: FeatureMarketOptions,
    horizon: Horizon = 20,
    model: Annotated[str, Option("--model", help="A finished model, or stack.")] = "xgboost",
    formats: Annotated[
        list[str] | None,
        Option(
            "--format",
            help="Several times: bundle, one file that predicts raw bars; onnx; of networks pt2 and pth. "
            "Empty: bundle, and onnx where the model has it.",
        ),
    ] = None,
    out: Annotated[Path | None, Option("--out", help="Folder to write to; empty: the run's in results/.")] = None,
    run: Run = "",
) -> None:
    """Export a finished model for use elsewhere. Example: `python -m ml_factory export --symbol MES --model stack`"""
    place = market.check((horizon,), models=(model,))
    check_model_trained(place, market.symbol)
    with cli_progress_of_work(f"exporting {model}", market.as_json):
        result = pipeline.export(place, market.symbol, horizon, model, formats or None, run=run, out=out)
    print_cli_result(result, market.as_json)
