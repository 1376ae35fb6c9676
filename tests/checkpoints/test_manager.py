"""Whatever happens to a save, what was acknowledged before it is there, and nothing torn is ever loaded."""

import errno
import json
import logging
import os
import pickle
import random
import re
import signal
import struct
import threading
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_factory.checkpoints import file_format, staging_buffer
from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.schedule import SaveSchedule
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.errors import CheckpointError, SettingsError


class Clock:
    def __init__(self):
        self.minutes = 0.0

    def __call__(self) -> float:
        return float(self.minutes) * 60


@pytest.fixture
def manager(tmp_path):
    with written(tmp_path) as manager:
        yield manager


def written(folder, run="r", keep_last=3, **tiers):
    """A manager whose saves are on the disk when they return."""
    return CheckpointManager(folder, run=run, keep_last=keep_last, background=False, tiers=StorageTiers(**tiers))


def save(manager, value, phase="p"):
    return manager.save_checkpoint(phase, {"value": value, "a": np.full(500, value)}, force=True)


def newest(manager, phase="p"):
    """The value that loads, after checking that it is whole; None without one."""
    checkpoint = manager.load_latest_checkpoint(phase)
    if checkpoint is None:
        return None
    state = checkpoint["state"]
    assert (state["a"] == state["value"]).all() and len(state["a"]) == 500
    return state["value"]


def slot_of(manager, which=-1):
    """Return the path of one of the checkpoints, by default the newest."""
    return Path(manager.list_checkpoints("p")[which]["path"])


# ---------------------------------------------------------------- the contract


def test_manager_without_checkpoints_returns_none_and_empty_list(manager):
    assert manager.load_latest_checkpoint("p") is None
    assert manager.list_checkpoints() == [] == manager.list_checkpoints("p")
    manager.wait()


def test_manager_save_and_load_return_state_metrics_and_facts(manager, tmp_path):
    info = manager.save_checkpoint(
        "train_xgboost", {"epoch": 3}, metrics={"loss": np.float32(0.5), "t": torch.tensor(2)}
    )
    got = written(tmp_path).load_latest_checkpoint("train_xgboost")
    assert got["state"] == {"epoch": 3} and got["skipped"] == []
    assert got["metrics"] == {"loss": 0.5, "t": 2}
    for key in ("sequence", "saved_at", "hash", "path", "bytes"):
        assert got[key] == info[key]
    assert os.path.getsize(info["path"]) == info["bytes"]


def test_manager_saves_values_at_time_of_call(tmp_path):
    array, tensor, inner = np.ones(4), torch.ones(4), [1]
    for background in (False, True):
        with CheckpointManager(tmp_path, run=f"r{background}", background=background) as manager:
            manager.save_checkpoint("p", {"a": array, "t": tensor, "l": inner}, force=True)
            array[:], inner[0] = 7, 7
            tensor.fill_(7)
            state = manager.load_latest_checkpoint("p")["state"]
            assert state["a"].tolist() == [1] * 4 and state["t"].tolist() == [1] * 4 and state["l"] == [1]
            array[:], inner[0] = 1, 1
            tensor.fill_(1)


