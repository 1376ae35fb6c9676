"""Common start of all verbs: check the settings, load certified data, find or open the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Unpack

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import SettingsError
from ml_factory.features.custom import own_features_line
from ml_factory.models.base import ModelBase
from ml_factory.models.registry import find_model_spec, registered_model_settings
from ml_factory.run_folder import RunFolder, open_run_folder
from ml_factory.settings import RunSettings, make_run_settings
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.weights import WeightSpec
from ml_factory.workflows.load_prepared import load_certified_dataset
from ml_factory.workflows.prepared_dataset import PreparedDataset
from ml_factory.workflows.runs.restore_run import restore_run_from_wandb
from ml_factory.workflows.runs.run_options import RunOptionFields, RunOptions, build_run_options
from ml_factory.workflows.runs.run_status import check_run_matches, check_run_unlocked, format_run_status
from ml_factory.workflows.train import build_untrained_model


def open_training(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, *,
    model_settings: Mapping | None = None, weights: WeightSpec | None = None, **options: Unpack[RunOptionFields],
) -> tuple[ModelBase, CheckpointManager]:  # fmt: skip
    """Return the model that `train` fits with these arguments, not fitted yet, and the checkpoints of its run.

    Pass the model to `train(..., estimator=model)`. `load_latest_checkpoint(phase=f"train_{name}")` of the manager
    finds the newest checkpoint of this run. States of `save_checkpoint`, also from a callback, are kept separately and
    never change the resumed state. When the training has ended and its model is registered, its own
    checkpoints are deleted.
    """
    workspace = Workspace(workspace)
    chosen = build_run_options(options, unused=("run", "source", "mirror", "on_status"))
    data, spec = load_training_setup(workspace, symbol, horizon, model, model_settings, weights, chosen)
    run = open_run_folder(workspace.results, symbol, spec, chosen.fresh)
    manager = CheckpointManager(workspace.checkpoints, run=run.run_id, during_training=True)
    return build_untrained_model(data, spec)[0], manager


def load_training_setup(
    workspace: Workspace, symbol: str, horizon: int, model: str, model_settings: Mapping | None,
    weights: WeightSpec | None, options: RunOptions,
) -> tuple[PreparedDataset, RunSettings]:  # fmt: skip
    """Return the certified data and the run spec of a training."""
    find_model_spec(model)
    data = load_certified_dataset(workspace, symbol, horizon, options.uncertified)
    report_own_features(data, options)
    settings = check_model_settings_for_run(model_settings) | weight_settings_for_record(weights)
    spec = make_run_settings(
        symbol, horizon, model, task="train", seed=options.seed, quick=options.quick, data=data.fingerprint,
        settings=settings,
    )  # fmt: skip
    return data, spec


def report_own_features(data: PreparedDataset, options: RunOptions) -> None:
    """Report in one line which features of the prepared data are not built-in."""
    names = data.settings["data"]["features"]["custom"]
    if names:
        options.on_status(own_features_line(names))


def find_or_open_run(
    workspace: Workspace, spec: RunSettings, options: RunOptions, check: Callable[[], object] = bool
) -> tuple[RunFolder, str, Artifact | None]:
    """Return the run to work on, its status line, and its artifact where it is finished.

    Raises CheckpointError when another process works on it.

    check : called before the status line, where there is work to do, so that a refusal is not announced as a start.
    """
    if options.run:
        check_run_matches(workspace.results / spec.symbol, spec, options.run)
    run = open_run_folder(workspace.results, spec.symbol, spec, options.fresh, options.run)
    kind = "stack" if spec.task == "stack" else "model"
    check_run_unlocked(workspace, run, spec)
    artifact = None
    restore_run_from_wandb(workspace, run, spec, source=options.source, mirror=options.mirror, fresh=options.fresh)
    if spec.task != "folds":
        artifact = ArtifactRegistry(workspace.models).find(
            spec.symbol, spec.horizon, spec.model, kind=kind, run_id=run.run_id
        )
    whole = artifact if artifact is not None and artifact.is_intact() else None
    finished = whole is not None or (spec.task == "folds" and run.ended)
    line = format_run_status(workspace, run, spec, finished=finished)
    if not finished:
        check()
    options.on_status(line)
    return run, line, whole


def check_model_settings_for_run(settings: Mapping | None) -> dict:
    """Return the model's own settings. Raises SettingsError for settings of the run, which have an argument of their
    own.
    """
    for name in ("seed", "folds", "scheme", "test_blocks", "window", "weights"):
        if name in (settings or {}):
            raise SettingsError(
                "Not a setting of the model", where="model_settings", got=name, next_step=f"give {name}= as an argument"
            )
    return dict(settings or {})


def settings_per_model(names: Sequence[str], given: Mapping[str, Mapping] | None) -> dict[str, dict]:
    """Return model -> its settings by this project's names, for models that have any.

    Raises SettingsError for settings of a model that is not among `names`.
    """
    for name in given or {}:
        if name not in names:
            raise SettingsError(
                "Settings of a model that is not used here", where="model_settings", got=name, wanted=", ".join(names),
                next_step="leave them out, or name the model",
            )  # fmt: skip
    return {
        name: registered_model_settings(name, check_model_settings_for_run(settings))
        for name, settings in (given or {}).items()
    }


def weight_settings_for_record(spec: WeightSpec | None) -> dict:
    """Return the weight settings for the run's record; {} for the default weights."""
    return {} if spec in (None, WeightSpec()) else {"weights": asdict(spec)}
