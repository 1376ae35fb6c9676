"""`stack`: pool weights fitted on out-of-fold predictions of training rows, calibrated on validation rows."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from ml_factory.argument_checks import BASE_MODELS, check_seed
from ml_factory.datasets.row_selection import sample_contiguous_blocks
from ml_factory.ensemble.stacking import Stack
from ml_factory.errors import SettingsError, check_known
from ml_factory.evaluation.calibration import Calibration, floored_log_probabilities
from ml_factory.inference.predict import common_prediction_index
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import merge_inexact_reasons
from ml_factory.models.registry import (
    build_model,
    check_registered_model_settings,
    find_model_spec,
    registered_model_settings,
)
from ml_factory.result import Result
from ml_factory.runs import Run, RunOptions, open_run
from ml_factory.settings import QuickLimits, RunSettings
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.storage.json_values import to_json_value
from ml_factory.storage.workspace import Workspace, push_workspace_on_exit
from ml_factory.targets.weights import training_weights
from ml_factory.workflows import report
from ml_factory.workflows.evaluation import evaluate_artifacts
from ml_factory.workflows.folds import FoldModel, FoldSchemeSpec, fit_folds, plan_folds
from ml_factory.workflows.predictions import uncalibrated_predictions
from ml_factory.workflows.prepared_dataset import (
    PreparedDataset,
    dataset_rows_with_weight,
    load_certified_dataset,
    quick_row_limit,
    resolve_dataset_settings,
)
from ml_factory.workflows.train import complete_log, log_summary, run_facts, settings_limited_by_quick, train_or_load
from ml_factory.workflows.train_ranks import check_single_rank

plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


@push_workspace_on_exit
def stack(
    workspace: Workspace | str | Path, symbol: str, horizon: int, base_models: Sequence[str] = BASE_MODELS, *,
    folds: int = 5, model_settings: Mapping[str, Mapping] | None = None, **options: Any,
) -> Result:  # fmt: skip
    """Fit a stack: pool weights on out-of-fold predictions of the training rows, evaluated on test rows.

    The base models are those of `train`: loaded when finished, trained when not, or with source="wandb" loaded from
    W&B.

    folds : number of folds of the out-of-fold predictions.
    model_settings : base model -> its settings.
    options : as of `train`; fresh and run are those of the stack, not of its base models.

    The result has the facts of `report.model_result`, and base_models, weights, lineage (the artifacts it is made of)
    and comparison, sentences compared with the plain mean of its models.
    """
    started, workspace = time.perf_counter(), Workspace(workspace)
    check_single_rank("stack")
    base_models = check_stack_base_models(base_models)
    settings, chosen = settings_per_model(base_models, model_settings), RunOptions.of(options)
    data = load_certified_dataset(workspace, symbol, horizon, chosen.uncertified)
    plan_folds(data, data.splits["train"], FoldSchemeSpec(folds=folds), 1)  # refused before hours of fits
    folds = stack_folds(folds, chosen.quick)
    hashes, shared = [], replace(chosen, fresh=False, run="")
    for name in base_models:
        base = train_or_load(workspace, symbol, horizon, name, (), settings.get(name), None, shared)
        hashes.append(base.artifact.hash)
        if not files.is_file(base.run.folder / "report.html"):  # a finished model keeps its report as it is
            base.reported(time.perf_counter())
            workspace.push()
    spec = stack_run_settings(data, base_models, hashes, folds, chosen.seed, chosen.quick, settings)
    with open_run(workspace, spec, replace(chosen, source="registry")) as run:
        artifact = run.artifact()
        reused = artifact is not None
        found = run.status(finished=reused)
        chosen.on_status(found)
        if artifact is None:
            artifact = fit_stack(data, run, folds, mirror=chosen.mirror)
        else:
            complete_log(run, artifact, chosen.mirror)
    evaluated = evaluate_artifacts(workspace, data, {"stack": artifact})
    weights = pd.DataFrame(artifact.facts["weights"]).set_index("model")
    comparison = tuple(
        report.report_comparison_sentence("stack", who, gain) for who, gain in evaluated.reference_gains.items()
    )
    reached, resumed = (artifact.facts[name] for name in ("reached", "resumed_from"))
    begun = f", {resumed} out-of-fold parts found done" if resumed else f", resumed at {reached}" if reached else ""
    return report.model_result(
        run, data, artifact, evaluated, started,
        f"stack of {', '.join(base_models)} on {symbol}, horizon {horizon}{'' if reused else begun}", found=found,
        reused=reused, figure=lambda: plots.plot_stack_weights(weights), more_lines=comparison,
        base_models=list(base_models), weights=weights, comparison=comparison,
        lineage=pd.DataFrame(ArtifactRegistry(workspace.models).lineage(artifact)),
    )  # fmt: skip


def stack_run_settings(
    data: PreparedDataset, names: Sequence[str], bases: Sequence[str], folds: int, seed: int, quick: bool,
    model_settings: Mapping[str, Mapping],
) -> RunSettings:  # fmt: skip
    """Return the run settings of a stack of these models, whose artifacts have these hashes.

    model_settings : model -> its settings, for models that have any.
    """
    settings = (("base_models", list(names)), ("bases", list(bases)), ("folds", folds))
    if own := {name: to_json_value(dict(given)) for name, given in model_settings.items() if given}:
        settings = (*settings, ("model_settings", own))
    return RunSettings(data.symbol, data.horizon, "stack", "stack", check_seed(seed), quick, data.fingerprint, settings)


def stack_folds(folds: int, quick: bool) -> int:
    """Return the number of folds of a stack: at most those of QUICK."""
    return min(folds, QuickLimits().folds) if quick else folds


def settings_per_model(names: Sequence[str], given: Mapping[str, Mapping] | None) -> dict[str, dict]:
    """Return model -> its settings by this project's names, for models that have any.

    Raises SettingsError for settings of a model that is not among `names`.
    """
    for name in given or {}:
        check_known("Settings of a model that is not used here", "model_settings", name, names)
    return {
        name: registered_model_settings(name, check_registered_model_settings(name, settings))
        for name, settings in (given or {}).items()
    }


def fit_stack(data: PreparedDataset, run: Run, folds: int, *, mirror: str = "off") -> Artifact:
    """Fit the stack: out-of-fold predictions of every base model, the pool's weights, and its calibration."""
    run.begin()
    # Locked before the log is opened, as in a fit: a second session on this stack is refused.
    with run.phase.acquired(), run.log(mirror) as tracker:
        artifact = _fit_pool(data, run, folds)
        tracker.finish(log_summary(artifact), artifact=artifact)
    run.end()
    return artifact


