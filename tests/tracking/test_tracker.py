"""Every step once and in order, over any number of kills; a mirror that never delays the run; no key anywhere."""

import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_factory.errors import FactoryError, SettingsError, WorkspaceError
from ml_factory.storage.files import files
from ml_factory.tracking import run_log, wandb_process
from ml_factory.tracking.tracker import Tracker
from tests.tracking.metrics_table import read_log
from tests.tracking.offline_file import READ

KEY = "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c"


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "ML_FACTORY_WANDB", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(wandb_process, "_warned", set())


@pytest.fixture
def track(tmp_path):
    def start(**named) -> Tracker:
        return Tracker("run", {"lr": 0.1}, tmp_path / "w", tmp_path / "l", **{"mirror": "off", **named})

    return start


def steps(folder) -> list[int]:
    return read_log(folder)["step"].tolist()


def ended(tracker: Tracker, seconds: float = 30) -> bool:
    """Wait for the mirror; True when W&B has everything."""
    return tracker._mirror.wait(seconds)


def abandon(tracker: Tracker) -> None:
    """Close the tracker's file as a kill does: the operating system closes it, nothing else happens."""
    tracker._file.close()


# ---------------------------------------------------------------- the record


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
    with pytest.raises(FactoryError, match="finished"):
        tracker.log(2, {})


def test_tracker_resumed_attempt_replaces_steps_after_checkpoint(track, tmp_path):
    first = track()
    for step in range(1, 8):
        first.log(step, {"loss": step})
        if step == 4:
            first.flush()
    abandon(first)
    assert steps(tmp_path / "w") == [1, 2, 3, 4, 5, 6, 7]
    second = track()
    assert second.attempt == 2
    for step in (5, 6):
        second.log(step, {"loss": step * 10})
    second.finish()
    log = read_log(tmp_path / "w")
    assert log["step"].tolist() == [1, 2, 3, 4, 5, 6]  # stopped earlier this time: 7 is void
    assert log["loss"].tolist() == [1, 2, 3, 4, 50, 60] and log["attempt"].tolist() == [1] * 4 + [2] * 2


attempts_of_steps = st.lists(st.lists(st.integers(0, 9), max_size=5).map(sorted), max_size=4)


@given(attempts_of_steps)
def test_merge_attempts_equals_replay_in_order(attempts):
    """The brute-force twin: play everything in order; a new attempt first forgets all from its first step on."""
    truth, numbered, value = {}, [], 0
    for number, its_steps in enumerate(attempts, start=1):
        if its_steps:
            for step in list(truth):
                if step >= its_steps[0]:
                    del truth[step]
        lines = []
        for step in its_steps:
            value += 1
            truth.setdefault(step, {})[f"m{value % 3}"] = value
            lines.append({"step": step, "time": 0.0, "metrics": {f"m{value % 3}": value}})
        numbered.append((number, lines))
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


# ---------------------------------------------------------------- the mirror

FAKE = """
import hashlib, json, os, sys, time
HERE = os.path.dirname(__file__)
class Settings:
    def __init__(self, **named): pass
class Error(Exception): pass
class Artifact:
    def __init__(self, name, type, metadata): self.told, self.files = [name, type, metadata], []
    def add_file(self, path, name): self.files.append([name, hashlib.sha256(open(path, "rb").read()).hexdigest()])
class Run:
    summary, starting_step = {}, 0
    def log_artifact(self, artifact): self._write(["artifact", *artifact.told, artifact.files])
    def log(self, metrics, step): self._write(["log", step, metrics])
    def finish(self, exit_code=0): self._write(["finish", exit_code, self.summary])
    def _write(self, line):
        with open(HERE + "/calls", "a") as file: print(json.dumps(line), file=file)
def init(**named):
    CODE
    named.pop("settings")
    Run()._write(["init", named.pop("id"), named])
    return Run()
"""


