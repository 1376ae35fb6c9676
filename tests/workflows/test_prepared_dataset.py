"""Prepared data as trainings read it: which rows train and judge, the clock's column, predictions that are read."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import SettingsError
from ml_factory.features.build import FeatureSpec
from ml_factory.runs import open_run
from ml_factory.settings import make_run_settings
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import evaluation, predictions
from ml_factory.workflows import train as train_module
from ml_factory.workflows.prepared_dataset import PreparedDataset, resolve_dataset_settings

HORIZON = 10
SMALL = {"rounds": 20, "depth": 3, "threads": 1}


@pytest.fixture
def prepared(sixteen_days) -> tuple[Workspace, PreparedDataset]:
    return sixteen_days


@pytest.fixture
def data(prepared) -> PreparedDataset:
    return prepared[1]


def fitted(data: PreparedDataset, root: Path, model: str = "lightgbm", **settings):
    workspace = Workspace(root)
    spec = make_run_settings(
        data.symbol, HORIZON, model, task="train", seed=1, quick=False, data=data.fingerprint, settings=SMALL | settings
    )
    with open_run(workspace, spec) as run:
        return workspace, train_module.train_with_holdout(data, run)


def test_evaluate_artifact_counts_prior_on_rows_with_full_window(prepared, data, monkeypatch):
    workspace, _ = prepared
    read = np.flatnonzero(data.full_window_mask(32))  # as a network with 32 rows of look-back
    frame = data.labels.iloc[read][[]].assign(p_short=0.3, p_neutral=0.3, p_long=0.4, split=data.split_names()[read])
    monkeypatch.setattr(predictions, "load_or_make_predictions", lambda *_: frame)
    artifact = SimpleNamespace(symbol="MES", kind="model", facts={"model": "lstm", "run_id": "any"})
    test = evaluation.evaluate_artifacts(workspace, data, {"lstm": artifact}).test_metrics

    def prior_loss(training_rows):
        training_rows = training_rows[data.unambiguous_mask[training_rows]]
        assessed = np.intersect1d(read, data.splits["test"])
        share = {side: np.mean(data.y[training_rows] == side) for side in (-1, 0, 1)}
        return np.mean([-np.log(share[side]) for side in data.y[assessed[data.unambiguous_mask[assessed]]]])

    wanted = prior_loss(np.intersect1d(read, data.splits["train"]))
    assert test.loc["prior", "log_loss"] == pytest.approx(wanted, rel=1e-12)
    assert abs(wanted - prior_loss(data.splits["train"])) > 1e-4  # counted on all of them it is another number


def test_development_rows_end_before_first_test_row(data):
    rows, first = data.development_rows(), data.labels.index[data.splits["test"][0]]
    assert (data.labels["label_end"].iloc[rows] < first).all()
    left = np.setdiff1d(np.arange(len(data.labels)), rows)
    assert (data.labels["label_end"].iloc[left] >= first).all()


def test_training_windows_stay_inside_one_segment(data):
    lookback = 12
    spec = make_run_settings(
        data.symbol, HORIZON, "lstm", task="train", seed=0, quick=False, data="0", settings={"lookback": lookback}
    )
    _, train, validation, _ = train_module.build_untrained_model(data, spec)
    for rows in (train, validation):
        at = data.row[rows]
        assert (data.segment[at - lookback + 1] == data.segment[at]).all() and (np.diff(at) > 0).all()


def test_load_or_predict_replaces_predictions_of_other_artifact(prepared, tmp_path):
    """A folder of results outlives its model: what another model said there is not taken for this one's."""
    _, data = prepared
    workspace, artifact = fitted(data, tmp_path)
    printed = predictions.load_or_make_predictions(workspace, data, artifact)
    path = predictions.predictions_path(workspace, artifact)
    written = path.read_bytes()
    strange = printed.copy()
    strange[["p_short", "p_neutral", "p_long"]] = [0.1, 0.1, 0.8]
    for spoil in (lambda: strange.to_parquet(path), lambda: path.write_bytes(written[:1000])):
        spoil()
        assert not predictions.is_prediction_of_artifact(path, artifact)
        predictions.load_or_make_predictions(workspace, data, artifact)
        assert path.read_bytes() == written and predictions.is_prediction_of_artifact(path, artifact)
    assert not predictions.is_prediction_of_artifact(path, replace(artifact, hash="0" * 64))
    path.unlink()
    path.mkdir()  # cannot be read as a file
    assert not predictions.is_prediction_of_artifact(path, artifact)


def test_dataset_last_move_is_nan_at_segment_start(data):
    opening = data.segment[data.row] != data.segment[data.row - 1]
    assert opening.any() and np.isnan(data.last_move[opening & (data.row > 0)]).all()
    inside = np.flatnonzero(~opening & (data.row > 0))
    row = data.row[inside]
    np.testing.assert_allclose(data.last_move[inside], np.log(data.close[row] / data.close[row - 1]), atol=1e-12)


def reading(columns: list[str], *steps: str | dict) -> PreparedDataset:
    """A data set of these columns and steps, without rows."""
    nothing, settings = np.empty(0), {"features": asdict(FeatureSpec()), "preprocess": list(steps)}
    features = pd.DataFrame(columns=columns)
    return PreparedDataset("DEMO", 5, "", features, nothing, nothing, pd.DataFrame(), {}, None, {"data": settings})


@pytest.mark.parametrize(
    ("steps", "given", "wanted"),
    [
        (["robust"], {}, {"offset_column": 1, "offset_bars": 5}),
        ([{"step": "standard"}], {"offset": "clock"}, {"offset_column": 1, "offset_bars": 5}),
        (["robust"], {"offset": "none", "rounds": 3}, {"rounds": 3}),
        (["robust"], {"offset_column": 0}, {"offset_column": 0}),
        (["quantile"], {}, {}),  # equal steps of the clock are no longer equal
        (["pca", "robust"], {}, {}),
    ],
)
def test_resolve_data_settings_clock_offset_needs_evenly_scaled_column(steps, given, wanted):
    assert resolve_dataset_settings(reading(["rsi_14", "session_progress"], *steps), given) == wanted


def test_resolve_data_settings_unavailable_offset_raises():
    with pytest.raises(SettingsError, match=r"\[offset\]"):
        resolve_dataset_settings(reading(["session_progress"], "robust"), {"offset": "hour"})
    for columns, steps in ((["rsi_14"], ["robust"]), (["session_progress"], ["quantile"])):
        with pytest.raises(SettingsError, match=r"\[offset\].*leave offset out"):
            resolve_dataset_settings(reading(columns, *steps), {"offset": "clock"})
