"""A mount that hangs, dies or loses writes costs the training nothing: a child process does its file operations.

A mount that hangs is a folder with a named pipe in it: opening one blocks until another process writes to it, as a call
into a dead mount does. `tests/faults` has real mounts.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ml_factory.checkpoints import save_writer
from ml_factory.checkpoints.child_slots import LOCAL_DISK, ChildSlots
from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.file_format import read_checkpoint_file_header
from ml_factory.checkpoints.leases import LeaseTakenOverError
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.safe_stop import safe_stop
from ml_factory.checkpoints.slot_pool import CheckpointUnit, SlotPool, SlotWriterId
from ml_factory.checkpoints.slots import Slots
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.checkpoints.uploader import COPIED, LOCAL
from ml_factory.errors import UnresponsiveMountError, WorkspaceError
from ml_factory.storage import mounts, worker_process
from ml_factory.storage.files import files
from tests.storage.hanging_file import make_hanging_file

UNIT = CheckpointUnit("r", "p")
LONG = 90.0  # seconds no test waits


@pytest.fixture
def drive(tmp_path):
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def manager_of(drive, deadline=LONG, background=True, local="local", **tiers):
    tiers = StorageTiers(drive.parent / local, deadline_seconds=deadline, **tiers)
    return CheckpointManager(drive, run="r", background=background, tiers=tiers)


def hang(drive):
    make_hanging_file(drive / "slot-aaaaaa.ckpt")


def heal(drive):
    (drive / "slot-aaaaaa.ckpt").unlink()


def save(manager, value):
    return manager.save_checkpoint("p", {"value": value}, force=True)


def value_of(manager):
    return manager.load_latest_checkpoint("p")["state"]["value"]


def forget_local(drive):
    for path in (drive.parent / "local").glob("slot-*"):
        path.unlink()


def test_manager_on_mount_saves_locally_and_copies_to_mount(drive):
    with manager_of(drive) as manager:
        saved = [save(manager, value) for value in range(6)]
        assert manager.wait(LONG)
        assert saved[-1]["status"] == COPIED == manager.phase("p").last_save.where
        assert "upload unconfirmed" in str(manager.phase("p").last_save)
    forget_local(drive)  # an empty machine
    with manager_of(drive) as manager:
        assert value_of(manager) == 5
        assert [info["sequence"] for info in manager.list_checkpoints("p")][-1] == 6
        save(manager, 7)
    forget_local(drive)
    with manager_of(drive) as manager:
        assert value_of(manager) == 7
    assert len(list(drive.glob("slot-*.ckpt"))) <= 5


def test_manager_on_hanging_mount_saves_locally_and_copies_after_recovery(drive, caplog):
    with manager_of(drive, deadline=2) as manager:
        save(manager, 1)
        assert manager.wait(LONG)
        hang(drive)
        for value in range(2, 6):
            saved = save(manager, value)
            assert manager.store.wait_home(LONG) and saved["status"] == LOCAL
        assert not manager.wait(LONG)  # gives up after its deadline
        assert value_of(manager) == 5
        assert caplog.text.count("stay on the local disk for now") == 1 and "does not answer" in caplog.text
        stopped = manager.safe_stop(0.5)
        assert not stopped.safe and "Not confirmed" in stopped.text and "saved locally" in stopped.text
        heal(drive)
        assert manager.wait(LONG) and saved["status"] == COPIED
        assert "holds every newest checkpoint" in caplog.text
        assert manager.store.mount.list_unverified(UNIT)[0]["sequence"] == 5


def test_phase_due_retries_unresponsive_mount_after_delay(drive):
    with manager_of(drive, deadline=2) as manager:
        hang(drive)
        save(manager, 1)
        while not manager.store.uploader.unresponsive:
            time.sleep(0.01)
        heal(drive)
        manager.store.uploader._next_try = 0
        assert not manager.phase("p").due()
        assert manager.store.uploader.executor.wait(LONG) and not manager.store.uploader.pending


def test_manager_copies_local_checkpoints_of_earlier_session_to_mount(drive):
    hang(drive)
    with manager_of(drive, deadline=2, lease=SlotWriterId("earlier")) as manager:
        save(manager, 1)
    heal(drive)
    with manager_of(drive, lease=SlotWriterId("later")) as manager:
        assert manager.phase("p").load()["state"] == {"value": 1}
        assert manager.wait(LONG) and manager.store.mount.read_lease(UNIT)["fence"] == 2
        assert manager.store.mount.list_unverified(UNIT)[0]["sequence"] == 1


def test_manager_prefers_later_session_on_mount_over_local_checkpoints(drive):
    """Whatever its number: the other session went on from an older checkpoint, and this machine's never went up."""
    with manager_of(drive, lease=SlotWriterId("here")) as manager:
        save(manager, "common")
        assert manager.wait(LONG)
    other = manager_of(drive, local="other", lease=SlotWriterId("there"))
    with manager_of(drive, lease=SlotWriterId("here")) as manager:
        drive.rename(drive.parent / "gone")
        drive.write_text("a mount that is away")
        saved = [save(manager, f"left behind {number}") for number in range(3)]
    drive.unlink()
    (drive.parent / "gone").rename(drive)
    with other:
        assert other.phase("p").load()["state"] == {"value": "common"}
        assert save(other, "later") and other.wait(LONG)
        assert other.store.mount.list_unverified(UNIT)[0]["sequence"] < saved[-1]["sequence"]
    with manager_of(drive, lease=SlotWriterId("back here")) as manager:
        assert manager.phase("p").load()["state"] == {"value": "later"}
        assert manager.list_checkpoints("p")[-1]["lease"]["session"] == "there"


