"""The record over ten kills and a forgetful cloud; two sessions of one run."""

import json
import shutil
import signal

import pytest

from ml_factory.tracking import wandb_process
from ml_factory.tracking.run_log import list_log_attempts
from ml_factory.tracking.tracker import Tracker
from tests.tracking.metrics_table import read_log

KILLED = """
import os, signal, sys
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.tracking.tracker import Tracker
root, life, dies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
checkpoints = CheckpointManager(root + "/c", background=False)
found = checkpoints.load_latest_checkpoint("p")
history = found["state"]["history"] if found else []
print(len(history), flush=True)
with Tracker("run", {}, root + "/w", root + "/l", mirror="off") as tracker:
    tracker.log_missing([(one["step"], one["told"]) for one in history])
    for step in range(len(history) + 1, 61):
        history.append({"step": step, "told": {"loss": 1 / step, "life": life}})
        tracker.log(step, history[-1]["told"])
        if step == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 4 == 0:
            tracker.flush()
            checkpoints.save_checkpoint("p", {"history": history}, force=True)
            if step == -dies:
                os.kill(os.getpid(), signal.SIGKILL)
"""
DEATHS = (3, 6, -12, 15, 22, 23, -36, 38, 47, 58)  # a minus: right after the checkpoint of that step


@pytest.fixture(autouse=True)
def nothing_was_reported(monkeypatch):
    monkeypatch.setattr(wandb_process, "_warned", set())


@pytest.mark.soak_except("newest attempt")
@pytest.mark.parametrize("lost", ["nothing", "newest attempt"])
def test_tracker_over_ten_kills_logs_each_step_once_in_order(tmp_path, spawn, lost):
    resumed = []
    for life, dies in enumerate((*DEATHS, 0)):
        process = spawn(KILLED, tmp_path, life, dies)
        assert process.wait() == (-signal.SIGKILL if dies else 0)
        resumed.append(int(process.stdout.readline()))
        if lost != "nothing":  # the cloud never got it: the history of the checkpoint is logged again
            (tmp_path / "w" / list_log_attempts(tmp_path / "w")[-1]).unlink()
    # By hand from DEATHS: the last multiple of 4 before each.
    assert resumed == [0, 0, 4, 12, 12, 20, 20, 36, 36, 44, 56]
    if lost != "nothing":
        tracker = Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off")
        tracker.log_missing([(step, {"loss": 1 / step}) for step in range(1, 61)])
        tracker.finish()
    log = read_log(tmp_path / "w")
    assert log["step"].tolist() == list(range(1, 61))
    assert log["loss"].tolist() == [1 / step for step in range(1, 61)]
    assert log["attempt"].is_monotonic_increasing


@pytest.mark.parametrize("seen", [True, False])
def test_tracker_of_superseded_session_does_not_mix_into_newer_log(tmp_path, monkeypatch, seen):
    """Not seen: the cloud showed the second session nothing of the first; both are attempt 1 of their own count."""

    def session(name):
        monkeypatch.setattr("ml_factory.tracking.tracker.process_id", lambda: name * 8)
        return Tracker("run", {}, tmp_path / "w", tmp_path / name, mirror="off")

    def log(tracker, steps, scale):
        for step in steps:
            tracker.log(step, {"loss": step * scale})
        tracker.flush()

    old = session("a")
    log(old, range(1, 6), 1)
    if not seen:
        (tmp_path / "w").rename(tmp_path / "unseen")
    new = session("b")
    assert new.attempt == (2 if seen else 1)
    log(new, range(3, 7), 10)
    if not seen:
        shutil.copytree(tmp_path / "unseen", tmp_path / "w", dirs_exist_ok=True)
    log(old, range(6, 9), 1)  # the zombie wakes up
    new.finish({"who": "new"})
    old.finish({"who": "old"})
    log = read_log(tmp_path / "w")
    assert log["step"].tolist() == [1, 2, 3, 4, 5, 6] and log["loss"].tolist() == [1, 2, 30, 40, 50, 60]
    assert json.loads((tmp_path / "w/summary.json").read_text())["summary"] == {"who": "new"}
    assert [name[-14:-6] for name in list_log_attempts(tmp_path / "w")] == ["a" * 8, "b" * 8]
