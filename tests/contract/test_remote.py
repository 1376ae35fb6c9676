"""A remote that hangs: only its child waits, and its caller gets an error within the deadline.

A mount is a folder named by $ML_FACTORY_MOUNTS; a file in it that hangs has a lease on it (`hanging_file`). Real ones
are in the two files `*_on_mount.py`.
"""

import errno
import os
import threading

import psutil
import pytest

from ml_factory import Workspace
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import FileError, UnresponsiveMountError
from tests.contract.doors import MountedFolder, Remote, fetch_file, mount_of, remotes
from tests.storage.hanging_file import make_hanging_file


@pytest.fixture
def drive(tmp_path, monkeypatch):
    folder = tmp_path / "drive"
    (folder / "ws").mkdir(parents=True)
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remotes, "SILENCE_SECONDS", 3.0)
    return folder


@pytest.fixture
def untouched(monkeypatch, drive):
    """Fail any operating-system call of this very process on a path of the drive."""

    def forbid(name):
        whole = getattr(os, name)

        def observed(path, *args, **named):
            if isinstance(path, str | os.PathLike) and str(path).startswith(f"{drive}/"):
                raise AssertionError(f"this process asked {name} of {path}")
            return whole(path, *args, **named)

        monkeypatch.setattr(os, name, observed)

    for name in ("stat", "lstat", "listdir", "scandir", "open", "mkdir", "unlink", "replace", "readlink", "access"):
        forbid(name)


def test_this_process_asks_nothing_of_a_mount_itself(drive, tmp_path, untouched):
    (tmp_path / "link").symlink_to(drive / "ws")
    (tmp_path / "here").symlink_to("link")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    assert mount_of(tmp_path / "here" / "z") == str(drive)
    assert mount_of(tmp_path / "drives") is None and mount_of(tmp_path / "round" / "x") is None
    workspace = Workspace(tmp_path / "here")
    with CheckpointManager(workspace.checkpoints, run="r") as manager:
        manager.save_checkpoint("p", {"value": 1}, force=True)
        assert manager.wait(60) and len(manager.list_checkpoints()) == 1
    (workspace.raw / "DEMO_1m.parquet").write_bytes(b"bars")
    workspace.push()
    assert fetch_file(str(drive / "ws/data/raw/DEMO_1m.parquet")).read_bytes() == b"bars"


def test_calls_on_a_hanging_mount_fail_in_time_and_others_go_on(drive, tmp_path, spawn):
    make_hanging_file(drive / "hangs")
    remote, received = Remote(str(drive)), []

    def ask():
        with pytest.raises(UnresponsiveMountError, match=r"does not answer.*no answer for 3 s.*mount it again"):
            remote.get("hangs", tmp_path / "copy", {"size": 0})
        received.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]  # a notebook may have many files open
    assert remote.names() == ["hangs", "ws"] and remote.exists()
    for descriptor in held:
        os.close(descriptor)
    thread.join()
    assert received == [True]
    code = """
import sys
from ml_factory.errors import UnresponsiveMountError
from ml_factory.storage.mirror import Mirror
from ml_factory.storage import remote
remote.SILENCE_SECONDS = 1.0
try:
    Mirror(sys.argv[1], sys.argv[2]).fetch("hangs")
except UnresponsiveMountError as error:
    print(error.got, flush=True)
"""
    process = spawn(code, drive, tmp_path / "mirror", ML_FACTORY_MOUNTS=str(drive))
    assert process.stdout.readline() == "no answer for 1 s\n"
    assert process.wait(60) == 0  # its child still hangs


@pytest.mark.parametrize("code", [errno.ENOTCONN, errno.ESTALE, errno.EHOSTDOWN, errno.EIO])
def test_disconnected_mount_is_told_from_a_refused_file(tmp_path, monkeypatch, code):
    def refuse(*given):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(FileError if code == errno.EIO else UnresponsiveMountError, match=os.strerror(code)):
        MountedFolder(str(tmp_path)).names()


def test_killed_child_is_started_again_and_forked_process_has_its_own(drive, tmp_path):
    remote, before, threads = Remote(str(drive)), set(psutil.Process().children()), set(threading.enumerate())
    assert remote.names() == ["ws"]
    [child] = set(psutil.Process().children()) - before
    child.kill()
    for thread in set(threading.enumerate()) - threads:  # the one that reaps it
        thread.join()
    (drive / "a").touch()
    assert remote.names() == ["a", "ws"]
    with pytest.raises(FileError, match="No such file"):
        remote.facts("absent")
    child = os.fork()
    if child == 0:
        os._exit(7 if remote.names() == ["a", "ws"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 and remote.names() == ["a", "ws"]


def test_full_mount_keeps_the_file_before_and_leaves_no_part(drive, tmp_path, monkeypatch):
    (drive / "a.json").write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new")
    folder = MountedFolder(str(drive))

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FileError, match="No space left"):
            folder.put("a.json", str(tmp_path / "new"))
    assert (drive / "a.json").read_bytes() == b"old" and sorted(os.listdir(drive)) == ["a.json", "ws"]


def test_removed_file_leaves_nothing_in_the_trash_and_no_empty_folder(drive):
    folder = MountedFolder(str(drive))
    (drive / "models/MES/a").mkdir(parents=True)
    (drive / "models/MES/a/state").write_bytes(b"large")
    with open(drive / "models/MES/a/state") as trash:  # what Drive keeps for 30 days
        folder.remove("models/MES/a/state")
        assert os.fstat(trash.fileno()).st_size == 0 and os.listdir(drive / "models") == []


@pytest.mark.parametrize("step", ["put", "remove"])
def test_hard_linked_backup_of_checkpoint_keeps_its_content(drive, tmp_path, step):
    (drive / "p.0.ckpt").write_bytes(b"kept")
    os.link(drive / "p.0.ckpt", tmp_path / "backup")
    (tmp_path / "new").write_bytes(b"new")
    getattr(MountedFolder(str(drive)), step)("p.0.ckpt", *([str(tmp_path / "new")] if step == "put" else []))
    assert (tmp_path / "backup").read_bytes() == b"kept"
    assert not (drive / "p.0.ckpt").exists() if step == "remove" else (drive / "p.0.ckpt").read_bytes() == b"new"


def test_opening_a_workspace_whose_mount_hangs_goes_on_with_the_working_copy(drive, monkeypatch, caplog):
    workspace = Workspace(drive / "ws")
    (workspace.results / "a.json").write_text("{}")
    workspace.push()
    monkeypatch.setattr(remotes, "SILENCE_SECONDS", 0.5)
    make_hanging_file(drive / "ws/results/hangs")
    again = Workspace(drive / "ws")
    assert (again.results / "a.json").read_text() == "{}" and "does not answer" in caplog.text
