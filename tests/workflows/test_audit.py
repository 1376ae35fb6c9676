"""The proof at the doors a user takes, and what each check names; the stages are in tests/contract/test_leaks.py."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.data.bar_report import hash_bars
from ml_factory.data.io import load_bars
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import NotPreparedError
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.features import custom
from ml_factory.inference import predict
from ml_factory.leakage.certificate import certificate_path, read_certificate, write_certificate
from ml_factory.leakage.tables import Findings
from ml_factory.settings import DataSpec, certified_code_hash
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import audit, build, evaluation, folds, predictions, prepare, prepared_dataset, prove
from ml_factory.workflows import train as train_module
from ml_factory.workflows.prepared_dataset import load_dataset
from ml_factory.workflows.prove import audit_prepared_files, describe_proof_of_store, find_certificates
from tests.small_data import FEW_COLUMNS, SMALL_DATA

MODEL = "linear"


@pytest.fixture
def no_small_runs(monkeypatch):
    """Folds, stacks and predictions are proved further down; here they would only take time."""
    monkeypatch.setattr(audit, "audit_sample_runs", lambda *given: None)


@pytest.fixture(scope="module")
def read(prepared_template) -> Workspace:
    """The prepared workspace; tests only read it."""
    return Workspace(prepared_template)


@pytest.fixture(scope="module")
def data(read):
    return load_dataset(read, "DEMO", 5)


@pytest.fixture(scope="module")
def sample(data):
    return audit.sample_rows(data, 1_000)


def certificate_of(workspace: Workspace, horizon: int = 5):
    store = DatasetStore.current(workspace.processed("DEMO"))
    return read_certificate(certificate_path(workspace.processed("DEMO"), store.fingerprint, horizon))


def found_by(check, *given, tamper=None) -> list[str]:
    found = Findings(tamper=tamper)
    check(*given, found)
    assert found.compared
    return [leak.sentence() for leak in found.leaks]


def at(stage, change):
    """A tamper that changes the values of one stage."""
    return lambda here, value: change(value) if here == stage else value


# ---- the verb --------------------------------------------------------------------------------------------------------


def test_train_without_certificate_raises_unless_uncertified(prepared):
    store = DatasetStore.current(prepared.processed("DEMO"))
    certificate_path(prepared.processed("DEMO"), store.fingerprint, 5).unlink()
    for step in (pipeline.train, pipeline.cross_validate):
        with pytest.raises(NotPreparedError, match="python -m ml_factory audit --symbol DEMO"):
            step(prepared, "DEMO", 5, MODEL)
    with pytest.raises(NotPreparedError, match="no certificate"):
        pipeline.stack(prepared, "DEMO", 5, ("xgboost", "lightgbm"))
    trained = pipeline.train(prepared, "DEMO", 5, MODEL, mirror="off", uncertified=True)
    assert "none: uncertified" in trained.report_path.read_text()
    again = pipeline.prepare(prepared, "DEMO", (5,), settings=SMALL_DATA)
    assert again.reused and again.proof == "quick, 16 cuts"  # prepare proves what lacks a proof
    assert "features, fed bar by bar" in certificate_of(prepared).compared
    write_certificate(prepared.processed("DEMO"), replace(certificate_of(prepared), code="0" * 64))
    pipeline.prepare(prepared, "DEMO", (5,), settings=SMALL_DATA)  # and what other code proved
    assert certificate_of(prepared).code == certified_code_hash()


def test_certificate_copied_from_other_data_or_horizon_proves_nothing(prepared):
    store, own = DatasetStore.current(prepared.processed("DEMO")), certificate_of(prepared)
    assert find_certificates(store, (5,), "quick") == {5: own}
    for horizon, copied in ((5, replace(own, subject="0" * 64)), (7, own)):
        path = certificate_path(prepared.processed("DEMO"), store.fingerprint, horizon)
        files.write_json(path, copied.to_dict())
        assert find_certificates(store, (horizon,), "quick") == {}


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
    assert pipeline.audit(prepared, "DEMO", cuts=2).passed  # mended, it is proved again


@pytest.mark.soak
@pytest.mark.slow
def test_audit_full_form_passes_and_is_reused(prepared):
    found = pipeline.audit(prepared, "DEMO")
    assert found.passed and found.cuts == 50 and found.form == "full, 50 cuts"
    fed = "features, fed bar by bar"
    assert {"features", "frame 5m", "frame 60m", "labels h5", "fitted h5", fed} <= set(found.compared)
    assert "nothing looks ahead" in found.summary() and found.certificates[0].is_file()
    assert found.cuts == 50
    again = pipeline.audit(prepared, "DEMO")
    assert again.reused and again.form == found.form
    assert describe_proof_of_store(DatasetStore.current(prepared.processed("DEMO")), 5) == "full, 50 cuts"


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


@pytest.fixture(scope="module")
def of_files(read):
    """of_files(tamper): sentences of the audit of the files alone."""
    store, (bars, _) = DatasetStore.current(read.processed("DEMO")), load_bars(read, "DEMO")
    return lambda tamper=None: found_by(audit_prepared_files, read, store, bars, (5,), tamper=tamper)


def in_place(splits):
    splits["train"] = splits["train"][:-1]


@pytest.mark.parametrize(
    ("stage", "change", "says"),
    [
        ("bars", lambda bars: bars.iloc[1:], "bars: (rows)"),
        ("features", lambda x: x.to_numpy(), "features: (columns) of a ndarray"),
        ("labels", lambda x: x.assign(label=np.roll(x["label"], -1)), "labels h5: label "),
        ("splits", in_place, "splits h5: split['train']"),
        ("dataset", lambda x: replace(x, splits=x.splits | {"test": x.splits["train"]}), "dataset h5: splits['test']"),
    ],
)
def test_audit_of_files_with_a_tamper_names_the_leak(of_files, stage, change, says):
    sentences = of_files(at(stage, change))
    assert any(says in sentence for sentence in sentences), sentences


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

    monkeypatch.setattr(prove, "load_bars", ahead)
    store, (shifted, _) = DatasetStore.current(read.processed("DEMO")), ahead(read, "DEMO")
    if prepared_so:  # by the same reading
        monkeypatch.setitem(store.facts["raw"], "bars", hash_bars(shifted))
    found = " ".join(found_by(audit_prepared_files, read, store, shifted, (5,)))
    assert ("bars: (rows) differs from the bars that the data set was made of" in found) is not prepared_so, found
    assert "bars: close differs from the raw file's rows of the same minute" in found


def test_prepare_with_scaler_fitted_on_all_rows_names_scaler(prepared, monkeypatch, caplog):
    """The stored scaler itself: what is fitted again in a proof is another one."""
    honest = prepare.fit_preprocessing_steps
    everything = lambda steps, sample: honest(steps, replace(sample, rows=np.arange(len(sample.x_NF))))  # noqa: E731
    monkeypatch.setattr(prepare, "fit_preprocessing_steps", everything)
    made = pipeline.prepare(prepared, "DEMO", (7,), settings=SMALL_DATA)
    assert made.proof.startswith("FAILED") and "scaler h7: scaler['center']" in caplog.text


# ---- trainings -------------------------------------------------------------------------------------------------------


def test_sample_rows_double_until_each_fifth_has_two_classes(data):
    assert len(audit.sample_rows(data, 300).labels) == 300
    labels = data.labels.copy()
    labels.iloc[:70, labels.columns.get_loc("label")] = np.int8(0)
    assert len(audit.sample_rows(replace(data, labels=labels), 100).labels) == 400


training = partial(found_by, audit.audit_training)


def test_audit_of_honest_training_of_a_network_passes(data):
    assert training(audit.sample_rows(data, 300), "tcn") == []


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

    def made(self, values, labels, roles, real=audit.Sample.make):
        current["labels"] = labels["label"]
        return real(self, values, labels, roles)

    def tempered(bundle, features, **more):
        frame = honest(bundle, features, **more)
        return frame * 0.99 + 0.01 * np.eye(3)[current["labels"].reindex(frame.index).to_numpy() + 1]

    patch.setattr(audit.Sample, "make", made)
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


def oracle_mix(frame, part=0.001):
    frame[PROBABILITIES] = (1 - part) * frame[PROBABILITIES] + part * np.eye(3)[frame["label"] + 1]
    return frame


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (oracle_mix, ["p_short"]), (lambda frame: frame.iloc[1:], ["(rows)"]),
        (lambda frame: frame.assign(label=np.roll(frame["label"], -1), split="test"), ["label", "split"]),
    ],
)  # fmt: skip
def test_audit_of_predictions_with_a_tamper_names_the_leak(sample, change, says):
    found = training(sample, MODEL, tamper=at("predictions", change))
    assert all(any(f"predictions: {one}" in sentence for sentence in found) for one in says), found


# ---- a fold with its baselines, a stack ------------------------------------------------------------------------------

fold = partial(found_by, audit.audit_fold)
LATER = {"train": "validation", "validation": "test"}


def softened(p_N3):
    return p_N3**0.9 / (p_N3**0.9).sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda fold: {name: value.copy() if hasattr(value, "copy") else value for name, value in fold.items()}, ""),
        (lambda fold: fold | {"validation": fold["train"][-5:]}, "fold: train against validation"),
        (lambda fold: fold | {"test": fold["test"][1:]}, "fold: test"),
        (lambda fold: fold | {"scaler": RobustScaler.fit(fold["features"].to_numpy())}, "fold: scaler['center']"),
        (lambda fold: fold | {"inputs_test": np.roll(fold["inputs_test"], -1, axis=0)}, "fold: inputs_test"),
        (lambda fold: fold | {"inputs_train": fold["inputs_train"][::-1]}, "fold: inputs_train"),
        (lambda fold: fold | {"y": np.roll(fold["y"], -1)}, "fold: y"),
        (lambda fold: fold | {"forecasts": softened(fold["forecasts"])}, "fold: forecasts"),
    ],
)
def test_audit_of_fold_with_a_tamper_names_the_leak(sample, change, says):
    found = fold(sample, MODEL, tamper=at("fold", change))
    assert any(says in sentence for sentence in found) if says else found == []


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


SMALL_NETWORK = {"epochs": 1, "lookback": 16, "batch": 128}


@pytest.mark.parametrize(
    ("model", "settings", "small"), [(MODEL, {}, 0.001), ("tcn", SMALL_NETWORK, 0.01)], ids=[MODEL, "tcn"]
)
def test_audit_of_finished_model_with_altered_forecasts_or_scaler_names_it(model, settings, small, prepared):
    pipeline.train(prepared, "DEMO", 5, model, quick=True, model_settings=settings, mirror="off")
    data, check = load_dataset(prepared, "DEMO", 5), partial(found_by, audit.audit_finished_models)
    assert check(prepared, data) == []
    says = "probabilities differs from the predictions of its bundle"
    assert says in check(prepared, data, tamper=at("predictions", partial(oracle_mix, part=small)))[0]
    if model == MODEL:
        assert "scaler['center']" in check(prepared, replace(data, scaler=RobustScaler.fit(data.x_NF)))[0]
    else:  # many small moves towards the outcomes
        moved = check(prepared, data, tamper=at("predictions", partial(oracle_mix, part=0.0009)))
        assert "probability of the outcome differs" in moved[0]
