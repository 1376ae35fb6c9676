"""Verbs that train and use models: train, cross-validate, stack, evaluate, and those that take what they made."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ml_factory.argument_checks import BASE_MODELS, check_fold_scheme, check_units_per_hour, quick_from_environment
from ml_factory.cli_output import cli_training_progress, print_cli_result, run_verb
from ml_factory.commands.options import (
    BarFile,
    FeatureMarket,
    Finished,
    Folds,
    Horizon,
    Horizons,
    Model,
    Models,
    Place,
    Quick,
    Run,
    RunFlags,
    Seed,
    Setting,
    Texts,
    parse_settings,
)
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import available_models, split_settings_by_model
from ml_factory.process_identity import process_rank
from ml_factory.storage.files import files

pipeline, validation = LazyModule("ml_factory.pipeline"), LazyModule("ml_factory.data.validation")
trading = LazyModule("ml_factory.evaluation.backtest.simulation")
schemes = LazyModule("ml_factory.workflows.folds")


def train(
    *,
    market: FeatureMarket = FeatureMarket(),
    run: RunFlags = RunFlags(),
    horizon: Horizon = 20,
    model: Model = "xgboost",
) -> None:
    """Train, resume, or load the finished run. Example: `python -m ml_factory train --symbol MES --model lstm`"""
    place = market.check((horizon,), models=(model,), seed=run.seed, prepared=True)
    further = process_rank() > 0  # of several processes rank 0 prints
    settings = parse_settings(run.setting)
    with cli_training_progress(model) as on_epoch:
        result = pipeline.train(
            place, market.symbol, horizon, model, model_settings=settings, callbacks=(on_epoch,),
            **run.pipeline_arguments(),
        )  # fmt: skip
    if not further:
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
    check_fold_scheme(scheme)
    place = market.check((horizon,), models=(model,), seed=run.seed, prepared=True)
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
    place = market.check((horizon,), models=base_model, seed=run.seed, prepared=True)
    settings = split_settings_by_model(base_model, parse_settings(run.setting), "--set")
    run_verb(market.as_json, f"stacking {', '.join(base_model)}", lambda: pipeline.stack(
        place, market.symbol, horizon, base_model, folds=folds, model_settings=settings,
        **run.pipeline_arguments(),
    ))  # fmt: skip


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
    place = market.check((horizon,), models=model, prepared=True)
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
    *, market: FeatureMarket = FeatureMarket(), horizon: Horizon = 20, model: Finished = "xgboost", run: Run = "",
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
    place = market.check((horizon,), models=(model,))
    by_hand = least_edge is not None or daily_loss_limit is not None or overnight
    run_verb(market.as_json, f"trading {model}", lambda: pipeline.backtest(
        place, market.symbol, horizon, model, costs=trading.CostSpec(spread, slippage), run_id=run,
        contract=trading.contract_spec(market.symbol, file=contracts) if contracts else None,
        rule=trading.TradingRule(
            least_edge=least_edge or 0.0, daily_loss_limit=daily_loss_limit, flat_at_session_end=not overnight
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
    check_units_per_hour(units_per_hour)
    place = market.check((horizon,), models=model, seed=seed, prepared=True)
    settings = split_settings_by_model(model or available_models(), parse_settings(setting), "--set")
    run_verb(market.as_json, "warming up", lambda: pipeline.plan(
        place, market.symbol, horizon, model or None, seed=seed, quick=quick_from_environment(quick), tasks=task,
        folds=folds, model_settings=settings, units_per_hour=units_per_hour,
    ))  # fmt: skip


def predict(
    *, market: FeatureMarket = FeatureMarket(), file: BarFile = BarFile(), horizon: Horizon = 20,
    model: Finished = "xgboost", out: Path | None = None, run: Run = "",
    all_rows: Annotated[bool, Parameter("--all")] = False,
) -> None:  # fmt: skip
    """Predict out of sample, as Parquet. Example: `python -m ml_factory predict --symbol MES --model stack`

    Args:
        out: Where to write; empty: results/.
        all_rows: Also rows the model was fitted or chosen on.
    """
    place = market.check((horizon,), models=(model,), data=file.data)
    run_verb(market.as_json, f"predicting with {model}", lambda: pipeline.predict(
        place, market.symbol, horizon, model, data=file.data, out=out, run=run, all_rows=all_rows,
        bars=validation.RawBarSpec(**file.raw_bar_spec_fields()),
    ))  # fmt: skip


def export(
    *, market: FeatureMarket = FeatureMarket(), horizon: Horizon = 20, model: Finished = "xgboost",
    formats: Annotated[Texts, Parameter("--format")] = (), out: Path | None = None, run: Run = "",
) -> None:  # fmt: skip
    """Export a finished model for use elsewhere. Example: `python -m ml_factory export --symbol MES --model stack`

    Args:
        formats: Several times: bundle, one file that predicts raw bars; onnx; of networks pt2 and pth. Empty: bundle,
            and onnx where the model has it.
        out: Folder to write to; empty: the run's in results/.
    """
    place = market.check((horizon,), models=(model,))
    run_verb(market.as_json, f"exporting {model}", lambda: pipeline.export(
        place, market.symbol, horizon, model, formats or None, run=run, out=out
    ))  # fmt: skip
