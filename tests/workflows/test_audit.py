"""The proof where a function of the library itself looks ahead; the stages are in tests/contract/test_leaks.py."""
# ruff: noqa: F811 - fixtures of the contract

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.data.bar_report import hash_bars
from ml_factory.data.io import load_bars
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import NotPreparedError
from ml_factory.features import custom
from ml_factory.inference import predict
from ml_factory.settings import DataSpec
from ml_factory.workflows import audit, build, evaluation, folds, predictions, prepare, prepared_dataset
from ml_factory.workflows import train as train_module
from ml_factory.workflows.prepared_dataset import load_dataset
from ml_factory.workflows.prove import audit_prepared_files
from tests.contract.test_audit import MODEL, at, certificate_of, data, fold, found_by, of_files, read, sample, training  # noqa: F401 - fixtures
from tests.small_data import FEW_COLUMNS, SMALL_DATA

pytestmark = pytest.mark.slow  # so that it begins first


@pytest.fixture
def no_small_runs(monkeypatch):
    """Folds, stacks and predictions are proved further down; here they would only take time."""
    monkeypatch.setattr(audit, "audit_sample_runs", lambda *given: None)


# ---- the verb --------------------------------------------------------------------------------------------------------


def test_cli_audit_with_leaky_feature_names_leak_and_exits_1(prepared, monkeypatch, call, no_small_runs):
    honest = build.build_features

    def leaky(*given, **options):
        matrix = honest(*given, **options)
        values = np.array(matrix.values)
        values[:-1, 0] = values[1:, 0]
        return replace(matrix, values=values)

    monkeypatch.setattr(build, "build_features", leaky)
    code, out, _ = call("audit", "--workspace", prepared.root, "--symbol", "DEMO", "--cuts", 2, "--json")
    reported = json.loads(out)
    first = DatasetStore.current(prepared.processed("DEMO")).feature_names[0]
    assert code == 1 and not reported["passed"] and first in reported["sentences"][0]
    assert {"column", "rows", "cut", "disturbance"} <= set(reported["leaks"][0])
    with pytest.raises(NotPreparedError, match=f"looks ahead.*{first}"):
        pipeline.train(prepared, "DEMO", 5, "xgboost")
    monkeypatch.setattr(build, "build_features", honest)
    assert pipeline.audit(prepared, "DEMO", 5, cuts=2).passed  # mended, it is proved again


def from_memory(bars, met={}):  # noqa: B006 - the fault to be found
    """The next close; each moment's first answer is kept, so no later call shows that it looks ahead."""
    ahead = np.append(bars.close[1:] / bars.close[:-1] - 1.0, 0.0)
    return [met.setdefault(moment, value) for moment, value in zip(bars.known_at.tolist(), ahead.tolist(), strict=True)]


def test_audit_finds_leak_of_custom_feature_with_state_of_earlier_calls(prepared, monkeypatch, no_small_runs):
    """In the very process that has shown it the whole file, in `prepare` and in `audit`."""
    monkeypatch.setattr(custom, "_FEATURES", {})
    with monkeypatch.context() as blind:
        blind.setattr(custom, "prove_custom_feature", lambda *given: None)  # else it would not be registered at all
        custom.feature(from_memory, memory=64)
    settings = DataSpec(features=replace(FEW_COLUMNS, custom=("from_memory",)))
    pipeline.prepare(prepared, "DEMO", (5,), settings=settings)
    assert not certificate_of(prepared).passed
    shutil.rmtree(prepared.processed("DEMO") / "certificates")
    found = pipeline.audit(prepared, "DEMO", cuts=2)
    assert not found.passed and set(found.leaks["column"]) == {"from_memory"}


# ---- the files that training reads, against their references -------------------------------------------------------


def test_audit_of_files_passes_and_names_a_dataset_that_is_read_shifted(of_files, monkeypatch):
    assert of_files() == []

    def ahead(*given):
        data = load_dataset(*given)
        return replace(data, features=data.features.shift(-1).ffill())

    monkeypatch.setattr(prepared_dataset, "load_dataset", ahead)
    assert "dataset h5, features: return_1" in of_files()[0]


