"""A fold, a training, its verdict, a stack and predict under proof: clean ones pass, each injected leak is named."""

from dataclasses import replace

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.data.io import load_bars
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference import prediction_spec
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import audit, evaluation, folds, predictions, prepared_dataset
from ml_factory.workflows.audits import audit_models, audit_training
from ml_factory.workflows.audits.audit_artifacts import AuditFindings
from ml_factory.workflows.load_prepared import load_dataset

MODEL = "linear"


@pytest.fixture(scope="module")
def data(prepared_template):
    return load_dataset(Workspace(prepared_template), "DEMO", 5)


@pytest.fixture(scope="module")
def part(data):
    return audit_training.audit_training_subsample(data)


@pytest.fixture(scope="module")
def fold_values(part):
    """What each run of the fold gives, once for all tests."""
    made, real = {}, audit_training.record_fold_training

    def remembered(data, plan, model):
        key = (data.labels["label"].sum(), float(np.nansum(data.x_NF[:, 0], dtype=np.float64)))
        if key not in made:
            made[key] = real(data, plan, model)
        return dict(made[key])

    return remembered


@pytest.fixture(scope="module")
def trained(part):
    made, real = {}, audit_training._trained

    def remembered(data, model):
        key = int((data.labels["label"].to_numpy() * np.arange(len(data.labels))).sum())
        if key not in made:
            made[key] = real(data, model)
        return made[key]

    return remembered


def found_by(check, *given):
    to = AuditFindings()
    check(*given, to)
    return [leak.sentence() for leak in to.leaks]


def at(stage, change):
    return lambda here, value: change(value) if here == stage else value


# ---- a market that begins with a single class -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_class_first(data):
    """The first 140 rows are neutral."""
    labels = data.labels.copy()
    labels.iloc[:140, labels.columns.get_loc("label")] = np.int8(0)
    return replace(data, labels=labels)


def test_first_of_two_classes_doubles_until_each_fifth_has_two_classes():
    y = np.r_[np.zeros(100), np.tile([0, 1], 500)]
    assert audit_training.audit_training_row_count(np.tile([0, 1], 500), 60) == 60
    assert (
        audit_training.audit_training_row_count(y, 100) == 800
    )  # of 400 the first 80 are of one class, of 800 the first 160
    assert (
        audit_training.audit_training_row_count(np.zeros(300), 40)
        == audit_training.audit_training_row_count(y[:300], 900)
        == 300
    )


@pytest.mark.soak
def test_leaks_of_training_of_market_starting_with_one_class_is_empty(one_class_first, monkeypatch):
    part = audit_training.audit_training_subsample(one_class_first, 70)
    assert all(len(np.unique(part.y[rows])) > 1 for rows in part.splits.values())
    assert found_by(audit_training.audit_fold_training, part, MODEL, None) == []
    assert found_by(audit_training.audit_training_predictions, part, MODEL, None) == []
    monkeypatch.setitem(audit.TRAINING_ROWS, "tabular", 70)
    assert audit.audit_leaks_of_model(one_class_first, MODEL) == []


# ---- a fold ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda fold: fold, ""),
        (lambda fold: {name: value.copy() if hasattr(value, "copy") else value for name, value in fold.items()}, ""),
        (lambda fold: fold | {"train": np.arange(fold["test"][0] + 9)}, "fold: train against test"),
        (lambda fold: fold | {"validation": fold["test"]}, "fold: train against test"),
        (lambda fold: fold | {"test": fold["test"][1:]}, "fold: test"),
        (lambda fold: fold | {"scaler": RobustScaler.fit(fold["features"].to_numpy())}, "fold: scaler['center']"),
        (lambda fold: fold | {"inputs_test": np.roll(fold["inputs_test"], -1, axis=0)}, "fold: inputs_test"),
        (lambda fold: fold | {"inputs_train": fold["inputs_train"][::-1]}, "fold: inputs_train"),
        (lambda fold: fold | {"y": np.roll(fold["y"], -1)}, "fold: y"),
        (lambda fold: fold | {"calibrated": softened(fold["calibrated"])}, "fold: calibrated"),
        (lambda fold: fold | {"forecasts": softened(fold["forecasts"])}, "fold: forecasts"),
    ],
)
def test_check_fold_with_a_tamper_names_the_leak(part, fold_values, monkeypatch, change, says):
    monkeypatch.setattr(audit_training, "record_fold_training", fold_values)
    found = found_by(audit_training.audit_fold_training, part, MODEL, at("fold", change))
    assert any(says in sentence for sentence in found) if says else found == []


def softened(p_N3):
    p_N3 = p_N3**0.9
    return p_N3 / p_N3.sum(axis=1, keepdims=True)


def test_check_fold_with_scaler_fitted_on_all_rows_names_scaler(part, monkeypatch):
    monkeypatch.setattr(
        folds,
        "fit_dataset_preprocessing",
        lambda data, rows: prepared_dataset.fit_dataset_preprocessing(data, np.arange(len(data.labels))),
    )
    assert any("fold: scaler" in one for one in found_by(audit_training.audit_fold_training, part, MODEL, None))


def test_check_fold_with_calibration_on_test_labels_names_calibrated(part, monkeypatch):
    honest = audit_training.score_folds

    def on_test(data, outcome, name):
        (assessed,) = honest(data, outcome, name)
        hit = np.eye(3)[data.y[assessed.rows] + 1]
        return [replace(assessed, forecasts=assessed.forecasts | {name: 0.99 * assessed.forecasts[name] + 0.01 * hit})]

    monkeypatch.setattr(audit_training, "score_folds", on_test)
    assert found_by(audit_training.audit_fold_training, part, MODEL, None)[0].startswith("fold: calibrated")


