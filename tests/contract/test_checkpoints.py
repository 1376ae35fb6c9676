"""Whatever happens to a save, what was acknowledged before it is there, and nothing torn is ever loaded."""

import itertools
import json
import logging
import math
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import CheckpointError, SettingsError


class Clock:
    def __init__(self):
        self.minutes = 0.0

    def __call__(self) -> float:
        return float(self.minutes) * 60


@pytest.fixture
def manager(tmp_path):
    with CheckpointManager(tmp_path, run="r") as manager:
        yield manager


def save(manager, value, phase="p", **metrics):
    """Save, and return the description when the state is on the disk."""
    info = manager.save_checkpoint(phase, {"value": value, "a": np.full(500, value)}, force=True, metrics=metrics)
    manager.wait()
    return info


def newest(manager, phase="p"):
    """The value that loads, after checking that it is whole; None without one."""
    checkpoint = manager.load_latest_checkpoint(phase)
    if checkpoint is None:
        return None
    state = checkpoint["state"]
    assert (state["a"] == state["value"]).all() and len(state["a"]) == 500
    return state["value"]


# ---------------------------------------------------------------- the contract


def test_manager_without_checkpoints_returns_none_and_empty_list(manager):
    assert manager.load_latest_checkpoint("p") is None
    assert manager.list_checkpoints() == [] == manager.list_checkpoints("p")
    assert manager.wait()


def test_manager_save_and_load_return_state_metrics_and_facts(manager, tmp_path):
    metrics = {"loss": np.float32(0.5), "t": torch.tensor(2), "not yet": math.nan}
    info = manager.save_checkpoint("train_xgboost", {"epoch": 3}, metrics=metrics)
    manager.wait()
    got = CheckpointManager(tmp_path, run="r").load_latest_checkpoint("train_xgboost")
    assert got["state"] == {"epoch": 3} and got["skipped"] == []
    assert math.isnan(got["metrics"].pop("not yet")) and got["metrics"] == {"loss": 0.5, "t": 2}
    for key in ("sequence", "saved_at", "hash", "path", "bytes"):
        assert got[key] == info[key]
    assert os.path.getsize(info["path"]) == info["bytes"] and info["status"] == "saved"


def test_manager_saves_values_at_time_of_call(tmp_path):
    array, tensor, inner = np.ones(4), torch.ones(4), [1]
    with CheckpointManager(tmp_path, run="r") as manager:
        manager.save_checkpoint("p", {"a": array, "t": tensor, "l": inner}, force=True)
        array[:], inner[0] = 7, 7
        tensor.fill_(7)
        state = manager.load_latest_checkpoint("p")["state"]
        assert state["a"].tolist() == [1] * 4 and state["t"].tolist() == [1] * 4 and state["l"] == [1]


def test_manager_timer_saves_every_two_minutes_then_every_thirty(tmp_path):
    clock = Clock()
    manager = CheckpointManager(tmp_path, clock=clock)
    saved = []
    for clock.minutes in np.arange(0, 100, 0.5):
        assert manager.phase("p").due() is (manager.save_checkpoint("p", {"minutes": clock.minutes}) is not None)
        saved.append(manager.load_latest_checkpoint("p")["state"]["minutes"])
    assert sorted(set(saved)) == [*range(0, 30, 2), 58, 88]
    assert manager.save_checkpoint("p", {}) is None and not manager.phase("p").due()
    assert manager.save_checkpoint("p", {}, force=True) is not None
    assert manager.save_checkpoint("other", {}) is not None  # each phase has its own timer
    manager.close()