@pytest.mark.parametrize("torn", ["the newest", "all"])
def test_manager_with_torn_local_slot_loads_checkpoint_from_mount(drive, torn):
    with manager_of(drive) as manager:
        for value in (1, 2, 3):
            save(manager, value)
            assert manager.wait(LONG)
    here = sorted(
        (drive.parent / "local").glob("slot-*.ckpt"),
        key=lambda path: read_checkpoint_file_header(Disk(), path).info["sequence"],
    )
    for path in here[-1:] if torn == "the newest" else here:
        content = bytearray(path.read_bytes())
        content[-100] ^= 1  # of the payload: its two ends still say that all is well
        path.write_bytes(content)
    with manager_of(drive) as manager:
        found = manager.load_latest_checkpoint("p")
        assert found["state"]["value"] == 3
        assert any(here[-1].name in reason and "hash" in reason for reason in found["skipped"])


def test_superseded_manager_release_slots_raises_and_returns_no_slot(drive):
    """One machine's session hears only from the mount that another one's has gone on."""
    with manager_of(drive) as ours, manager_of(drive, local="other") as other:
        ours.phase("p").load()
        save(ours, 1)
        assert ours.wait(LONG)
        other.phase("p").lease_holder.lease = SlotWriterId("zzz", fence=9)
        other.phase("p").lease_holder.held = True
        save(other, 2)
        assert other.wait(LONG)
        save(ours, 3)
        with pytest.raises(LeaseTakenOverError):
            ours.phase("p").release_slots()
        again = Slots(SlotPool(drive))
        assert [info["sequence"] for info in again.list_unverified(UNIT) if info["lease"]["fence"] == 9]
        assert not [slot.path for slot in again.pool.scan() if slot.is_returned]


def test_phase_load_without_local_checkpoint_on_hanging_mount_raises(drive):
    with manager_of(drive) as manager:
        save(manager, 1)
    forget_local(drive)
    hang(drive)
    silent = pytest.raises(WorkspaceError, match=r"does not answer.*mount it again")
    with manager_of(drive, deadline=0.5) as manager, silent:
        manager.phase("p").load()
    heal(drive)
    with manager_of(drive) as manager:
        assert value_of(manager) == 1


