"""An audit with a tamper: what is the same passes, and a leak at any stage is named; nothing is written."""

import os
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline, settings
from ml_factory.code_fingerprint import import_closure, package_files
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.datasets.store import DatasetStore
from ml_factory.leakage.proof_spec import QUICK
from ml_factory.workflows import audit as audit_module
from ml_factory.workflows import load_prepared, prepare
from ml_factory.workflows.audits import audit_artifacts
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.prove import ProofOutcome
from tests.small_data import SMALL_DATA


@pytest.fixture
def audit(prepared, monkeypatch):
    """audit(tamper), with little tried beside the artefacts."""
    small = replace(QUICK, cuts=1, whole_cuts=0, fit_rows=1_500, fit_splits=1, feed_rows=100)
    monkeypatch.setattr(audit_module, "ProofSpec", lambda cuts: small)
    monkeypatch.setattr(audit_module, "audit_leaks_of_model", lambda *given: [])
    return lambda tamper=None: pipeline.audit(prepared, "DEMO", models=("linear",), tamper=tamper)


def at(stage, change):
    """A tamper that changes the values of one stage."""
    return lambda here, value: change(value) if here == stage else value


def one_hour_ahead(features):
    changed, hour = features.copy(), features.index.hour == 14
    changed.loc[hour] = features.shift(-1).ffill()[hour]
    return changed


def stale_y(data):
    data.__dict__["y"] = np.roll(data.y, -1)
    return data


def next_bars_volatility(data):
    data.__dict__["volatility"] = np.roll(data.volatility, -1)
    return data


def later_clock(data):
    clock = data.clock
    data.__dict__["clock"] = replace(clock, minutes_left=np.roll(clock.minutes_left, -1))
    return data


def shuffled(splits):
    rows = np.random.default_rng(0).permutation(np.concatenate(list(splits.values())))
    return {"train": rows[:300], "validation": rows[300:500], "test": rows[500:]}


def files(root):
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def test_audit_with_unchanged_tamper_passes_and_writes_no_file(audit, prepared):
    before, seen = files(prepared.root), set()

    def copies(stage, value):
        seen.add(stage)
        return value.copy() if hasattr(value, "copy") else value

    found = audit(copies)
    assert found.passed and found.certificates == [] and "no certificate" in found.summary()
    assert {"bars", "features", "labels", "splits", "scaler", "dataset"} <= seen
    assert files(prepared.root) == before


@pytest.mark.parametrize(
    ("stage", "change", "says"),
    [
        ("bars", lambda bars: bars.assign(close=bars["close"].shift(-1).ffill()), "bars: close"),
        ("bars", lambda bars: bars.iloc[1:], "bars: (rows)"),
        ("features", lambda x: x.shift(-1).ffill(), "features: return_1"),
        ("features", one_hour_ahead, "features: return_1"),
        ("features", lambda x: x.iloc[:, ::-1], "features: (columns)"),
        ("labels", lambda x: x.assign(label=np.roll(x["label"], -1)), "labels h5: label "),
        ("labels", lambda x: x.assign(label_end=x["label_end"] - pd.Timedelta("5min")), "labels h5: label_end"),
        ("splits", lambda x: x | {"train": np.arange(x["train"][-1] + 40)}, "train against validation"),
        ("splits", lambda x: x | {"test": x["test"][1:]}, "splits h5: test"),
        ("splits", shuffled, "train against"),
        ("scaler", lambda x: replace(x, scale=np.nextafter(x.scale, 99)), "scaler h5: scaler['scale']"),
        ("dataset", lambda x: replace(x, features=x.features.shift(-1).ffill()), "dataset h5, features: return_1"),
        ("dataset", lambda x: replace(x, close=np.roll(x.close, -1)), "dataset h5: close"),
        ("dataset", lambda x: replace(x, splits=x.splits | {"test": x.splits["train"]}), "dataset h5, splits: test"),
        ("dataset", stale_y, "dataset h5: y"),
        ("dataset", next_bars_volatility, "dataset h5: volatility"),
        ("dataset", later_clock, "dataset h5: clock"),
    ],
)
def test_audit_with_a_tamper_names_the_leak(audit, prepared, stage, change, says):
    before = files(prepared.root)
    found = audit(at(stage, change))
    assert not found.passed and any(says in sentence for sentence in found.sentences), found.sentences
    assert files(prepared.root) == before


