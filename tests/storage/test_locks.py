"""File locks: what the kernel holds is held, and what a lock file proves."""

import errno
import fcntl
import os
import signal
import time
from contextlib import nullcontext

import pytest

from ml_factory import process_identity
from ml_factory.errors import CheckpointError
from ml_factory.process_identity import process_id
from ml_factory.storage import locks
from ml_factory.storage.locks import (
    HeldLock,
    acquire_lock_file,
    check_lock_file_free,
    file_lock,
    lock_file_identity,
    release_lock_file,
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "locks" / "some.lock"
    yield path
    while path in locks._held:
        release_lock_file(path)


def in_child(action) -> int:
    """Run an action in a forked child and return its result, a small number."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(action()))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_refused(path) -> bool:
    try:
        acquire_lock_file(path, "the work")
    except CheckpointError:
        return True
    return False


def test_process_id_in_forked_child_is_another_also_with_process_number_of_parent(monkeypatch):
    own = process_id()
    assert own == process_id() and len(own) == 16
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in two containers
    assert in_child(lambda: process_id() != own and len(process_id()) == 16) == 1
    assert process_id() == own


def test_boot_id_of_system_without_one_is_empty(monkeypatch):
    def refuse(path):
        raise FileNotFoundError

    monkeypatch.setattr(process_identity.Path, "read_text", refuse)
    assert process_identity.boot_id.__wrapped__() == ""


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"pid": 4194305, "host": "elsewhere 0123abcd", "since": 1.0}',  # of an earlier version
        b"0123456789abcdef 4194305 elsewhere\n",
        b"\xff\x00 not a line",
    ],
)
def test_lock_file_held_by_kernel_is_refused_whatever_its_text(path, text):
    acquire_lock_file(path, "the work")
    path.write_bytes(text)
    inode = path.stat().st_ino
    assert in_child(lambda: is_refused(path)) == 1
    assert path.stat().st_ino == inode and path.read_bytes() == text


def test_lock_file_refusal_names_holder_and_next_step(path):
    acquire_lock_file(path, "the work")

    def refusal() -> bool:
        try:
            check_lock_file_free(path, "the work")
        except CheckpointError as error:
            return f"process {parent} on " in str(error) and "wait for it" in str(error)
        return False

    parent = os.getpid()
    assert in_child(refusal) == 1
    release_lock_file(path)
    assert in_child(lambda: not is_refused(path)) == 1


def test_check_lock_file_free_neither_makes_nor_signs_nor_holds_the_file(path):
    check_lock_file_free(path, "the work")
    assert not path.exists()
    acquire_lock_file(path, "the work")
    check_lock_file_free(path, "the work")  # this process's own
    release_lock_file(path)
    text = path.read_bytes()
    check_lock_file_free(path, "the work")
    assert path.read_bytes() == text and in_child(lambda: not is_refused(path)) == 1


def test_acquire_lock_file_waits_for_process_that_only_looks(path):
    acquire_lock_file(path, "the work")
    release_lock_file(path)
    looks = os.open(path, os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_SH)
    child = os.fork()
    if child == 0:
        os._exit(not is_refused(path))
    time.sleep(0.05)
    fcntl.flock(looks, fcntl.LOCK_UN)
    os.close(looks)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_lock_of_killed_owner_is_free_though_its_forked_child_lives(path):
    """The child closed its copy; before, such a lock was unlinked while it was held."""
    read, write = os.pipe()
    owner = os.fork()
    if owner == 0:
        acquire_lock_file(path, "the work")
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.write(write, b"%d\n" % child)
        time.sleep(60)
        os._exit(0)
    child = int(os.read(read, 20))
    inode = path.stat().st_ino
    assert is_refused(path)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    try:
        os.kill(child, 0)
        assert acquire_lock_file(path, "the work") and path.stat().st_ino == inode
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read), os.close(write)


@pytest.mark.parametrize("waiting", [True, False])
def test_lock_released_while_a_copy_of_its_descriptor_is_open_is_free(path, waiting):
    """As after a fork by a library, which runs no hook of Python."""
    before = set(locks._LockFile.open_files)
    with file_lock(path) if waiting else nullcontext():
        if not waiting:
            acquire_lock_file(path, "the work")
        [file] = set(locks._LockFile.open_files) - before
        copy = os.dup(file.descriptor)
    release_lock_file(path)
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor), os.close(copy)


def test_file_lock_is_left_by_forked_child_at_once(path):
    with file_lock(path):
        child = os.fork()
        if child == 0:
            os._exit(len(locks._LockFile.open_files))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        descriptor = os.open(path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


def test_acquired_lock_file_proves_end_of_earlier_holders_alone(path):
    assert in_child(lambda: acquire_lock_file(path, "the work").holder != "") == 1
    [line] = path.read_text().splitlines()
    dead = f"{lock_file_identity(path)} {line.split()[0]}"
    held = acquire_lock_file(path, "the work")
    assert held.proves_end_of(dead) and held.proves_end_of(held.holder) and held.holder.endswith(process_id())
    for other in (None, "", 7, dead[:-1] + "?", line.split()[0], f"another disk {line.split()[0]}"):
        assert not held.proves_end_of(other)
    assert acquire_lock_file(path, "the work") is held  # nested


def test_acquired_lock_file_proves_end_of_all_earlier_holders(path):
    """The last one may have died before it wrote its lease: the lease then names the one before."""
    for _ in range(3):
        assert in_child(lambda: acquire_lock_file(path, "the work").holder != "") == 1
    ids = [line.split()[0] for line in path.read_text().splitlines()]
    held = acquire_lock_file(path, "the work")
    assert len(set(ids)) == 3 and all(held.proves_end_of(f"{lock_file_identity(path)} {name}") for name in ids)


def test_copied_lock_file_proves_nothing(path, tmp_path):
    """Of a container that was started from a copy of a living one's disk."""
    assert in_child(lambda: acquire_lock_file(path, "the work").holder != "") == 1
    dead = f"{lock_file_identity(path)} {path.read_text().split()[0]}"
    copy = tmp_path / "copy.lock"
    copy.write_bytes(path.read_bytes())
    held = acquire_lock_file(copy, "the work")
    assert not held.proves_end_of(dead)
    release_lock_file(copy)


def test_lock_file_deleted_while_held_proves_nothing_to_next_holder(path):
    held = acquire_lock_file(path, "the work")
    path.unlink()
    holder = held.holder
    assert in_child(lambda: not acquire_lock_file(path, "the work").proves_end_of(holder)) == 1


def test_lock_file_replaced_between_open_and_lock_is_locked_at_its_path(path, monkeypatch):
    try_lock = locks._LockFile.try_lock

    def replaced_meanwhile(file, how):
        monkeypatch.setattr(locks._LockFile, "try_lock", try_lock)
        path.unlink()
        path.touch()
        return try_lock(file, how)

    monkeypatch.setattr(locks._LockFile, "try_lock", replaced_meanwhile)
    acquire_lock_file(path, "the work")
    assert in_child(lambda: is_refused(path)) == 1


def test_lock_file_with_many_holders_stays_small_and_keeps_the_newest(path):
    path.parent.mkdir()
    path.write_text("".join(f"{number:016x} 12 host\n" for number in range(5000)))
    held = acquire_lock_file(path, "the work")
    assert path.stat().st_size < locks._LARGEST_TEXT
    assert path.read_text().splitlines()[-1].startswith(process_id())
    release_lock_file(path)
    for _ in range(500):
        acquire_lock_file(path, "the work")
        release_lock_file(path)
    assert path.stat().st_size <= locks._LARGEST_TEXT and acquire_lock_file(path, "the work").proves_end_of(held.holder)


def held_below(folder):
    """Lock files below the folder that this process holds."""
    return [path for path in locks._held if folder in path.parents]


def test_lock_on_full_disk_is_held_and_not_signed(path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(locks.os, "pwrite", full)
        assert acquire_lock_file(path, "the work") == HeldLock("")
    assert in_child(lambda: is_refused(path)) == 1


@pytest.fixture
def without_locks(monkeypatch):
    def refuse(*given):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)


def test_lock_file_on_file_system_without_locks_is_not_acquired(path, without_locks):
    assert acquire_lock_file(path, "the work") is None and path not in locks._held
    check_lock_file_free(path, "the work")
    release_lock_file(path)
