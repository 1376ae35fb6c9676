"""Compiled kernels are those of the sources as they are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numba
import pytest

from tests.contract.doors import numba_sources_hash, set_numba_cache_folder

ROOT = Path(__file__).parents[2]


def test_sources_hash_changes_only_with_compiled_sources(tmp_path):
    (tmp_path / "room").mkdir()
    kernel, plain = tmp_path / "room" / "kernel.py", tmp_path / "plain.py"
    kernel.write_text("@njit\ndef f(): return 1\n")
    plain.write_text("x = 1\n")
    before = numba_sources_hash(tmp_path)
    plain.write_text("x = 2\n")
    assert numba_sources_hash(tmp_path) == before
    kernel.write_text("@njit\ndef f(): return 2\n")
    assert numba_sources_hash(tmp_path) != before
    kernel.rename(tmp_path / "kernel.py")
    moved = numba_sources_hash(tmp_path)
    kernel.write_text("@njit\ndef f(): return 2\n")
    assert len({before, moved, numba_sources_hash(tmp_path)}) == 3


@pytest.mark.parametrize(("hours", "left"), [((1, 25, 26), {"1", "25"}), ((1, 2, 3), {"1", "2", "3"})])
def test_numba_cache_folder_is_that_of_the_sources_and_old_ones_are_deleted(tmp_path, monkeypatch, hours, left):
    """Three folders stay, and what was used today: another process may still write to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (place := tmp_path / "ml_factory-kernels").mkdir(0o700)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    for age in hours:
        (place / str(age)).mkdir()
        os.utime(place / str(age), (time.time() - 3600 * age,) * 2)
    set_numba_cache_folder()
    own = place / numba_sources_hash()
    assert os.environ["NUMBA_CACHE_DIR"] == numba.config.CACHE_DIR == str(own)
    assert {path.name for path in place.iterdir()} == {own.name, *left}


def test_numba_cache_keeps_numba_cache_dir_of_environment(tmp_path):
    code = "import ml_factory, numba; print(numba.config.CACHE_DIR)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path)