def test_manager_timer_saves_every_two_minutes_then_every_thirty(tmp_path):
    clock = Clock()
    manager = CheckpointManager(tmp_path, schedule=SaveSchedule(clock=clock))
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
    with CheckpointManager(tmp_path, auto_save_minutes=0, schedule=SaveSchedule(clock=clock)) as manager:
        assert all(manager.save_checkpoint("p", {}) for _ in range(3))
    with CheckpointManager(tmp_path, auto_save_minutes=1, schedule=SaveSchedule(clock=clock)) as manager:
        assert [manager.save_checkpoint("p", {}) is not None for clock.minutes in (0, 0.5, 1, 1.5, 2)] == [
            1,
            0,
            1,
            0,
            1,
        ]
    for wrong in ({"auto_save_minutes": -1}, {"keep_last": 0}, {"run": "../up"}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            CheckpointManager(tmp_path, **wrong)
    with pytest.raises(SettingsError, match="first_save_minutes"):
        SaveSchedule(first_save_minutes=float("nan"))


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_manager_keeps_last_checkpoints_in_reused_slots(tmp_path, keep):
    """One slot more than is kept, at least two of them; made once, written in turn."""
    with written(tmp_path, keep_last=keep) as manager:
        inodes = set()
        for value in range(3 * keep + 4):
            save(manager, value)
            assert [one["sequence"] for one in manager.list_checkpoints("p")] == list(range(1, value + 2))[-keep:]
            inodes |= {path.stat().st_ino for path in tmp_path.glob("slot-*.ckpt")}
        assert len(inodes) == max(keep, 2) + 1 == len(list(tmp_path.glob("slot-*.ckpt")))


def test_manager_phases_and_runs_are_isolated(tmp_path):
    with CheckpointManager(tmp_path, run="one") as one, CheckpointManager(tmp_path, run="two") as two:
        save(one, 1)
        save(one, 2, "q")
        assert newest(two) is None and newest(one) == 1 and newest(one, "q") == 2
        save(two, 3)
        assert newest(one) == 1 and newest(two) == 3
        assert [info["phase"] for info in one.list_checkpoints()] == ["p", "q"]


def test_manager_ignores_and_keeps_slot_of_other_run(tmp_path):
    with written(tmp_path, "one") as one, written(tmp_path, "two") as two:
        foreign = Path(save(one, 1)["path"]).read_bytes()
        for _ in range(3):
            save(two, 2)
        slot = Path(two.list_checkpoints("p")[-1]["path"])
        slot.write_bytes(foreign)  # its manifest still says that it is of two
        assert newest(two) == 2 and newest(one) == 1
        for value in range(5):
            save(two, value)
        assert slot.read_bytes() == foreign


def test_manager_unsupported_state_or_metric_raises_before_write(manager, tmp_path):
    with pytest.raises(CheckpointError, match=r"state\['f'\]"):
        manager.save_checkpoint("p", {"f": print})
    with pytest.raises(CheckpointError, match="metric"):
        manager.save_checkpoint("p", {}, metrics={"m": [1]})
    assert not list(tmp_path.glob("slot-*"))
    with pytest.raises(SettingsError, match="'fold-1-of-5'"):
        manager.save_checkpoint("fold 1/of 5", {})


def test_manager_of_new_session_continues_sequence(tmp_path):
    for value in range(6):
        with written(tmp_path) as manager:
            assert save(manager, value)["sequence"] == value + 1
            assert newest(manager) == value


# ---------------------------------------------------------------- damaged files


def test_manager_with_truncated_newest_slot_loads_previous_checkpoint(manager):
    save(manager, 1)
    info = save(manager, 2)
    slot = Path(info["path"])
    whole = slot.read_bytes()
    for size in [*range(0, len(whole), 97), *range(len(whole) - 60, len(whole))]:
        slot.write_bytes(whole[:size])
        assert newest(manager) == 1
    checkpoint = manager.load_latest_checkpoint("p")
    assert checkpoint["sequence"] == 1 and len(checkpoint["skipped"]) == 1 and slot.name in checkpoint["skipped"][0]


def test_manager_with_torn_overwritten_slot_loads_previous_checkpoint(manager):
    """A slot overwritten in place and killed there holds the new beginning and the old end."""
    for value in range(4):
        save(manager, value)
    before = {path: path.read_bytes() for path in slot_of(manager).parent.glob("slot-*.ckpt")}
    slot = Path(save(manager, 4)["path"])
    old, new = before[slot], slot.read_bytes()
    assert len(old) == len(new)
    for cut in range(0, len(new) - 1, 101):
        slot.write_bytes(new[:cut] + old[cut:])
        assert newest(manager) == 3


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_manager_with_any_changed_byte_loads_previous_checkpoint(tmp_path_factory, at, flip):
    manager = written(tmp_path_factory.mktemp("flip"))
    save(manager, 1)
    slot = Path(save(manager, 2)["path"])
    data = bytearray(slot.read_bytes())
    data[at % len(data)] ^= flip
    slot.write_bytes(data)
    assert newest(manager) == 1
    manager.close()


class _Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code ran')",))


def _torch_zip(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", pickle.dumps(_Bomb()))


def _sparse(path):
    with open(path, "wb") as file:
        file.write((1 << 40).to_bytes(8, "little") + b'{"__metadata__":{"format":"ml_factory.checkpoint/4"')
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(pickle.dumps(_Bomb())), "pickle"),
        (_torch_zip, "zip archive"),
        (lambda path: path.write_bytes(b"\x1f\x8bxxxx"), "gzip"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(b"hello"), "does not start"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0" * 5000), "end mark"),
        (lambda path: path.write_bytes(path.read_bytes() + path.read_bytes()), "sizes disagree"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "end mark"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"checkpoint/4", b"checkpoint/9")),
            "later version of ml_factory.*update ml_factory",
        ),
        (
            lambda path: path.write_bytes(b"mlfckpt\n" + struct.pack("<IIQ", 3, 5, 5) + b"?" * 80),
            "earlier version of ml_factory.*train again",
        ),
        (_sparse, "sparse"),
        (lambda path: (path.unlink(), path.mkdir()), "refused"),
    ],
)
def test_manager_with_invalid_slot_reports_reason_and_loads_previous(manager, caplog, spoil, reason):
    save(manager, 1)
    spoil(Path(save(manager, 2)["path"]))
    checkpoint = manager.load_latest_checkpoint("p")
    assert checkpoint["state"]["value"] == 1
    assert len(checkpoint["skipped"]) == 1 and re.search(reason, checkpoint["skipped"][0])
    assert [info["sequence"] for info in manager.list_checkpoints("p")] == [1]
    assert not caplog.records


