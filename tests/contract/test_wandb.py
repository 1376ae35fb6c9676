"""A mirror that never delays the run, and restoring, with a stand-in of W&B; the real client offline.

No key is in any file of a run.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import CheckpointError, SettingsError, WorkspaceError
from ml_factory.storage.workspace import Workspace
from tests.contract import doors
from tests.tracking import wandb_stand_in
from tests.tracking.metrics_table import read_log
from tests.tracking.offline_file import READ
from tests.tracking.wandb_stand_in import KEY, calls, versions

PASSWORD = "netrc-5b4c3d2e1f00f1e2d3c0f1e2d3c4b5a6978"


@pytest.fixture(autouse=True)
def account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "ML_FACTORY_WANDB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    doors.forget_wandb_warnings()


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Install the stand-in; return the folder where it keeps things."""
    return lambda answer="pass", code="pass": wandb_stand_in.install(tmp_path, monkeypatch, answer, code)


@pytest.fixture
def track(tmp_path):
    return lambda **named: doors.Tracker("run", {"lr": 0.1}, tmp_path / "w", tmp_path / "l", **named)


def steps(folder) -> list[int]:
    return read_log(folder)["step"].tolist()


def run_once(tracker) -> float:
    """Return the seconds that logging and finishing took."""
    started = time.monotonic()
    for step in range(1, 6):
        tracker.log(step, {"loss": 1 / step})
    tracker.finish({"accuracy": 0.5})
    return time.monotonic() - started


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


# ---------------------------------------------------------------- the mirror


def test_mirror_logs_valid_steps_of_all_attempts_once_in_order(track, service):
    first = track(mirror="off")
    for step in range(1, 8):
        first.log(step, {"loss": step})  # then killed; its checkpoint is of step 4
    store = service()
    with track() as second:
        for step in (5, 6, 7):
            second.log(step, {"loss": step * 10})
            second.log(step, {"val": -step})
            time.sleep(0.3)
        second.finish({"accuracy": 0.5})
    assert second._mirror.wait(30)
    begun, *logged, last = calls(store)
    assert begun == ["init", "run", "online", "ohlcv-ml-factory", {"lr": 0.1}]
    assert last == ["finish", 0, {"accuracy": 0.5}]
    wanted = [["log", step, {"loss": step}] for step in range(1, 5)]
    wanted += [["log", step, {"loss": step * 10, "val": -step}] for step in (5, 6, 7)]
    assert logged == wanted


def test_mirror_finishes_after_run_process_is_killed(tmp_path, service, spawn):
    store = service()
    code = """
import sys, time
from ml_factory.tracking.tracker import Tracker
tracker = Tracker("run", {}, sys.argv[1] + "/w", sys.argv[1] + "/l")
tracker.log(1, {"loss": 1.0})
print("logged", flush=True)
time.sleep(60)
"""
    path = f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path / 'service'}"
    process = spawn(code, tmp_path, PYTHONPATH=path)
    assert process.stdout.readline() == "logged\n"
    process.kill()
    deadline = time.monotonic() + 30
    while not calls(store) or calls(store)[-1][0] != "finish":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert calls(store)[1:] == [["log", 1, {"loss": 1.0}], ["finish", 1, {}]]


@pytest.mark.parametrize(
    ("code", "output"),
    [("raise RuntimeError('on fire')", "on fire"),
     ("import subprocess; record(subprocess.Popen(['sleep', '1000']).pid); time.sleep(1000)", "did not answer")],
)  # fmt: skip
def test_broken_client_delays_nothing_and_costs_one_warning(
    track, service, tmp_path, monkeypatch, caplog, code, output
):
    monkeypatch.setattr(doors.wandb_process, "INIT_SECONDS", 2.0)
    store = service(code=code)
    tracker = track(mirror="offline")
    assert run_once(tracker) < 1
    assert not tracker._mirror.wait(30)
    assert len(caplog.records) == 1 and output in caplog.text
    assert not any(is_alive(pid) for [pid] in calls(store))  # what the client had started ended with it
    assert steps(tmp_path / "w") == [1, 2, 3, 4, 5]


