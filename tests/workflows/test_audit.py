"""The proof at the doors a user takes: prepare, audit, train, and the reports."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ml_factory import __main__, pipeline
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import NotPreparedError
from ml_factory.features import custom
from ml_factory.leakage.certificate import certificate_path, read_certificate, write_certificate
from ml_factory.settings import DataSpec, certified_code_hash
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import audit, audit_files, build, load_prepared, prepare
from ml_factory.workflows.load_prepared import load_dataset
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
    write_certificate(prepared.processed("DEMO"), replace(certificate_of(prepared), code="0" * 64))
    pipeline.prepare(prepared, "DEMO", (5,), settings=SMALL_DATA)  # and what other code proved
    assert certificate_of(prepared).code == certified_code_hash()


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


# ---- the files that training reads, against their references -------------------------------------------------------


@pytest.fixture
def audited(prepared):
    """audited(tamper): of the files alone."""
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
def test_audit_with_a_tamper_names_the_leak(audited, stage, change, says):
    found = audited(at(stage, change))
    assert not found.passed and any(says in sentence for sentence in found.sentences), found.sentences


def test_audit_with_scaler_fitted_on_all_rows_names_scaler(audited, prepared):
    everything = RobustScaler.fit(pipeline.load_features(prepared, "DEMO").to_numpy())
    for change in (lambda scaler: everything, lambda scaler: everything.to_dict()):
        assert "scaler h5: scaler['center']" in audited(at("scaler", change)).sentences[0]


def test_prepare_with_scaler_fitted_on_all_rows_names_scaler(prepared, monkeypatch, caplog):
    """The stored scaler itself: what is fitted again in a proof is another one."""
    honest = prepare.fit_preprocessing_steps
    everything = lambda steps, sample: honest(steps, replace(sample, rows=np.arange(len(sample.x_NF))))  # noqa: E731
    monkeypatch.setattr(prepare, "fit_preprocessing_steps", everything)
    made = pipeline.prepare(prepared, "DEMO", (7,), settings=SMALL_DATA)
    assert made.proof.startswith("FAILED") and "scaler h7: scaler['center']" in caplog.text


def test_audit_with_every_reading_of_the_bars_shifted_names_them(audited, monkeypatch):
    """No second reading shows it: the hash of what was prepared does, and the rows of the raw file."""
    honest = audit_files.load_bars

    def ahead(*given, **options):
        bars, report = honest(*given, **options)
        return bars.assign(close=bars["close"].shift(-1).ffill()), report

    for module in (audit, audit_files):
        monkeypatch.setattr(module, "load_bars", ahead)
    found = audited().sentences
    assert any("bars: (rows) differs from the bars that the data set was made of" in one for one in found), found
    assert any("bars: close differs from the raw file's rows of the same minute" in one for one in found), found


def test_audit_with_load_dataset_shifted_by_one_row_names_features(audited, monkeypatch):
    def ahead(*given):
        data = load_dataset(*given)
        return replace(data, features=data.features.shift(-1).ffill())

    monkeypatch.setattr(load_prepared, "load_dataset", ahead)
    assert "dataset h5, features: return_1" in audited().sentences[0]
