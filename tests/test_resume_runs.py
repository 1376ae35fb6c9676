"""Runs taken up again: what identifies them, what is told of them, and the mark of those continued elsewhere."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from ml_factory import code_fingerprint, pipeline
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

LIVES = """
import os, signal, sys
from ml_factory import pipeline
if sys.argv[2]:
    os.sched_setaffinity(0, {int(sys.argv[2])})
at = int(sys.argv[3])
def kill(epoch, metrics):
    if epoch == at:
        os.kill(os.getpid(), signal.SIGKILL)
result = pipeline.train(
    sys.argv[1], "DEMO", 5, sys.argv[4], mirror="off", callbacks=(kill,), on_status=print,
    model_settings={"epochs": 3, "lookback": 8, "hidden": 8, "save_seconds": 0.0, "device": "cpu"}
    if sys.argv[4] == "lstm" else {"rounds": 30, "block": 5, "depth": 3},
)
print(result.summary())
print(result.origin.to_string())
"""


def live(root: Path, home: Path, *, core: int | None, until: int, model: str) -> subprocess.CompletedProcess:
    """A training in a process and a home of its own, on one core or on all; killed after `until` epochs."""
    home.mkdir(exist_ok=True)
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("ML_FACTORY", "XDG", "PYTEST"))}
    return subprocess.run(
        [sys.executable, "-c", LIVES, root, "" if core is None else str(core), str(until), model], cwd=ROOT,
        env=clean | {"HOME": str(home), "ML_FACTORY_SAVE_MINUTES": "0", "ML_FACTORY_WANDB": "off"},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.soak_except("xgboost")
@pytest.mark.parametrize("model", ["lstm", "xgboost"])
def test_train_resumed_with_other_core_count_is_marked_inexact_in_all_outputs(prepared, tmp_path, model):
    """Begun on one core, continued on all, on a machine with an empty home: only the workspace went along."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core only: nothing to differ")
    first = live(prepared.root, tmp_path / "one", core=cores[0], until=2 if model == "lstm" else 4, model=model)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = live(prepared.root, tmp_path / "two", core=None, until=0, model=model)
    assert second.returncode == 0, second.stderr
    reason = f"threads: began with 1, now {len(cores)}"
    line, *summary = second.stdout.splitlines()
    assert "unfinished at" in line and f"on another machine ({reason}): continued, not bit-exact" in line
    assert any(f"continued, not bit-exact: {reason}" in one for one in summary)  # the summary
    assert any(one.startswith("bits") and "continued, not bit-exact" in one for one in summary)  # the notebooks' table
    page = next((prepared.results / "DEMO").glob(f"train-{model}-*/report.html")).read_text()
    assert "Continued, not bit-exact" in page and reason in page  # the report
    facts = json.loads(next((prepared.models / "DEMO").glob(f"model-{model}-*/artifact.json")).read_text())["facts"]
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