def test_manager_short_intervals_are_kept_and_invalid_options_raise(tmp_path):
    clock = Clock()
    with CheckpointManager(tmp_path, auto_save_minutes=0, clock=clock) as manager:
        assert all(manager.save_checkpoint("p", {}) for _ in range(3))
    with CheckpointManager(tmp_path, auto_save_minutes=1, clock=clock) as manager:
        due = [manager.save_checkpoint("p", {}) is not None for clock.minutes in (0, 0.5, 1, 1.5, 2)]
        assert due == [True, False, True, False, True]
    for wrong in ({"auto_save_minutes": -1}, {"keep_last": 0}, {"run": "../up"}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            CheckpointManager(tmp_path, **wrong)


@pytest.mark.parametrize("keep", [1, 3, 5])
def test_manager_keeps_last_checkpoints_and_best_in_few_files(tmp_path, keep):
    """Two files more than are kept, at least two of them: the best, and the one that is written."""
    with CheckpointManager(tmp_path, run="r", keep_last=keep) as manager:
        best = save(manager, 0, val_loss=0.1)
        for value in range(1, 3 * keep + 4):
            save(manager, value, val_loss=1.0)
            assert [one["sequence"] for one in manager.list_checkpoints("p")] == list(range(1, value + 2))[-keep:]
        assert len(list(tmp_path.glob("r/*"))) <= max(keep, 2) + 2
        for path in tmp_path.glob("r/*"):
            if str(path) != best["path"]:
                path.unlink()
        assert newest(manager) == 0


def test_manager_phases_and_runs_are_isolated(tmp_path):
    with CheckpointManager(tmp_path, run="one") as one, CheckpointManager(tmp_path, run="two") as two:
        save(one, 1)
        save(one, 2, "q")
        save(one, 5, "p.0")  # a name that looks like a file of the other phase
        assert newest(two) is None and newest(one) == 1 and newest(one, "q") == 2 and newest(one, "p.0") == 5
        save(two, 3)
        assert newest(one) == 1 and newest(two) == 3
        assert [info["phase"] for info in one.list_checkpoints()] == ["p", "p.0", "q"]
        two.wait()
        (tmp_path / "two/p.0.ckpt").write_bytes((tmp_path / "one/p.0.ckpt").read_bytes())
        assert newest(two) is None  # a file of the other run under this one's name


def test_manager_unsupported_state_or_metric_raises_before_write(manager, tmp_path):
    with pytest.raises(CheckpointError, match=r"state\['f'\]"):
        manager.save_checkpoint("p", {"f": print})
    with pytest.raises(CheckpointError, match="metric"):
        manager.save_checkpoint("p", {}, metrics={"m": [1]})
    assert not list(tmp_path.rglob("*.ckpt"))
    with pytest.raises(SettingsError, match="'fold-1-of-5'"):
        manager.save_checkpoint("fold 1/of 5", {})


def test_manager_of_new_session_continues_sequence(tmp_path):
    for value in range(6):
        with CheckpointManager(tmp_path, run="r") as manager:
            assert save(manager, value)["sequence"] == value + 1
            assert newest(manager) == value


def test_manager_deletes_files_of_finished_phase_and_keeps_the_users(tmp_path):
    with (
        CheckpointManager(tmp_path, run="r", during_training=True) as mine,
        CheckpointManager(tmp_path, run="r") as manager,
    ):
        save(mine, 1)
        save(manager, 2)
        save(manager, 3, "q")
        manager.phase("p").remove_files()
        assert newest(manager) is None and newest(manager, "q") == 3 and newest(mine) == 1


# ---------------------------------------------------------------- damaged files


def test_manager_with_damaged_newest_file_loads_previous_and_reports_reason(manager, caplog):
    save(manager, 1)
    path = Path(save(manager, 2)["path"])
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:40], b"", b"hello", whole[:-1] + b"?"):
        path.write_bytes(content)
        checkpoint = manager.load_latest_checkpoint("p")
        assert checkpoint["state"]["value"] == 1
        assert len(checkpoint["skipped"]) == 1 and path.name in checkpoint["skipped"][0]
        assert [info["sequence"] for info in manager.list_checkpoints("p")] == [1]
    assert not caplog.records
    assert save(manager, 3) and newest(manager) == 3


def test_manager_without_valid_file_warns_once_and_continues(manager, caplog):
    Path(save(manager, 1)["path"]).write_bytes(b"hello")
    assert newest(manager) is None
    assert len(caplog.records) == 1 and "torn or was changed" in caplog.text
    assert save(manager, 5) and newest(manager) == 5


def test_manager_ignores_file_times(manager, tmp_path):
    for value in range(4):
        save(manager, value)
    for number, path in enumerate(tmp_path.glob("r/*")):
        os.utime(path, (number * 1000, random.Random(number).random() * 1e9))
    assert newest(manager) == 3
    save(manager, 4)
    assert newest(manager) == 4 and [one["sequence"] for one in manager.list_checkpoints()] == [3, 4, 5]


# ---------------------------------------------------------------- disks that refuse


def test_manager_on_full_disk_warns_once_and_keeps_checkpoint(tmp_path, caplog, disk_full_beyond):
    with CheckpointManager(tmp_path, 0, run="r") as manager:
        save(manager, 1)
        with disk_full_beyond(1500):
            for value in (2, 3, 4):
                refused = manager.save_checkpoint("p", {"value": value, "a": np.full(500, value)})
                assert manager.wait() and refused["status"] == "not saved"
        assert newest(manager) == 1
        assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
        assert "No space left" in caplog.text and "the run continues" in caplog.text
        assert save(manager, 5)["status"] == "saved" and newest(manager) == 5


