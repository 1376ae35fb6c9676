"""The proof at the doors a user takes, and what each check names when a value of a stage is changed (`tamper=`)."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.errors import NotPreparedError
from ml_factory.storage.workspace import Workspace
from tests.contract import doors
from tests.small_data import SMALL_DATA

MODEL = "linear"


@pytest.fixture(scope="module")
def read(prepared_template) -> Workspace:
    """The prepared workspace; tests only read it."""
    return Workspace(prepared_template)


@pytest.fixture(scope="module")
def data(read):
    return doors.load_dataset(read, "DEMO", 5)


@pytest.fixture(scope="module")
def sample(data):
    return doors.audit.sample_rows(data, 1_000)


def certificate_of(workspace: Workspace, horizon: int = 5):
    store = doors.DatasetStore.current(workspace.processed("DEMO"))
    return doors.read_certificate(doors.certificate_path(workspace.processed("DEMO"), store.fingerprint, horizon))


def found_by(check, *given, tamper=None) -> list[str]:
    found = doors.Findings(tamper=tamper)
    check(*given, found)
    assert found.compared
    return [leak.sentence() for leak in found.leaks]


def at(stage, change):
    """A tamper that changes the values of one stage."""
    return lambda here, value: change(value) if here == stage else value


def test_train_without_certificate_raises_unless_uncertified(prepared, every_cut):
    store = doors.DatasetStore.current(prepared.processed("DEMO"))
    doors.certificate_path(prepared.processed("DEMO"), store.fingerprint, 5).unlink()
    for step in (pipeline.train, pipeline.cross_validate):
        with pytest.raises(NotPreparedError, match="python -m ml_factory audit --symbol DEMO"):
            step(prepared, "DEMO", 5, MODEL)
    with pytest.raises(NotPreparedError, match="no certificate"):
        pipeline.stack(prepared, "DEMO", 5, ("xgboost", "lightgbm"))
    trained = pipeline.train(prepared, "DEMO", 5, MODEL, mirror="off", uncertified=True)
    assert "none: uncertified" in trained.report_path.read_text()
    with every_cut():
        again = pipeline.prepare(prepared, "DEMO", (5,), settings=SMALL_DATA)
    assert again.reused and again.proof == "quick, 16 cuts"  # prepare proves what lacks a proof
    assert "features, fed bar by bar" in certificate_of(prepared).compared
    doors.write_certificate(prepared.processed("DEMO"), replace(certificate_of(prepared), code="0" * 64))
    pipeline.prepare(prepared, "DEMO", (5,), settings=SMALL_DATA)  # and what other code proved
    assert certificate_of(prepared).code == doors.certified_code_hash()


def test_certificate_copied_from_other_data_or_horizon_proves_nothing(prepared):
    store, own = doors.DatasetStore.current(prepared.processed("DEMO")), certificate_of(prepared)
    assert doors.find_certificates(store, (5,), "quick") == {5: own}
    for horizon, copied in ((5, replace(own, subject="0" * 64)), (7, own)):
        path = doors.certificate_path(prepared.processed("DEMO"), store.fingerprint, horizon)
        doors.files.write_json(path, copied.to_dict())
        assert doors.find_certificates(store, (horizon,), "quick") == {}


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
    assert doors.describe_proof_of_store(doors.DatasetStore.current(prepared.processed("DEMO")), 5) == "full, 50 cuts"


@pytest.fixture(scope="module")
def of_files(read):
    """of_files(tamper): sentences of the audit of the files alone."""
    store, (bars, _) = doors.DatasetStore.current(read.processed("DEMO")), doors.load_bars(read, "DEMO")
    return lambda tamper=None: found_by(doors.audit_prepared_files, read, store, bars, (5,), tamper=tamper)


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


def test_sample_rows_double_until_each_fifth_has_two_classes(data):
    assert len(doors.audit.sample_rows(data, 300).labels) == 300
    labels = data.labels.copy()
    labels.iloc[:70, labels.columns.get_loc("label")] = np.int8(0)
    assert len(doors.audit.sample_rows(replace(data, labels=labels), 100).labels) == 400


training = partial(found_by, doors.audit.audit_training)


def test_audit_of_honest_training_of_a_network_passes(data):
    assert training(doors.audit.sample_rows(data, 300), "tcn") == []


def oracle_mix(frame, part=0.001):
    frame[doors.PROBABILITIES] = (1 - part) * frame[doors.PROBABILITIES] + part * np.eye(3)[frame["label"] + 1]
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


fold = partial(found_by, doors.audit.audit_fold)


def softened(p_N3):
    return p_N3**0.9 / (p_N3**0.9).sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda fold: {name: value.copy() if hasattr(value, "copy") else value for name, value in fold.items()}, ""),
        (lambda fold: fold | {"validation": fold["train"][-5:]}, "fold: train against validation"),
        (lambda fold: fold | {"test": fold["test"][1:]}, "fold: test"),
        (lambda fold: fold | {"scaler": doors.RobustScaler.fit(fold["features"].to_numpy())}, "fold: scaler['center']"),
        (lambda fold: fold | {"inputs_test": np.roll(fold["inputs_test"], -1, axis=0)}, "fold: inputs_test"),
        (lambda fold: fold | {"inputs_train": fold["inputs_train"][::-1]}, "fold: inputs_train"),
        (lambda fold: fold | {"y": np.roll(fold["y"], -1)}, "fold: y"),
        (lambda fold: fold | {"forecasts": softened(fold["forecasts"])}, "fold: forecasts"),
    ],
)
def test_audit_of_fold_with_a_tamper_names_the_leak(sample, change, says):
    found = fold(sample, MODEL, tamper=at("fold", change))
    assert any(says in sentence for sentence in found) if says else found == []


SMALL_NETWORK = {"epochs": 1, "lookback": 16, "batch": 128}


@pytest.mark.parametrize(
    ("model", "settings", "small"), [(MODEL, {}, 0.001), ("tcn", SMALL_NETWORK, 0.01)], ids=[MODEL, "tcn"]
)
def test_audit_of_finished_model_with_altered_forecasts_or_scaler_names_it(model, settings, small, prepared):
    pipeline.train(prepared, "DEMO", 5, model, quick=True, model_settings=settings, mirror="off")
    data, check = doors.load_dataset(prepared, "DEMO", 5), partial(found_by, doors.audit.audit_finished_models)
    assert check(prepared, data) == []
    says = "probabilities differs from the predictions of its bundle"
    assert says in check(prepared, data, tamper=at("predictions", partial(oracle_mix, part=small)))[0]
    if model == MODEL:
        assert "scaler['center']" in check(prepared, replace(data, scaler=doors.RobustScaler.fit(data.x_NF)))[0]
    else:  # many small moves towards the outcomes
        moved = check(prepared, data, tamper=at("predictions", partial(oracle_mix, part=0.0009)))
        assert "probability of the outcome differs" in moved[0]
