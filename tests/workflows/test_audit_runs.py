"""What learns and predicts, under proof on a sample: honest ones pass, each injected leak is named."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.data.io import load_bars
from ml_factory.datasets.preprocessing import SCALERS, STEPS
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference import predict
from ml_factory.leakage.tables import Findings
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import audit_runs, evaluation, folds, predictions, prepared_dataset
from ml_factory.workflows import train as train_module
from ml_factory.workflows.load_prepared import load_dataset

MODEL = "linear"


@pytest.fixture(scope="module")
def data(prepared_template):
    return load_dataset(Workspace(prepared_template), "DEMO", 5)


@pytest.fixture(scope="module")
def sample(data):
    return audit_runs.sample_rows(data, 1_000)


def found_by(check, *given) -> list[str]:
    found = Findings()
    check(*given, found)
    assert found.compared
    return [leak.sentence() for leak in found.leaks]


def at(stage, change):
    return lambda here, value: change(value) if here == stage else value


def test_sample_rows_double_until_each_fifth_has_two_classes(data):
    assert len(audit_runs.sample_rows(data, 300).labels) == 300
    labels = data.labels.copy()
    labels.iloc[:70, labels.columns.get_loc("label")] = np.int8(0)
    assert len(audit_runs.sample_rows(replace(data, labels=labels), 100).labels) == 400


# ---- trainings -------------------------------------------------------------------------------------------------------

training = partial(found_by, audit_runs.audit_training)


@pytest.mark.parametrize(("model", "rows"), [("xgboost", 1_000), ("tcn", 300)])
def test_audit_of_honest_training_passes(data, model, rows):
    assert training(audit_runs.sample_rows(data, rows), model, None) == []


def stops_on_test_rows(patch):
    honest = train_module.build_untrained_model

    def spoilt(data, spec):
        model, train, _, limited = honest(data, spec)
        return model, train, data.splits["test"], limited

    patch.setattr(train_module, "build_untrained_model", spoilt)


def learns_from_a_test_row(patch):
    honest = train_module.build_untrained_model

    def spoilt(data, spec):
        model, train, validation, limited = honest(data, spec)
        return model, np.append(train, data.splits["test"][:1]), validation, limited

    patch.setattr(train_module, "build_untrained_model", spoilt)


def prior_of_all(patch):
    """The class prior that a model must beat is counted on the rows that judge too."""
    honest = evaluation.prepared_dataset_baselines

    def spoilt(data, training_rows, rows):
        everything = np.arange(len(data.labels))
        return honest(data, training_rows, rows) | {"prior": honest(data, everything, rows)["prior"]}

    patch.setattr(evaluation, "prepared_dataset_baselines", spoilt)


def prior_other_a_history_of_all(patch):
    honest = evaluation.dataset_weighted_prior_loss
    spoilt = lambda data, training_rows, rows: honest(data, np.arange(len(data.labels)), rows)  # noqa: E731
    patch.setattr(evaluation, "dataset_weighted_prior_loss", spoilt)


def worsened_prior(patch):
    honest = evaluation.prior_baseline_probabilities
    spoilt = lambda *given: 0.8 * honest(*given) + 0.2 / 3  # noqa: E731
    patch.setattr(evaluation, "prior_baseline_probabilities", spoilt)


def forecasts_tempered_by_outcomes(patch):
    honest, current = predictions.predict_features, {}

    def made(self, values, labels, roles, real=audit_runs.Sample.make):
        current["labels"] = labels["label"]
        return real(self, values, labels, roles)

    def tempered(bundle, features, **more):
        frame = honest(bundle, features, **more)
        return frame * 0.99 + 0.01 * np.eye(3)[current["labels"].reindex(frame.index).to_numpy() + 1]

    patch.setattr(audit_runs.Sample, "make", made)
    patch.setattr(predictions, "predict_features", tempered)


@pytest.mark.soak_except("stops_on", "learns_from", "prior_of_all-", "worsened", "tempered")
@pytest.mark.parametrize(
    ("inject", "says"),
    [
        (stops_on_test_rows, "training: trained xgboost"),
        (learns_from_a_test_row, "training: trained xgboost"),
        (prior_of_all, "training: evaluated xgboost['metrics']"),
        (prior_other_a_history_of_all, "training: evaluated xgboost['prior']"),
        (worsened_prior, "baseline: prior, log loss of test rows"),
        (forecasts_tempered_by_outcomes, "predictions: p_"),
    ],
)
def test_audit_of_training_that_reads_forbidden_rows_names_it(sample, inject, says, monkeypatch):
    inject(monkeypatch)
    found = training(sample, "xgboost", None)
    assert any(sentence.startswith(says) for sentence in found), found


@pytest.mark.soak_except("variance")
@pytest.mark.parametrize("step", sorted(set(STEPS) - set(SCALERS)))
def test_audit_of_training_with_each_preprocessing_step_passes(sample, step):
    asked = [{"step": step, **({"trees": 5} if step in ("mda", "mdi") else {})}, "robust"]
    settings = sample.data.settings | {"data": sample.data.settings["data"] | {"preprocess": asked}}
    assert training(replace(sample, data=replace(sample.data, settings=settings)), MODEL, None) == []


def oracle_mix(frame):
    frame[PROBABILITIES] = 0.999 * frame[PROBABILITIES] + 0.001 * np.eye(3)[frame["label"] + 1]
    return frame


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (oracle_mix, "predictions: p_short"),
        (lambda frame: frame.assign(label=np.roll(frame["label"], -1)), "predictions: label"),
        (lambda frame: frame.assign(split="test"), "predictions: split"),
        (lambda frame: frame.iloc[1:], "predictions: (rows)"),
    ],
)
def test_audit_of_predictions_with_a_tamper_names_the_leak(sample, change, says):
    assert any(says in sentence for sentence in training(sample, MODEL, at("predictions", change)))


# ---- baselines, a fold, a stack --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prior", "last_move", "clock", "clock_volatility"])
def test_audit_of_baseline_mixed_with_uniform_names_it(sample, name):
    worse = at("baseline", lambda given: given | {name: 0.95 * given[name] + 0.05 / 3})
    assert f"baseline: {name} " in found_by(audit_runs.audit_baselines, sample, worse)[0]


def test_audit_of_baselines_passes_and_names_worsened_prior(sample, monkeypatch):
    arrays = at("baseline", lambda given: {name: frame.to_numpy() for name, frame in given.items()})
    assert found_by(audit_runs.audit_baselines, sample, arrays) == []
    worsened_prior(monkeypatch)
    assert "baseline: prior differs from a recount" in found_by(audit_runs.audit_baselines, sample, None)[0]


def softened(p_N3):
    return p_N3**0.9 / (p_N3**0.9).sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda fold: {name: value.copy() if hasattr(value, "copy") else value for name, value in fold.items()}, ""),
        (lambda fold: fold | {"train": np.arange(fold["test"][0] + 9)}, "fold: train against test"),
        (lambda fold: fold | {"validation": fold["test"]}, "fold: train against test"),
        (lambda fold: fold | {"validation": fold["train"][-5:]}, "fold: train against validation"),
        (lambda fold: fold | {"test": fold["test"][1:]}, "fold: test"),
        (lambda fold: fold | {"scaler": RobustScaler.fit(fold["features"].to_numpy())}, "fold: scaler['center']"),
        (lambda fold: fold | {"inputs_test": np.roll(fold["inputs_test"], -1, axis=0)}, "fold: inputs_test"),
        (lambda fold: fold | {"inputs_train": fold["inputs_train"][::-1]}, "fold: inputs_train"),
        (lambda fold: fold | {"y": np.roll(fold["y"], -1)}, "fold: y"),
        (lambda fold: fold | {"calibrated": softened(fold["calibrated"])}, "fold: calibrated"),
        (lambda fold: fold | {"forecasts": softened(fold["forecasts"])}, "fold: forecasts"),
    ],
)
def test_audit_of_fold_with_a_tamper_names_the_leak(sample, change, says):
    found = found_by(audit_runs.audit_fold, sample, MODEL, at("fold", change))
    assert any(says in sentence for sentence in found) if says else found == []


def test_audit_of_fold_with_scaler_of_other_rows_or_calibration_on_test_rows_names_it(sample, monkeypatch):
    everything = lambda data, rows: prepared_dataset.fit_dataset_preprocessing(data, np.arange(len(data.y)))  # noqa: E731
    for scaler in (everything, lambda data, rows: data.scaler):
        with monkeypatch.context() as patch:
            patch.setattr(folds, "fit_dataset_preprocessing", scaler)
            assert any("fold: scaler" in one for one in found_by(audit_runs.audit_fold, sample, MODEL, None))
    honest = audit_runs.score_folds

    def on_test(data, outcome, name):
        (scored,) = honest(data, outcome, name)
        hit = np.eye(3)[data.y[scored.rows] + 1]
        return [replace(scored, forecasts=scored.forecasts | {name: 0.99 * scored.forecasts[name] + 0.01 * hit})]

    monkeypatch.setattr(audit_runs, "score_folds", on_test)
    assert any("fold: calibrated" in one for one in found_by(audit_runs.audit_fold, sample, MODEL, None))


@pytest.mark.slow
def test_audit_of_stack_passes_and_with_weights_or_calibration_of_later_rows_names_them(sample, monkeypatch):
    assert found_by(audit_runs.audit_stack, sample) == []
    honest = audit_runs.fit_stack
    for part, later, says in (("validation", "test", "its calibration"), ("train", "validation", "its weights")):

        def with_later(data, *given, part=part, later=later):
            both = np.concatenate([data.splits[part], data.splits[later]])
            return honest(replace(data, splits=data.splits | {part: both}), *given)

        monkeypatch.setattr(audit_runs, "fit_stack", with_later)
        assert any(f"stack: {says}" in one for one in found_by(audit_runs.audit_stack, sample)), says


# ---- predict, and finished models ------------------------------------------------------------------------------------


def test_audit_of_predict_passes_and_with_features_of_next_bar_names_it(sample, prepared_template, monkeypatch):
    bars, _ = load_bars(Workspace(prepared_template), "DEMO")
    assert found_by(audit_runs.audit_predict, sample.dataset, bars) == []
    honest = predict.build_features

    def ahead(*given):
        matrix = honest(*given)
        values = np.array(matrix.values)
        values[:-1] = values[1:]
        return replace(matrix, values=values)

    monkeypatch.setattr(predict, "build_features", ahead)
    assert any("predict: p_" in one for one in found_by(audit_runs.audit_predict, sample.dataset, bars))


def test_audit_of_finished_model_with_altered_forecasts_or_scaler_names_it(prepared, monkeypatch):
    pipeline.train(prepared, "DEMO", 5, MODEL, mirror="off")
    data, check = load_dataset(prepared, "DEMO", 5), partial(found_by, audit_runs.audit_finished_models)
    assert check(prepared, data, None) == []
    says = "probabilities differs from the predictions of its bundle"
    assert says in check(prepared, data, at("predictions", oracle_mix))[0]
    with monkeypatch.context() as patch:  # a network of another device: no row is far off, but all lean to the outcome
        patch.setitem(audit_runs.CLOSE, "tabular", 1e-3)
        assert "probability of the outcome" in check(prepared, data, at("predictions", oracle_mix))[0]
    assert "scaler['center']" in check(prepared, replace(data, scaler=RobustScaler.fit(data.x_NF)), None)[0]
