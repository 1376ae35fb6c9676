"""Disturb the rows that judge, watch what was learnt: no bit of it may move, and what may move does."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.data.io import import_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.evaluation.calibration import Calibration
from ml_factory.runs import open_run
from ml_factory.settings import make_run_settings
from ml_factory.storage.serialization import serialize_state
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import evaluation, folds, predictions, stack
from ml_factory.workflows import train as train_module
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.prepared_dataset import PreparedDataset
from tests.small_data import SMALL_DATA

HORIZON = 10
SMALL = {"rounds": 20, "depth": 3, "threads": 1}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> tuple[Workspace, PreparedDataset]:
    workspace = Workspace(tmp_path_factory.mktemp("clean"))
    import_bars(synthetic_bars(days=16, kind="planted", seed=2).reset_index(), workspace, "MES")
    pipeline.prepare(workspace, "MES", (HORIZON,), settings=SMALL_DATA)
    return workspace, load_dataset(workspace, "MES", HORIZON)


@pytest.fixture
def data(prepared) -> PreparedDataset:
    return prepared[1]


def disturbed(data: PreparedDataset, rows: np.ndarray, *, inputs: bool) -> PreparedDataset:
    """The same data with other outcomes in these rows of the labels, and with `inputs` other features and prices."""
    labels, random = data.labels.copy(), np.random.default_rng(7)
    wrong = np.where(random.random(len(rows)) < 0.8, 1, -1).astype(np.int8)
    labels.iloc[rows, labels.columns.get_loc("label")] = wrong
    labels.iloc[rows, labels.columns.get_loc("barrier")] = np.where(wrong > 0, "upper", "lower")
    if not inputs:
        return replace(data, labels=labels)
    features, close = data.features.copy(), data.close.copy()
    at = data.row[rows]
    features.iloc[at] = random.normal(5.0, 50.0, (len(at), features.shape[1])).astype(np.float32)
    close[at] *= 1.7
    return replace(data, labels=labels, features=features, close=close)


def fitted(data: PreparedDataset, root: Path, model: str = "lightgbm", **settings):
    workspace = Workspace(root)
    spec = make_run_settings(
        data.symbol, HORIZON, model, task="train", seed=1, quick=False, data=data.fingerprint, settings=SMALL | settings
    )
    with open_run(workspace, spec) as run:
        return workspace, train_module.train_with_holdout(data, run)


def test_train_with_changed_validation_labels_changes_only_stop_and_calibration(data, tmp_path):
    _, clean = fitted(data, tmp_path / "clean", patience=0)
    _, other = fitted(disturbed(data, data.splits["validation"], inputs=False), tmp_path / "other", patience=0)
    clean, other = clean.load_state(), other.load_state()
    assert other["scaler"] == clean["scaler"]
    assert other["calibration"] != clean["calibration"]
    assert other["model_state"]["best_round"] != clean["model_state"]["best_round"]


def metrics_with_baselines(data, rows, shown):
    counted = evaluation.prepared_dataset_baselines(data, data.splits["train"], rows)
    return evaluation.prepared_dataset_metrics(data, rows, shown | counted, "prior")


def test_with_baselines_counts_prior_on_training_rows_only(data):
    rows = data.splits["test"]
    shown = {"model": np.full((len(rows), 3), 1 / 3)}
    clean = metrics_with_baselines(data, rows, shown)
    # The judge's labels reversed in place: the prior, if it were counted on them, would still do as well.
    labels = data.labels.copy()
    labels.iloc[rows, labels.columns.get_loc("label")] = np.int8(1)
    labels.iloc[rows, labels.columns.get_loc("barrier")] = "upper"
    other = metrics_with_baselines(replace(data, labels=labels), rows, shown)
    train = data.splits["train"]
    clear = train[data.unambiguous_mask[train]]
    share = np.mean(data.y[clear] == 1)
    assert other.loc["prior", "log_loss"] == pytest.approx(-np.log(share), rel=1e-12)
    assert other.loc["prior", "log_loss"] > 2 * clean.loc["model", "log_loss"] / 3


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


def test_prepared_scaler_equals_scaler_fitted_on_training_rows(data):
    wanted = RobustScaler.fit(data.x_NF[data.row[data.splits["train"]]])
    assert data.scaler.to_dict() == wanted.to_dict()
    assert data.scaler.to_dict() != RobustScaler.fit(data.x_NF).to_dict()


def out_of_fold(data: PreparedDataset, root: Path) -> tuple[folds.FoldPlan, folds.FoldForecasts]:
    spec = make_run_settings(
        data.symbol, HORIZON, "lightgbm", task="folds", seed=1, quick=False, data=data.fingerprint, settings=SMALL
    )
    plan = folds.plan_folds(data, data.development_rows(), 3, 1)
    with open_run(Workspace(root), spec) as run:
        return plan, folds.fit_folds(run, data, plan, folds.FoldModel(1, "lightgbm", SMALL))


@pytest.mark.parametrize("block", [0, 1, 2])
def test_out_of_fold_with_changed_block_labels_gives_same_block_forecasts(data, tmp_path, block):
    plan, clean = out_of_fold(data, tmp_path / "clean")
    test = plan.folds[block][1]
    _, other = out_of_fold(disturbed(data, plan.rows[test], inputs=False), tmp_path / "other")
    assert np.isfinite(clean.p_N3[test]).all()
    np.testing.assert_array_equal(other.p_N3[test], clean.p_N3[test])
    assert other.calibrations[block] == clean.calibrations[block] != Calibration()
    rest = np.setdiff1d(np.arange(len(plan.rows)), test)
    assert not np.array_equal(other.p_N3[rest], clean.p_N3[rest])  # the other folds have learnt from it


def test_out_of_fold_scaler_ignores_rows_of_test_block(data, tmp_path, monkeypatch):
    """Rows of the block moved far away: the scaler of that fold stays where it was."""
    seen = []
    fit = RobustScaler.fit
    monkeypatch.setattr(RobustScaler, "fit", lambda *words: seen.append(fit(*words).to_dict()) or fit(*words))
    plan, _ = out_of_fold(data, tmp_path / "clean")
    test = plan.rows[plan.folds[1][1]]
    features = data.features.copy()
    features.iloc[data.row[test]] += np.float32(1e6)
    out_of_fold(replace(data, features=features), tmp_path / "other")
    assert len(seen) == 6 and seen[4] == seen[1]
    assert seen[3] != seen[0] and seen[5] != seen[2]


def test_development_rows_end_before_first_test_row(data):
    rows, first = data.development_rows(), data.labels.index[data.splits["test"][0]]
    assert (data.labels["label_end"].iloc[rows] < first).all()
    left = np.setdiff1d(np.arange(len(data.labels)), rows)
    assert (data.labels["label_end"].iloc[left] >= first).all()


@pytest.mark.parametrize(("lookback", "wanted"), [(1, 64), (200, 200)])
def test_fold_plan_embargo_covers_lookback_window(data, lookback, wanted):
    plan = folds.plan_folds(data, data.development_rows(), 3, lookback)
    for train, test in plan.folds[:2]:
        end = data.labels["label_end"].iloc[plan.rows[test]].max()
        known = data.labels.index[plan.rows]
        after = train[train > test[-1]]
        assert after[0] == np.flatnonzero(known > end)[0] + wanted
        assert data.row[plan.rows[after[0]]] - lookback + 1 > data.row[plan.rows[test[-1]]]


@pytest.mark.soak
def test_stack_with_changed_test_rows_gives_same_state(prepared, tmp_path, monkeypatch):
    """Pool and calibration are the same state whatever the test rows were; the pool ignores validation rows, too."""
    _, data = prepared
    quick = type("Limits", (stack.QuickLimits,), {"settings_for": lambda self, family: dict(SMALL)})
    monkeypatch.setattr(stack, "QuickLimits", quick)
    states = {}
    for name, part, inputs in (("clean", None, False), ("test", "test", True), ("validation", "validation", False)):
        now = data if part is None else disturbed(data, data.splits[part], inputs=inputs)
        bases, workspace = {}, Workspace(tmp_path / name)
        for model in ("lightgbm", "xgboost"):
            _, bases[model] = fitted(data, workspace.root, model)
        settings = (("base_models", list(bases)), ("bases", [one.hash for one in bases.values()]), ("folds", 3))
        spec = make_run_settings(
            data.symbol, HORIZON, "lightgbm", task="stack", seed=0, quick=True, data="0", settings=None
        )
        spec = replace(spec, settings=settings)
        for base in bases.values():  # said on clean rows: only what the stack itself does is at stake
            predictions.load_or_make_predictions(workspace, data, base)
        with open_run(workspace, spec) as run:
            states[name] = stack.fit_stack(now, run, 3).load_state()
    assert serialize_state(states["test"]) == serialize_state(states["clean"])
    assert states["validation"]["stack"] == states["clean"]["stack"]
    assert states["validation"]["calibration"] != states["clean"]["calibration"]


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
