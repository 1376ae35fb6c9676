"""The public pipeline: prepare, search_barriers, audit, train, cross_validate, stack, evaluate, predict.

Each function takes a workspace, resumes interrupted work, and returns a result with `.summary()`, `.plot()` and the
paths it wrote. Notebooks, command line and tests call the same functions.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack, cast

import pandas as pd

from ml_factory.argument_checks import BASE_MODELS
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import ModelBase
from ml_factory.models.registry import available_models, build_model, find_model_spec
from ml_factory.process_identity import process_rank
from ml_factory.settings import make_run_settings
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit
from ml_factory.targets.barrier_search import BarrierSearchSpec
from ml_factory.targets.weights import WeightSpec
from ml_factory.workflows import report
from ml_factory.workflows.audit import audit_for_look_ahead
from ml_factory.workflows.audit_files import Tamper
from ml_factory.workflows.audit_runs import MODELS
from ml_factory.workflows.backtest import backtest
from ml_factory.workflows.clean import clean
from ml_factory.workflows.cross_validate import (
    check_cross_validation_labels,
    fit_and_score_folds,
)
from ml_factory.workflows.cross_validation.fold_schemes import FoldSchemeSpec, plan_folds
from ml_factory.workflows.cross_validation.folds import FoldModel
from ml_factory.workflows.evaluate import evaluate
from ml_factory.workflows.evaluation import evaluate_artifacts
from ml_factory.workflows.explain import explain
from ml_factory.workflows.export import export
from ml_factory.workflows.export_data import export_data
from ml_factory.workflows.inspect_data import (
    certificate,
    draw_cuts,
    draw_gaps,
    draw_split,
    feature_families,
    frame_alignment,
    gap_table,
    replay,
    try_feature,
)
from ml_factory.workflows.leaderboard import leaderboard
from ml_factory.workflows.load_prepared import (
    load_certified_dataset,
    load_dataset,
    load_features,
    load_labels,
    load_splits,
)
from ml_factory.workflows.plan import PlanResult, plan_models
from ml_factory.workflows.predict import predict
from ml_factory.workflows.predictions import load_predictions, write_prediction_frame
from ml_factory.workflows.prepare import prepare
from ml_factory.workflows.prepared_dataset import quick_row_limit, resolve_dataset_settings
from ml_factory.workflows.results.data import AuditResult, SearchBarriersResult
from ml_factory.workflows.results.models import (
    CrossValidateResult,
    StackResult,
    TrainResult,
)
from ml_factory.workflows.runs.open_run import (
    check_model_settings_for_run,
    find_or_open_run,
    load_training_setup,
    open_training,
    report_own_features,
    settings_per_model,
    weight_settings_for_record,
)
from ml_factory.workflows.runs.run_options import RunOptionFields, build_run_options
from ml_factory.workflows.search_barriers import run_barrier_search
from ml_factory.workflows.stack import check_stack_base_models, fit_stack, stack_folds, stack_run_spec
from ml_factory.workflows.train import (
    build_untrained_model,
    check_given_estimator,
    complete_train_log,
    train_with_holdout,
)
from ml_factory.workflows.train_ranks import broadcast_fit_decision, check_single_rank, fit_worker_rank

__all__ = [
    "audit", "backtest", "certificate", "clean", "cross_validate", "draw_cuts", "draw_gaps", "draw_split", "evaluate",
    "explain", "export", "export_data", "feature_families", "frame_alignment", "gap_table", "leaderboard",
    "load_features", "load_labels", "load_predictions", "load_splits", "open_training", "plan", "predict", "prepare",
    "replay", "search_barriers", "stack", "train", "try_feature",
]  # fmt: skip

evaluate, predict = push_workspace_on_exit(evaluate), push_workspace_on_exit(predict)
prepare, export = push_workspace_on_exit(prepare), push_workspace_on_exit(export)
clean, leaderboard = push_workspace_on_exit(clean), push_workspace_on_exit(leaderboard)
backtest = push_workspace_on_exit(backtest)

plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train
Folder = Workspace | str | Path
Callback = Callable[[int, dict], None]


@push_workspace_on_exit
def audit(
    workspace: Folder, symbol: str, horizons: Sequence[int] | None = None, *, cuts: int | None = None,
    fresh: bool = False, progress: Callable[[int, int], None] | None = None, models: Sequence[str] | None = None,
    tamper: Tamper | None = None,
) -> AuditResult:  # fmt: skip
    """Prove that nothing prepared or learnt looks ahead, and write the certificates that training requires.

    At 50 moments or more the future is cut off, rewritten and thinned, and all that was known, proven or learnt
    before must stay the same bit for bit. Bars that an earlier proof with the same code and settings covers are not
    proved again, unless `fresh`.

    horizons : default: all that are prepared.
    cuts : number of moments; default 50; fewer are the quick form.
    progress : called with (builds done, builds in all).
    models : models trained on a small sample; default: a booster and a network (xgboost, lstm).
    tamper : checks the audit itself: `tamper(stage, value)` returns the value to use (None: the same object) at the
        stages of `workflows.audit_files.STAGES` (docs/guide.md). `.sentences` names leaks; nothing is written.
    """
    for name in models or ():
        find_model_spec(name)
    return audit_for_look_ahead(
        Workspace(workspace), check_symbol(symbol), horizons, cuts, fresh, progress, models or MODELS, tamper
    )


@push_workspace_on_exit
def search_barriers(
    workspace: Folder, symbol: str, horizon: int, spec: BarrierSearchSpec | None = None
) -> SearchBarriersResult:
    """Search barriers whose labels are the most informative on the training rows, within a balance of classes.

    Reads only training rows of the chronological split, and of their labels those proven before the first validation
    row. Writes a label spec that names the rows it saw, `processed/{SYMBOL}/searched/h{H}-v{N}.json`, unless the same
    is there; `prepare(..., searched="h20-v1")` makes labels with it.

    spec : grid and constraints; its labels take their horizon from the call.

    Raises SettingsError when no barriers of the grid keep the balance, and NotPreparedError.
    """
    workspace, symbol = Workspace(workspace), check_symbol(symbol)
    load_dataset(workspace, symbol, horizon)  # refuses bars or code that changed since they were prepared
    return run_barrier_search(workspace, symbol, horizon, spec)


def plan(
    workspace: Folder, symbol: str, horizon: int, models: Sequence[str] | None = None, *,
    model_settings: Mapping[str, Mapping] | None = None, tasks: Sequence[str] = ("train",),
    scheme: str = "purged_kfold", folds: int = 5, units_per_hour: float | None = None,
    **options: Unpack[RunOptionFields],
) -> PlanResult:  # fmt: skip
    """Forecast which of this work fits into the rest of the session, and in which order.

    Each model is fitted briefly twice, and its time extrapolated. Nothing is kept.

    models : default: all there are; finished ones are left out.
    model_settings : model -> its settings, as of `train`.
    tasks : "train"; "folds", a cross-validation of each; "stack", with these as base models.
    scheme, folds : as of `cross_validate` and `stack`.
    units_per_hour : compute units that this runtime takes per hour, to price the plan; None: no price.
    options : `seed` and `quick`, as of `RunOptions`.
    """
    workspace = Workspace(workspace)
    run = build_run_options(options, unused=("fresh", "run", "source", "mirror", "uncertified", "on_status"))
    chosen = available_models() if models is None else [find_model_spec(name).name for name in models]
    settings = settings_per_model(chosen, model_settings)
    data = load_dataset(workspace, symbol, horizon)
    return plan_models(
        workspace, data, chosen, quick=run.quick, seed=run.seed, settings=settings, tasks=tasks,
        scheme=FoldSchemeSpec(scheme, folds), units_per_hour=units_per_hour,
    )  # fmt: skip


@push_workspace_on_exit
def train(
    workspace: Folder, symbol: str, horizon: int, model: str, *, callbacks: Sequence[Callback] = (),
    model_settings: Mapping | None = None, weights: WeightSpec | None = None, estimator: ModelBase | None = None,
    **options: Unpack[RunOptionFields],
) -> TrainResult | None:  # fmt: skip
    """Train one model on the training rows, stop early and calibrate on validation rows, evaluate on test rows.

    A finished run is found and loaded; an unfinished one resumes from its last checkpoint.

    callbacks : each is called (epoch, metrics) after every epoch or booster block, and with the model as third argument
        where it takes one.
    model_settings : settings of the model by name.
    weights : weight of each training row; default: average uniqueness of its label.
    estimator : the model that `open_training` returned for the same arguments. It is the one that is fitted, so that a
        callback may read its state, and it holds the finished model afterwards.
    options : fields of `RunOptions`: seed, quick, fresh, run, source, mirror, uncertified, on_status.

    Of several processes that torchrun started rank 0 does all of this; the others take part in a network's fit, write
    nothing and return None.  Raises SettingsError, NotPreparedError, FactoryError.
    """
    started = time.perf_counter()
    workspace = Workspace(workspace)
    chosen = build_run_options(options)
    data, spec = load_training_setup(workspace, symbol, horizon, model, model_settings, weights, chosen)
    if process_rank():
        fit_worker_rank(data, spec)
        return None
    opened, found, artifact = find_or_open_run(workspace, spec, chosen, partial(build_untrained_model, data, spec))
    broadcast_fit_decision(spec, fitting=artifact is None)
    reused = artifact is not None
    if artifact is not None:
        complete_train_log(workspace, opened, spec, artifact, mirror=chosen.mirror)
        if estimator is not None:
            check_given_estimator(build_untrained_model(data, spec)[0], estimator).load_state(
                artifact.load_state()["model_state"]
            )
    else:
        artifact = train_with_holdout(
            workspace, data, opened, spec, callbacks=callbacks, mirror=chosen.mirror, estimator=estimator,
        )  # fmt: skip
    verdict = evaluate_artifacts(workspace, data, {artifact.facts["model"]: artifact})
    facts, history = artifact.facts, pd.DataFrame(artifact.facts["history"])
    return TrainResult(
        **report.write_model_report(workspace, opened, data, artifact, verdict, reused=reused), found=found,
        model=model, history=history, best_epoch=facts["best_epoch"], artifact_hash=artifact.hash,
        importances=pd.DataFrame(facts["importances"]) if facts.get("importances") else None,
        machine=facts.get("machine", {}), seconds=time.perf_counter() - started,
        draw=lambda: plots.plot_learning_curves(
            history, best_epoch=facts["best_epoch"], resumed_from=facts["resumed_from"],
            prior=verdict.priors["validation"],
        ),
    )  # fmt: skip


@push_workspace_on_exit
def cross_validate(
    workspace: Folder, symbol: str, horizon: int, model: str, *, scheme: str | FoldSchemeSpec = "purged_kfold",
    folds: int = 5, model_settings: Mapping | None = None, weights: WeightSpec | None = None,
    **options: Unpack[RunOptionFields],
) -> CrossValidateResult:  # fmt: skip
    """Cross-validate a model with purged and embargoed folds over all rows before the test rows.

    scheme : "purged_kfold", "walk_forward_expanding", "walk_forward_rolling" or "combinatorial"; or a `FoldSchemeSpec`,
        which also holds the folds, the test blocks of combinatorial folds and the window of rolling ones.
    folds : number of test blocks, where `scheme` is a name.
    weights, model_settings, options : as of `train`, without `source`.

    Each fold is calibrated on its early-stopping rows, as `train` does on validation rows; uncalibrated forecasts have
    the suffix `_uncalibrated`. A fold whose training rows hold one class has no forecasts and is listed; the others
    continue. Data prepared with searched barriers (`prepare(searched=…)`) are refused: that search saw rows that folds
    test.
    """
    started = time.perf_counter()
    workspace = Workspace(workspace)
    check_single_rank("cross_validate")
    find_model_spec(model)
    cut = scheme if isinstance(scheme, FoldSchemeSpec) else FoldSchemeSpec(scheme, folds)
    chosen = build_run_options(options, unused=("source",))
    data = load_certified_dataset(workspace, symbol, horizon, chosen.uncertified)
    report_own_features(data, chosen)
    check_cross_validation_labels(data)
    fold_settings = cut.to_dict() | weight_settings_for_record(weights)
    settings = fold_settings | check_model_settings_for_run(model_settings)
    spec = make_run_settings(
        symbol, horizon, model, task="folds", seed=chosen.seed, quick=chosen.quick, data=data.fingerprint,
        settings=settings,
    )  # fmt: skip
    opened, found, _ = find_or_open_run(workspace, spec, chosen)
    fitted_with = {name: value for name, value in spec.settings if name not in fold_settings}
    lookback = build_model(model, **resolve_dataset_settings(data, fitted_with)).lookback
    plan = plan_folds(data, data.development_rows(), cut, lookback, quick_row_limit(model, chosen.quick))
    opened.begin(spec)
    fitted = FoldModel(spec, model, fitted_with, weights)
    scores = fit_and_score_folds(workspace, data, plan, opened, fitted, mirror=chosen.mirror)
    path, paths_path = opened.folder / "folds.parquet", None
    write_prediction_frame(path, scores.scores)
    if scores.paths is not None:
        paths_path = opened.folder / "paths.parquet"
        write_prediction_frame(paths_path, scores.paths)
    opened.end()
    limits = {name: value for name, value in fitted_with.items() if name in ("epochs", "rounds")}
    return CrossValidateResult(
        symbol=symbol, horizon=horizon, model=model, run_id=opened.run_id, found=found, scheme=cut.name,
        folds=scores.scores, fold_table=scores.table, paths=scores.paths, gain_mean=scores.gain, gain_se=scores.gain_se,
        gain_uncalibrated=scores.gain_uncalibrated, untaught=scores.unfitted, path=path, paths_path=paths_path,
        resumed_from=scores.resumed or None, reached=scores.progress, exact=not scores.nondeterminism,
        inexact_because=list(scores.nondeterminism), limited=plan.quick_limits | limits if chosen.quick else {},
        seconds=time.perf_counter() - started, verdict=scores.verdict,
        draw=lambda: plots.plot_fold_scores(scores.scores, scores.paths),
    )  # fmt: skip


@push_workspace_on_exit
def stack(
    workspace: Folder, symbol: str, horizon: int, base_models: Sequence[str] = BASE_MODELS, *,
    folds: int = 5, model_settings: Mapping[str, Mapping] | None = None, **options: Unpack[RunOptionFields],
) -> StackResult:  # fmt: skip
    """Fit a stack: pool weights on out-of-fold predictions of the training rows, evaluated on test rows.

    The base models are those of `train`: loaded when finished, trained when not, or with source="wandb" loaded from
    W&B.

    folds : number of folds of the out-of-fold predictions.
    model_settings : base model -> its settings.
    options : as of `train`; fresh and run are those of the stack, not of its base models.
    """
    started = time.perf_counter()
    workspace = Workspace(workspace)
    check_single_rank("stack")
    base_models = check_stack_base_models(base_models)
    settings, chosen = settings_per_model(base_models, model_settings), build_run_options(options)
    data = load_certified_dataset(workspace, symbol, horizon, chosen.uncertified)
    plan_folds(data, data.splits["train"], folds, 1)  # refuses impossible folds before hours of fits
    folds = stack_folds(folds, chosen.quick)
    shared = cast(RunOptionFields, {name: value for name, value in options.items() if name not in ("fresh", "run")})
    bases = [
        train(workspace, symbol, horizon, name, model_settings=settings.get(name), **shared) for name in base_models
    ]
    hashes = [base.artifact_hash for base in bases if base is not None]
    spec = stack_run_spec(data, base_models, hashes, folds, chosen.seed, chosen.quick, settings)
    opened, found, artifact = find_or_open_run(workspace, spec, replace(chosen, source="registry"))
    reused = artifact is not None
    if artifact is not None:
        complete_train_log(workspace, opened, spec, artifact, mirror=chosen.mirror)
    else:
        artifact = fit_stack(workspace, data, opened, spec, folds, mirror=chosen.mirror)
    verdict = evaluate_artifacts(workspace, data, {artifact.facts["model"]: artifact})
    weights = pd.DataFrame(artifact.facts["weights"]).set_index("model")
    return StackResult(
        **report.write_model_report(workspace, opened, data, artifact, verdict, reused=reused), found=found,
        base_models=list(base_models), weights=weights, reached="" if reused else artifact.facts["reached"],
        lineage=pd.DataFrame(ArtifactRegistry(workspace.models).lineage(artifact)),
        comparison=tuple(
            report.report_comparison_sentence("stack", who, gain) for who, gain in verdict.reference_gains.items()
        ),
        seconds=time.perf_counter() - started,
        draw=lambda: plots.plot_stack_weights(weights),
    )  # fmt: skip