@pytest.mark.parametrize("prepared_so", [False, True])
def test_audit_of_files_with_every_reading_of_the_bars_shifted_names_them(prepared_so, read, monkeypatch):
    """No second reading shows it: the hash of what was prepared does, and the rows of the raw file always do."""

    def ahead(*given, **options):
        bars, report = load_bars(*given, **options)
        return bars.assign(close=bars["close"].shift(-1).ffill()), report

    store, (shifted, _) = DatasetStore.current(read.processed("DEMO")), ahead(read, "DEMO")
    if prepared_so:  # by the same reading
        monkeypatch.setitem(store.facts["raw"], "bars", hash_bars(shifted))
    found = " ".join(found_by(audit_prepared_files, read, store, shifted, (5,)))
    assert ("bars: (rows) differs from the bars that the data set was made of" in found) is not prepared_so, found
    assert "bars: close differs from the raw file's rows of the same minute" in found


def test_prepare_with_scaler_fitted_on_all_rows_names_scaler(prepared, monkeypatch, caplog):
    """The stored scaler itself: what is fitted again in a proof is another one."""
    honest = prepare.fit_preprocessing_steps
    everything = lambda steps, x_NF, rows: honest(steps, x_NF, np.arange(len(x_NF)))  # noqa: E731
    monkeypatch.setattr(prepare, "fit_preprocessing_steps", everything)
    made = pipeline.prepare(prepared, "DEMO", (7,), settings=SMALL_DATA)
    assert made.proof.startswith("FAILED") and "scaler h7: scaler['center']" in caplog.text


# ---- trainings -------------------------------------------------------------------------------------------------------


def with_rows(change):
    """A fault that builds a training on other rows: change(data, training rows, validation rows) -> both."""

    def inject(patch):
        honest = train_module.build_untrained_model

        def spoilt(data, spec):
            model, train, validation, limited = honest(data, spec)
            return model, *change(data, train, validation), limited

        patch.setattr(train_module, "build_untrained_model", spoilt)

    return inject


def prior_of_all(patch):
    """The class prior that a model must beat is counted on the rows that judge too."""
    honest = evaluation.prepared_dataset_baselines

    def spoilt(data, training_rows, rows):
        everything = np.arange(len(data.labels))
        return honest(data, training_rows, rows) | {"prior": honest(data, everything, rows)["prior"]}

    patch.setattr(evaluation, "prepared_dataset_baselines", spoilt)


def prior_loss_of_all(patch):
    honest = evaluation.dataset_weighted_prior_loss
    spoilt = lambda data, training_rows, rows: honest(data, np.arange(len(data.labels)), rows)  # noqa: E731
    patch.setattr(evaluation, "dataset_weighted_prior_loss", spoilt)


def worsened_prior(patch):
    honest = evaluation.prior_baseline_probabilities
    spoilt = lambda *given: 0.8 * honest(*given) + 0.2 / 3  # noqa: E731
    patch.setattr(evaluation, "prior_baseline_probabilities", spoilt)


def volatility_of_next_bar(patch):
    honest = prepared_dataset.baseline_trailing_volatility
    ahead = lambda *given: np.append(honest(*given)[1:], honest(*given)[-1])  # noqa: E731
    patch.setattr(prepared_dataset, "baseline_trailing_volatility", ahead)


def forecasts_tempered_by_outcomes(patch):
    honest, current = predictions.predict_features, {}

    def made(self, values, labels, roles, real=audit.AuditSample.make):
        current["labels"] = labels["label"]
        return real(self, values, labels, roles)

    def tempered(bundle, features, **more):
        frame = honest(bundle, features, **more)
        return frame * 0.99 + 0.01 * np.eye(3)[current["labels"].reindex(frame.index).to_numpy() + 1]

    patch.setattr(audit.AuditSample, "make", made)
    patch.setattr(predictions, "predict_features", tempered)


