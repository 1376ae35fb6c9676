"""Saves that a disk refuses, and writing processes that are killed, with real processes and files."""

import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ml_factory.checkpoints import disk as checkpoint_disk
from ml_factory.checkpoints import file_format, leases, save_writer, store
from ml_factory.checkpoints.child_slots import LOCAL_DISK, ChildSlots
from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.schedule import SaveSchedule
from ml_factory.checkpoints.slot_pool import CheckpointUnit, SlotWriterId
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.checkpoints.uploader import COPIED, REFUSED, SAVED
from ml_factory.errors import SessionOverError, WorkspaceError
from ml_factory.storage import worker_process
from ml_factory.storage.worker_process import abandon_worker_process, start_python_process

UNIT = CheckpointUnit("r", "p")
STATE = {"a": np.arange(4_000_000)}


def two_disks(folder: Path, deadline: float = 60, **options) -> CheckpointManager:
    tiers = StorageTiers(folder / "here", deadline_seconds=deadline)
    return CheckpointManager(folder / "there", run="r", tiers=tiers, **options)


class WriterKiller:
    """Kills the process that writes to the local disk in the middle of a write, as often as `left` says."""

    def __init__(self, monkeypatch):
        self.left, self.killed, self._call = 0, [], ChildSlots._call
        monkeypatch.setattr(ChildSlots, "_call", lambda slots, *args, **named: self.call(slots, *args, **named))

    def call(self, slots, method, *args, **named):
        if method == "write" and slots.disk == LOCAL_DISK and self.left:
            self.left -= 1
            self._call(slots, "list_unverified", UNIT)  # it runs now
            self.killed.append(slots._process.pid)
            os.kill(self.killed[-1], signal.SIGSTOP)
            threading.Timer(0.05, os.kill, (self.killed[-1], signal.SIGKILL)).start()
        return self._call(slots, method, *args, **named)


def wait_until(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def exists(pid: int) -> bool:
    """Return True for a process that lives or is a zombie."""
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("kills", [1, 6])
def test_manager_with_killed_writer_saves_every_forced_save(tmp_path, monkeypatch, caplog, kills):
    killer = WriterKiller(monkeypatch)
    with CheckpointManager(tmp_path, run="r", keep_last=5) as manager:
        for value in range(5 if kills == 1 else 1):
            killer.left = kills
            saved = manager.save_checkpoint("p", {**STATE, "value": value}, force=True)
            assert manager.wait(60) and saved["status"] == SAVED and not killer.left
            assert manager.load_latest_checkpoint("p")["state"]["value"] == value
        assert len(manager.list_checkpoints("p")) == value + 1
        assert not caplog.records and not [pid for pid in killer.killed if exists(pid)]


def test_manager_with_writer_killed_again_and_again_names_process_and_no_mount(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(save_writer, "_PAUSES", (0.0,))
    killer = WriterKiller(monkeypatch)
    with CheckpointManager(tmp_path, run="r") as manager:
        killer.left = 8
        assert manager.save_checkpoint("p", STATE, force=True) and manager.wait(60)
        assert manager.phase("p").last_save.where == REFUSED and len(killer.killed) == 8
        assert "The process that works on the local disk was killed" in caplog.text and "mount" not in caplog.text
        assert wait_until(manager.phase("p").due)
        assert not manager.safe_stop(10).safe


def test_manager_with_idle_writer_killed_leaves_no_zombie(tmp_path):
    with CheckpointManager(tmp_path, run="r") as manager:
        manager.save_checkpoint("p", STATE, force=True)
        assert manager.wait(60)
        child = manager.store.writer.child._process.pid
        os.kill(child, signal.SIGKILL)
        assert wait_until(lambda: not exists(child))
        assert manager.save_checkpoint("p", STATE, force=True) and manager.wait(60)
        assert manager.phase("p").last_save.where == SAVED


def test_abandoned_process_that_ends_later_leaves_no_zombie():
    process = start_python_process(["-c", "import time; time.sleep(600)"])
    abandon_worker_process(process, "a mount")
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: not exists(process.pid))


@pytest.mark.parametrize("size", [10, 2_000_000], ids=["small", "large"])
@pytest.mark.parametrize("fault", ["refuses", "hangs"])
def test_manager_writes_directly_to_mount_while_local_disk_refuses(tmp_path, monkeypatch, caplog, size, fault):
    monkeypatch.setattr(save_writer, "_ANSWER_SECONDS", 1.5)
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.2)
    here, state = tmp_path / "here", {"a": np.arange(size)}
    with two_disks(tmp_path) as manager:
        manager.save_checkpoint("p", {**state, "value": 0}, force=True)
        assert manager.wait(60)
        if fault == "hangs":  # no call gets further than the locks
            locks = [os.open(here / "locks" / name, os.O_RDWR) for name in ("pool.lock", "mount.lock")]
            for lock in locks:
                fcntl.flock(lock, fcntl.LOCK_EX)
        else:
            here.rename(tmp_path / "away")
            here.write_text("no folder")
        for value in (1, 2):
            saved = manager.save_checkpoint("p", {**state, "value": value}, force=True)
            assert manager.store.wait_home(60) and saved["status"] == COPIED
            assert Path(saved["path"]).parent.name == "there" and saved["sequence"] == value + 1
        assert caplog.text.count("written to the mount itself for now: ") == 1
        assert ("The local disk does not answer" in caplog.text) == (fault == "hangs")
        if fault == "hangs":
            for lock in locks:
                os.close(lock)
        else:
            here.unlink()
            (tmp_path / "away").rename(here)
    with two_disks(tmp_path) as manager:
        assert manager.phase("p").load()["state"]["value"] == 2
        saved = manager.save_checkpoint("p", {**state, "value": 3}, force=True)
        assert manager.wait(60) and Path(saved["path"]).parent.name == "here"
        assert manager.load_latest_checkpoint("p")["state"]["value"] == 3