@pytest.fixture
def fake_wandb(tmp_path, monkeypatch):
    """Put a client of our making before the real one in the mirror's process; gives its calls back."""
    calls = tmp_path / "fake" / "calls"

    def install(code: str = "pass"):
        calls.parent.mkdir(exist_ok=True)
        (calls.parent / "wandb.py").write_text(FAKE.replace("CODE", code))
        monkeypatch.setenv("PYTHONPATH", str(calls.parent))
        return lambda: [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []

    return install


def run_once(tracker, count=5):
    """Seconds that logging and finishing took."""
    started = time.monotonic()
    for step in range(1, count + 1):
        tracker.log(step, {"loss": 1 / step})
    tracker.finish({"accuracy": 0.5})
    return time.monotonic() - started


def test_wandb_mirror_logs_each_step_once_in_order(track, fake_wandb):
    calls = fake_wandb()
    with track(mirror="auto") as tracker:
        for step in range(1, 30):
            tracker.log(step, {"loss": step})
            tracker.log(step, {"val": -step})
            if step % 10 == 0:
                tracker.flush()
                time.sleep(0.3)
        tracker.finish({"accuracy": 0.5})
    assert ended(tracker)
    first, *logged, last = calls()
    assert first[:2] == ["init", "run"] and first[2]["mode"] == "offline" and first[2]["config"] == {"lr": 0.1}
    assert first[2]["project"] == "ohlcv-ml-factory"
    assert logged == [["log", step, {"loss": step, "val": -step}] for step in range(1, 30)]
    assert last == ["finish", 0, {"accuracy": 0.5}]


def test_wandb_mirror_after_kill_replays_valid_steps(track, fake_wandb):
    first = track()
    for step in range(1, 8):
        first.log(step, {"loss": step})
        if step == 4:
            first.flush()
    abandon(first)
    calls = fake_wandb()
    second = track(mirror="auto")
    for step in (5, 6):
        second.log(step, {"loss": step * 10})
    second.finish()
    assert ended(second)
    assert [line[1:] for line in calls()[1:-1]] == [[s, {"loss": s}] for s in range(1, 5)] + [
        [5, {"loss": 50}],
        [6, {"loss": 60}],
    ]


def test_wandb_mirror_finishes_after_run_process_is_killed(tmp_path, fake_wandb, spawn):
    calls = fake_wandb()
    code = """
import sys, time
from ml_factory.tracking.tracker import Tracker
tracker = Tracker("run", {}, sys.argv[1] + "/w", sys.argv[1] + "/l")
tracker.log(1, {"loss": 1.0})
print("logged", flush=True)
time.sleep(60)
"""
    process = spawn(code, tmp_path, PYTHONPATH=f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path / 'fake'}")
    assert process.stdout.readline() == "logged\n"
    process.kill()
    deadline = time.monotonic() + 30
    while not calls() or calls()[-1][0] != "finish":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert calls()[1:] == [["log", 1, {"loss": 1.0}], ["finish", 1, {}]]


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("raise RuntimeError('the service is on fire')", "on fire"),
        ("raise SystemExit(3)", "stopped"),
        ("os.kill(os.getpid(), 9)", "stopped"),
        ("time.sleep(1000)", "did not answer"),
    ],
)
def test_tracker_with_broken_wandb_client_logs_all_steps_without_delay(
    track, fake_wandb, tmp_path, monkeypatch, caplog, code, output
):
    monkeypatch.setattr(wandb_process, "INIT_SECONDS", 3.0)
    fake_wandb(code)
    tracker = track(mirror="auto")
    assert run_once(tracker) < 1
    assert not ended(tracker)
    assert len(caplog.records) == 1 and output in caplog.text
    assert steps(tmp_path / "w") == [1, 2, 3, 4, 5]


def test_tracker_warns_once_if_wandb_client_fails_during_run(track, fake_wandb, caplog):
    fake_wandb("raise RuntimeError('no')")
    tracker = track(mirror="auto")
    deadline = time.monotonic() + 30
    step = 0
    while not caplog.records and time.monotonic() < deadline:
        step += 1
        tracker.log(step, {"loss": 1.0})
        time.sleep(0.05)
    tracker.finish()
    assert [record.getMessage().endswith("RuntimeError: no") for record in caplog.records] == [True]


def test_tracker_process_exits_without_waiting_for_hanging_wandb_client(tmp_path, fake_wandb, spawn):
    fake_wandb("time.sleep(1000)")
    code = """
import sys
from ml_factory.tracking import wandb_process
wandb_process.INIT_SECONDS = 3.0
from ml_factory.tracking.tracker import Tracker
with Tracker("run", {}, sys.argv[1] + "/w", sys.argv[1] + "/l") as tracker:
    tracker.log(1, {"loss": 1.0})
print(tracker._mirror._process.pid, flush=True)
"""
    process = spawn(code, tmp_path, PYTHONPATH=f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path / 'fake'}")
    child = int(process.stdout.readline())
    started = time.monotonic()
    assert process.wait(10) == 0
    assert time.monotonic() - started < 2
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the mirror outlives its deadline"
        time.sleep(0.2)


