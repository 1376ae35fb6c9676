"""SIGTERM and SIGINT: saved at the next step, then the process ends as the signal asks."""

import shutil
import signal
import threading

import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from tests.contract.doors import StopSignalFlag


@pytest.fixture(autouse=True)
def interrupts_are_received():
    """A shell's background jobs are born ignoring them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


TRAINING = """
import logging, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born ignoring it
logging.basicConfig(stream=sys.stdout, format='%(message)s')
from ml_factory.checkpoints.manager import CheckpointManager

with CheckpointManager(sys.argv[1], 600, run="r") as manager:
    with manager.phase("p").acquired() as checkpoints:
        checkpoints.save({"step": 0}, force=True)
        manager.wait()
        print("ready", flush=True)
        for step in range(1, 10**9):
            time.sleep(0.01)
            if checkpoints.due():
                print("step", step, flush=True)
                checkpoints.save({"step": step})
                raise SystemExit("the signal did nothing")
"""


@pytest.fixture(params=["one disk", "mount"])
def place(tmp_path, monkeypatch, request):
    """Folder of the checkpoints; on a mount, the machine's own disk is another one."""
    if request.param == "mount":
        monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path / "there"))
    return tmp_path / "there/ws/checkpoints", tmp_path / "disk"


@pytest.mark.parametrize(
    ("place", "number"), [("one disk", signal.SIGINT), ("mount", signal.SIGTERM)], indirect=["place"]
)
def test_stop_signal_saves_at_next_step_then_ends_process(place, spawn, number, monkeypatch):
    folder, disk = place
    process = spawn(TRAINING, folder, XDG_CACHE_HOME=str(disk))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    step = next(int(line.split()[1]) for line in process.stdout if line.startswith("step"))
    assert process.wait(90) == -number
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk.with_name("another")))  # the machine and its local disk are gone
    with CheckpointManager(folder, run="r") as manager:
        assert manager.load_latest_checkpoint("p")["state"] == {"step": step}


@pytest.mark.parametrize("place", ["mount"], indirect=True)
def test_stop_signal_with_refusing_mount_ends_process_and_prints_where_the_save_is(place, spawn, monkeypatch):
    folder, disk = place
    process = spawn(TRAINING, folder, XDG_CACHE_HOME=str(disk))
    assert process.stdout.readline() == "ready\n"
    shutil.rmtree(folder)
    folder.touch()  # a file where the folder was
    process.send_signal(signal.SIGTERM)
    printed = process.stdout.read()
    assert process.wait(90) == -signal.SIGTERM
    assert "on this machine's disk alone" in printed and "saved locally" in printed
    folder.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
    with CheckpointManager(folder, run="r") as manager:
        assert manager.load_latest_checkpoint("p")["state"]["step"] > 0


@pytest.mark.parametrize("leaves", [False, True])
def test_stop_flag_second_signal_or_last_listener_lets_the_signal_act(leaves):
    flag = StopSignalFlag()
    for _ in range(2):
        flag.listen()
    signal.raise_signal(signal.SIGINT)
    assert flag.requested == signal.SIGINT
    flag.remove_listener()
    with pytest.raises(KeyboardInterrupt):
        flag.remove_listener() if leaves else signal.raise_signal(signal.SIGINT)
    if not leaves:
        flag.requested = None
        flag.remove_listener()
    assert flag.requested is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_stop_flag_is_set_only_while_phase_is_acquired_and_where_signals_are_not_ignored(tmp_path):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with CheckpointManager(tmp_path, run="r") as manager:
            manager.save_checkpoint("p", {}, force=True)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            with manager.phase("p").acquired(), manager.phase("q").acquired():
                assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.timeout(60)
def test_save_whose_thread_did_not_start_for_ctrl_c_is_written_by_wait_and_blocks_no_later_save(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    with CheckpointManager(tmp_path, run="r") as manager:
        manager.save_checkpoint("p", {"step": 1}, force=True)
        assert manager.wait(30)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", interrupted)
            manager.save_checkpoint("p", {"step": 2}, force=True)
        assert manager.wait(30)
        with CheckpointManager(tmp_path, run="r") as other:
            assert other.load_latest_checkpoint("p")["state"]["step"] == 2
        manager.save_checkpoint("p", {"step": 3}, force=True)
    with CheckpointManager(tmp_path, run="r") as manager:
        assert manager.load_latest_checkpoint("p")["state"]["step"] == 3