def test_manager_with_both_disks_refusing_names_each(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(save_writer, "_PAUSES", ())
    for name in ("here", "there"):
        (tmp_path / name).write_text("no folder")
    with two_disks(tmp_path) as manager:
        manager.save_checkpoint("p", {"value": 1}, force=True)
        assert manager.store.wait_home(60) and manager.phase("p").last_save.where == REFUSED
    assert "Neither disk takes this checkpoint" in caplog.text
    assert f"local disk: The disk refused this file [{tmp_path / 'here'}" in caplog.text
    assert f"mount: The disk refused this file [{tmp_path / 'there'}" in caplog.text


def refuse_first_writes(manager: CheckpointManager, monkeypatch, count: int) -> list[int]:
    """Refuse that many writes to the local disk; return [the number left], which may be set again."""
    write, refusals = manager.store.home.write, [count]

    def refusing(*given):
        refusals[0] -= 1
        if refusals[0] >= 0:
            raise WorkspaceError("refused")
        return write(*given)

    monkeypatch.setattr(manager.store.home, "write", refusing)
    return refusals


def test_forced_save_is_repeated_with_pauses_and_given_up_for_newer_one(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, run="r") as manager:
        refusals = refuse_first_writes(manager, monkeypatch, 3)
        monkeypatch.setattr(save_writer, "_PAUSES", (0.01, 0.02, 0.03))
        assert manager.save_checkpoint("p", {"value": 1}, force=True) and manager.wait(60)
        assert manager.load_latest_checkpoint("p")["state"] == {"value": 1}
        monkeypatch.setattr(save_writer, "_PAUSES", (40.0,))
        refusals[0] = 1
        first = manager.save_checkpoint("p", {"value": 2}, force=True)
        second = manager.save_checkpoint("p", {"value": 3}, force=True)
        assert manager.wait(60) and (first["status"], second["status"]) == (REFUSED, SAVED)
        assert manager.load_latest_checkpoint("p")["state"] == {"value": 3}


def test_forced_save_is_not_given_up_for_save_of_another_phase(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, run="r") as manager:
        refuse_first_writes(manager, monkeypatch, 1)
        monkeypatch.setattr(save_writer, "_PAUSES", (1.0,))
        first = manager.save_checkpoint("p", {"value": 1}, force=True)
        other = manager.save_checkpoint("q", {"value": 2}, force=True)
        assert manager.wait(60) and (first["status"], other["status"]) == (SAVED, SAVED)


@pytest.mark.parametrize(("number", "refused"), [(errno.EBADF, False), (errno.EPERM, False), (errno.EIO, True)])
def test_save_on_file_system_that_syncs_no_folder_succeeds_and_after_error_is_refused(
    tmp_path, monkeypatch, number, refused
):
    def fail(folder):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint_disk, "flush_folder", fail)
    with CheckpointManager(tmp_path / "checkpoints", run="r", background=False) as manager:
        saved = manager.save_checkpoint("p", {"value": 1}, force=True)
        assert bool(saved and saved["status"] == SAVED) != refused