# ---- predictions and their verdict -----------------------------------------------------------------------------------


def oracle_mix(frame):
    frame[PROBABILITIES] = 0.999 * frame[PROBABILITIES] + 0.001 * np.eye(3)[frame["label"] + 1]
    return frame


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda frame: frame, ""),
        (lambda frame: frame.copy(), ""),
        (oracle_mix, "predictions: p_short"),
        (lambda frame: frame.assign(p_long=frame["p_long"].shift(-1).ffill()), "predictions: p_long"),
        (lambda frame: frame.assign(label=np.roll(frame["label"], -1)), "predictions: label"),
        (lambda frame: frame.assign(split="test"), "predictions: split"),
        (lambda frame: frame.iloc[1:], "predictions: (rows)"),
    ],
)
def test_check_predictions_with_a_tamper_names_the_leak(part, trained, monkeypatch, change, says):
    monkeypatch.setattr(audit_training, "_trained", trained)
    found = found_by(audit_training.audit_training_predictions, part, MODEL, at("predictions", change))
    assert any(says in sentence for sentence in found) if says else found == []


def test_check_predictions_calibrated_on_test_labels_names_predictions(part, monkeypatch):
    honest = predictions.predict_features

    def tempered(bundle, features, **more):
        frame, labels = honest(bundle, features, **more), current[0].labels["label"]
        hit = np.eye(3)[labels.reindex(frame.index).to_numpy() + 1]
        return frame * 0.99 + 0.01 * hit

    current, real = [part], audit_training._trained

    def trained_on(data, model):
        current[0] = data
        return real(data, model)

    monkeypatch.setattr(audit_training, "_trained", trained_on)
    monkeypatch.setattr(predictions, "predict_features", tempered)
    assert any(
        "predictions: p_" in one for one in found_by(audit_training.audit_training_predictions, part, MODEL, None)
    )


def test_check_predictions_with_worsened_prior_names_baseline(part, monkeypatch):
    honest = evaluation.prior_baseline_probabilities
    monkeypatch.setattr(evaluation, "prior_baseline_probabilities", lambda *given: 0.8 * honest(*given) + 0.2 / 3)
    found = found_by(audit_training.audit_training_predictions, part, MODEL, None)
    assert any("baseline: prior, log loss of test rows" in one and "by a recount" in one for one in found)
    assert any("baseline: prior" in one for one in found_by(audit_training.audit_training_baselines, part, None))


# ---- baselines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prior", "last_move", "clock", "clock_volatility"])
def test_check_baselines_with_baseline_mixed_with_uniform_names_baseline(data, name):
    worse = at("baseline", lambda printed: printed | {name: 0.95 * printed[name] + 0.05 / 3})
    assert f"baseline: {name} differs" in found_by(audit_training.audit_training_baselines, data, worse)[0]


def test_check_baselines_equal_arrays_pass_and_baseline_of_test_rows_fails(data):
    assert found_by(audit_training.audit_training_baselines, data, None) == []
    arrays = at("baseline", lambda printed: {name: frame.to_numpy() for name, frame in printed.items()})
    assert found_by(audit_training.audit_training_baselines, data, arrays) == []
    test = data.splits["test"]
    fitted_on_test = at(
        "baseline",
        lambda printed: printed | {"clock": evaluation.prepared_dataset_baselines(data, test, test)["clock"]},
    )
    assert "baseline: clock " in found_by(audit_training.audit_training_baselines, data, fitted_on_test)[0]


# ---- a stack and predict ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_check_stack_passes_and_with_calibration_on_test_rows_names_stack(part, monkeypatch):
    assert found_by(audit_models.audit_stack_model, part) == []
    honest = audit_models.fit_stack

    def on_test(data, *given):
        both = np.concatenate([data.splits["validation"], data.splits["test"]])
        return honest(replace(data, splits=data.splits | {"validation": both}), *given)

    monkeypatch.setattr(audit_models, "fit_stack", on_test)
    assert any("stack: its weights and calibration" in one for one in found_by(audit_models.audit_stack_model, part))


def test_check_predict_passes_and_with_features_of_next_bar_names_predict(part, prepared_template, monkeypatch):
    bars, _ = load_bars(Workspace(prepared_template), "DEMO")
    assert found_by(audit_models.audit_model_predictions, part, bars) == []
    honest = prediction_spec.build_features

    def ahead(*given):
        matrix = honest(*given)
        values = np.array(matrix.values)
        values[:-1] = values[1:]
        return replace(matrix, values=values)

    monkeypatch.setattr(prediction_spec, "build_features", ahead)
    assert any("predict: p_" in one for one in found_by(audit_models.audit_model_predictions, part, bars))


# ---- finished models -------------------------------------------------------------------------------------------------


def test_check_finished_with_altered_forecasts_or_scaler_names_difference(prepared):
    pipeline.train(prepared, "DEMO", 5, MODEL, mirror="off")
    data = load_dataset(prepared, "DEMO", 5)
    assert found_by(audit_models.audit_finished_models, prepared, data, None) == []
    given = at("predictions", oracle_mix)
    assert (
        "probabilities differs from the predictions of its bundle"
        in found_by(audit_models.audit_finished_models, prepared, data, given)[0]
    )
    other = replace(data, scaler=RobustScaler.fit(data.x_NF))
    assert "scaler['center']" in found_by(audit_models.audit_finished_models, prepared, other, None)[0]