def test_manager_refuses_valid_container_with_pickle_payload(manager):
    save(manager, 1)
    kept = ("run", "phase", "saved_at", "metrics", "lease")
    info = {key: value for key, value in save(manager, 2).items() if key in kept}
    file_format.write_checkpoint_file(Disk(), slot_of(manager), {**info, "sequence": 9}, pickle.dumps(_Bomb()))
    checkpoint = manager.load_latest_checkpoint("p")
    assert checkpoint["state"]["value"] == 1 and "not a whole state" in checkpoint["skipped"][0]


def test_manager_without_valid_slot_warns_once_and_continues_sequence(manager, caplog):
    slot = Path(save(manager, 1)["path"])
    slot.write_bytes(b"hello")
    assert newest(manager) is None
    assert len(caplog.records) == 1 and "does not start" in caplog.text
    assert save(manager, 5)["sequence"] == 2  # a number never comes twice
    assert newest(manager) == 5


@pytest.mark.parametrize("damage", ["delete", "torn", "older", "list"])
def test_manager_rewrites_missing_or_stale_manifest_from_container(manager, damage):
    for value in range(5):
        save(manager, value)
    info = manager.list_checkpoints("p")[-2]
    file = Path(info["path"]).with_suffix(".json")
    observed = json.loads(file.read_text())
    assert {name: observed[name] for name in ("sequence", "bytes", "hash", "status")} == {
        "sequence": 4, "bytes": info["bytes"], "hash": info["hash"], "status": "held",
    }  # fmt: skip
    {
        "delete": file.unlink,
        "torn": lambda: file.write_text('{"sequence": 4'),
        "older": lambda: file.write_text(json.dumps({**observed, "sequence": 1, "hash": "0" * 64})),
        "list": lambda: file.write_text("[]"),
    }[damage]()
    assert newest(manager) == 4 and len(manager.list_checkpoints("p")) == 3
    assert save(manager, 9)["sequence"] == 6 and newest(manager) == 9
    assert json.loads(file.read_text()) == observed


def test_manager_ignores_file_times(manager, tmp_path):
    for value in range(4):
        save(manager, value)
    for number, path in enumerate(tmp_path.glob("slot-*")):
        os.utime(path, (number * 1000, random.Random(number).random() * 1e9))
    assert newest(manager) == 3
    save(manager, 4)
    assert newest(manager) == 4 and [one["sequence"] for one in manager.list_checkpoints()] == [3, 4, 5]


# ---------------------------------------------------------------- disks that refuse


