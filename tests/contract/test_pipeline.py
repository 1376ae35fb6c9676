"""The pipeline from end to end on a small market: nothing done twice, nothing lost, the same bits again."""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.errors import BarsError, FactoryError, NotPreparedError, SettingsError, WorkspaceError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import BASELINES, CURRENT, SUMMARY, ArtifactRegistry, DataSpec, LabelSpec, write_bars
from tests.small_data import FEW_COLUMNS, SMALL_DATA

pytestmark = pytest.mark.slow  # so that it begins first
H = 5
BOOSTER = {"rounds": 30, "depth": 3}
NETWORK = {"epochs": 3, "hidden": 4, "lookback": 8, "batch": 128}
SMALL = {"xgboost": BOOSTER, "lightgbm": BOOSTER, "catboost": BOOSTER, "lstm": NETWORK}
P = ["p_short", "p_neutral", "p_long"]
OTHER_LABELS = DataSpec(features=FEW_COLUMNS, labels=LabelSpec(k_up=2.0))


class Killed(BaseException):
    """Not an Exception: nothing on the way may catch it."""


def train(workspace: Workspace, model: str = "xgboost", **options):
    options = {"model_settings": SMALL[model], "mirror": "off", **options}
    return pipeline.train(workspace, "DEMO", H, model, **options)


def kill_after(number: int):
    def callback(epoch, metrics):
        if epoch == number:
            raise Killed

    return callback


