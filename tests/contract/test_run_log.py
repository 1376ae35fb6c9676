"""Every step once and in order, over any number of kills and a forgetful cloud."""

import json
import math
import signal

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_factory.errors import WorkspaceError
from tests.contract.doors import Tracker, files, forget_wandb_warnings, list_log_attempts, run_log
from tests.tracking.metrics_table import read_log


@pytest.fixture(autouse=True)
def nothing_was_reported():
    forget_wandb_warnings()


@pytest.fixture
def track(tmp_path):
    return lambda: Tracker("run", {"lr": 0.1}, tmp_path / "w", tmp_path / "l", mirror="off")


def steps(folder) -> list[int]:
    return read_log(folder)["step"].tolist()


def test_tracker_log_holds_steps_metrics_and_summary(track, tmp_path):
    with track() as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"loss": np.float32(1 / step), "note": "x"})
            tracker.log(step, {"val": math.inf if step == 1 else math.nan if step == 2 else 1.5})
            tracker.flush()
            assert steps(tmp_path / "w") == list(range(1, step + 1))
        tracker.finish({"accuracy": np.float64(0.5), "auc": math.nan})
    log = read_log(tmp_path / "w")
    assert log.columns.tolist() == ["step", "time", "attempt", "loss", "note", "val"]
    assert log["loss"].tolist() == [1.0, 0.5, float(np.float32(1 / 3))]
    assert log["val"][0] == math.inf and np.isnan(log["val"][1]) and log["val"][2] == 1.5
    assert str(log["time"].dt.tz) == "UTC" and (pd.Timestamp.now("UTC") - log["time"]).max() < pd.Timedelta("1min")
    summary = json.loads((tmp_path / "w/summary.json").read_text())
    assert summary["summary"] == {"accuracy": 0.5, "auc": None} and summary["status"] == "finished"
    assert json.loads((tmp_path / "w/run.json").read_text())["settings"] == {"lr": 0.1}


def test_tracker_on_exception_ends_log_as_failed_and_reraises(track, tmp_path):
    with pytest.raises(ZeroDivisionError), track() as tracker:
        tracker.log(1, {"loss": 1.0})
        _ = 1 / 0
    assert json.loads((tmp_path / "w/summary.json").read_text())["status"] == "failed"
    assert steps(tmp_path / "w") == [1]


attempts_of_steps = st.lists(st.lists(st.integers(0, 9), max_size=5).map(sorted), max_size=4)


@given(attempts_of_steps)
def test_merge_attempts_equals_replay_in_order(attempts):
    """The brute-force twin: play everything in order; a new attempt first forgets all from its first step on."""
    truth, numbered = {}, []
    for number, its_steps in enumerate(attempts, start=1):
        truth = {step: kept for step, kept in truth.items() if not its_steps or step < its_steps[0]}
        records = [
            {"step": step, "time": 0.0, "metrics": {f"m{at % 3}": (number, at)}} for at, step in enumerate(its_steps)
        ]
        for record in records:
            truth.setdefault(record["step"], {}).update(record["metrics"])
        numbered.append((number, records))
    rows = run_log.merge_log_attempts(numbered)
    assert [(row["step"], row["metrics"]) for row in rows] == sorted(truth.items())


def test_read_log_skips_torn_last_line_and_raises_on_other_damage(track, tmp_path):
    tracker = track()
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0})
    tracker.finish()
    segment = next((tmp_path / "w").glob("0001-*.jsonl"))
    data = segment.read_bytes()
    for size in range(len(data)):
        segment.write_bytes(data[:size])
        assert steps(tmp_path / "w") == [1, 2][: data[:size].count(b"\n")]
    segment.write_bytes(b"{\n" + data)
    with pytest.raises(WorkspaceError, match="line 1"):
        read_log(tmp_path / "w")


def test_tracker_with_unwritable_workspace_warns_and_logs_from_history_later(track, tmp_path, caplog):
    (tmp_path / "w").write_text("in the way")
    tracker = track()
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0})
        tracker.flush()
    assert len(caplog.records) == 2 and "not in its log" in caplog.text
    (tmp_path / "w").unlink()
    tracker.log_missing([(1, {"loss": 1.0}), (2, {"loss": 1.0})])
    tracker.finish()
    assert steps(tmp_path / "w") == [1, 2]


def test_tracker_on_full_local_disk_warns_once_and_continues(track, tmp_path, disk_full_beyond, caplog, monkeypatch):
    left = iter(range(100))
    monkeypatch.setattr(files, "free_bytes", lambda path: next(left))  # other programs write too: a message each time
    tracker = track()
    tracker.log(1, {"loss": 1.0})
    with disk_full_beyond(1):
        tracker.log(2, {"loss": 1.0})
        tracker.log(3, {"loss": 1.0})
    assert "No space left" in caplog.text and len(caplog.records) == 1
    tracker.log(4, {"loss": 1.0})
    tracker.finish()
    assert steps(tmp_path / "w") == [1, 4]


KILLED = """
import os, signal, sys
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.tracking.tracker import Tracker
root, life, dies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
checkpoints = CheckpointManager(root + "/c")
found = checkpoints.load_latest_checkpoint("p")
history = found["state"]["history"] if found else []
print(len(history), flush=True)
with Tracker("run", {}, root + "/w", root + "/l", mirror="off") as tracker:
    tracker.log_missing([(one["step"], one["metrics"]) for one in history])
    for step in range(len(history) + 1, 61):
        history.append({"step": step, "metrics": {"loss": 1 / step, "life": life}})
        tracker.log(step, history[-1]["metrics"])
        if step == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 4 == 0:
            tracker.flush()
            checkpoints.save_checkpoint("p", {"history": history}, force=True)
            checkpoints.wait()
            if step == -dies:
                os.kill(os.getpid(), signal.SIGKILL)
"""
DEATHS = (3, 6, -12, 15, -36, 58)  # a minus: right after the checkpoint of that step


def test_tracker_over_kills_and_lost_attempts_logs_each_step_once_in_order(tmp_path, spawn):
    """The cloud never got what the newest attempt logged: the history of the checkpoint is logged again."""
    resumed = []
    for life, dies in enumerate((*DEATHS, 0)):
        process = spawn(KILLED, tmp_path, life, dies)
        assert process.wait() == (-signal.SIGKILL if dies else 0)
        resumed.append(int(process.stdout.readline()))
        (tmp_path / "w" / list_log_attempts(tmp_path / "w")[-1]).unlink()
    # By hand from DEATHS: the last multiple of 4 before each.
    assert resumed == [0, 0, 4, 12, 12, 36, 56]
    tracker = Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off")
    tracker.log_missing([(step, {"loss": 1 / step}) for step in range(1, 61)])
    tracker.finish()
    log = read_log(tmp_path / "w")
    assert log["step"].tolist() == list(range(1, 61))
    assert log["loss"].tolist() == [1 / step for step in range(1, 61)]
    assert log["attempt"].is_monotonic_increasing
    last = Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off")
    last.log_missing([(step, {"loss": step}) for step in range(1, 4)])  # a checkpoint from before, after which it ends
    last.finish()
    assert steps(tmp_path / "w") == [1, 2, 3]