def test_manager_repeats_forced_save_until_disk_takes_it(tmp_path, disk_full_beyond):
    with CheckpointManager(tmp_path, run="r") as manager:
        with disk_full_beyond(100):
            state = {"value": 1, "a": np.full(500, 1)}
            assert manager.save_checkpoint("p", state, force=True)["status"] == "in memory"
            time.sleep(0.1)
        assert manager.wait() and newest(manager) == 1


def test_manager_after_full_disk_retries_at_next_timer(tmp_path, disk_full_beyond):
    clock = Clock()
    with CheckpointManager(tmp_path, clock=clock) as manager:
        with disk_full_beyond(100):
            manager.save_checkpoint("p", {"a": np.ones(100)})
            manager.wait()
        assert 0 < manager.phase("p").due_in() <= 10  # soon, not at the usual time
        assert manager.save_checkpoint("p", {"a": np.ones(100)}) is None
        clock.minutes = 40
        assert manager.save_checkpoint("p", {"a": np.ones(100)}) is not None and manager.wait()
        assert manager.phase("p").due_in() == 120  # a run without a checkpoint stays young


# ---------------------------------------------------------------- killed in the middle

SAVER = """
import sys, numpy as np
from ml_factory.checkpoints.manager import CheckpointManager
manager = CheckpointManager(sys.argv[1], run="r")
checkpoint = manager.load_latest_checkpoint("p")
value = checkpoint["state"]["value"] if checkpoint else 0
while True:
    value += 1
    manager.save_checkpoint("p", {"value": value, "a": np.full(300_000, value)}, force=True)
    manager.wait()
    print(value, flush=True)
"""


def test_manager_killed_during_saves_keeps_acknowledged_checkpoints(tmp_path, spawn):
    chance, value = random.Random(11), 0
    for _ in range(5):
        process = spawn(SAVER, tmp_path)
        first = process.stdout.readline()
        time.sleep(chance.uniform(0, 0.08))
        process.send_signal(signal.SIGKILL)
        lines = (first + process.stdout.read()).splitlines(keepends=True)
        acknowledged = max(int(line) for line in lines if line.endswith("\n"))
        with CheckpointManager(tmp_path, run="r") as manager:
            state = manager.load_latest_checkpoint("p")["state"]
            assert (state["a"] == state["value"]).all() and len(state["a"]) == 300_000
            assert state["value"] >= acknowledged > value
            assert len(manager.list_checkpoints("p")) == min(3, state["value"])
        value = state["value"]


# ---------------------------------------------------------------- one owner

OWNER = """
import sys, time
from ml_factory.checkpoints.manager import CheckpointManager
manager = CheckpointManager(sys.argv[1], run="r")
manager.phase("p").load()
print("owned", flush=True)
time.sleep(60)
"""
FORKING_OWNER = OWNER.replace('print("owned"', 'import os\nif os.fork() == 0: time.sleep(60)\nprint("owned"')


@pytest.mark.parametrize("code", [OWNER, FORKING_OWNER])
def test_manager_phase_owned_by_live_process_raises_in_second_process(tmp_path, spawn, code):
    process = spawn(code, tmp_path)
    assert process.stdout.readline() == "owned\n"
    with CheckpointManager(tmp_path, run="r") as manager:
        for attempt in (lambda: manager.phase("p").load(), lambda: save(manager, 1)):
            with pytest.raises(CheckpointError, match=rf"Another process.*process {process.pid}"):
                attempt()
        assert newest(manager) is None  # looking is free
        save(manager, 2, "q")
        process.kill()  # nothing is released properly, and a forked child may still hold the lock
        process.wait()
        assert manager.phase("p").load() is None
        save(manager, 1)


def test_phase_refused_by_renewed_lease_keeps_neither_lock_nor_file(tmp_path, spawn, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds, real=time.sleep: real(min(seconds, 0.1)))
    with CheckpointManager(tmp_path, run="r") as manager:
        save(manager, 1)
    (lease,) = tmp_path.glob("leases/*")
    beats = itertools.count()

    def beat() -> None:  # another machine that shares this folder
        record = {"session": "other", "fence": 7, "host": "far", "lock": "", "seen": time.time(), "released": False}
        lease.write_text(json.dumps(record | {"beat": next(beats)}))

    beat()
    with CheckpointManager(tmp_path, run="r") as manager:
        timer = threading.Timer(0.5, beat)
        timer.start()
        with pytest.raises(CheckpointError, match="Another session is working on run r, phase p"):
            manager.phase("p").load()
        timer.join()
        assert [info["sequence"] for info in manager.list_checkpoints()] == [1]
        beat()
        lease.write_text(lease.read_text().replace("false", "true"))  # released
        assert spawn(OWNER, tmp_path).stdout.readline() == "owned\n"  # nobody holds the lock