def test_manager_on_full_disk_warns_once_and_keeps_checkpoint(manager, caplog, disk_full_beyond):
    save(manager, 1)
    with disk_full_beyond(1500):
        for value in (2, 3, 4):
            assert save(manager, value) is None
    assert newest(manager) == 1
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    assert "No space left" in caplog.text and "the run goes on" in caplog.text
    assert save(manager, 5) is not None and newest(manager) == 5


def test_manager_after_full_disk_retries_at_next_timer(tmp_path, disk_full_beyond):
    clock = Clock()
    with CheckpointManager(tmp_path, schedule=SaveSchedule(clock=clock), background=False) as manager:
        with disk_full_beyond(100):
            assert manager.save_checkpoint("p", {"a": np.ones(100)}) is None
        assert manager.save_checkpoint("p", {"a": np.ones(100)}) is None
        clock.minutes = 2
        assert manager.save_checkpoint("p", {"a": np.ones(100)}) is not None


def test_phase_is_saved_is_false_after_skipped_save(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, tiers=StorageTiers(deadline_seconds=0.1)) as manager:
        phase, gate, write = manager.phase("p"), threading.Event(), manager.store.home.write
        monkeypatch.setattr(manager.store.home, "write", lambda *given: gate.wait(60) and write(*given))
        assert not phase.is_saved()
        assert phase.save({"fold": 1}, force=True)
        assert phase.save({"fold": 2}, force=True) is None  # the first is still being written
        gate.set()
        assert not phase.is_saved()
        assert phase.latest()["state"] == {"fold": 1}
        assert phase.save({"fold": 2}, force=True) and phase.is_saved()


class Quota(Disk):
    """Refuses to let all files together grow past `bytes`, as a full Drive does in the middle of a write."""

    def __init__(self, folder):
        self.folder, self.bytes = folder, 1 << 40

    def write(self, descriptor, data, offset):
        others = sum(file.stat().st_size for file in self.folder.glob("slot-*.ckpt"))
        if others - self.size(descriptor) + max(self.size(descriptor), offset + len(data)) > self.bytes:
            raise OSError(errno.EDQUOT, "quota")
        return super().write(descriptor, data, offset)


def test_manager_with_quota_for_three_slots_continues_saving(tmp_path):
    """The fourth slot does not fit: the oldest good one, whose space is ours, is taken instead."""
    disk = Quota(tmp_path)
    with written(tmp_path, disk=disk) as manager:
        size = save(manager, 0)["bytes"]
        disk.bytes = size * 3.5
        for value in range(1, 10):
            assert save(manager, value) is not None
            assert newest(manager) == value
            assert len(manager.list_checkpoints("p")) == min(value + 1, 3)
        disk.bytes = size * 0.5  # now not even one: the two newest stay
        for value in range(10, 20):
            assert save(manager, value) is None
        assert newest(manager) == 9 and len(manager.list_checkpoints("p")) == 2


def test_manager_save_exceeding_quota_changes_no_slot(tmp_path, caplog):
    with written(tmp_path) as manager:
        size = save(manager, 0)["bytes"]
        save(manager, 1)
    before = {path: path.read_bytes() for path in tmp_path.glob("slot-*")}
    with written(tmp_path, quota_bytes=2 * size + 100) as manager:
        assert save(manager, 2) is None and "Not enough space" in caplog.text
        assert {path: path.read_bytes() for path in tmp_path.glob("slot-*")} == before


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("operation", ["open", "fsync", "ftruncate", "pwrite", "preadv"])
def test_manager_on_os_errors_keeps_acknowledged_checkpoints(manager, monkeypatch, caplog, code, operation):
    for value in range(5):
        save(manager, value)

    def fail(*arguments, **named):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fail)
        got = [save(manager, value) for value in (5, 6)]
    # One that is whole on the disk counts, even if the disk took back its word.
    assert newest(manager) in (4, 5, 6) and (newest(manager) == 6 or got[1] is None)
    assert len(manager.list_checkpoints("p")) >= 2
    assert save(manager, 7) is not None and newest(manager) == 7