def test_manager_syncs_folder_of_each_new_slot_and_its_parents_once(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    folder = tmp_path / "a" / "b" / "checkpoints"
    with CheckpointManager(folder, run="r", background=False, keep_last=2) as manager:
        new = [len(list(folder.glob("slot-*.ckpt"))) for _ in range(6) if manager.save_checkpoint("p", {}, force=True)]
    assert new[-1] == 3 == synced.count(str(folder))
    first = next(path for path in synced if path.endswith(".ckpt"))
    assert synced[:2] == [first, str(folder)]  # the file, then its name, then the names of the folders above it
    assert [synced.count(str(one)) for one in folder.parents] == [1] * len(folder.parents)
    assert not [path for path in synced if path.endswith("leases")]


def test_write_flushes_large_state_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(file_format, "_FLUSH_BYTES", 1 << 23)
    calls, fsync = [], Disk.fsync
    monkeypatch.setattr(Disk, "fsync", lambda disk, file: calls.append(os.fstat(file).st_size) or fsync(disk, file))
    with CheckpointManager(tmp_path, run="r", background=False) as manager:
        saved = manager.save_checkpoint("p", STATE, force=True)
    assert len(calls) == 4 and calls[-1] == saved["bytes"] and max(np.diff([0, *calls])) <= (1 << 23) + (1 << 22)


def test_last_save_of_session_is_repeated_while_disk_refuses(tmp_path, monkeypatch):
    """No later save comes: it is tried as long as the deadline allows, not only as often as another forced one."""
    monkeypatch.setattr(save_writer, "_PAUSES", (0.2,))
    over: list[bool] = []
    schedule = SaveSchedule(ending=lambda seconds: bool(over))
    with CheckpointManager(tmp_path, run="r", schedule=schedule) as manager:
        manager.save_checkpoint("p", {"value": 1}, force=True)
        assert manager.wait(60)
        write, refusals = manager.store.home.write, iter([True] * 5)

        def refusing(*given):
            if next(refusals, False):
                raise WorkspaceError("refused")
            return write(*given)

        monkeypatch.setattr(manager.store.home, "write", refusing)
        over.append(True)
        with pytest.raises(SessionOverError, match="saved and stopped here"):
            manager.save_checkpoint("p", {"value": 2})
        over.clear()
        assert manager.load_latest_checkpoint("p")["state"] == {"value": 2}


def test_save_on_mount_alone_waits_until_lease_of_earlier_session_there_is_stale(tmp_path, monkeypatch):
    """The local disk takes nothing, and the session never loaded: the mount's lease may be a living session's."""
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 1.0)
    (tmp_path / "full").write_text("no folder can be made here")
    with two_disks(tmp_path) as earlier:
        assert earlier.save_checkpoint("p", {"value": 1}, force=True) and earlier.wait(30)
        earlier.store.heartbeat.stop()  # it is gone
        slots = {path: path.read_bytes() for path in (tmp_path / "there").glob("slot-*")}
        tiers = StorageTiers(tmp_path / "full", lease=SlotWriterId("later"))
        with CheckpointManager(tmp_path / "there", run="r", tiers=tiers) as later:
            later.save_checkpoint("p", {"value": 2})
            later.store.wait_home(30)
            assert later.phase("p").last_save.where == REFUSED
            assert {path: path.read_bytes() for path in (tmp_path / "there").glob("slot-*")} == slots
            later.save_checkpoint("p", {"value": 3}, force=True)  # repeated until the lease is stale
            assert later.store.wait_home(30) and later.phase("p").last_save.where == COPIED
            assert later.phase("p").latest_info()["lease"] == {"session": "later", "fence": 2}


def test_manager_whose_writer_cannot_be_started_counts_save_as_refused(tmp_path, monkeypatch):
    def no_process(*given, **named):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with CheckpointManager(tmp_path, run="r") as manager:
        phase = manager.phase("p")
        with monkeypatch.context() as patch:
            patch.setattr(worker_process, "start_python_process", no_process)
            phase.save(STATE)
            while phase.last_save is None:  # the first one makes its pages
                time.sleep(0.01)
                phase.save(STATE)
            phase.store.wait_home()
            assert phase.last_save.where == REFUSED and phase.due_in() <= 10.0
        phase.save(STATE, force=True)
        assert phase.is_saved() and manager.load_latest_checkpoint("p") is not None