FAULTS = {
    "stops on test rows": (
        with_rows(lambda data, train, _: (train, data.splits["test"])), "training: trained xgboost",
    ),
    "learns from a test row": (
        with_rows(lambda data, train, held: (np.append(train, data.splits["test"][:1]), held)),
        "training: trained xgboost",
    ),
    "prior of all rows": (prior_of_all, "training: evaluated xgboost['metrics']"),
    "prior loss of all rows": (prior_loss_of_all, "training: evaluated xgboost['prior']"),
    "worsened prior": (worsened_prior, "baseline: prior, log loss of test rows"),
    "a baseline's volatility of the next bar": (volatility_of_next_bar, "training: evaluated xgboost['metrics']"),
    "forecasts tempered by outcomes": (forecasts_tempered_by_outcomes, "predictions: p_"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_audit_of_training_that_reads_forbidden_rows_names_it(sample, fault, monkeypatch):
    inject, says = FAULTS[fault]
    inject(monkeypatch)
    found = training(sample, "xgboost")
    assert any(sentence.startswith(says) for sentence in found), found


# ---- a fold with its baselines, a stack ------------------------------------------------------------------------------

LATER = {"train": "validation", "validation": "test"}


def test_audit_of_fold_names_a_changed_baseline_and_a_worsened_prior(sample, monkeypatch):
    for name in ("prior", "clock_volatility"):
        worse = at("baseline", lambda given, name=name: given | {name: 0.95 * given[name] + 0.05 / 3})
        assert any(f"baseline: {name} " in one for one in fold(sample, MODEL, tamper=worse))
    arrays = at("baseline", lambda given: {name: frame.to_numpy() for name, frame in given.items()})
    assert fold(sample, MODEL, tamper=arrays) == []
    worsened_prior(monkeypatch)
    assert "baseline: prior differs from a recount" in fold(sample, MODEL)[0]


def test_audit_of_fold_with_scaler_of_other_rows_or_calibration_on_test_rows_names_it(sample, monkeypatch):
    everything = lambda data, rows: prepared_dataset.fit_dataset_preprocessing(data, np.arange(len(data.y)))  # noqa: E731
    for scaler in (everything, lambda data, rows: data.scaler):
        with monkeypatch.context() as patch:
            patch.setattr(folds, "fit_dataset_preprocessing", scaler)
            assert any("fold: scaler" in one for one in fold(sample, MODEL))
    honest = audit.score_folds

    def on_test(data, outcome, name):
        (scored,) = honest(data, outcome, name)
        hit = np.eye(3)[data.y[scored.rows] + 1]
        return [replace(scored, forecasts=scored.forecasts | {name: 0.99 * scored.forecasts[name] + 0.01 * hit})]

    monkeypatch.setattr(audit, "score_folds", on_test)
    assert any("fold: calibrated" in one for one in fold(sample, MODEL))


def test_audit_of_stack_with_weights_and_calibration_of_later_rows_names_both(data, monkeypatch):
    """That an honest one passes is seen by the audit of all stages in tests/contract/test_leaks.py."""
    honest = audit.fit_stack

    def with_later(data, *given):
        later = {name: np.concatenate([data.splits[name], data.splits[then]]) for name, then in LATER.items()}
        return honest(replace(data, splits=data.splits | later), *given)

    monkeypatch.setattr(audit, "fit_stack", with_later)
    found = found_by(audit.audit_stack, audit.sample_rows(data, 400))
    assert all(any(f"stack: {says}" in one for one in found) for says in ("its weights", "its calibration")), found


# ---- predict, and finished models ------------------------------------------------------------------------------------


def test_audit_of_predict_passes_and_with_features_of_next_bar_names_it(sample, read, monkeypatch):
    bars, _ = load_bars(read, "DEMO")
    assert found_by(audit.audit_predict, sample.dataset, bars) == []
    honest = predict.build_features

    def ahead(*given):
        matrix = honest(*given)
        values = np.array(matrix.values)
        values[:-1] = values[1:]
        return replace(matrix, values=values)

    monkeypatch.setattr(predict, "build_features", ahead)
    assert any("predict: p_" in one for one in found_by(audit.audit_predict, sample.dataset, bars))
