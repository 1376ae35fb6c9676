"""Compiled kernels are those of the sources as they are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ml_factory.numba_cache import KEEP, numba_sources_hash

ROOT = Path(__file__).parents[1]


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


CALL = """
import os, sys
sys.path.insert(0, sys.argv[1])
import ml_factory
from ml_factory.caller import twice
print(twice(1.0), len(os.listdir(os.path.dirname(os.environ["NUMBA_CACHE_DIR"]))))
"""


def run(package, home):
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(package)], capture_output=True, text=True, check=False,
        env=environment | {"XDG_CACHE_HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},  # its stamps count seconds
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    number, folders = done.stdout.split()
    return float(number), int(folders)


@pytest.mark.soak
def test_numba_cache_recompiles_caller_after_change_in_called_kernel(tmp_path):
    package = tmp_path / "ml_factory"
    (package / "storage").mkdir(parents=True)
    storage = ("__init__", "private_folder", "mounts")
    for name in (
        "__init__.py",
        "numba_cache.py",
        "redaction.py",
        "errors.py",
        "process_identity.py",
        *(f"storage/{one}.py" for one in storage),
    ):
        (package / name).write_text((ROOT / "ml_factory" / name).read_text())
    head = "from numba import njit\n"
    (package / "caller.py").write_text(
        head + "from ml_factory.called import half\n\n@njit(cache=True)\ndef twice(x):\n    return 4.0 * half(x)\n"
    )
    answers = []
    for factor in (0.5, 0.5, 1.5, 2.5, 3.5):
        (package / "called.py").write_text(head + f"\n@njit(cache=True)\ndef half(x):\n    return {factor} * x\n")
        answers.append(run(tmp_path, tmp_path / "home"))
    assert [answer for answer, _ in answers] == [2.0, 2.0, 6.0, 10.0, 14.0]
    assert answers[-1][1] == 4 > KEEP  # all used today: another process may still write to one of them
    for folder in (tmp_path / "home" / "ml_factory-kernels").iterdir():
        os.utime(folder, (time.time() - 90_000,) * 2)
    assert run(tmp_path, tmp_path / "home") == (14.0, KEEP)


def test_numba_cache_keeps_numba_cache_dir_of_environment(tmp_path):
    code = "import ml_factory, numba; print(numba.config.CACHE_DIR)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path)