def test_audit_with_scaler_fitted_on_all_rows_names_scaler(audit, prepared):
    everything = RobustScaler.fit(pipeline.load_features(prepared, "DEMO").to_numpy())
    for change in (lambda scaler: everything, lambda scaler: everything.to_dict()):
        assert "scaler h5: scaler['center']" in audit(at("scaler", change)).sentences[0]


def test_prepare_with_scaler_fitted_on_all_rows_reports_leak_to_proof(prepared, monkeypatch):
    """The stored scaler itself: what is fitted again in a proof is another one."""
    honest, reported = prepare.fit_preprocessing_steps, []

    def of_all(steps, sample):
        return honest(steps, replace(sample, rows=np.arange(len(sample.x_NF))))

    def proof(*given, also, **more):
        reported.extend(leak.sentence() for leak in also)
        return ProofOutcome(None, {})

    monkeypatch.setattr(prepare, "fit_preprocessing_steps", of_all)
    monkeypatch.setattr(prepare, "prove_store", proof)
    pipeline.prepare(prepared, "DEMO", (7,), settings=SMALL_DATA)
    assert reported and reported[0].startswith("scaler h7: scaler['center']")


def test_audit_with_load_dataset_shifted_by_one_row_names_features(audit, monkeypatch):
    def ahead(*given):
        data = load_dataset(*given)
        return replace(data, features=data.features.shift(-1).ffill())

    monkeypatch.setattr(audit_module, "audit_sample_runs", lambda *given: None)
    monkeypatch.setattr(load_prepared, "load_dataset", ahead)
    assert "dataset h5, features: return_1" in audit().sentences[0]


def test_check_rows_stored_with_missing_label_row_names_labels(prepared, monkeypatch):
    store, found = DatasetStore.current(prepared.processed("DEMO")), audit_artifacts.AuditFindings()
    monkeypatch.setattr(
        DatasetStore, "load_labels", lambda self, horizon, real=DatasetStore.load_labels: real(self, horizon)[1:]
    )
    bars, _ = audit_artifacts.load_bars(prepared, "DEMO")
    audit_artifacts.audit_row_artifacts(store, bars, (5,), None, found)
    assert any(leak.part == "labels h5" and leak.column == "(rows)" for leak in found.leaks)


def test_certified_packages_cover_imports_of_prepare_train_and_evaluate():
    entries = [name for names in settings.TASKS.values() for name in names]
    used = set(
        import_closure(
            [*entries, "workflows/prepare.py", "workflows/predictions.py", "workflows/cross_validate.py", "pipeline.py"]
        )
    )
    covered = set(package_files(settings.CERTIFIED_PACKAGES))
    left = {path.relative_to(settings.import_closure.__globals__["PACKAGE"]).as_posix() for path in used - covered}
    # What writes the file that `prepare` reads, what trades on predictions.
    others = ("data/databases/", "evaluation/backtest/")
    apart = {name for name in left if name.startswith(others)}
    assert left - apart <= {"errors.py", "progress.py"}


def test_certified_code_changes_with_certified_package_but_not_with_plots(monkeypatch):
    before = settings.certified_code_hash()
    assert {"workflows", "ensemble", "evaluation", "training", "models"} <= set(settings.CERTIFIED_PACKAGES)
    real = settings.source_hash.__globals__["code_hash"]

    def edited(name):
        def hashed(path):
            return "other" if path.as_posix().endswith(name) else real(path)

        monkeypatch.setitem(settings.source_hash.__globals__, "code_hash", hashed)
        return settings.certified_code_hash()

    assert edited("evaluation/plots.py") == before
    for name in ("workflows/train.py", "ensemble/stacking.py", "evaluation/baselines.py", "leakage/proof.py"):
        assert edited(name) != before, os.path.basename(name)
