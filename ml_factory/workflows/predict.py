"""Predict bars out of sample with a finished model."""

import time
from pathlib import Path

from ml_factory.argument_checks import check_horizon
from ml_factory.data.validation import RawBarSpec
from ml_factory.inference.predict import add_prediction_splits
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows.predictions import (
    describe_run_choice,
    find_artifact_to_predict,
    predict_bars,
    write_prediction_frame,
)
from ml_factory.workflows.results.models import PredictResult

plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


def predict(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, *, data: str | Path | None = None,
    bars: RawBarSpec | None = None, out: str | Path | None = None, run: str = "", all_rows: bool = False,
) -> PredictResult:  # fmt: skip
    """Predict out of sample with the newest finished model, as Parquet under `results/`; newest bars included.

    The column `split` is "test", or "new" behind the last labelled row; with all_rows also "train" and "validation",
    the rows of fitting and selection. `run_id` names the run.

    data : bars to predict instead of the symbol's own, checked and turned into features with the settings of training.
    bars : format of that file: stamp, zone and decimal mark.
    run : run id of the model; "" for the newest.
    """
    started, workspace = time.perf_counter(), Workspace(workspace)
    artifact = find_artifact_to_predict(workspace, check_symbol(symbol), check_horizon(horizon), model, run)
    frame, close = predict_bars(workspace, artifact, data, bars)
    frame = add_prediction_splits(frame, artifact.facts, all_rows, artifact.path)
    path = Path(out) if out else workspace.results / symbol / f"predictions-{model}-h{horizon}.parquet"
    write_prediction_frame(path, frame)
    return PredictResult(
        symbol=symbol, horizon=horizon, model=model, run_id=artifact.facts["run_id"], rows=len(frame),
        path=path, frame=frame, frame_hash=files.sha256(path), seconds=time.perf_counter() - started,
        choice=describe_run_choice(workspace, artifact, run),
        draw=lambda: plots.plot_probabilities(frame, close),
    )  # fmt: skip
