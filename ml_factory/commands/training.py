"""Verbs that train and use models: train, cross-validate, stack, evaluate, plan, predict, export."""

from pathlib import Path
from typing import Annotated

import typer

from ml_factory.argument_checks import BASE_MODELS, DEMO, SCHEMES, check_scheme, quick_from_environment
from ml_factory.cli_output import print_result, status_printer, training, working
from ml_factory.commands.options import (
    Data,
    Decimal,
    Folder,
    Fresh,
    Horizon,
    Json,
    Model,
    Quick,
    RunOption,
    Seed,
    Setting,
    SettingOfOne,
    Stamp,
    Stamped,
    Symbol,
    Uncertified,
    Zone,
    check_prepared,
    check_trained,
    checked_workspace,
    settings_of,
)
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import available_models, settings_by_model
from ml_factory.storage.locks import process_rank

pipeline, bars_of = LazyModule("ml_factory.pipeline"), LazyModule("ml_factory.data.validation")
search_spec = LazyModule("ml_factory.targets.barrier_search_spec")
schemes = LazyModule("ml_factory.workflows.fold_schemes")


def train(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Horizon = 20,
    model: Model = "xgboost",
    seed: Seed = 0,
    quick: Quick = False,
    fresh: Fresh = False,
    uncertified: Uncertified = False,
    run: RunOption = "",
    setting: Setting = None,
    as_json: Json = False,
) -> None:
    """Train, resume, or load the finished run. Example: `python -m ml_factory train --symbol MES --model lstm`"""
    quick = quick_from_environment(quick)
    place = checked_workspace(workspace, symbol, (horizon,), models=(model,), seed=seed)
    check_prepared(place, symbol)
    further = process_rank() > 0  # of several processes rank 0 prints
    settings = settings_of(setting)
    with training(model, as_json or further) as on_epoch:
        result = pipeline.train(
            place, symbol, horizon, model, seed=seed, quick=quick, fresh=fresh, uncertified=uncertified,
            run=run, on_status=status_printer(as_json), model_settings=settings,
            callbacks=(on_epoch,),
        )  # fmt: skip
    if not further:
        print_result(result, as_json)


def cross_validate(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Horizon = 20,
    model: Model = "xgboost",
    scheme: Annotated[str, typer.Option(help="One of " + ", ".join(SCHEMES) + ".")] = "purged_kfold",
    folds: Annotated[int, typer.Option(help="Number of test blocks, or blocks to combine.")] = 5,
    test_blocks: Annotated[int, typer.Option(help="Test blocks of one combinatorial fold.")] = 2,
    window: Annotated[int | None, typer.Option(help="Rows of a rolling window; empty: as the first fold has.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Search barriers in every fold, on its own rows.")] = False,
    trials: Annotated[int, typer.Option(help="Trials of one search.")] = 40,
    seed: Seed = 0,
    quick: Quick = False,
    fresh: Fresh = False,
    uncertified: Uncertified = False,
    run: RunOption = "",
    setting: Setting = None,
    as_json: Json = False,
) -> None:
    """Evaluate on many test blocks. Example: `python -m ml_factory cross-validate --scheme combinatorial`"""
    quick = quick_from_environment(quick)
    place = checked_workspace(workspace, symbol, (horizon,), models=(model,), seed=seed)
    check_scheme(scheme)
    settings = settings_of(setting)
    check_prepared(place, symbol)
    with working(f"cross-validating {model}", as_json):
        result = pipeline.cross_validate(
            place, symbol, horizon, model, scheme=schemes.SchemeSpec(scheme, folds, test_blocks, window),
            seed=seed, quick=quick, fresh=fresh, uncertified=uncertified,
            run=run, on_status=status_printer(as_json), model_settings=settings,
            search=search_spec.SearchSpec(trials=trials) if search else None,
        )  # fmt: skip
    print_result(result, as_json)