def test_client_that_fails_during_the_run_costs_one_warning_then(track, service, caplog):
    service(code="raise RuntimeError('no')")
    tracker, deadline, step = track(), time.monotonic() + 30, 0
    while not caplog.records and time.monotonic() < deadline:
        step += 1
        tracker.log(step, {"loss": 1.0})
        time.sleep(0.05)
    tracker.finish()
    assert [record.getMessage().endswith("RuntimeError: no") for record in caplog.records] == [True]


def test_tracker_without_wandb_package_warns_once_for_all_runs(track, monkeypatch, caplog, tmp_path):
    """What W&B leaves in the current folder is not W&B."""
    (tmp_path / "cwd" / "wandb").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "cwd")])
    for _ in range(2):
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
        ("auto", {"ML_FACTORY_WANDB": "Offline", "WANDB_API_KEY": KEY}, "offline"),
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
    assert doors.wandb_mirror_mode(mode) == wanted
    with pytest.raises(SettingsError, match="'offline'"):
        doors.wandb_mirror_mode("offlin")
    monkeypatch.setenv("ML_FACTORY_WANDB", "of")
    with pytest.raises(SettingsError, match="ML_FACTORY_WANDB"):
        doors.wandb_mirror_mode(mode)


# ---------------------------------------------------------------- restoring


def snapshot_of(manager: CheckpointManager, folder: Path) -> doors.RunSnapshot:
    return doors.RunSnapshot(manager.run, str(manager.folder.folder), str(folder), "part-*.json")


def tracker_of(snapshot: doors.RunSnapshot, tmp_path: Path) -> doors.Tracker:
    return doors.Tracker("r", {}, tmp_path / "w", tmp_path / "l", snapshot=snapshot)


def keep(snapshot: doors.RunSnapshot, tmp_path: Path) -> None:
    """A short attempt that fails, mirrored and waited for."""
    tracker = tracker_of(snapshot, tmp_path)
    tracker.log(1, {"loss": 1.0})
    tracker.finish(status="failed")
    assert tracker._mirror.wait(60)


