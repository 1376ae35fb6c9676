"""The runtime's age comes from its process 1, not from the notebook."""

import json
import math
import os
import threading
import time

import pytest

from ml_factory.checkpoints import compute_session, session_lifetimes
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.save_status import SAVED
from ml_factory.errors import SettingsError, WorkspaceError


def write_proc(folder, started: float, name: str = "init") -> None:
    (folder / "1").mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    boot = 1_000_000
    fields = " ".join(["S", *["7"] * 18, str(int((started - boot) * ticks)), "9", "9"])
    (folder / "1" / "stat").write_text(f"1 ({name}) {fields}\n")
    (folder / "stat").write_text(f"cpu 1 2 3\nbtime {boot}\nprocesses 5\n")


@pytest.mark.parametrize("name", ["init", "a (b) c) S 5"])
def test_runtime_started_reads_start_of_process_1_from_proc(tmp_path, name):
    write_proc(tmp_path, 1_700_000_000, name)
    assert compute_session.runtime_start_time(tmp_path) == pytest.approx(1_700_000_000, abs=0.02)


def test_runtime_started_without_proc_returns_current_time(tmp_path):
    assert compute_session.runtime_start_time(tmp_path) == pytest.approx(time.time(), abs=5)


def test_hours_remaining_follows_tier_and_limit(monkeypatch):
    lived = {"hours": 1}
    monkeypatch.setattr(compute_session, "runtime_start_time", lambda: time.time() - 3600 * lived["hours"])
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    assert compute_session.configured_hours_remaining() == math.inf
    assert compute_session.configured_hours_remaining(limit_hours=3) == pytest.approx(2, abs=1e-3)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    lived["hours"] = 2
    assert compute_session.configured_hours_remaining() == pytest.approx(10, abs=1e-3)
    assert compute_session.configured_hours_remaining("pro") == pytest.approx(22, abs=1e-3)
    with pytest.raises(SettingsError, match="unheard of"):
        compute_session.configured_hours_remaining("unheard of")
    lived["hours"] = 1e6
    assert compute_session.configured_hours_remaining(limit_hours=3) == 0


def test_runtime_started_on_this_machine_is_in_the_past():
    assert 0 < compute_session.runtime_start_time() <= time.time()


def test_session_ending_is_true_when_only_last_save_fits(monkeypatch, tmp_path):
    lived = {"seconds": 0.0}
    monkeypatch.setattr(compute_session, "runtime_start_time", lambda: time.time() - lived["seconds"])
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "1")
    here = compute_session.ComputeSession(tmp_path / "sessions")
    for left, save, ends in ((60, 10, False), (60, 16, True), (40, 5, False), (20, 0, False), (14, 0, True)):
        lived["seconds"] = 3600 - left
        assert here.ending(save) is ends, (left, save)


def test_hours_left_beyond_tier_limit_uses_next_tier_and_warns(monkeypatch, tmp_path, caplog):
    lived = {"hours": 12 - 10 / 3600}
    compute_session._warn_outlived.cache_clear()
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    monkeypatch.setattr(compute_session, "runtime_start_time", lambda: time.time() - 3600 * lived["hours"])
    here = compute_session.ComputeSession(tmp_path / "free")
    assert here.ending(0) and not caplog.text
    for hours, left in ((13, 11), (13.5, 10.5), (23.99, 0.01), (25, math.inf), (400, math.inf)):
        lived["hours"] = hours
        assert compute_session.configured_hours_remaining() == pytest.approx(left, abs=1e-3) and here.ending(20) is (
            left < 0.02
        )
    assert [record.getMessage().count("ML_FACTORY_COLAB_TIER") for record in caplog.records] == [1, 1]
    assert (
        compute_session.configured_hours_remaining(limit_hours=12) == 0
        and compute_session.configured_hours_remaining("pro") == math.inf
    )


def test_session_record_without_known_limit_stores_null_limit(monkeypatch, tmp_path):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    for hours, left in ((13, 11 * 3600), (25, None)):
        monkeypatch.setattr(compute_session, "runtime_start_time", lambda hours=hours: time.time() - 3600 * hours)
        here = compute_session.ComputeSession(tmp_path / str(hours))
        here.record_alive()
        here._writer._thread.join()
        observed = written(tmp_path / str(hours))[0]
        assert here.mean_life == 2 * 3600
        assert observed["limit"] == (left and pytest.approx(observed["seen"] + left, abs=60))


def written(folder) -> list[dict]:
    """The records in a folder, once there is one; they are written by a thread."""
    while not (found := list(folder.glob("*.json"))):
        time.sleep(0.01)
    return [json.loads(path.read_text()) for path in found]


def test_session_opened_repeatedly_in_process_writes_one_record(monkeypatch, tmp_path):
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "12")
    for _ in range(5):
        one = compute_session.ComputeSession(tmp_path)
        one.record_alive()
        one._writer._thread.join()
    assert len(written(tmp_path)) == 1


def test_session_record_that_hangs_or_fails_does_not_stop_saves(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "12")
    hangs, calls = threading.Event(), []

    def write(path, observed):
        calls.append(path.parent.name)
        if path.parent.name == "hung":
            hangs.wait()
        raise WorkspaceError("full")

    monkeypatch.setattr(session_lifetimes.files, "write_json", write)
    hung, full = compute_session.ComputeSession(tmp_path / "hung"), compute_session.ComputeSession(tmp_path / "full")
    with CheckpointManager(tmp_path / "a", on_saved=hung.record_alive) as manager:
        for _ in range(3):
            manager.save_checkpoint("p", {"value": 1}, force=True)
            assert manager.wait(60)
        assert manager.phase("p").last_save.where == SAVED and calls == ["hung"]
    with CheckpointManager(tmp_path / "b", on_saved=full.record_alive, background=False) as manager:
        assert manager.save_checkpoint("p", {"value": 1}, force=True)["sequence"] == 1
    hung._writer._end()
    hangs.set()
    hung._writer._thread.join()
    full._writer._thread.join()
    assert calls == ["hung", "full"] and not caplog.text


def test_session_mean_life_defaults_to_two_hours_and_infinite_off_colab(monkeypatch, tmp_path):
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "12")
    first = compute_session.ComputeSession(tmp_path)
    assert first.mean_life == 2 * 3600
    first.record_alive()
    written(tmp_path)
    monkeypatch.delenv("ML_FACTORY_SESSION_HOURS")
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    unbounded = compute_session.ComputeSession(tmp_path / "none")
    unbounded.record_alive()
    assert unbounded.mean_life == math.inf and not unbounded.ending(1e9)
    assert not (tmp_path / "none").exists()
