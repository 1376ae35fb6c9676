"""File locks: what the kernel holds is held, and what a lock file proves."""

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from ml_factory.errors import CheckpointError
from tests.contract.doors import acquire_lock_file, file_lock, is_lock_file_held, release_lock_file


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "locks" / "some.lock"
    yield path
    for _ in range(9):
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


def test_is_lock_file_held_neither_makes_nor_signs_nor_holds_the_file(path):
    assert not is_lock_file_held(path) and not path.exists()
    acquire_lock_file(path, "the work")
    assert is_lock_file_held(path) and in_child(lambda: is_lock_file_held(path)) == 1
    release_lock_file(path)
    text = path.read_bytes()
    assert not is_lock_file_held(path)
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


def test_lock_identity_is_that_of_the_very_file(path):
    """A file deleted while it was held and made again proves no holder's end."""
    held = acquire_lock_file(path, "the work")
    path.unlink()
    assert in_child(lambda: acquire_lock_file(path, "the work") not in ("", held)) == 1


def test_lock_file_on_full_disk_is_held_and_without_locks_proves_nothing(path, monkeypatch):
    def refuse(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        assert acquire_lock_file(path, "the work")
    assert in_child(lambda: is_refused(path)) == 1
    (held,) = (number for number in Path("/proc/self/fd").iterdir() if number.exists() and number.samefile(path))
    copy = os.dup(int(held.name))  # of a process that a library forked without Python's hook
    release_lock_file(path)
    assert in_child(lambda: not is_refused(path)) == 1
    os.close(copy)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert acquire_lock_file(path, "the work") == ""
    assert not is_lock_file_held(path)
    with file_lock(path):
        release_lock_file(path)