def test_restore_run_restores_last_checkpoints_of_all_phases_and_part_files(tmp_path, service):
    store = service()
    state = {"weights": np.arange(5.0), "history": [1, 2]}
    (tmp_path / "one").mkdir()
    with CheckpointManager(tmp_path / "one/c", run="r") as manager:
        manager.save_checkpoint("folds_lstm", {"weights": np.zeros(5)}, force=True)
        manager.save_checkpoint("folds_lstm", state, force=True)
        manager.save_checkpoint("folds_lstm_2", {"weights": np.ones(3)}, force=True)
        manager.save_checkpoint("given_back", {"weights": np.ones(3)}, force=True)
        manager.phase("given_back").remove_files()
        with CheckpointManager(tmp_path / "one/c", run="another") as other:
            other.save_checkpoint("p", {"a": 1}, force=True)
        manager.wait()
        (tmp_path / "one/part-0.json").write_text('{"a": 1}')
        keep(snapshot_of(manager, tmp_path / "one"), tmp_path)
    assert [path.name for path in store.iterdir()] == ["checkpoints-r"]
    (version,) = versions(store, "checkpoints-r")
    assert {path.name for path in version.iterdir()} == {
        "folds_lstm.ckpt", "folds_lstm_2.ckpt", "part-0.json",
    }  # fmt: skip
    with CheckpointManager(tmp_path / "two/c", run="r") as manager:
        snapshot = snapshot_of(manager, tmp_path / "two")
        assert doors.restore_from_wandb("r", doors.ArtifactRegistry(tmp_path / "m"), ["model"], snapshot)
        found = manager.load_latest_checkpoint("folds_lstm")
        assert found["sequence"] == 2 and found["state"]["history"] == [1, 2]
        assert found["state"]["weights"].tolist() == [0, 1, 2, 3, 4]
        assert manager.load_latest_checkpoint("folds_lstm_2")["state"]["weights"].tolist() == [1, 1, 1]
        assert manager.load_latest_checkpoint("given_back") is None
        assert (tmp_path / "two/part-0.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize("fault", ["changed", "another's checkpoint"])
def test_restore_run_of_damaged_checkpoints_raises_and_leaves_no_file(tmp_path, service, fault):
    store = service()
    with CheckpointManager(tmp_path / "c", run="r") as manager:
        for phase in ("p", "q"):
            manager.save_checkpoint(phase, {"a": 1}, force=True)
        manager.wait()
        keep(snapshot_of(manager, tmp_path), tmp_path)
    (version,) = versions(store, "checkpoints-r")
    last = version / "q.ckpt"
    if fault == "changed":
        last.write_bytes(last.read_bytes()[:-1] + b"x")
    else:
        with CheckpointManager(tmp_path / "d", run="s") as other:
            saved = other.save_checkpoint("q", {"a": 1}, force=True)
        shutil.copy(saved["path"], last)
    with CheckpointManager(tmp_path / "e", run="r") as manager:
        with pytest.raises(CheckpointError, match=r"another run|torn or was changed"):
            doors.restore_from_wandb("r", None, [], snapshot_of(manager, tmp_path / "f"))
        assert manager.list_checkpoints() == []


def test_session_that_was_taken_over_uploads_no_checkpoint(tmp_path, service):
    store = service()
    with CheckpointManager(tmp_path / "c", run="r") as manager:
        manager.save_checkpoint("p", {"a": 1}, force=True)
        manager.wait()
        with pytest.raises(doors.LeaseTakenOverError), tracker_of(snapshot_of(manager, tmp_path), tmp_path) as tracker:
            raise doors.LeaseTakenOverError("another session has it")
        assert tracker._mirror.wait(60) and not (store / "checkpoints-r").exists()


@pytest.mark.soak
def test_wandb_checkpoint_versions_keep_newest_and_user_aliased(tmp_path, service):
    store = service()
    with CheckpointManager(tmp_path / "c", run="r") as manager:
        for number in range(6):
            manager.save_checkpoint("p", {"number": number}, force=True)
            manager.wait()
            keep(snapshot_of(manager, tmp_path), tmp_path)
            if number == 1:
                about = store / "checkpoints-r/about-v1.json"
                about.write_text(json.dumps(json.loads(about.read_text()) | {"aliases": ["mine"]}))
        assert [path.name for path in versions(store, "checkpoints-r")] == ["v1", "v3", "v4", "v5"]
    with CheckpointManager(tmp_path / "d", run="r") as manager:
        assert doors.restore_from_wandb("r", None, [], snapshot_of(manager, tmp_path)) == "checkpoints"
        assert manager.load_latest_checkpoint("p")["state"] == {"number": 5}


@pytest.mark.parametrize(
    ("answer", "seconds", "more"),  # -60: the process does not end by its own deadline
    [("import time; time.sleep(1000)", 2.0, 900.0), ("import time; time.sleep(1000)", 2.0, -60.0),
     ("raise RuntimeError('no key " + KEY + "')", 60.0, 900.0)],
)  # fmt: skip
def test_run_that_failing_service_does_not_restore_warns_once_and_goes_offline(
    tmp_path, monkeypatch, service, caplog, answer, seconds, more
):
    service(answer)
    monkeypatch.setattr(doors.wandb_restore, "ANSWER_SECONDS", seconds)
    monkeypatch.setattr(doors.wandb_restore, "FETCH_SECONDS", more)
    settings = doors.RunSettings("DEMO", 5, "linear", "train", 0, True, "0" * 64)
    assert doors.wandb_mirror_mode("auto") == "online"
    with doors.open_run(Workspace(tmp_path), settings, doors.RunOptions(mirror="auto")):
        pass
    assert len(caplog.records) == 1 and "Nothing is restored" in caplog.text and KEY not in caplog.text
    assert doors.wandb_mirror_mode("auto") == "offline"  # nothing waits for it again


def test_restore_artifact_of_torn_copy_or_with_file_name_that_is_a_path_raises(tmp_path, service):
    folder = service() / "model-r" / "v0"
    kept = doors.ArtifactRegistry(tmp_path / "a").register("ES", "model", "gru", {"v": 1}, {"run_id": "r"})
    shutil.copytree(kept.path, folder)
    about, registry = folder.parent / "about-v0.json", doors.ArtifactRegistry(tmp_path / "b")
    about.write_text('{"type": "model", "metadata": {"forged names": ["../../outside"]}, "aliases": []}')
    with pytest.raises(WorkspaceError, match="cannot be a file's"):
        doors.restore_from_wandb("r", registry, ["model"])
    assert registry.list("ES") == []
    about.write_text('{"type": "model", "metadata": {}, "aliases": []}')
    assert doors.restore_from_wandb("r", registry, ["model"]) == "model" and registry.find("ES").hash == kept.hash
    (folder / "state.safetensors").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="torn"):
        doors.restore_from_wandb("r", registry, ["model"])
    assert doors.restore_from_wandb("unknown", registry, ["model"]) == "" and len(registry.list("ES")) == 1