def test_manager_detects_silently_dropped_write(manager, monkeypatch, caplog):
    save(manager, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "write", lambda disk, file, data, offset: len(data))
        assert save(manager, 2) is None
    assert "not saved" in caplog.text and newest(manager) == 1


# ---------------------------------------------------------------- killed in the middle

SAVER = """
import sys, numpy as np
from ml_factory.checkpoints import file_format
from ml_factory.checkpoints.manager import CheckpointManager
file_format._CHUNK = 1024  # many small writes, so that a kill at a random moment often falls between two
manager = CheckpointManager(sys.argv[1], run="r", background=False)
checkpoint = manager.load_latest_checkpoint("p")
value = checkpoint["state"]["value"] if checkpoint else 0
while True:
    value += 1
    manager.save_checkpoint("p", {"value": value, "a": np.full(300_000, value)}, force=True)
    print(value, flush=True)
"""


def test_manager_killed_during_saves_keeps_acknowledged_checkpoints(tmp_path, spawn):
    chance, kills, torn, value = random.Random(11), 0, 0, 0
    while kills < 4 or (torn < 1 and kills < 40):
        process = spawn(SAVER, tmp_path)
        first = process.stdout.readline()
        time.sleep(chance.uniform(0, 0.08))
        process.send_signal(signal.SIGKILL)
        lines = (first + process.stdout.read()).splitlines(keepends=True)
        acknowledged = max(int(line) for line in lines if line.endswith("\n"))
        with written(tmp_path) as manager:
            checkpoint = manager.load_latest_checkpoint("p")
            state = checkpoint["state"]
            assert (state["a"] == state["value"]).all() and len(state["a"]) == 300_000
            assert state["value"] >= acknowledged > value
            assert len(manager.list_checkpoints("p")) == min(3, state["value"])
        kills, torn, value = kills + 1, torn + len(checkpoint["skipped"]), state["value"]
    assert torn, "no kill fell into a write: the test proves nothing"


KILLED_AT_CALL = """
import os, signal, sys, numpy as np
from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.store import StorageTiers
class Deadly(Disk):
    left = 1 << 30
for name in [name for name in vars(Disk) if not name.startswith("_")]:
    def call(self, *arguments, method=getattr(Disk, name)):
        Deadly.left -= 1
        if not Deadly.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *arguments)
    setattr(Deadly, name, call)
manager = CheckpointManager(sys.argv[1], run="r", background=False, tiers=StorageTiers(disk=Deadly()))
for value in range(1, 6):
    manager.save_checkpoint("p", {"value": value, "a": np.full(500, value)}, force=True)
Deadly.left = int(sys.argv[2])
manager.save_checkpoint("p", {"value": 6, "a": np.full(500, 6)}, force=True)
print(int(sys.argv[2]) - Deadly.left, flush=True)
"""


def test_manager_killed_at_each_operation_of_save_loads_valid_checkpoint(tmp_path, spawn):
    count = int(spawn(KILLED_AT_CALL, tmp_path / "whole", 1 << 29).stdout.read())
    assert count > 60
    found = set()
    for call in sorted({*range(1, count + 1, 23), *range(count - 16, count + 1, 4)}):
        folder = tmp_path / str(call)
        process = spawn(KILLED_AT_CALL, folder, call)
        assert process.wait(60) == -signal.SIGKILL and process.stdout.read() == ""
        with written(folder) as manager:
            value = newest(manager)
            found.add(value)
            assert value in (5, 6) and len(manager.list_checkpoints("p")) == 3
            assert save(manager, 7)["sequence"] in (6, 7) and newest(manager) == 7
        assert len(list(folder.glob("slot-*.ckpt"))) <= 5
    assert found == {5, 6}


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


def test_managers_of_one_process_share_phase_until_last_close(tmp_path, spawn):
    first, second = written(tmp_path), written(tmp_path)
    save(first, 1)
    save(second, 2)
    save(first, 3)
    assert newest(second) == 3 and [one["sequence"] for one in first.list_checkpoints()] == [1, 2, 3]
    first.close()
    other = spawn(OWNER, tmp_path)
    assert other.stdout.readline() == "" and other.wait() == 1
    second.close()
    assert spawn(OWNER, tmp_path).stdout.readline() == "owned\n"


