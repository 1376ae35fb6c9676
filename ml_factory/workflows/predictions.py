"""`predict`, and predictions of finished models on labelled rows; which run's model is taken."""

import io
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_horizon
from ml_factory.code_fingerprint import source_hash
from ml_factory.data.bar_files import read_bars_table, resolve_bars_file
from ml_factory.data.io import read_usable_rows
from ml_factory.data.quality import OFF_SHARE
from ml_factory.data.validation import RawBarSpec
from ml_factory.errors import (
    CheckpointError,
    FileError,
    NotPreparedError,
    SettingsError,
    WorkspaceError,
    refuse_damaged_content,
)
from ml_factory.evaluation.calibration import Calibration, condition_on_classes
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.bundle import check_bars_on_tick, off_tick_share
from ml_factory.inference.predict import (
    FittedModels,
    PredictionSpec,
    TrainedModel,
    add_prediction_splits,
    predict_features,
    stacked_predictions,
)
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.result import Result
from ml_factory.settings import DATA_PACKAGES
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.files import files, stored_path
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit, require_raw_bars
from ml_factory.workflows.prepared_dataset import PreparedDataset, limit_training_rows, quick_row_limit

STACK = "stack"
_log = logging.getLogger("ml_factory")
plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


@push_workspace_on_exit
def predict(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, *, data: str | Path | None = None,
    bars: RawBarSpec | None = None, out: str | Path | None = None, run: str = "", all_rows: bool = False,
) -> Result:  # fmt: skip
    """Predict out of sample with the newest finished model, as Parquet under `results/`; newest bars included.

    The column `split` is "test", or "new" behind the last labelled row; with all_rows also "train" and "validation",
    the rows of fitting and selection. `run_id` names the run.

    data : bars to predict instead of the symbol's own, checked and turned into features with the settings of training.
    bars : format of that file, as of `RawBarSpec`; refused without one.
    run : run id of the model; "" for the newest.

    The result has `frame`, as in the file at `path`: index known_at; p_short, p_neutral, p_long (of meta-labels `side`
    too), split and run_id; `choice`, why this run's model was taken, in words; `frame_hash`; and
    `rows_without_probability`, with too few rows before them in their segment (meta-labels: None).
    """
    started, workspace = time.perf_counter(), Workspace(workspace)
    if data is None and bars not in (None, RawBarSpec()):
        given = [name for name, value in vars(bars).items() if value != getattr(RawBarSpec(), name)]
        raise SettingsError("The format of bars is that of a file", where="bars", got=", ".join(given), wanted="data",
                            next_step="name the file with --data, or leave this out")  # fmt: skip
    artifact = find_artifact_to_predict(workspace, check_symbol(symbol), check_horizon(horizon), model, run)
    table, close = predict_bars(workspace, artifact, data, bars)
    table, rows = (add_prediction_splits(one, artifact.facts, all_rows) for one in (table, close.to_frame()))
    path = Path(out) if out else workspace.results / symbol / f"predictions-{model}-h{horizon}.parquet"
    write_predictions(path, table)
    run_id, choice = artifact.facts["run_id"], describe_run_choice(workspace, artifact, run)
    counts, seconds = table["split"].value_counts(sort=False), time.perf_counter() - started
    lacking = None if "side" in table else len(rows) - len(table)
    lines = [
        f"{model} on {symbol}, run {run_id} ({choice}): {len(table):,} rows, {table.index[0]} to {table.index[-1]}, "
        f"{seconds:.1f} s",
        f"  by split: {', '.join(f'{name} {count:,}' for name, count in counts.items())}",
        f"  {path}",
    ]
    if lacking:
        lines.insert(2, f"  without a probability: {lacking:,} of {len(rows):,} rows: {model} reads a "
                        "window of rows of one segment, and they have too few before them in theirs")  # fmt: skip
    return Result(
        lines, figure=lambda: plots.plot_probabilities(table, close), also={"frame": table}, symbol=symbol,
        horizon=horizon, model=model, run_id=run_id, choice=choice, rows=len(table), rows_without_probability=lacking,
        path=path, frame_hash=files.sha256(path), seconds=seconds,
    )  # fmt: skip


