"""File locks: what the kernel holds is held, and what a lock file proves."""

import errno
import fcntl
import os
import time

import pytest

from ml_factory.errors import CheckpointError
from ml_factory.storage import locks
from ml_factory.storage.locks import (
    acquire_lock_file,
    check_lock_file_free,
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


def test_check_lock_file_free_neither_makes_nor_signs_nor_holds_the_file(path):
    check_lock_file_free(path, "the work")
    assert not path.exists()
    acquire_lock_file(path, "the work")
    check_lock_file_free(path, "the work")  # this process's own
    release_lock_file(path)
    text = path.read_bytes()
    check_lock_file_free(path, "the work")
    assert path.read_bytes() == text and in_child(lambda: not is_refused(path)) == 1


def test_lock_file_replaced_before_it_is_locked_is_opened_again(path, monkeypatch):
    acquire_lock_file(path, "the work")
    release_lock_file(path)
    lock, replaced = fcntl.flock, []

    def replace_and_lock(descriptor, how):
        if not replaced:
            replaced.append(path.unlink())
            path.touch()
        lock(descriptor, how)

    monkeypatch.setattr(locks.fcntl, "flock", replace_and_lock)
    assert acquire_lock_file(path, "the work").endswith(f":{path.stat().st_ino:x}")


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


def test_lock_identity_is_that_of_the_very_file(path, tmp_path):
    """A copied disk, or a file deleted while it was held and made again, proves no holder's end."""
    held = acquire_lock_file(path, "the work")
    assert held and acquire_lock_file(path, "the work") == held  # nested
    copy = tmp_path / "copy.lock"
    copy.write_bytes(path.read_bytes())
    assert acquire_lock_file(copy, "the work") != held
    release_lock_file(copy)
    path.unlink()
    assert in_child(lambda: acquire_lock_file(path, "the work") not in ("", held)) == 1


def test_lock_file_on_full_disk_is_held_and_without_locks_is_not(path, monkeypatch):
    def refuse(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(locks.os, "pwrite", refuse)
        assert acquire_lock_file(path, "the work")
    assert in_child(lambda: is_refused(path)) == 1
    release_lock_file(path)
    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    assert acquire_lock_file(path, "the work") == "" and path not in locks._held
    check_lock_file_free(path, "the work")


def test_lock_that_a_fork_has_copied_is_freed_by_its_owner_alone(path):
    """A forked child closed its copy at once; one that a library forked without Python's hook is unlocked with ours."""
    acquire_lock_file(path, "the work")
    assert in_child(lambda: len(locks._held)) == 0 and in_child(lambda: is_refused(path)) == 1
    copy = os.dup(locks._held[path][0])
    release_lock_file(path)
    assert in_child(lambda: not is_refused(path)) == 1
    os.close(copy)