def _fit_pool(data: PreparedDataset, run: Run, folds: int) -> Artifact:
    started, spec, registry = time.perf_counter(), run.settings, ArtifactRegistry(run.workspace.models)
    settings, rows = dict(spec.settings), data.splits["train"]
    digests = dict(zip(settings["base_models"], settings["bases"], strict=True))
    by_hash = {artifact.hash: artifact for artifact in registry.list(data.symbol)}
    bases = {name: by_hash[digest] for name, digest in digests.items()}
    # The stack inherits the nondeterminism of its base models.
    inexact = [f"{name}, {reason}" for name, base in bases.items() for reason in base.facts["inexact"]]
    oof, quick_limits = {}, {}
    for name in bases:
        limits = QuickLimits().settings_for(find_model_spec(name).family) if spec.quick else {}
        given = limits | settings.get("model_settings", {}).get(name, {})
        lookback = build_model(name, **resolve_dataset_settings(data, given)).lookback
        plan = plan_folds(data, rows, FoldSchemeSpec(folds=folds), lookback, quick_row_limit(name, spec.quick))
        if spec.quick:
            most = max(1, QuickLimits().forecast_rows // folds)
            plan = replace(plan, folds=[(train, sample_contiguous_blocks(test, most)) for train, test in plan.folds])
        oof[name] = fit_folds(run, data, plan, FoldModel(spec.seed, name, given))
        quick_limits |= plan.quick_limits | settings_limited_by_quick(name, given)
        inexact = merge_inexact_reasons(inexact, oof[name].inexact)
    forecasts = {name: one.p_N3 for name, one in oof.items()}
    pool = Stack.fit(forecasts, data.y[rows], training_weights(data.labels.iloc[rows]), horizon=data.horizon)
    calibration = _calibration(run.workspace, data, pool, bases)
    facts = run_facts(data, run) | {
        "weights": pool.weights().reset_index().to_dict("records"), "note": pool.note, "inexact": inexact,
        "resumed_from": sum(one.resumed for one in oof.values()) or None,
        "reached": "; ".join(f"{name}: {one.reached}" for name, one in oof.items() if one.reached),
        "limited": quick_limits | {"folds": folds} if spec.quick else {}, "seconds": time.perf_counter() - started,
    }  # fmt: skip
    state = {
        "model": "stack", "stack": pool.to_dict(), "bases": digests, "calibration": calibration.to_dict(),
        "spec": data.settings, "run_id": run.run_id,
    }  # fmt: skip
    made_from = {"run": run.run_id, "data": data.fingerprint, "models": digests}
    return registry.register(data.symbol, "stack", "stack", state, facts, made_from)


def _calibration(workspace: Workspace, data: PreparedDataset, pool: Stack, bases: dict[str, Artifact]) -> Calibration:
    """Fit the calibration on the validation rows that every base model can predict."""
    rows, _ = dataset_rows_with_weight(data, data.splits["validation"])
    predictions = {name: uncalibrated_predictions(workspace, data, artifact) for name, artifact in bases.items()}
    readable = data.labels.index[rows].isin(common_prediction_index(predictions))
    index = data.labels.index[rows][readable]
    pooled = pool.predict_proba({name: table.loc[index].to_numpy() for name, table in predictions.items()})
    return Calibration.fit(floored_log_probabilities(pooled), data.y[rows][readable], horizon=data.horizon)


def check_stack_base_models(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names. Raises SettingsError unless they are two known models or more."""
    names = tuple(names)
    for name in names:
        find_model_spec(name)
    if len(names) < 2 or len(set(names)) < len(names):
        raise SettingsError(
            "A stack needs different models", where="base_models", got=", ".join(names), wanted="two or more, each once"
        )
    return names
