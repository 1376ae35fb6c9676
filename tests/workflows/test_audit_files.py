"""An audit with a tamper: what is the same passes, and a leak at any stage is named; nothing is written."""

from dataclasses import replace

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.workflows import audit as audit_module
from ml_factory.workflows import audit_files, load_prepared, prepare
from ml_factory.workflows.load_prepared import load_dataset
from tests.small_data import SMALL_DATA


@pytest.fixture
def audit(prepared, monkeypatch):
    """audit(tamper) of the files alone."""
    monkeypatch.setattr(audit_module, "audit_sample_runs", lambda *given: None)
    return lambda tamper=None: pipeline.audit(prepared, "DEMO", cuts=1, tamper=tamper)


def at(stage, change):
    """A tamper that changes the values of one stage."""
    return lambda here, value: change(value) if here == stage else value


def one_hour_ahead(features):
    changed, hour = features.copy(), features.index.hour == 14
    changed.loc[hour] = features.shift(-1).ffill()[hour]
    return changed


def shuffled(splits):
    rows = np.random.default_rng(0).permutation(np.concatenate(list(splits.values())))
    return {"train": rows[:300], "validation": rows[300:500], "test": rows[500:]}


def in_place(splits):
    splits["train"] = splits["train"][:-1]


@pytest.mark.parametrize(
    ("stage", "change", "says"),
    [
        ("bars", lambda bars: bars.iloc[1:], "bars: (rows)"),
        ("features", one_hour_ahead, "features: return_1"),
        ("features", lambda x: x.iloc[:, ::-1], "features: (columns)"),
        ("features", lambda x: x.to_numpy(), "features: (columns) of a ndarray"),
        ("labels", lambda x: x.assign(label=np.roll(x["label"], -1)), "labels h5: label "),
        ("labels", lambda x: x.iloc[1:], "labels h5: (rows)"),
        ("splits", lambda x: x | {"test": x["test"][1:]}, "splits h5: split['test']"),
        ("splits", lambda x: {"train": x["train"]}, "splits h5: split['test']"),
        ("splits", in_place, "splits h5: split['train']"),
        ("splits", shuffled, "train against"),
        ("dataset", lambda x: replace(x, close=np.roll(x.close, -1)), "dataset h5: close"),
        ("dataset", lambda x: replace(x, splits=x.splits | {"test": x.splits["train"]}), "dataset h5: splits['test']"),
        ("dataset", lambda x: replace(x, horizon=7), "dataset h5: horizon"),
        ("dataset", lambda x: x.labels, "dataset h5: (type)"),
    ],
)
def test_audit_with_a_tamper_names_the_leak(audit, stage, change, says):
    found = audit(at(stage, change))
    assert not found.passed and any(says in sentence for sentence in found.sentences), found.sentences


def test_audit_with_scaler_fitted_on_all_rows_names_scaler(audit, prepared):
    everything = RobustScaler.fit(pipeline.load_features(prepared, "DEMO").to_numpy())
    for change in (lambda scaler: everything, lambda scaler: everything.to_dict()):
        assert "scaler h5: scaler['center']" in audit(at("scaler", change)).sentences[0]


def test_prepare_with_scaler_fitted_on_all_rows_names_scaler(prepared, monkeypatch, caplog):
    """The stored scaler itself: what is fitted again in a proof is another one."""
    honest = prepare.fit_preprocessing_steps
    everything = lambda steps, sample: honest(steps, replace(sample, rows=np.arange(len(sample.x_NF))))  # noqa: E731
    monkeypatch.setattr(prepare, "fit_preprocessing_steps", everything)
    made = pipeline.prepare(prepared, "DEMO", (7,), settings=SMALL_DATA)
    assert made.proof.startswith("FAILED") and "scaler h7: scaler['center']" in caplog.text


def test_audit_with_every_reading_of_the_bars_shifted_names_them(audit, monkeypatch):
    """No second reading shows it: the hash of what was prepared does, and the rows of the raw file."""
    honest = audit_files.load_bars

    def ahead(*given, **options):
        bars, report = honest(*given, **options)
        return bars.assign(close=bars["close"].shift(-1).ffill()), report

    for module in (audit_module, audit_files):
        monkeypatch.setattr(module, "load_bars", ahead)
    found = audit().sentences
    assert any("bars: (rows) differs from the bars that the data set was made of" in one for one in found), found
    assert any("bars: close differs from the raw file's rows of the same minute" in one for one in found), found


def test_audit_with_load_dataset_shifted_by_one_row_names_features(audit, monkeypatch):
    def ahead(*given):
        data = load_dataset(*given)
        return replace(data, features=data.features.shift(-1).ffill())

    monkeypatch.setattr(load_prepared, "load_dataset", ahead)
    assert "dataset h5, features: return_1" in audit().sentences[0]