LEAVES = """
import sys
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.store import StorageTiers
manager = CheckpointManager(sys.argv[1], run="r", tiers=StorageTiers(sys.argv[2], deadline_seconds=600))
manager.save_checkpoint("p", {"value": 1}, force=True)
manager.store.wait_home()
print("end", flush=True)
"""


def test_manager_process_exits_while_mount_hangs(drive, spawn):
    hang(drive)
    process = spawn(LEAVES, drive, drive.parent / "local")
    assert process.stdout.readline() == "end\n"
    assert process.wait(30) == 0
    heal(drive)
    with manager_of(drive) as manager:
        assert value_of(manager) == 1


def test_child_slots_with_killed_worker_raises_and_restarts_worker(drive):
    slots = ChildSlots(drive, drive.parent / "lock", SlotWriterId())
    hang(drive)
    caught = []

    def query():
        try:
            slots.list_unverified(UNIT)
        except WorkspaceError as error:
            caught.append(str(error))

    thread = threading.Thread(target=query)
    thread.start()
    while slots._process is None:
        time.sleep(0.01)
    os.kill(slots._process.pid, signal.SIGKILL)
    thread.join(LONG)
    assert len(caught) == 1 and "the child process died" in caught[0]
    heal(drive)
    assert slots.list_unverified(UNIT) == []
    slots.close()


def test_child_slots_of_hanging_local_disk_raise_error_that_names_no_mount(drive):
    slots = ChildSlots(drive, drive.parent / "lock", SlotWriterId(), disk=LOCAL_DISK, deadline=1)
    hang(drive)
    with pytest.raises(WorkspaceError, match=r"The local disk does not answer.*check this disk") as raised:
        slots.list_unverified(UNIT)
    assert "mount" not in str(raised.value)
    slots.close()


def test_child_slots_worker_has_lower_priority_and_separate_process_group(drive):
    """Niceness counts among the processes of one session only, where the kernel groups by session (autogroup)."""
    slots = ChildSlots(drive, drive.parent / "lock", SlotWriterId())
    assert slots.list_unverified(UNIT) == []
    child = slots._process.pid
    assert os.getpriority(os.PRIO_PROCESS, child) > os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getsid(child) == os.getsid(0) and os.getpgid(child) != os.getpgid(0)
    slots.close()


ORPHANED = """
import sys, time
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.store import StorageTiers
manager = CheckpointManager(sys.argv[1], run="r", tiers=StorageTiers(sys.argv[2], deadline_seconds=600))
manager.save_checkpoint("p", {"value": 1}, force=True)
while manager.store.mount._process is None:
    time.sleep(0.01)
time.sleep(1)  # it is inside the pipe by now
print(manager.store.mount._process.pid, flush=True)
time.sleep(600)
"""


