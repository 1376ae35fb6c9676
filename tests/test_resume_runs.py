"""Runs taken up again: what identifies them, what is told of them, and the mark of those continued elsewhere."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import code_fingerprint, pipeline, runs
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.runs import RunFolder, open_run_checkpoints, progress_words
from ml_factory.storage.workspace import Workspace

ROOT = Path(__file__).resolve().parents[1]
TREES = {"rounds": 30, "block": 5, "depth": 3, "threads": 1}


class Killed(BaseException):
    """Not an Exception: nothing on the way may catch it."""


def train(workspace: Workspace, until: int = 0, model: str = "xgboost", **how):
    """The result and the lines told; killed after `until` blocks where that is above 0."""
    lines = []

    def kill(epoch, metrics):
        if epoch == until:
            raise Killed

    how = {"model_settings": TREES, "mirror": "off", "on_status": lines.append, "callbacks": (kill,)} | how
    try:
        return pipeline.train(workspace, "DEMO", 5, model, **how), lines
    except Killed:
        return None, lines


def reached(workspace: Workspace, run_id: str, phase: str = "train_xgboost") -> str:
    with open_run_checkpoints(workspace.checkpoints, RunFolder(run_id, workspace.results)) as manager:
        return progress_words(manager.list_checkpoints(phase)[-1]["metrics"])


@pytest.fixture
def often(prepared, tmp_path, monkeypatch) -> Workspace:
    """A prepared workspace in which every block is saved, and caches of its own."""
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return prepared


# ---- the line ------------------------------------------------------------------------------------------------------


def test_train_prints_one_line_on_found_run_and_next_action(often):
    _, (line,) = train(often, 2)
    assert line.startswith("Found nothing of xgboost on DEMO, horizon 5. Starts from the beginning, as train-xgboost-")
    result, (line,) = train(often)
    assert "unfinished at round 10" in line and line.endswith("Resumes from there.")
    assert result.found == line and result.resumed_from == 2 and result.exact
    again, (line,) = train(often)
    assert "finished before" in line and again.reused
    table = result.origin["value"]
    assert table["resumed from"] == "block 2" and table["bits"] == "as uninterrupted" and table["found"] == result.found
    assert again.origin["value"]["resumed from"] == "the end: it was finished before"


# ---- changed code --------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """The library's sources in a repository of their own; run ids are computed from them."""
    place = tmp_path / "checkout"
    shutil.copytree(code_fingerprint.PACKAGE, place / "ml_factory", ignore=shutil.ignore_patterns("__pycache__"))
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", place, *words], check=True, capture_output=True)
    monkeypatch.setattr(code_fingerprint, "PACKAGE", place / "ml_factory")
    return place


def test_train_after_code_change_starts_new_run(often, checkout):
    train(often, 4)
    first = next((often.results / "DEMO").glob("train-*/run.json"))
    reported = json.loads(first.read_text())
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert reported["commit"] == commit and set(reported["sources"]) == {"data", "fit"}
    source = checkout / "ml_factory" / "seeding.py"
    before = source.read_text()
    source.write_text(before + "\n\nCHANGED = 1\n")
    with pytest.raises(NotPreparedError, match="certificate is of other code"):
        train(often)
    result, (line,) = train(often, uncertified=True)
    assert "was begun with other code. Opens a new run" in line
    assert result.resumed_from is None and result.run_id != reported["run_id"]
    assert reached(often, reported["run_id"]) == "round 20"  # nothing of it was touched
    with pytest.raises(SettingsError, match=r"cannot be resumed.*begun with other code"):
        train(often, run=reported["run_id"], uncertified=True)
    source.write_text(before)
    result, (line,) = train(often, run=reported["run_id"])
    assert result.resumed_from == 4 and result.run_id == reported["run_id"]


def test_train_with_run_of_other_settings_raises_else_resumes(often):
    train(often, 2)
    name = next((often.results / "DEMO").glob("train-*/run.json")).parent.name
    with pytest.raises(SettingsError, match="other settings"):
        train(often, run=name, model_settings=TREES | {"depth": 2})
    with pytest.raises(SettingsError, match=rf"No such run.*{name}"):
        train(often, run="train-xgboost-of-nobody")
    assert train(often, run=name)[0].resumed_from == 2


# ---- restarted from the top ----------------------------------------------------------------------------------------


def test_train_restarted_with_fresh_never_overwrites_longer_run(often):
    """FRESH left on: each restart opens a run beside, and the one that had come furthest is still there."""
    train(often, 5, fresh=True)
    longest = next((often.results / "DEMO").glob("train-*/run.json")).parent.name
    for _ in range(2):
        train(often, 1, fresh=True)
        assert reached(often, longest) == "round 25"
    assert len(list((often.results / "DEMO").glob("train-*/run.json"))) == 3
    result, _ = train(often, run=longest)
    assert result.resumed_from == 5
    whole, _ = train(often, fresh=True)
    same = [pd.read_parquet(one.predictions_path).drop(columns="run_id") for one in (result, whole)]
    pd.testing.assert_frame_equal(*same, check_exact=True)


# ---- other machines ------------------------------------------------------------------------------------------------


def test_train_resumed_with_other_library_version_names_library(often, monkeypatch):
    versions = runs.installed_library_versions
    train(often, 2)
    monkeypatch.setattr(runs, "installed_library_versions", lambda names: versions(names) | {"numpy": "9.9"})
    result, (line,) = train(often)
    assert result.inexact_because == [f"numpy: began with {np.__version__}, now 9.9"] and not result.exact
    assert "numpy: began with" in line


def test_train_resumed_with_other_core_count_is_marked_inexact_in_all_outputs(often, monkeypatch):
    trees = {name: value for name, value in TREES.items() if name != "threads"}
    with monkeypatch.context() as patch:
        patch.setattr(runs, "cores", lambda: 64)
        train(often, 4, model_settings=trees)
    result, (line,) = train(often, model_settings=trees)
    reason = f"threads: began with 64, now {runs.cores()}"
    assert "unfinished at" in line and f"on another machine ({reason}): continued, not bit-exact" in line
    assert f"continued, not bit-exact: {reason}" in result.summary()
    assert result.origin["value"]["bits"] == "continued, not bit-exact"
    page = result.report_path.read_text()
    assert "Continued, not bit-exact" in page and reason in page
    facts = json.loads((result.artifact / "artifact.json").read_text())["facts"]
    assert facts["inexact"] == [reason] and not facts["exact"]


# ---- what a kill left undone ---------------------------------------------------------------------------------------


def test_train_of_finished_run_without_log_summary_writes_summary(often):
    """Killed between the registration of the model and the end of the record; and a cloud that lost the log."""
    result, _ = train(often)
    log = result.report_path.parent / "log"
    whole, steps = (log / "summary.json").read_text(), list(result.history["epoch"])
    (log / "summary.json").unlink()
    [lost] = log.glob("0001-*.jsonl")
    lost.unlink()
    again, _ = train(often)
    assert again.reused
    reported = json.loads((log / "summary.json").read_text())
    assert (reported["status"], reported["summary"]) == ("finished", json.loads(whole)["summary"])
    from tests.tracking.metrics_table import read_log

    assert list(read_log(log)["step"]) == steps