def predictions_path(workspace: Workspace, artifact: Artifact) -> Path:
    """Return the path of the run's predictions."""
    folder = workspace.results / check_symbol(artifact.symbol)
    return stored_path(folder, artifact.facts["run_id"], "predictions.parquet", inside=workspace.results)


def load_or_make_predictions(workspace: Workspace, data: PreparedDataset, artifact: Artifact) -> pd.DataFrame:
    """Load the run's predictions of labelled rows, or predict and write them.

    Index known_at; p_short, p_neutral, p_long, split (train, validation, test), run_id, label. Purged rows belong to no
    split and are left out, so that a split's rows are those of its metrics. A file that was changed, or that another
    artifact wrote, is written again.
    """
    path = predictions_path(workspace, artifact)
    if is_prediction_of_artifact(path, artifact):
        return read_predictions(path)
    if artifact.kind == STACK:
        state, bases = artifact.load_state(), base_model_artifacts(workspace, artifact)
        table = stacked_predictions(
            state, {name: uncalibrated_predictions(workspace, data, base) for name, base in bases.items()}
        )
    else:
        bundle = TrainedModel.from_state(artifact.load_state())
        rows = data.row[_labels_to_predict(data, artifact, bundle.lookback)]
        table = predict_features(bundle, data.features, segment=data.segment, rows=rows)
    positions = data.labels.index.get_indexer(table.index)
    split = data.split_names()[positions]
    table = table.assign(split=split, run_id=artifact.facts["run_id"], label=data.y[positions])[split != "purged"]
    write_predictions(path, table)
    files.write_json(_checksum_path(path), {"artifact": artifact.hash, "predictions": files.sha256(path)})
    return table


def _labels_to_predict(data: PreparedDataset, artifact: Artifact, lookback: int) -> np.ndarray:
    """Return positions of the labels to predict: all; of a QUICK run no other training rows than it was fitted on."""
    limit = quick_row_limit(artifact.facts["model"], artifact.facts["run"]["quick"])
    train = data.splits["train"]
    if not limit:
        return np.arange(len(data.labels))
    train, _ = limit_training_rows(train[data.full_window_mask(lookback)[train]], limit)
    return np.concatenate([train, data.splits["validation"], data.splits["test"]])


def is_prediction_of_artifact(path: Path, artifact: Artifact) -> bool:
    """Return True where the predictions on disk are this artifact's and unchanged; a run folder may outlive its
    model. Predictions that cannot be read are made again.
    """
    checksum = files.read_json_or_none(_checksum_path(path))
    try:
        return isinstance(checksum, dict) and checksum == {
            "artifact": artifact.hash, "predictions": files.sha256(path)
        }  # fmt: skip
    except FileError:
        return False


def _checksum_path(path: Path) -> Path:
    return path.with_suffix(".json")


def uncalibrated_predictions(workspace: Workspace, data: PreparedDataset, artifact: Artifact) -> pd.DataFrame:
    """Return predictions of labelled rows without the model's calibration, comparable with out-of-fold predictions."""
    table = load_or_make_predictions(workspace, data, artifact)[PROBABILITIES]
    p_N3 = condition_on_classes(
        Calibration.from_dict(artifact.load_state()["calibration"]).invert(table.to_numpy()), data.classes.values()
    )
    return pd.DataFrame(p_N3, index=table.index, columns=PROBABILITIES)


def base_model_artifacts(workspace: Workspace, stack: Artifact) -> dict[str, Artifact]:
    """Return the base models of a stack, found by their hash."""
    by_hash = {one.hash: one for one in ArtifactRegistry(workspace.models).list(stack.symbol)}
    bases = stack.load_state()["bases"]
    for name, digest in bases.items():
        if digest not in by_hash:
            raise CheckpointError(
                f"A base model of the stack is gone: {name}", where=workspace.models / stack.symbol,
                wanted=digest[:12], next_step="stack again",
            )  # fmt: skip
    return {name: by_hash[digest] for name, digest in bases.items()}