def test_child_slots_worker_exits_after_parent_is_killed(drive, spawn):
    hang(drive)
    process = spawn(ORPHANED, drive, drive.parent / "local")
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    for _ in range(3000):
        try:
            with open(f"/proc/{child}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    break
        except FileNotFoundError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the child lives on")


@pytest.mark.parametrize("background", [True, False])
def test_manager_with_worker_saves_values_at_time_of_call(tmp_path, background, monkeypatch):
    """Also of a state that a child process reads out of shared memory while the caller goes on."""
    monkeypatch.setattr(save_writer, "_INLINE_BYTES", 1000)
    array = np.ones(1_500_000)
    with CheckpointManager(tmp_path, run="r", background=background) as manager:
        for value in range(1, 5):
            array[:] = value
            manager.save_checkpoint("p", {"a": array}, force=True)
            array[:] = -1
        assert (manager.load_latest_checkpoint("p")["state"]["a"] == 4).all()
        assert isinstance(manager.store.writer.child, ChildSlots) is background
        assert (manager.store.writer.child._process is not None) if background else True
        assert [info["sequence"] for info in manager.list_checkpoints()] == [2, 3, 4]


def test_manager_without_shared_memory_file_saves_in_thread(tmp_path, disk_full_beyond, caplog, monkeypatch):
    monkeypatch.setattr(save_writer, "_PAUSES", (0.1,))
    state = {"a": np.arange(1_000_000)}
    with CheckpointManager(tmp_path, run="r") as manager:
        with disk_full_beyond(1_000_000):
            manager.save_checkpoint("p", state, force=True)
            manager.wait()
        assert "No space left" in caplog.text
        manager.save_checkpoint("p", state, force=True)
        assert (manager.load_latest_checkpoint("p")["state"]["a"] == state["a"]).all()


def test_safe_stop_is_safe_only_after_logs_and_flush(drive):
    done = []
    with manager_of(drive) as manager:
        save(manager, 1)
        assert "upload is not confirmed" in manager.safe_stop(LONG).text
        steps = {"logs": [lambda: done.append("log")], "flush": lambda: done.append("flush")}
        assert manager.safe_stop(LONG, **steps).safe and done == ["log", "flush"]
        stopped = manager.safe_stop(0.3, flush=lambda: time.sleep(5))
        assert not stopped.safe and "took too long" in stopped.text

        def fails():
            raise OSError("gone")

        stopped = manager.safe_stop(LONG, flush=fails)
        assert not stopped.safe and "gone" in stopped.text
    with CheckpointManager(drive.parent / "disk", run="r") as manager:
        save(manager, 1)
        assert manager.safe_stop(LONG).safe


def test_safe_stop_prints_location_of_each_checkpoint(drive, capsys):
    with manager_of(drive, deadline=2) as manager:
        save(manager, 1)
        manager.safe_stop(LONG, flush=lambda: None)
        output = capsys.readouterr().out.splitlines()
        assert output[-2].startswith("  p #1 copied to the mount, upload unconfirmed") and output[-1].startswith("Safe")
        hang(drive)
        save(manager, 2)
        manager.safe_stop(1)
        output = capsys.readouterr().out.splitlines()
        assert output[0] == "Stopping safely: waiting up to 1 s for the checkpoints"
        assert output[1].startswith("  p #2 saved locally") and output[-1].startswith("Not confirmed")
        assert not any(line.startswith("Safe") for line in output)
        observed = []
        safe_stop(0.1, on_status=observed.append)
        assert observed[-1].startswith("Not confirmed") and not capsys.readouterr().out


def test_manager_warns_of_takeover_when_detected_and_raises_at_next_save(drive, caplog):
    first = manager_of(drive, lease=SlotWriterId("first"))
    other = manager_of(drive, local="other", lease=SlotWriterId("second"))
    with first, other:
        save(first, 1)
        assert first.wait(LONG)
        next((drive / "leases").iterdir()).unlink()  # as on a mount that does not show it yet
        other.phase("p").lease_holder.acquire()
        save(other, 2)
        assert other.wait(LONG)
        save(first, 3)
        first.wait(LONG)
        assert caplog.text.count("A later session has taken this work over") == 1
        with pytest.raises(LeaseTakenOverError):
            save(first, 4)


def test_list_checkpoints_reads_payload_only_with_verify(drive, monkeypatch):
    with manager_of(drive) as manager:
        for value in range(5):
            save(manager, value)
        assert manager.wait(LONG)
        calls = []
        whole = ChildSlots.verify
        monkeypatch.setattr(ChildSlots, "verify", lambda mount, path: calls.append(path) or whole(mount, path))
        assert [one["sequence"] for one in manager.list_checkpoints()] == [3, 4, 5] and not calls
    forget_local(drive)
    with manager_of(drive) as manager:
        assert manager.phase("p").latest_info()["sequence"] == 5 and not calls
        there = len(manager.list_checkpoints())
        assert there == len(calls) >= 1
        newest = manager.list_checkpoints()[-1]["path"]
        with open(newest, "r+b") as file:
            file.seek(os.path.getsize(newest) - 100)
            file.write(b"?")
        assert manager.phase("p").latest_info()["path"] == newest
        assert newest not in [one["path"] for one in manager.list_checkpoints()]


def test_latest_info_without_local_checkpoint_on_hanging_mount_raises(drive):
    with manager_of(drive) as manager:
        save(manager, 1)
    hang(drive)
    with manager_of(drive, deadline=0.5) as manager:
        assert manager.phase("p").latest_info()["sequence"] == 1  # what is here is told
        assert [one["sequence"] for one in manager.list_checkpoints()] == [1]
    forget_local(drive)
    with manager_of(drive, deadline=0.5) as manager, pytest.raises(UnresponsiveMountError, match=r"for 0\.5 s"):
        manager.phase("p").latest_info()


def test_manager_saves_locally_while_all_mount_workers_hang(drive, monkeypatch):
    monkeypatch.setattr(save_writer, "_INLINE_BYTES", 1000)
    stuck = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(4)]
    monkeypatch.setattr(worker_process, "_abandoned", [(str(drive), process) for process in stuck])
    try:
        with manager_of(drive) as manager:
            saved = manager.save_checkpoint("p", {"a": np.zeros(1000)}, force=True)
            assert manager.store.wait_home(LONG) and saved["status"] == LOCAL
    finally:
        for process in stuck:
            process.kill()
            process.wait()


