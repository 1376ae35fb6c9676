"""The stack: pool weights fitted on out-of-fold predictions of training rows, calibrated on validation rows."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ml_factory.argument_checks import check_seed
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.datasets.row_selection import sample_contiguous_blocks
from ml_factory.ensemble.stacking import Stack
from ml_factory.errors import SettingsError
from ml_factory.evaluation.calibration import Calibration, floored_log_probabilities
from ml_factory.inference.predict import common_prediction_index, installed_library_versions, times_of_splits
from ml_factory.models.base import merge_inexact_reasons
from ml_factory.models.registry import build_model, find_model_spec
from ml_factory.run_folder import RunFolder, open_run_checkpoints
from ml_factory.settings import QuickLimits, RunSettings
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.json_values import to_json_value
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.weights import training_weights
from ml_factory.workflows.cross_validation.fold_schemes import plan_folds
from ml_factory.workflows.cross_validation.folds import FoldModel, fit_and_forecast_folds_or_raise
from ml_factory.workflows.predictions import uncalibrated_predictions
from ml_factory.workflows.prepared_dataset import (
    PreparedDataset,
    dataset_rows_with_weight,
    quick_row_limit,
    resolve_dataset_settings,
)
from ml_factory.workflows.runs.restore_run import open_run_tracker, restorable_snapshot
from ml_factory.workflows.train import training_log_summary
from ml_factory.workflows.unit_checkpoints import fold_forecasts_path, folds_phase_name


def stack_run_spec(
    data: PreparedDataset, names: Sequence[str], bases: Sequence[str], folds: int, seed: int, quick: bool,
    model_settings: Mapping[str, Mapping] | None = None,
) -> RunSettings:  # fmt: skip
    """Return the run spec of a stack of these models, whose artifacts have these hashes.

    model_settings : model -> its settings, for models that have any.
    """
    settings = (("base_models", list(names)), ("bases", list(bases)), ("folds", folds))
    if own := {name: to_json_value(dict(given)) for name, given in (model_settings or {}).items() if given}:
        settings = (*settings, ("model_settings", own))
    return RunSettings(data.symbol, data.horizon, "stack", "stack", check_seed(seed), quick, data.fingerprint, settings)


def stack_folds(folds: int, quick: bool) -> int:
    """Return the number of folds of a stack: at most those of QUICK."""
    return min(folds, QuickLimits().folds) if quick else folds


def fit_stack(
    workspace: Workspace, data: PreparedDataset, run: RunFolder, spec: RunSettings, folds: int, *, mirror: str = "auto"
) -> Artifact:
    """Fit the stack: out-of-fold predictions of every base model, the pool's weights, and its calibration."""
    run.begin(spec)
    with (
        open_run_checkpoints(workspace.checkpoints, run) as manager,
        # Locked before the log is opened, as in a fit: a second session on this stack is refused.
        manager.phase(folds_phase_name(spec.models[0])).acquired(),
        open_run_tracker(run, spec.to_dict(), mirror, restorable_snapshot(manager, run)) as tracker,
    ):
        artifact = _fit_pool(workspace, manager, data, run, spec, folds)
        tracker.finish(training_log_summary(artifact), artifact=artifact)
    run.end()
    return artifact


def _fit_pool(
    workspace: Workspace,
    manager: CheckpointManager,
    data: PreparedDataset,
    run: RunFolder,
    spec: RunSettings,
    folds: int,
) -> Artifact:
    started = time.perf_counter()
    settings = dict(spec.settings)
    names, digests = settings["base_models"], dict(zip(settings["base_models"], settings["bases"], strict=True))
    rows = data.splits["train"]
    oof, found, reached, quick_limits = {}, 0, {}, {}
    by_hash = {artifact.hash: artifact for artifact in ArtifactRegistry(workspace.models).list(data.symbol)}
    bases = {name: by_hash[digest] for name, digest in digests.items()}
    # The stack inherits the nondeterminism of its base models.
    nondeterminism = [f"{name}, {reason}" for name, base in bases.items() for reason in base.facts["inexact"]]
    for name in names:
        limits = QuickLimits().settings_for(find_model_spec(name).family) if spec.quick else {}
        given = limits | settings.get("model_settings", {}).get(name, {})
        lookback = build_model(name, **resolve_dataset_settings(data, given)).lookback
        plan = plan_folds(data, rows, folds, lookback, quick_row_limit(name, spec.quick))
        if spec.quick:
            most = max(1, QuickLimits().forecast_rows // folds)
            plan = replace(plan, folds=[(train, sample_contiguous_blocks(test, most)) for train, test in plan.folds])
        results_path = fold_forecasts_path(run, name)
        outcome = fit_and_forecast_folds_or_raise(manager, data, plan, FoldModel(spec, name, given), results_path)
        oof[name], found, quick_limits = (
            outcome.p_N3,
            found + outcome.resumed,
            quick_limits | plan.quick_limits | limits,
        )
        nondeterminism, reached[name] = (
            merge_inexact_reasons(nondeterminism, outcome.nondeterminism),
            outcome.progress,
        )
    pool = Stack.fit(oof, data.y[rows], training_weights(data.labels.iloc[rows]), horizon=data.horizon)
    calibration = _calibration(workspace, data, pool, bases)
    facts = {
        "run_id": run.run_id, "symbol": data.symbol, "horizon": data.horizon, "model": "stack",
        "data": data.fingerprint, "run": spec.to_dict(), "weights": pool.weights().reset_index().to_dict("records"),
        "split_times": times_of_splits(data.labels.index, data.splits),
        "note": pool.note, "resumed_from": found or None,
        "reached": "; ".join(f"{name}: {at}" for name, at in reached.items() if at), "inexact": nondeterminism,
        "limited": quick_limits | {"folds": folds} if spec.quick else {}, "seconds": time.perf_counter() - started,
        "versions": installed_library_versions(),
    }  # fmt: skip
    state = {
        "model": "stack", "stack": pool.to_dict(), "bases": digests, "calibration": calibration.to_dict(),
        "spec": data.settings, "run_id": run.run_id,
    }  # fmt: skip
    made_from = {"run": run.run_id, "data": data.fingerprint, "models": digests}
    return ArtifactRegistry(workspace.models).register(data.symbol, "stack", "stack", state, facts, made_from)


def _calibration(workspace: Workspace, data: PreparedDataset, pool: Stack, bases: dict[str, Artifact]) -> Calibration:
    """Fit the calibration on the validation rows that every base model can predict."""
    rows, _ = dataset_rows_with_weight(data, data.splits["validation"])
    predictions = {name: uncalibrated_predictions(workspace, data, artifact) for name, artifact in bases.items()}
    readable = data.labels.index[rows].isin(common_prediction_index(predictions))
    index = data.labels.index[rows][readable]
    pooled = pool.predict_proba({name: frame.loc[index].to_numpy() for name, frame in predictions.items()})
    return Calibration.fit(floored_log_probabilities(pooled), data.y[rows][readable], horizon=data.horizon)


def check_stack_base_models(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, also from one text with commas. Raises SettingsError unless they are two known models or
    more.
    """
    if isinstance(names, str):
        names = names.split(",")
    names = tuple(name.strip() for name in names)
    for name in names:
        find_model_spec(name)
    if len(names) < 2 or len(set(names)) < len(names):
        raise SettingsError(
            "A stack needs different models", where="base_models", got=", ".join(names), wanted="two or more, each once"
        )
    return names
