"""Audit of a stack and of `predict`: neither changes when data of the future change."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.io import write_bars
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.leakage.artifact_comparison import compare_frames, compare_states, difference
from ml_factory.leakage.tables import ROWS, Leak
from ml_factory.run_folder import open_run
from ml_factory.settings import run_spec
from ml_factory.workflows.audit_artifacts import Findings
from ml_factory.workflows.audit_runs import (
    BLIND,
    one_per_column,
    small_run_spec,
    temporary_workspace,
    with_disturbed_labels,
)
from ml_factory.workflows.dataset import Dataset
from ml_factory.workflows.predict import evaluate_artifact, predict_bars, read_frame
from ml_factory.workflows.stack import fit_stack, stack_spec
from ml_factory.workflows.train import fit_holdout

MODELS, FOLDS = ("linear", "xgboost"), 2
BARS = 60_000  # newest bars, on which `predict` is checked
CUTS = (1, 777, 2_345)  # minutes before the end at which the file is shortened, by one bar at least


def check_stack(data: Dataset, findings: Findings) -> None:
    """Check that weights, calibration and forecasts of a stack do not change with the test labels."""
    clean, blind = _stacked(data), _stacked(with_disturbed_labels(data, data.splits["test"]))
    leaks = compare_states("stack", "its weights and calibration", clean[0], blind[0], BLIND)
    leaks += compare_frames("stack", clean[1], blind[1], BLIND)
    findings.take("stack", len(clean[1]), one_per_column(leaks))


def _stacked(data: Dataset) -> tuple[dict, pd.DataFrame]:
    """Return (state of the fitted stack, its probabilities of every row)."""
    with temporary_workspace() as workspace:
        hashes = []
        for model in MODELS:
            spec = run_spec(
                data.symbol, data.horizon, model, task="train", seed=0, quick=True, data=data.fingerprint, settings=None
            )
            run = open_run(workspace.results, data.symbol, spec, fresh=True)
            hashes.append(fit_holdout(workspace, data, run, spec, callbacks=(), mirror="off").hash)
        spec = stack_spec(data, MODELS, hashes, FOLDS, 0, True)
        run = open_run(workspace.results, data.symbol, spec, fresh=True)
        artifact = fit_stack(workspace, data, run, spec, FOLDS, mirror="off")
        learnt = {name: value for name, value in artifact.load_state().items() if name not in ("bases", "run_id")}
        return learnt, read_frame(evaluate_artifact(workspace, data, artifact).path)[PROBABILITIES]


def check_predict(data: Dataset, bars: pd.DataFrame, findings: Findings, cuts: Sequence[int] = CUTS) -> None:
    """Check that `predict` gives the same probabilities for a moment whether the file of bars ends there or later."""
    bars = bars.iloc[-BARS:]
    with temporary_workspace() as workspace:
        spec = small_run_spec(data, MODELS[0], "train")
        run = open_run(workspace.results, data.symbol, spec, fresh=True)
        artifact = fit_holdout(workspace, data, run, spec, callbacks=(), mirror="off")

        def predicted_until(stop: int) -> pd.DataFrame:
            path = Path(workspace.root) / f"bars-{stop}.parquet"
            write_bars(path, bars.iloc[:stop])
            return predict_bars(workspace, artifact, path)[0]

        whole, leaks, compared = predicted_until(len(bars)), [], 0
        minutes = data.settings["market"]["bar_minutes"]
        for cut in cuts:
            stop = len(bars) - max(1, cut // minutes)
            known = bars.index[stop - 1] + pd.Timedelta(minutes=minutes)
            leaks += _differences(predicted_until(stop), whole[whole.index <= known])
            compared += int(np.count_nonzero(whole.index <= known))
    findings.take("predict", compared, one_per_column(leaks))


def _differences(short: pd.DataFrame, whole: pd.DataFrame) -> list[Leak]:
    if not len(whole):
        return [difference("predict", ROWS, 1, "the first", "any row: the bars are too few")]
    # Matrix products round by their number of rows, so the last bits are not compared.
    reference = "the prediction with later bars"
    return compare_frames("predict", short, whole, reference, rounded=PROBABILITIES)