def content(folder: Path) -> dict[str, str]:
    """Relative path -> hash of its bytes, of every file below."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(prepared_template, tmp_path_factory) -> Workspace:
    """A workspace with a booster and a network trained; tests only read it."""
    root = tmp_path_factory.mktemp("finished") / "workspace"
    shutil.copytree(prepared_template, root)
    workspace = Workspace(root)
    for model in ("xgboost", "lstm"):
        train(workspace, model)
    return workspace


# ---- prepare: once, and found again --------------------------------------------------------------------------------


def test_prepare_second_call_reuses_prepared_files(prepared):
    before = stamps(prepared.processed("DEMO"))
    result = pipeline.prepare(prepared, "DEMO", (H,), settings=SMALL_DATA)
    assert result.reused and "found as prepared before" in result.summary()
    assert re.search(r"test rows span 1\.0 weeks, a verdict needs 8", result.summary())
    after = stamps(prepared.processed("DEMO"))
    assert {path for path in after if after[path] != before[path]} <= {prepared.processed("DEMO") / "current.json"}


def test_train_registers_calibrated_validation_metrics(finished, model="lstm"):
    facts = ArtifactRegistry(finished.models).find("DEMO", H, model).facts
    reported = train(finished, model).metrics.query("split == 'validation' and name == @model").iloc[0]
    for name in ("log_loss", "brier", "accuracy", "ece"):
        assert facts["validation"][name] == pytest.approx(reported[name], rel=1e-6), name
    summary = json.loads((finished.results / "DEMO" / facts["run_id"] / "log" / SUMMARY).read_text())["summary"]
    assert summary["validation_log_loss"] == pytest.approx(reported["log_loss"], rel=1e-6)


def test_pipeline_verbs_with_replaced_raw_bars_raise_until_prepare(prepared):
    raw = prepared.raw_bars("DEMO")
    old, first = raw.read_bytes(), pipeline.prepare(prepared, "DEMO", (H,), settings=SMALL_DATA)
    kept = content(first.folder)
    write_bars(raw, pd.read_parquet(raw).iloc[:-2000].set_index("timestamp"))
    for attempt in (
        lambda: train(prepared),
        lambda: pipeline.cross_validate(prepared, "DEMO", H, "xgboost"),
        lambda: pipeline.stack(prepared, "DEMO", H),
        lambda: pipeline.evaluate(prepared, "DEMO", H),
    ):
        with pytest.raises(NotPreparedError, match=r"replaced since the last prepare.*DEMO_1m\.parquet.*Next: run"):
            attempt()
    assert not list(prepared.models.iterdir()) and not list(prepared.checkpoints.iterdir())
    second = pipeline.prepare(prepared, "DEMO", (H,), settings=SMALL_DATA)
    assert not second.reused and second.folder != first.folder and content(first.folder) == kept
    train(prepared)
    raw.write_bytes(old)
    assert pipeline.prepare(prepared, "DEMO", (H,), settings=SMALL_DATA).folder == first.folder


def test_prepare_rebuilds_damaged_part_with_same_bytes(prepared):
    folder = pipeline.prepare(prepared, "DEMO", (H,), settings=SMALL_DATA).folder
    whole = content(folder)
    file = folder / "features.npy"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(WorkspaceError, match="damaged"):
        train(prepared)
    assert not pipeline.prepare(prepared, "DEMO", (H,), settings=SMALL_DATA).reused
    assert content(folder) == whole


@pytest.mark.parametrize(
    ("horizons", "labels", "words"),
    [
        ((H, 5000), LabelSpec(), r"longer than a session.*5000 bars, while the longest session has 276.*Next: "),
        ((H,), LabelSpec(k_down=60.0), r"The train rows lack a class.*short 0, .*Next: "),
    ],
)
def test_prepare_infeasible_labels_raise_and_keep_prepared_data(horizons, labels, words, prepared):
    processed, raw = prepared.processed("DEMO"), content(prepared.raw)
    current = (processed / CURRENT).read_bytes()
    with pytest.raises(FactoryError, match=words):
        pipeline.prepare(prepared, "DEMO", horizons, settings=DataSpec(features=FEW_COLUMNS, labels=labels))
    assert content(prepared.raw) == raw and (processed / CURRENT).read_bytes() == current
    assert not list(processed.rglob("labels_h5000*")) and len(pipeline.load_labels(prepared, "DEMO", H))


# ---- train: the same bits again ------------------------------------------------------------------------------------


REFUSED = [
    lambda place: pipeline.prepare(place, "DEMO", ()),
    lambda place: pipeline.prepare(place, "DEMO", (5, True)),
    lambda place: train(place, model_settings={"round": 3}),
    lambda place: train(place, seed=-1),
    lambda place: train(place, model="lstm", model_settings={"lookback": 5000}),
    lambda place: pipeline.train(place, "DEMO", H, "xgbost"),
    lambda place: pipeline.train(place, "DEMO", 7, "xgboost"),
    lambda place: pipeline.train(place, "NONE", H, "xgboost"),
    lambda place: pipeline.cross_validate(place, "DEMO", H, "xgboost", folds=1),
    lambda place: pipeline.cross_validate(place, "DEMO", H, "xgboost", scheme="purged"),
    lambda place: pipeline.stack(place, "DEMO", H, ("xgboost", "xgboost")),
    lambda place: pipeline.stack(place, "DEMO", H, ("xgboost", "lstn")),
    lambda place: pipeline.stack(place, "DEMO", H, ("xgboost", "lightgbm"), folds=5000),
    lambda place: pipeline.evaluate(place, "DEMO", H),
    lambda place: pipeline.evaluate(place, "DEMO", H, ["xgboost"]),
    lambda place: pipeline.predict(place, "DEMO", H, "xgboost"),
    lambda place: pipeline.load_predictions(place, "DEMO", H, "stack"),
]


def test_pipeline_refused_requests_write_no_file(prepared):
    before = content(prepared.root)
    for attempt in REFUSED:
        with pytest.raises(FactoryError) as refused:
            attempt(prepared)
        assert refused.value.next_step or refused.value.wanted
    with pytest.raises(SettingsError, match="HORIZON"):
        pipeline.train(prepared, "DEMO", "xgboost", H)
    assert content(prepared.root) == before and not list(prepared.results.rglob("*.json"))


# ---- what is predicted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["xgboost", "lstm"])
def test_load_predictions_rows_match_labels_and_splits(model, finished):
    printed = pipeline.load_predictions(finished, "DEMO", H, model)
    labels, splits = pipeline.load_labels(finished, "DEMO", H), pipeline.load_splits(finished, "DEMO", H)
    assert list(printed.columns) == [*P, "split", "run_id", "label"] and printed.index.name == "known_at"
    assert set(printed["run_id"]) == {train(finished, model).run_id}
    assert printed.index.is_unique and printed.index.is_monotonic_increasing and str(printed.index.tz) == "UTC"
    p = printed[P].to_numpy()
    assert p.dtype == np.float64 and (p >= 0).all()
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-9)
    positions = labels.index.get_indexer(printed.index)
    assert (positions >= 0).all()
    wanted = np.full(len(labels), "", dtype=object)
    for name, rows in splits.items():
        wanted[rows] = name
    assert (printed["split"].to_numpy() == wanted[positions]).all()
    assert (printed["label"].to_numpy() == labels["label"].to_numpy()[positions]).all()
    inside = sum(map(len, splits.values()))  # purged rows belong to no part
    assert len(printed) == inside < len(labels) if model == "xgboost" else 0 < len(printed) < inside


@pytest.mark.parametrize("model", ["xgboost", "lstm"])
def test_predict_all_rows_matches_run_predictions_and_adds_newest_rows(model, finished, tmp_path):
    printed = pipeline.load_predictions(finished, "DEMO", H, model)
    result = pipeline.predict(finished, "DEMO", H, model, all_rows=True)
    assert result.path == finished.results / "DEMO" / f"predictions-{model}-h{H}.parquet"
    written = pd.read_parquet(result.path)
    pd.testing.assert_frame_equal(written, result.frame, check_freq=False)
    assert printed.index.isin(written.index).all()
    np.testing.assert_allclose(written.loc[printed.index, P], printed[P], rtol=0, atol=1e-9)
    features, labels = pipeline.load_features(finished, "DEMO"), pipeline.load_labels(finished, "DEMO", H)
    assert written.index[-1] == features.index[-1] > labels.index[-1]
    if model == "xgboost":
        assert written.index.equals(features.index)


def test_predict_bars_on_another_tick_than_those_of_training_raise(finished, tmp_path):
    bars = pd.read_parquet(finished.raw_bars("DEMO"))
    prices = ["open", "high", "low", "close"]
    bars[prices] = bars[prices] * 1.0137  # adjusted
    bars.to_parquet(tmp_path / "adjusted.parquet")
    with pytest.raises(BarsError, match=r"another tick than those the model was trained on .*DEMO"):
        pipeline.predict(finished, "DEMO", H, "xgboost", data=tmp_path / "adjusted.parquet")


def test_predict_default_writes_only_test_and_new_rows(finished):
    """The parts by hand: from the first test row on, and behind the last labelled row."""
    labels, splits = pipeline.load_labels(finished, "DEMO", H), pipeline.load_splits(finished, "DEMO", H)
    features = pipeline.load_features(finished, "DEMO").index
    first = {name: labels.index[rows[0]] for name, rows in splits.items()}
    everything = pipeline.predict(finished, "DEMO", H, "xgboost", all_rows=True).frame
    result = pipeline.predict(finished, "DEMO", H, "xgboost")
    written = pd.read_parquet(result.path)
    pd.testing.assert_frame_equal(written, result.frame, check_freq=False)
    assert list(written.columns) == [*P, "split", "run_id"] and set(written["run_id"]) == {result.run_id}
    assert written.index.equals(features[features >= first["test"]])
    assert written.index[written["split"] == "new"].equals(features[features > labels.index[-1]])
    assert set(written["split"]) == {"test", "new"} and "new" in result.summary()
    assert everything.index.equals(features)
    for name, after in (("train", "validation"), ("validation", "test")):
        mine = everything.index[everything["split"] == name]
        assert mine[-1] == features[features < first[after]][-1]  # purged rows count with the part before
        assert mine[0] == (features[0] if name == "train" else first[name])


def test_predict_bars_before_test_rows_raise_unless_all_rows(finished, tmp_path):
    bars = pd.read_parquet(finished.raw_bars("DEMO"))
    labels, splits = pipeline.load_labels(finished, "DEMO", H), pipeline.load_splits(finished, "DEMO", H)
    bars[bars["timestamp"] < labels.index[splits["test"][0]] - pd.Timedelta(hours=1)].to_csv(
        tmp_path / "old.csv", index=False
    )
    with pytest.raises(FactoryError, match=r"No row of these bars is out of sample.*--all"):
        pipeline.predict(finished, "DEMO", H, "xgboost", data=tmp_path / "old.csv")
    reported = pipeline.predict(finished, "DEMO", H, "xgboost", data=tmp_path / "old.csv", all_rows=True)
    assert set(reported.frame["split"]) == {"train", "validation"}


# ---- folds, stack, report ------------------------------------------------------------------------------------------


def test_stack_of_two_models_writes_pooled_predictions_and_report(prepared, drawn):
    own = {"folds": 2, "quick": True, "model_settings": {"xgboost": {"rounds": 5}, "lightgbm": {"rounds": 5}}}
    result = pipeline.stack(prepared, "DEMO", H, ("xgboost", "lightgbm"), **own, mirror="off")
    assert list(result.weights.index) == ["xgboost", "lightgbm"] and result.limited == {"folds": 2}
    printed = pipeline.load_predictions(prepared, "DEMO", H, "stack")
    np.testing.assert_allclose(printed[P].sum(axis=1), 1, atol=1e-9)
    assert result.report_path.is_file()
    assert set(result.metrics["name"]) == {"stack", "equal_pool", *BASELINES}
    bases = [
        pipeline.load_predictions(prepared, "DEMO", H, name).loc[printed.index] for name in ("xgboost", "lightgbm")
    ]
    plain = (bases[0][P] + bases[1][P]) / 2  # what nothing was learnt for
    clear = (pipeline.load_labels(prepared, "DEMO", H).loc[printed.index, "barrier"] != "ambiguous").to_numpy()
    assessed = (printed["split"] == "test").to_numpy() & clear
    happened = plain.to_numpy()[np.flatnonzero(assessed), printed["label"].to_numpy()[assessed] + 1]
    table = result.metrics[result.metrics["split"] == "test"].set_index("name")
    assert table.loc["equal_pool", "log_loss"] == pytest.approx(-np.log(happened).mean(), rel=1e-6)
    assert "the plain mean of its models (equal_pool)" in result.summary()
    assert "the plain mean of its models (equal_pool)" in result.report_path.read_text()
    again = pipeline.stack(prepared, "DEMO", H, ("xgboost", "lightgbm"), **own, mirror="off")
    assert again.predictions_hash == result.predictions_hash and again.artifact == result.artifact
    new = pipeline.predict(prepared, "DEMO", H, "stack", all_rows=True).frame
    np.testing.assert_allclose(new.loc[printed.index, P], printed[P], rtol=0, atol=1e-9)
    assert new.index[-1] == pipeline.load_features(prepared, "DEMO").index[-1]
    own = {"folds": 2, "quick": True, "model_settings": {"rounds": 5}}
    assert pipeline.cross_validate(prepared, "DEMO", H, "linear", **own).limited == {}  # our own limit
    compared = pipeline.evaluate(prepared, "DEMO", H)
    assert {"stack", "xgboost", "lightgbm"} < set(compared.metrics["name"])
    assert "linear (QUICK), 2 folds: gain over" in compared.report_path.read_text()  # other periods too
    for folds in prepared.results.glob("DEMO/folds-*/folds.parquet"):
        folds.write_bytes(b"")
    page = pipeline.evaluate(prepared, "DEMO", H).report_path.read_text()
    assert "linear (QUICK): its folds cannot be read" in page
    shutil.rmtree(next(prepared.models.glob("DEMO/model-xgboost-*")))
    with pytest.raises(FactoryError, match=r"base model of the stack is gone: xgboost.*stack again"):
        pipeline.predict(prepared, "DEMO", H, "stack")


def test_report_is_self_contained_and_lists_all_models(finished, drawn):
    result = pipeline.evaluate(finished, "DEMO", H)
    assert result.report_path == finished.results / "report.html"
    assert set(result.metrics["name"]) == {"xgboost", "lstm", *BASELINES}
    assert result.metrics["rows"].nunique() == 1  # all of them judged on the same rows
    assert result.metrics.columns[:2].tolist() == ["split", "name"] and set(result.metrics["split"]) == {"test"}
    for path in (result.report_path, train(finished).report_path):
        page = path.read_text(encoding="utf-8")
        for word in ("<svg", "xgboost", *BASELINES, "Calibration", "The split", "Labels", "</html>"):
            assert word in page, word
        links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", page) + re.findall(r"url\(([^)]*)\)", page)
        assert [link for link in links if not link.startswith(("#", "data:"))] == []
        assert not re.search(r"<(script|link|iframe|object)\b|@import", page)
    assert "Learning" in page


# ---- QUICK ---------------------------------------------------------------------------------------------------------


# ---- no space left on the disk -------------------------------------------------------------------------------------


class FullDisk:
    """os.fsync and os.replace that fail from the n-th call on, as a full disk does."""

    def __init__(self, monkeypatch, name: str, good_calls: int):
        self.left, self.real = good_calls, getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *words):
        if self.left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= 1
        return self.real(*words)


@pytest.mark.soak_except("replace")
@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_prepare_on_full_disk_raises_and_keeps_prepared_data(name, prepared):
    before = content(prepared.root)
    for good in (0, 1, 3, 6, 1_000):
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, name, good)
            try:
                pipeline.prepare(prepared, "DEMO", (H, 9), settings=OTHER_LABELS)
                break
            except WorkspaceError as error:
                assert "No space left" in str(error) and "bytes free" in str(error) and "Next: free some" in str(error)
        now = content(prepared.root)
        assert {path: now.get(path) for path in before} == before
        assert not list(prepared.root.rglob("*.tmp"))
        assert len(pipeline.load_labels(prepared, "DEMO", H))  # what was prepared before still serves
        if good == 3:
            with pytest.raises(NotPreparedError, match="Horizon 9"):
                pipeline.load_labels(prepared, "DEMO", 9)
    assert good >= 6  # each attempt goes on with what the one before could keep
    assert len(pipeline.load_labels(prepared, "DEMO", 9))


def test_train_on_full_disk_raises_then_resumes_with_same_predictions(prepared, finished, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    before = content(prepared.root)
    full = {}

    def fill(epoch, metrics):
        if epoch == 2 and not full:
            full["patch"] = pytest.MonkeyPatch()
            FullDisk(full["patch"], "fsync", 0)
            full["patch"].setattr(time, "sleep", lambda _, real=time.sleep: real(0.02))  # between attempts to save

    with pytest.raises(WorkspaceError, match="No space left"):
        train(prepared, "xgboost", callbacks=(fill,))
    full["patch"].undo()
    now = content(prepared.root)
    kept = [path for path in before if not path.endswith(".lock") and not path.startswith("checkpoints/")]
    assert {path: now.get(path) for path in kept} == {path: before[path] for path in kept}
    assert not list(prepared.root.rglob("*.tmp")) and not list(
        prepared.models.glob("DEMO/model-xgboost-*/artifact.json")
    )
    again = train(prepared, "xgboost")
    assert again.resumed_from in (1, 2)  # the second save may have been on its way when the disk was full
    assert again.predictions_hash == train(finished, "xgboost").predictions_hash