def load_predictions(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, run: str = ""
) -> pd.DataFrame:
    """Load the predictions of the newest finished run of a model, or of the run of this id, on its labelled rows.

    Index known_at; p_short, p_neutral, p_long, split (train, validation, test), run_id, label (-1, 0, 1: the outcome).
    """
    workspace = Workspace(workspace)
    artifact = find_artifact_to_predict(workspace, check_symbol(symbol), check_horizon(horizon), model, run)
    path = predictions_path(workspace, artifact)
    if not is_prediction_of_artifact(path, artifact):
        step = "train it again: the finished run is found and predicts"
        raise NotPreparedError("The predictions of this run are not there, or not its own", where=path, next_step=step)
    return read_predictions(path)


def _check_model_name(model: str) -> None:
    """Raise SettingsError unless it is the name of a model, or "stack"."""
    if model != STACK:
        find_model_spec(model)


def _finished(workspace: Workspace, symbol: str, horizon: int, model: str = "", data: str = "") -> list[Artifact]:
    """List the artifacts of finished runs of a horizon, oldest first; of this model and this data, where given."""
    return [
        one for one in ArtifactRegistry(workspace.models).list(symbol)
        if one.facts.get("horizon") == horizon and "run_id" in one.facts
        and model in ("", one.name) and data in ("", one.facts["data"])
    ]  # fmt: skip


def _newest_full(found: Sequence[Artifact]) -> Artifact | None:
    """Return the newest model of a full run, or of a QUICK run where there is no full one."""
    return max(found, key=lambda one: (not one.facts["run"]["quick"], one.sequence), default=None)


def find_artifact_to_predict(
    workspace: Workspace, symbol: str, horizon: int, model: str, run: str = "", data: str = ""
) -> Artifact:
    """Return the model (or "stack") of the newest data of this symbol and horizon: that of the newest full run, or of a
    QUICK run where there is no full one.

    run, data : run id and data fingerprint to match, where given.
    Raises NotPreparedError where there is none.
    """
    _check_model_name(model)
    found = _finished(workspace, symbol, horizon, model, data)
    if run and found:
        found = [_of_run(found, run, f"{symbol}, {model}, horizon {horizon}")]
    chosen = _newest_full([one for one in found if one.facts["data"] == found[-1].facts["data"]])
    if chosen is None:
        how = "stack" if model == STACK else f"train --model {model}"
        notebook = "05" if model == STACK else find_model_spec(model).notebook[:2]
        given = [f"{name} {value}" for name, value in (("run_id", run), ("data", data)) if value]
        raise NotPreparedError(
            f"No finished {model} for this symbol and horizon", where=workspace.models / symbol,
            got=", ".join([f"none with horizon {horizon}", *given]),
            next_step=f"train it first (notebook {notebook}: {how})",
        )  # fmt: skip
    return chosen


def _of_run(found: Sequence[Artifact], run: str, where: str) -> Artifact:
    """Return the newest of these artifacts that a run made. Raises NotPreparedError, naming the newest runs."""
    by_run = {one.facts["run_id"]: one for one in found}
    if run not in by_run:
        raise NotPreparedError(
            "No finished run of this id", where=where, got=run, wanted=f"one of {', '.join([*by_run][-5:]) or 'none'}",
            next_step="name one of these, or none for the newest; or prepare as for that run",
        )  # fmt: skip
    return by_run[run]


def describe_run_choice(workspace: Workspace, artifact: Artifact, run: str, data: str = "") -> str:
    """Return why this run's model was taken, and which other could have been.

    run : run id that was requested; "" for none.
    data : fingerprint of the data of the runs that count; "" for all.
    """
    if run:
        return "the requested run"
    found = _finished(workspace, artifact.symbol, artifact.facts["horizon"], artifact.name, data)
    runs, own = [one.facts["run_id"] for one in found], artifact.facts["run_id"]
    others = [one for one in dict.fromkeys(runs) if one != own]
    if not others:
        return "the only finished run"
    full = "finished" if runs[-1] == own else "full"
    return f"the newest {full} run of {len(others) + 1}; another with --run, such as --run {others[-1]}"


