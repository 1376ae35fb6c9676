"""The proof at the doors a user takes: prepare, audit, train, and the reports."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ml_factory import __main__, pipeline
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import NotPreparedError
from ml_factory.features import custom
from ml_factory.leakage.certificate import certificate_path, read_certificate
from ml_factory.settings import DataSpec
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import audit, build
from ml_factory.workflows.prove import describe_proof_of_store
from tests.small_data import FEW_COLUMNS, SMALL_DATA

SMALL = {"rounds": 5, "depth": 2, "threads": 1}


@pytest.fixture(autouse=True)
def no_small_runs(monkeypatch):
    """Folds, stacks and predictions are proved in test_audit_runs; here they would only take time."""
    monkeypatch.setattr(audit, "audit_sample_runs", lambda *given: None)


def certificate_of(workspace: Workspace, symbol: str = "DEMO", horizon: int = 5):
    store = DatasetStore.current(workspace.processed(symbol))
    return read_certificate(certificate_path(workspace.processed(symbol), store.fingerprint, horizon))


def test_train_without_certificate_raises_unless_uncertified(prepared):
    store = DatasetStore.current(prepared.processed("DEMO"))
    certificate_path(prepared.processed("DEMO"), store.fingerprint, 5).unlink()
    asked = {"model_settings": SMALL}
    for step in (pipeline.train, pipeline.cross_validate):
        with pytest.raises(NotPreparedError, match="python -m ml_factory audit --symbol DEMO"):
            step(prepared, "DEMO", 5, "xgboost", **asked)
    with pytest.raises(NotPreparedError, match="no certificate"):
        pipeline.stack(prepared, "DEMO", 5, ("xgboost", "lightgbm"))
    trained = pipeline.train(prepared, "DEMO", 5, "xgboost", mirror="off", uncertified=True, **asked)
    assert "none: uncertified" in trained.report_path.read_text()
    again = pipeline.prepare(prepared, "DEMO", (5,), settings=SMALL_DATA)
    assert again.reused and again.proof == "quick, 10 cuts"  # prepare proves what lacks a proof


def test_cli_audit_with_leaky_feature_names_leak_and_exits_1(prepared, monkeypatch, capsys):
    honest = build.build_features

    def leaky(*given, **options):
        matrix = honest(*given, **options)
        values = np.array(matrix.values)
        values[:-1, 0] = values[1:, 0]
        return replace(matrix, values=values)

    monkeypatch.setattr(build, "build_features", leaky)
    words = ["ml_factory", "audit", "--workspace", str(prepared.root), "--symbol", "DEMO", "--cuts", "2", "--json"]
    words += ["--model", "linear"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as stop:
        __main__.main()
    reported = json.loads(capsys.readouterr().out)
    first = DatasetStore.current(prepared.processed("DEMO")).feature_names[0]
    assert stop.value.code == 1 and not reported["passed"]
    assert first in reported["sentences"][0] and {"column", "rows", "cut", "disturbance"} <= set(reported["leaks"][0])
    with pytest.raises(NotPreparedError, match=f"looks ahead.*{first}"):
        pipeline.train(prepared, "DEMO", 5, "xgboost")
    monkeypatch.setattr(build, "build_features", honest)
    assert pipeline.audit(prepared, "DEMO", cuts=2, models=("linear",)).passed  # mended, it is proved anew


@pytest.mark.soak
@pytest.mark.slow
def test_audit_full_form_passes_and_is_reused(prepared):
    found = pipeline.audit(prepared, "DEMO")
    assert found.passed and found.cuts == 50 and found.form == "full, 50 cuts"
    assert {"features", "frame 5m", "frame 60m", "labels h5", "fitted h5"} <= set(found.compared)
    assert "nothing looks ahead" in found.summary() and found.certificates[0].is_file()
    assert len(found.plot().axes[0].lines) == 51
    again = pipeline.audit(prepared, "DEMO")
    assert again.reused and again.form == found.form
    assert describe_proof_of_store(DatasetStore.current(prepared.processed("DEMO")), 5) == "full, 50 cuts"


def from_memory(bars, met={}):  # noqa: B006 - the fault to be found
    """The next close; each moment's first answer is kept, so no later call shows that it looks ahead."""
    ahead = np.append(bars.close[1:] / bars.close[:-1] - 1.0, 0.0)
    return [met.setdefault(moment, value) for moment, value in zip(bars.known_at.tolist(), ahead.tolist(), strict=True)]


def test_audit_finds_leak_of_custom_feature_with_state_of_earlier_calls(prepared, monkeypatch):
    """In the very process that has shown it the whole file, in `prepare` and in `audit`."""
    monkeypatch.setattr(custom, "_FEATURES", {})
    with monkeypatch.context() as blind:
        blind.setattr(custom, "prove_custom_feature", lambda *given: None)  # else it would not be registered at all
        custom.feature(from_memory, memory=64)
    settings = DataSpec(features=replace(FEW_COLUMNS, custom=("from_memory",)))
    pipeline.prepare(prepared, "DEMO", (5,), settings=settings)
    assert not certificate_of(prepared).passed
    shutil.rmtree(prepared.processed("DEMO") / "certificates")
    found = pipeline.audit(prepared, "DEMO", cuts=2, models=("linear",))
    assert not found.passed and set(found.leaks["column"]) == {"from_memory"}