@pytest.mark.parametrize("how", ["none", "finder", "folder"])
def test_tracker_without_wandb_package_warns_once_for_all_runs(track, monkeypatch, caplog, tmp_path, how):
    if how == "none":
        monkeypatch.setitem(sys.modules, "wandb", None)
    elif how == "finder":

        def absent(name, *rest):
            raise ImportError(name)

        monkeypatch.setattr(wandb_process.importlib.util, "find_spec", absent)
    else:  # what W&B leaves in the current folder is not W&B
        (tmp_path / "cwd" / "wandb").mkdir(parents=True)
        monkeypatch.setattr(sys, "path", [str(tmp_path / "cwd")])
    for _ in range(3):
        tracker = track(mirror="auto")
        assert run_once(tracker) < 1
    assert [record.getMessage() for record in caplog.records] == [
        "W&B is not installed: runs are logged locally only (pip install 'ml_factory[track]')"
    ]
    assert steps(tmp_path / "w") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("mode", "env", "wanted"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY}, "online"),
        ("offline", {"WANDB_API_KEY": KEY}, "offline"),
        ("off", {"WANDB_API_KEY": KEY}, "off"),
        ("auto", {"ML_FACTORY_WANDB": "off"}, "off"),
        ("offline", {"ML_FACTORY_WANDB": "auto"}, "offline"),
        ("auto", {"ML_FACTORY_WANDB": "Offline", "WANDB_API_KEY": KEY}, "offline"),
        ("off", {"ML_FACTORY_WANDB": "auto"}, "off"),
        ("auto", {"WANDB_MODE": "disabled"}, "off"),
        ("auto", {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY}, "offline"),
        ("auto", {"NETRC": "machine api.wandb.ai login user password x"}, "online"),
    ],
)
def test_mirror_mode_is_most_restrictive_of_argument_and_environment(monkeypatch, tmp_path, mode, env, wanted):
    for name, value in env.items():
        if name == "NETRC":
            (tmp_path / "netrc").write_text(value)
        else:
            monkeypatch.setenv(name, value)
    assert wandb_process.wandb_mirror_mode(mode) == wanted


def test_mirror_mode_unknown_value_raises(monkeypatch, track):
    with pytest.raises(SettingsError, match="'offline'"):
        track(mirror="offlin")
    monkeypatch.setenv("ML_FACTORY_WANDB", "of")
    with pytest.raises(SettingsError, match="ML_FACTORY_WANDB"):
        track()


# ---------------------------------------------------------------- the real client


def files_that_hold(text: str, folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_tracker_with_real_wandb_offline_logs_steps_and_writes_no_key(tmp_path, monkeypatch, spawn, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("ML_FACTORY_WANDB", "offline")
    tracker = Tracker("run/1", {"lr": 0.1, "mistake": f"Bearer {KEY}"}, tmp_path / "w", tmp_path / "l")
    for step in range(1, 6):
        tracker.log(step, {"loss": 1 / step, "note": KEY})
        if step == 3:
            tracker.flush()
    tracker.finish({"note": f"the key is {KEY}"})
    assert ended(tracker, 90)
    lines = spawn(READ, tmp_path / "l").stdout.read().splitlines()
    assert [json.loads(line) for line in lines] == [[step, 1 / step] for step in range(1, 6)]
    assert files_that_hold("[redacted]", tmp_path) and not files_that_hold(KEY, tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_tracker_with_real_wandb_and_closed_port_warns_once(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_process, "INIT_SECONDS", 4.0)
    tracker = Tracker("run", {}, tmp_path / "w", tmp_path / "l")
    assert run_once(tracker) < 1
    assert not ended(tracker, 60)
    assert len(caplog.records) == 1 and "answer" in caplog.text
    assert steps(tmp_path / "w") == [1, 2, 3, 4, 5] and not files_that_hold(KEY, tmp_path)
