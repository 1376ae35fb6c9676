"""Predict bars out of sample with a finished model."""

import time
from pathlib import Path

from ml_factory.argument_checks import check_horizon
from ml_factory.data.validation import RawBarSpec
from ml_factory.inference.split_times import add_prediction_splits
from ml_factory.lazy_module import LazyModule
from ml_factory.result import Result
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit
from ml_factory.workflows.predictions import (
    describe_run_choice,
    find_artifact_to_predict,
    predict_bars,
    write_prediction_frame,
)

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
    bars : format of that file: stamp, zone and decimal mark.
    run : run id of the model; "" for the newest.

    The result has `frame`, as in the file at `path`: index known_at; p_short, p_neutral, p_long (of meta-labels `side`
    too), split and run_id; `choice`, why this run's model was taken, in words; and `frame_hash`.
    """
    started, workspace = time.perf_counter(), Workspace(workspace)
    artifact = find_artifact_to_predict(workspace, check_symbol(symbol), check_horizon(horizon), model, run)
    frame, close = predict_bars(workspace, artifact, data, bars)
    frame = add_prediction_splits(frame, artifact.facts, all_rows, artifact.path)
    path = Path(out) if out else workspace.results / symbol / f"predictions-{model}-h{horizon}.parquet"
    write_prediction_frame(path, frame)
    run_id, choice = artifact.facts["run_id"], describe_run_choice(workspace, artifact, run)
    counts, seconds = frame["split"].value_counts(sort=False), time.perf_counter() - started
    lines = [
        f"{model} on {symbol}, run {run_id} ({choice}): {len(frame):,} rows, {frame.index[0]} to {frame.index[-1]}, "
        f"{seconds:.1f} s",
        f"  by split: {', '.join(f'{name} {count:,}' for name, count in counts.items())}",
        f"  {path}",
    ]
    return Result(
        lines, figure=lambda: plots.plot_probabilities(frame, close), also={"frame": frame}, symbol=symbol,
        horizon=horizon, model=model, run_id=run_id, choice=choice, rows=len(frame), path=path,
        frame_hash=files.sha256(path), seconds=seconds,
    )  # fmt: skip