def test_managers_of_one_process_share_phase_until_last_close(tmp_path, spawn):
    first, second = (CheckpointManager(tmp_path, run="r") for _ in range(2))
    save(first, 1)
    save(second, 2)
    save(first, 3)
    assert newest(second) == 3 and [one["sequence"] for one in first.list_checkpoints()] == [1, 2, 3]
    first.close()
    other = spawn(OWNER, tmp_path)
    assert other.stdout.readline() == "" and other.wait() == 1
    second.close()
    assert spawn(OWNER, tmp_path).stdout.readline() == "owned\n"


def test_manager_opened_before_fork_raises_in_child_and_works_in_parent(tmp_path, spawn):
    code = """
import os, sys
from ml_factory.errors import CheckpointError
from ml_factory.checkpoints.manager import CheckpointManager
with CheckpointManager(sys.argv[1], run="r") as manager:
    phase = manager.phase("p")
    phase.load()
    phase.save({"value": 1}, force=True)
    child = os.fork()
    if child == 0:
        refused = 0
        for attempt in (lambda: phase.save({"value": 2}, force=True), phase.load, phase.latest, phase.acquire,
                        phase.remove_files, lambda: CheckpointManager(sys.argv[1], run="r").phase("p").load()):
            try:
                attempt()
            except CheckpointError as error:
                refused += 1
        phase.release()
        manager.close()
        os._exit(refused)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), phase.save({"value": 3}, force=True) is not None)
    print(manager.load_latest_checkpoint("p")["state"])
"""
    assert spawn(code, tmp_path).stdout.read() == "6 True\n{'value': 3}\n"


def test_manager_saves_one_after_the_other_give_each_file_its_own_values(tmp_path):
    """Also of several phases, of states that grow and shrink, and of a save inside another one: the memory of a save
    is used again.
    """

    class SlowTensor(torch.Tensor):
        def detach(self):
            save_with_history("inner", 100)
            return super().detach()

    def save_with_history(phase, value, size=100_000, **more):
        state = {"small": np.ones(3, np.int8), "a": np.full(size, value), "history": ["epoch"] * value, **more}
        saves.append((manager.save_checkpoint(phase, state, force=True), state["a"]))

    saves = []
    with CheckpointManager(tmp_path, run="r", keep_last=9) as manager:
        for value, size in enumerate((100_000, 100_000, 100_500, 100_000, 50_000, 400_000, 100_000)):
            save_with_history(f"p{value % 2}", value, size)
        save_with_history("outer", 99, slow=torch.ones(50).as_subclass(SlowTensor))
        manager.wait()
        for saved, array in saves:
            assert np.array_equal(load_file(saved["path"])["['a']"], array)
        found = [manager.load_latest_checkpoint(phase)["state"] for phase in ("p1", "p0", "inner", "outer")]
        assert len(saves) == 9 and found[0]["history"] == ["epoch"] * 5
        assert all(state["a"].flags.aligned for state in found)


def test_manager_concurrent_saves_of_two_threads_keep_states_apart(tmp_path):
    with CheckpointManager(tmp_path, run="r") as manager:
        threads = [threading.Thread(target=save, args=(manager, value, f"p{value}")) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [newest(manager, f"p{value}") for value in range(4)] == [0, 1, 2, 3]


def test_manager_loads_a_checkpoint_with_its_state_in_memory_once(tmp_path, spawn):
    """At most 1.5 times the state, so that a T5-base with AdamW resumes on a machine of 12.7 GB."""
    with CheckpointManager(tmp_path, run="r") as manager:
        manager.save_checkpoint("p", {"weights": [np.full(10_000_000, layer, np.float32) for layer in range(5)]}, True)
    code = """if True:
        import sys
        from ml_factory import CheckpointManager
        def kilobytes(name):
            return int(open("/proc/self/status").read().split(name + ":")[1].split()[0])
        manager = CheckpointManager(sys.argv[1], run="r")
        manager.load_latest_checkpoint("absent")
        before = kilobytes("VmRSS")
        state = manager.load_latest_checkpoint("p")["state"]
        print(state["weights"][4][-1], 1024 * (kilobytes("VmHWM") - before))
    """
    value, beyond = spawn(code, tmp_path).communicate(timeout=60)[0].split()
    assert float(value) == 4 and 0.9 < int(beyond) / 200e6 < 1.5
