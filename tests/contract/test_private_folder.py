"""Folders of compiled code: this user's alone, on a local disk."""

import stat

import pytest

from tests.contract.doors import private_folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache folder, with the temporary folder beside it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_private_folder_is_made_below_cache_folder_closed_to_others_and_found_again(cache):
    made = private_folder("kernels")
    assert made == cache / "ml_factory-kernels" and stat.S_IMODE(made.stat().st_mode) == 0o700
    (made / "kernel").touch()
    made.chmod(0o755)  # readable by others
    assert private_folder("kernels") == made and stat.S_IMODE(made.stat().st_mode) == 0o700
    assert (made / "kernel").exists()


@pytest.mark.parametrize("case", ["link", "writable by others", "mount", "file", "no home"])
def test_private_folder_is_elsewhere_where_its_place_is_not_this_users_alone(cache, tmp_path, monkeypatch, case):
    cache.mkdir()
    (tmp_path / "planted").mkdir()
    if case == "link":
        (cache / "ml_factory-kernels").symlink_to(tmp_path / "planted")
    elif case == "writable by others":
        (cache / "ml_factory-kernels").mkdir()
        (cache / "ml_factory-kernels").chmod(0o777)
    elif case == "mount":
        monkeypatch.setenv("ML_FACTORY_MOUNTS", str(cache))
    elif case == "file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
        (cache / "file").touch()
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(cache / "file"))
        (cache / "file").touch()
    made = private_folder("kernels")
    assert made.parent == tmp_path / "tmp" and made.name.startswith("ml_factory-kernels-")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700 and private_folder("kernels") == made
    made.chmod(0o777)
    assert private_folder("kernels") != made