# ---------------------------------------------------------------- going on


# ---------------------------------------------------------------- the real client


def files_that_hold(text: str, folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_tracker_with_real_wandb_offline_logs_steps_and_writes_no_key(tmp_path, monkeypatch, spawn, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("ML_FACTORY_WANDB", "offline")
    tracker = doors.Tracker("run/1", {"lr": 0.1, "mistake": f"Bearer {KEY}"}, tmp_path / "w", tmp_path / "l")
    for step in range(1, 6):
        tracker.log(step, {"loss": 1 / step, "note": KEY})
        if step == 3:
            tracker.flush()
    tracker.finish({"note": f"the key is {KEY}"})
    assert tracker._mirror.wait(90)
    lines = spawn(READ, tmp_path / "l").stdout.read().splitlines()
    assert [json.loads(line) for line in lines] == [[step, 1 / step] for step in range(1, 6)]
    assert files_that_hold("[redacted]", tmp_path) and not files_that_hold(KEY, tmp_path)
    assert capfd.readouterr() == ("", "")


def logged_steps(folder, spawn):
    """Return the content of the one .wandb file below the folder: [step, loss] of each point, and the artifacts'
    names.
    """
    lines = [json.loads(line) for line in spawn(READ, folder).stdout.read().splitlines()]
    return [one for one in lines if isinstance(one, list)], [one for one in lines if isinstance(one, str)]


@pytest.mark.soak
def test_cli_tracking_replay_writes_every_step_to_offline_file(tmp_path, spawn, call):
    pytest.importorskip("wandb")
    log = Workspace(tmp_path / "ws").results / "ES" / "train-x" / "log"
    first = doors.Tracker("train-x", {"lr": 0.1}, log, tmp_path / "l", mirror="off")
    for step in range(1, 9):
        first.log(step, {"loss": 1 / step})
    with doors.Tracker("train-x", {"lr": 0.1}, log, tmp_path / "l", mirror="off") as second:
        for step in range(6, 11):
            second.log(step, {"loss": 2 / step})
    words = ("tracking", "replay", "--run", "train-x", "--symbol", "ES", "--workspace", tmp_path / "ws")
    observed = json.loads(call(*words, "--offline", "--json")[1])
    assert observed["run"] == "train-x" and observed["steps"] == 10 and observed["mode"] == "offline"
    points, _ = logged_steps(log, spawn)
    assert points == [[step, 1 / step] for step in range(1, 6)] + [[step, 2 / step] for step in range(6, 11)]
    assert points == read_log(log)[["step", "loss"]].values.tolist()
    with pytest.raises(WorkspaceError, match="no log"):
        doors.replay_log_to_wandb(tmp_path / "nothing")


def test_replay_that_takes_too_long_ends_its_process_and_leaves_no_file(track, tmp_path, service, monkeypatch):
    store = service(code="record(os.getpid()); time.sleep(1000)")
    with track(mirror="off") as tracker:
        tracker.log(1, {"loss": 1.0})
    monkeypatch.setattr(doors.wandb_restore, "INIT_SECONDS", 2.0)
    monkeypatch.setattr(doors.wandb_restore, "FINISH_SECONDS", 0.0)
    with pytest.raises(WorkspaceError, match=r"did not take the log.*did not answer"):
        doors.replay_log_to_wandb(tmp_path / "w")
    [[pid]] = calls(store)
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list((tmp_path / "w").glob("mirror-replay.*"))


@pytest.mark.parametrize(("status", "warned"), [("W&B did not answer", 1), ("uploading", 0)])
def test_end_of_run_warns_only_of_mirror_that_has_not_connected(tmp_path, spawn, caplog, status, warned):
    (tmp_path / "status").write_text(status)
    mirror = doors.wandb_process.WandbMirrorProcess(
        spawn("import time; time.sleep(600)"), tmp_path / "status", tmp_path / "end", "online"
    )
    mirror.end({"status": "finished"}, 0.01)
    assert len(caplog.records) == warned