def test_on_mount_follows_mount_table_and_environment_variable(tmp_path, monkeypatch):
    assert not files.is_remote(tmp_path)
    table = tmp_path / "mounts"
    table.write_text("/dev/sda / ext4 rw 0 0\ndrive /content/drive fuse.drive rw 0 0\n")
    with monkeypatch.context() as patch:
        patch.setattr(mounts, "MOUNTS", table)
        assert files.is_remote("/content/drive/MyDrive/ml_factory/checkpoints") and not files.is_remote(
            "/content/ml_factory"
        )
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path / "drive"))
    assert files.is_remote(tmp_path / "drive" / "x") and not files.is_remote(tmp_path / "drive2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with CheckpointManager(tmp_path / "drive", run="r") as manager:
        assert manager.store.home_folder.is_relative_to(tmp_path / "cache") and manager.store.uploader is not None
        save(manager, 1)
    assert list((tmp_path / "drive").glob("slot-*.ckpt"))


def test_manager_on_full_mount_saves_locally_and_copies_after_space_is_freed(drive, caplog):
    """With what fits for two checkpoints on the drive: the newest two there stand, all newer ones lie here."""
    state = {"a": np.zeros(2000)}
    with manager_of(drive, disk=Disk(), background=False) as manager:
        size = manager.save_checkpoint("p", state, force=True)["bytes"]
        manager.save_checkpoint("p", state, force=True)
        assert manager.wait(LONG)
        before = {path: path.read_bytes() for path in drive.glob("slot-*.ckpt")}
    with manager_of(drive, disk=Disk(), quota_bytes=2 * size + 500) as manager:
        saved = [manager.save_checkpoint("p", state, force=True) for _ in range(3)]
        assert not manager.wait(LONG)
        assert [one["status"] for one in saved] == [LOCAL] * 3 and caplog.text.count("Not enough space") == 1
        assert {path: path.read_bytes() for path in drive.glob("slot-*.ckpt")} == before
        manager.store.mount.pool.quota = None  # somebody emptied the Trash
        assert manager.wait(LONG) and saved[-1]["status"] == COPIED
        assert manager.store.mount.list_unverified(UNIT)[0]["sequence"] == 5


def test_child_slots_on_hanging_mount_start_at_most_four_workers(drive, monkeypatch):
    """A child inside a mount cannot be killed; here processes that sleep stand for four of them."""
    stuck = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(4)]
    monkeypatch.setattr(worker_process, "_abandoned", [(str(drive), process) for process in stuck])
    slots = ChildSlots(drive, drive.parent / "lock", SlotWriterId())
    try:
        with pytest.raises(WorkspaceError, match="4 earlier requests still hang"):
            slots.list_unverified(UNIT)
        stuck[0].kill()
        os.waitid(os.P_PID, stuck[0].pid, os.WEXITED | os.WNOWAIT)
        assert slots.list_unverified(UNIT) == []
    finally:
        slots.close()
        for process in stuck:
            process.kill()
            process.wait()