def artifacts_to_compare(
    workspace: Workspace, data: PreparedDataset, models: Sequence[str] | None, runs: Sequence[str] = ()
) -> dict[str, Artifact]:
    """Return an artifact of each model on this data set; of all models there are, or of those requested.

    runs : ids of runs whose models are taken; of the other models the newest full one, else the newest QUICK one.
    Raises NotPreparedError where there is none, and for a run of other data: its test rows are others.
    """
    for name in models or ():
        _check_model_name(name)
    here, found = _finished(workspace, data.symbol, data.horizon, data=data.fingerprint), {}
    where = f"{data.symbol}, horizon {data.horizon}"
    named = {one.name: one for one in (_of_run(here, run, f"{where}, the prepared data") for run in runs)}
    if len(named) < len(runs):
        raise SettingsError("Two runs of one model", where="run", got=", ".join(runs), wanted="one run of each model")
    for name in [*models, *named] if models else [*available_models(), STACK]:
        artifact = named.get(name) or _newest_full([one for one in here if one.name == name])
        if artifact is not None:
            found[name] = artifact
        elif models:
            step = "stack them first" if name == STACK else "train it first"
            raise NotPreparedError(f"No finished {name} on this data", where=data.symbol, next_step=step)
    if not found:
        raise NotPreparedError(
            "Nothing is trained yet", where=where,
            next_step=f"python -m ml_factory train --symbol {data.symbol} --horizon {data.horizon} --model xgboost",
        )  # fmt: skip
    return found


def predict_bars(
    workspace: Workspace, artifact: Artifact, data: str | Path | None, stamped: RawBarSpec | None = None
) -> tuple[pd.DataFrame, pd.Series]:
    """Predict the symbol's raw bars, or those of another file, with the settings of training: (probabilities, close).

    Of meta-labels only the rows where the primary side bets, with its `side`.
    stamped : format of the other file; None: that of `RawBarSpec()`. Findings in it are logged.
    """
    fitted = load_fitted_models(workspace, artifact)
    for name, model in fitted.models.items():
        for change in model.changed_versions():
            _log.warning("%s: %s", name, change)
    spec = PredictionSpec.from_stored(fitted.spec)
    source = resolve_bars_file(data) if data else require_raw_bars(workspace, artifact.symbol)
    stamped = (stamped or RawBarSpec()) if data else None
    raw, _, skipped = read_usable_rows(source, stamped or RawBarSpec(), source)
    if skipped:
        _log.warning("%s: %s", source, skipped)
    bars, report = spec.check_bars(raw, stamped=stamped, where=source, quality=data is not None)
    for finding in report.findings if data else ():
        if finding.severity != "info":
            _log.warning("%s: %s", source, finding.message)
    if data and off_tick_share(bars, spec.market) > OFF_SHARE:
        own, _ = spec.check_bars(read_bars_table(require_raw_bars(workspace, artifact.symbol)), where=artifact.symbol)
        check_bars_on_tick(bars, spec.market, off_tick_share(own, spec.market))
    if fitted.spec["sources"] != source_hash(DATA_PACKAGES):
        _log.warning("%s was trained on features of other code: train it again to be sure", artifact.facts["model"])
    return spec.predict_bars(bars, fitted)


def load_fitted_models(workspace: Workspace, artifact: Artifact) -> FittedModels:
    """Load a registered model, or a stack with its base models."""
    if artifact.kind != STACK:
        return FittedModels({artifact.facts["model"]: TrainedModel.from_state(artifact.load_state())})
    bases = base_model_artifacts(workspace, artifact)
    models = {name: TrainedModel.from_state(base.load_state()) for name, base in bases.items()}
    return FittedModels(models, artifact.load_state())


def read_predictions(path: Path) -> pd.DataFrame:
    """Read the DataFrame that `write_predictions` wrote. Raises WorkspaceError."""
    data = files.read(path)
    step = "predict again: it makes what is missing or damaged"
    with refuse_damaged_content(WorkspaceError, "These predictions are damaged", where=path, next_step=step):
        return pd.read_parquet(io.BytesIO(data))


def write_predictions(path: Path, table: pd.DataFrame) -> None:
    """Write a DataFrame as Parquet, whole or not at all."""
    files.replace(path, lambda temporary: table.to_parquet(temporary))