def test_manager_opened_in_forked_child_does_not_own_phase(tmp_path, spawn):
    code = """
import os, sys
from ml_factory.errors import CheckpointError
from ml_factory.checkpoints.manager import CheckpointManager
manager = CheckpointManager(sys.argv[1], run="r", background=False)
manager.save_checkpoint("p", {})
child = os.fork()
if child == 0:
    try:
        CheckpointManager(sys.argv[1], run="r").save_checkpoint("p", {}, force=True)
    except CheckpointError:
        os._exit(5)
    os._exit(6)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), manager.save_checkpoint("p", {}, force=True)["sequence"])
"""
    assert spawn(code, tmp_path).stdout.read() == "5 2\n"


# ---------------------------------------------------------------- threads, forks and pages


@pytest.mark.parametrize("background", [True, False])
def test_manager_concurrent_saves_of_two_threads_keep_states_apart(tmp_path, monkeypatch, background):
    """Each waits for the copy in memory until the other's was written."""
    between = threading.Barrier(2)
    copy = staging_buffer.StagingBuffer.copy

    def slow(stage, layout):
        payload = copy(stage, layout)
        with suppress(threading.BrokenBarrierError):
            between.wait(0.2)  # both are here at once only if nothing keeps them apart
        return payload

    monkeypatch.setattr(staging_buffer.StagingBuffer, "copy", slow)
    with CheckpointManager(tmp_path, run="r", background=background) as manager:
        threads = [threading.Thread(target=save, args=(manager, value, f"p{value}")) for value in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [newest(manager, f"p{value}") for value in (1, 2)] == [1, 2]


def test_manager_opened_before_fork_raises_in_child_and_works_in_parent(tmp_path, spawn):
    code = """
import os, sys
from ml_factory.errors import CheckpointError
from ml_factory.checkpoints.manager import CheckpointManager
with CheckpointManager(sys.argv[1], run="r", background=False) as manager:
    phase = manager.phase("p")
    phase.load()
    phase.save({"value": 1}, force=True)
    child = os.fork()
    if child == 0:
        refused = 0
        for attempt in (lambda: phase.save({"value": 2}, force=True), phase.load, phase.latest, phase.acquire,
                        phase.release_slots, manager.list_checkpoints, phase.latest_info):
            try:
                attempt()
            except CheckpointError as error:
                refused += "made by fork" in str(error) and "open a CheckpointManager" in str(error)
        phase.release()
        manager.close()
        os._exit(refused)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), phase.save({"value": 3}, force=True) is not None)
    print(manager.store.home.read_lease(phase.unit)["released"], manager.load_latest_checkpoint("p")["state"])
"""
    assert spawn(code, tmp_path).stdout.read() == "7 True\nFalse {'value': 3}\n"


def test_staging_buffer_allocates_pages_of_large_state_in_background(tmp_path, monkeypatch):
    monkeypatch.setattr(staging_buffer, "_INLINE_BYTES", 1000)
    made, grow = [], staging_buffer.StagingBuffer._grow
    monkeypatch.setattr(
        staging_buffer.StagingBuffer,
        "_grow",
        lambda stage, size: made.append(threading.current_thread().name) or grow(stage, size),
    )
    state = {"a": np.arange(100_000)}
    with CheckpointManager(tmp_path, run="r") as manager:
        phase, steps = manager.phase("p"), 0
        while phase.save(state) is None:
            manager.store.staging._allocator.join()
            steps += 1
        assert steps <= 1 and made == ["staging"]  # a step later, and no page is waited for
    with CheckpointManager(tmp_path, run="r") as manager:
        assert (manager.phase("p").load()["state"]["a"] == state["a"]).all()
        manager.store.staging._allocator.join()
        assert manager.phase("p").due() and manager.save_checkpoint("p", state) is not None  # the size was known
    assert made == ["staging", "staging"]
    with CheckpointManager(tmp_path, run="other") as manager:
        assert manager.save_checkpoint("p", state, force=True) is not None  # who asks for it now has it now
    assert made[2:] == ["MainThread"]
