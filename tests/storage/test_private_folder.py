"""Folders for files that hold code: this user's alone, and never where another user can exchange them."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from ml_factory.storage.private_folder import private_folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache folder; the temporary folder is beside it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def is_temporary(folder: Path, cache: Path) -> bool:
    return folder.parent == cache.parent / "temporary" and mode(folder) == 0o700


def test_private_folder_is_made_below_cache_folder_and_found_again(cache):
    made = private_folder("kernels")
    assert made == cache / "ml_factory-kernels" and mode(made) == 0o700
    (made / "kernel").write_text("code")
    assert private_folder("kernels") == made and (made / "kernel").exists()


def test_private_folder_readable_by_others_is_closed_and_keeps_its_files(cache):
    """As earlier versions created it; no other user could write into it."""
    folder = cache / "ml_factory-kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "kernel").write_text("code")
    assert private_folder("kernels") == folder and mode(folder) == 0o700 and (folder / "kernel").exists()


@pytest.mark.parametrize("others", [0o777, 0o775, 0o757, 0o1777])
def test_private_folder_writable_by_others_is_emptied(cache, others, tmp_path):
    folder = cache / "ml_factory-kernels"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "planted").write_text("code")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("of the user")
    (folder / "link").symlink_to(tmp_path / "kept")
    folder.chmod(others)
    assert private_folder("kernels") == folder and mode(folder) == 0o700 and not list(folder.iterdir())
    assert (tmp_path / "kept" / "file").exists()


def test_private_folder_that_is_a_link_is_refused_and_fresh_one_made(cache, tmp_path):
    planted = tmp_path / "planted"
    planted.mkdir()
    planted.chmod(0o755)
    cache.mkdir()
    (cache / "ml_factory-kernels").symlink_to(planted)
    folder = private_folder("kernels")
    assert is_temporary(folder, cache) and mode(planted) == 0o755


def test_private_folder_below_folder_open_to_others_is_refused(cache):
    """Who may rename what is there can put another folder in its place after the check."""
    cache.mkdir()
    cache.chmod(0o777)
    assert is_temporary(private_folder("kernels"), cache)
    cache.chmod(0o1777)  # sticky, as /tmp: there only owners rename
    assert private_folder("kernels") == cache / "ml_factory-kernels"


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_private_folder_of_another_user_is_refused(cache):
    folder = cache / "ml_factory-kernels"
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, 12345, -1)
    assert is_temporary(private_folder("kernels"), cache)
    os.chown(folder, 0, -1)
    os.chown(cache, 12345, -1)
    assert is_temporary(private_folder("kernels"), cache)


def test_private_folder_on_mount_is_refused(cache, monkeypatch):
    """Drive shows every file as this user's, with mode 0700."""
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(cache))
    assert is_temporary(private_folder("kernels"), cache)


def test_private_temporary_folder_has_random_name_and_is_found_again(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nothing")
    first = private_folder("kernels")
    assert is_temporary(first, cache) and private_folder("kernels") == first
    first.chmod(0o770)
    second = private_folder("kernels")
    assert is_temporary(second, cache) and second != first  # which others could have written to
    occupied = first.with_name("ml_factory-kernels-000")
    occupied.symlink_to(tmp_path)
    assert private_folder("kernels") == second


def test_private_folder_without_home_is_made_below_temporary_folder(cache, monkeypatch):
    def homeless(cls):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert is_temporary(private_folder("kernels"), cache)
