"""Symbolic links in the places of files that are written: their targets are neither read as ours, nor changed."""

import os

import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import FileError
from ml_factory.storage.files import files, temporary_path
from ml_factory.storage.locks import acquire_lock_file, file_lock, release_lock_file

TEXT = b"{}\n" * 1000  # also when read as JSON nothing is wrong with it


@pytest.fixture
def victim(tmp_path):
    """A file of the user outside the workspace."""
    path = tmp_path / "victim"
    path.write_bytes(TEXT)
    yield path
    assert path.read_bytes() == TEXT


def test_checkpoints_and_leases_behind_links_are_replaced_and_their_targets_kept(tmp_path, victim):
    folder = tmp_path / "checkpoints"
    for life in range(2):
        with CheckpointManager(folder, run="run", keep_last=2) as manager:
            for step in range(6):
                assert manager.save_checkpoint("p", {"step": step}, force=True)
            assert manager.load_latest_checkpoint("p")["state"] == {"step": 5}, life
        for path in [*folder.glob("run/*"), *folder.glob("leases/*")]:
            path.unlink()
            path.symlink_to(victim)
    with CheckpointManager(folder, run="run", keep_last=2) as manager:
        assert manager.load_latest_checkpoint("p") is None


@pytest.mark.parametrize("dangling", [False, True])
def test_lock_file_behind_link_is_refused(tmp_path, victim, dangling):
    target = tmp_path / "never created" if dangling else victim
    lock = tmp_path / "locks" / "run.lock"
    lock.parent.mkdir()
    lock.symlink_to(target)
    with pytest.raises(FileError, match="symbolic link"):
        acquire_lock_file(lock, "a run")
    with pytest.raises(FileError, match="symbolic link"), file_lock(lock):
        pass
    lock.unlink()
    acquire_lock_file(lock, "a run")
    release_lock_file(lock)
    assert dangling is not target.exists()


@pytest.mark.parametrize("flush", [True, False])
def test_replace_with_link_at_temporary_path_writes_new_file(tmp_path, victim, flush):
    path = tmp_path / "results" / "a.json"
    path.parent.mkdir()
    temporary_path(path).symlink_to(victim)
    files.replace(path, lambda temporary: temporary.write_bytes(b"ours"), flush=flush)
    assert path.read_bytes() == b"ours" and not path.is_symlink() and sorted(os.listdir(path.parent)) == ["a.json"]


def test_replace_whose_temporary_file_became_link_raises_and_keeps_file(tmp_path, victim):
    path = tmp_path / "a.json"
    path.write_bytes(b"before")

    def exchange(temporary):
        temporary.unlink()
        temporary.symlink_to(victim)

    with pytest.raises(FileError):
        files.replace(path, exchange)
    assert path.read_bytes() == b"before" and not path.is_symlink()