def stack(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Horizon = 20,
    base_model: Annotated[
        list[str] | None, typer.Option("--base-model", help="Several times; empty: " + ", ".join(BASE_MODELS) + ".")
    ] = None,
    folds: Annotated[int, typer.Option(help="Folds of the out-of-fold predictions.")] = 5,
    seed: Seed = 0,
    quick: Quick = False,
    fresh: Fresh = False,
    uncertified: Uncertified = False,
    run: RunOption = "",
    setting: SettingOfOne = None,
    as_json: Json = False,
) -> None:
    """Combine models by weights fitted out of fold.
    Example: `python -m ml_factory stack --base-model xgboost --base-model lstm`
    """
    names, quick = tuple(base_model or BASE_MODELS), quick_from_environment(quick)
    place = checked_workspace(workspace, symbol, (horizon,), models=names, seed=seed)
    check_prepared(place, symbol)
    settings = settings_by_model(names, settings_of(setting), "--set")
    with working(f"stacking {', '.join(names)}", as_json):
        result = pipeline.stack(
            place, symbol, horizon, names, folds=folds, seed=seed, quick=quick, fresh=fresh,
            uncertified=uncertified, run=run, on_status=status_printer(as_json), model_settings=settings,
        )  # fmt: skip
    print_result(result, as_json)


def evaluate(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Horizon = 20,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="A finished model or stack, several times; empty: all.")
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the report.")] = "",
    as_json: Json = False,
) -> None:
    """Compare finished models on the same test rows. Example: `python -m ml_factory evaluate --symbol MES`"""
    place = checked_workspace(workspace, symbol, (horizon,), models=model or ())
    check_prepared(place, symbol)
    with working("evaluating", as_json):
        result = pipeline.evaluate(place, symbol, horizon, model, title=title)
    print_result(result, as_json)


def plan(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Horizon = 20,
    model: Annotated[list[str] | None, typer.Option("--model", help="A model, several times; empty: all.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="train (the default), folds, stack.")] = None,
    folds: Annotated[int, typer.Option("--folds", help="Of a cross-validation or a stack.")] = 5,
    seed: Seed = 0,
    quick: Quick = False,
    setting: SettingOfOne = None,
    as_json: Json = False,
) -> None:
    """Plan this session: work that fits, and its order.
    Example: `python -m ml_factory plan --model lstm --model tcn`
    """
    place = checked_workspace(workspace, symbol, (horizon,), models=model or (), seed=seed)
    check_prepared(place, symbol)
    settings = settings_by_model(tuple(model or available_models()), settings_of(setting), "--set")
    with working("warming up", as_json):
        result = pipeline.plan(
            place, symbol, horizon, model, seed=seed, quick=quick_from_environment(quick),
            tasks=task or ("train",), folds=folds, model_settings=settings,
        )  # fmt: skip
    print_result(result, as_json)


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
    all_rows: Annotated[bool, typer.Option("--all", help="Also rows the model was fitted or chosen on.")] = False,
    as_json: Json = False,
) -> None:
    """Predict out of sample, as Parquet. Example: `python -m ml_factory predict --symbol MES --model stack`"""
    place = checked_workspace(workspace, symbol, (horizon,), models=(model,), data=data)
    check_trained(place, symbol)
    with working(f"predicting with {model}", as_json):
        bars = bars_of.BarSpec(stamp=stamp.value, zone=zone, decimal=decimal)
        result = pipeline.predict(
            place, symbol, horizon, model, data=data, bars=bars, out=out, run=run, all_rows=all_rows
        )
    print_result(result, as_json)


def export(
    workspace: Folder = "",
    symbol: Symbol = DEMO,
    horizon: Horizon = 20,
    model: Model = "lstm",
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="pth: a network's state dict, for torch.load elsewhere.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to; empty: the run's in results/.")] = None,
    run: Annotated[str, typer.Option("--run", help="The id of the run whose model; empty: the newest.")] = "",
    as_json: Json = False,
) -> None:
    """Export a finished model for other programs. Example: `python -m ml_factory export --model lstm --format pth`"""
    place = checked_workspace(workspace, symbol, (horizon,), models=(model,))
    check_trained(place, symbol)
    result = pipeline.export(place, symbol, horizon, model, tuple(formats or ("pth",)), run=run, out=out)
    print_result(result, as_json)
