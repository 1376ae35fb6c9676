"""The script that sets the environment up: reused while the pins stand, and honest about what a machine lacks."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "environment.py"
REQUIREMENTS = SCRIPT.parents[1] / "requirements"
LOCKS = sorted((REQUIREMENTS / "locked").glob("*.txt"))


def run(folder: Path, pins: Path, *, before: str = "") -> subprocess.CompletedProcess:
    """The script as its own process, after the line `before`."""
    line = f"{before}\nimport runpy, sys\nsys.argv = {['environment.py', str(folder), str(pins)]!r}\n"
    text = f"{line}runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=quiet, check=False)


@pytest.mark.parametrize(
    ("before", "pins", "says"),
    [
        ("sys.modules['venv'] = None", "pins.txt", f"apt-get install python3.{sys.version_info[1]}-venv"),
        ("sys.modules['ensurepip'] = None", "pins.txt", "python3-venv"),
        ("sys.version_info = (3, 9, 0)", "pins.txt", "got Python 3.9, wanted 3.11 or newer"),
        ("", "none.txt", "none.txt is absent"),
    ],
)
def test_environment_script_on_a_machine_that_lacks_something_names_it(before, pins, says, tmp_path):
    (tmp_path / "pins.txt").touch()
    done = run(tmp_path / "env", tmp_path / pins, before=f"import sys; {before}")
    assert done.returncode == 1 and says in done.stderr and not (tmp_path / "env").exists()


@pytest.mark.soak
def test_environment_script_reuses_until_pins_change_and_rebuilds_if_broken(tmp_path):
    pins, held, folder = tmp_path / "pins.txt", tmp_path / "held.txt", tmp_path / "env"
    pins.write_text("-c held.txt\n")
    held.write_text("")
    first = run(folder, pins)
    assert first.returncode == 0 and "is ready after" in first.stdout, first.stdout + first.stderr
    _link(folder, tmp_path).unlink()
    assert run(folder, pins).stdout == ""
    assert _link(folder, tmp_path).is_file()
    (folder / "kept").touch()
    held.write_text("pip>=1\n")  # a file that the pins include
    assert "is ready after" in run(folder, pins).stdout
    assert (folder / "kept").exists()
    (folder / "bin" / "python").unlink()
    assert "is ready after" in run(folder, pins).stdout
    assert not (folder / "kept").exists() and run(folder, pins).stdout == ""


def _link(folder: Path, tmp_path: Path) -> Path:
    """The file that makes `import ml_factory` work from any folder; a package in the current folder comes first."""
    other = tmp_path / "other"
    (other / "ml_factory").mkdir(parents=True, exist_ok=True)
    (other / "ml_factory" / "__init__.py").touch()
    for cwd, home in ((tmp_path, SCRIPT.parents[1]), (other, other)):
        words = [folder / "bin" / "python", "-c", "import ml_factory; print(ml_factory.__file__)"]
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=True)
        assert Path(done.stdout.strip()) == home / "ml_factory" / "__init__.py"
    return next(folder.glob("lib/python*/site-packages/ml_factory_checkout.pth"))


@pytest.mark.soak
def test_environment_script_with_uninstallable_pins_leaves_no_stamp(tmp_path):
    (tmp_path / "pins.txt").write_text("./there-is-no-such-folder\n")
    done = run(tmp_path / "env", tmp_path / "pins.txt")
    assert done.returncode != 0 and "make again to retry" in done.stdout
    assert not (tmp_path / "env" / ".pins").exists()


# ---- lock files and direct pins ------------------------------------------------------------------------------------


def packages(path: Path) -> dict[str, str]:
    """The packages of a lock file, each with its hashes and the comment that names what requires it."""
    found = re.findall(r"^[A-Za-z0-9].*\n(?:[ \t].*\n)*", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {block.split("==")[0]: block for block in found}


def test_lock_files_are_of_development_xla_and_image():
    assert [path.stem for path in LOCKS] == ["dev", "image", "xla"]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_locked_packages_have_exact_version_hash_and_reason(path):
    for name, block in packages(path).items():
        assert re.match(r"[\w.-]+==[\w.]+ ", block) and block.count("--hash=sha256:") >= 1, name
        assert re.search(r"^    # +via", block, re.MULTILINE), name


@pytest.mark.parametrize("name", ["bench", "browser", "dvc", "peers", "tools"])
def test_direct_pins_are_exact(name):
    lines = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)] == []


@pytest.mark.parametrize(("name", "kept"), [("dev", {"nvidia-nccl-cu12"}), ("xla", set())])
def test_cuda_packages_of_lock_are_what_torch_alone_requires(name, kept):
    """A build of torch for CPUs is installed without them; what something else requires stays."""
    lock = packages(REQUIREMENTS / "locked" / f"{name}.txt")
    of_cuda = runpy.run_path(str(SCRIPT))["_cuda_packages"](list(lock.values()))
    there = {one for one in lock if one.startswith(("nvidia-", "cuda-", "triton"))}
    assert len(of_cuda) >= 10 and {block.split("==")[0] for block in of_cuda} == there - kept


# ---- the matrix of versions ----------------------------------------------------------------------------------------


def matrix(rows: str, home: Path, *, answers: bool) -> subprocess.CompletedProcess:
    """The script where the shim of python3.13 does not answer, and pyenv's own does or not; it builds nothing."""
    python = home / "versions" / "3.13.0" / "bin" / "python3.13"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text("#!/bin/sh\n[ $1 = -c ]\n" if answers else "#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (home / "bin").mkdir(exist_ok=True)
    (home / "bin" / "python3.13").write_text("#!/bin/sh\nexit 127\n")
    (home / "bin" / "python3.13").chmod(0o755)
    variables = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PYENV_ROOT": str(home), "ROWS": rows}
    script = SCRIPT.with_name("matrix")
    return subprocess.run(["sh", script], capture_output=True, text=True, env=variables, check=False)


def test_matrix_prints_and_counts_rows_that_did_not_run(tmp_path):
    done = matrix("3.13 3.13-colab", tmp_path, answers=False)
    assert "matrix 3.13: not run, no Python 3.13 here\n" in done.stdout and done.returncode == 1
    assert done.stdout.endswith("matrix: 0 passed, 0 failed, 2 not run; not run: 3.13 3.13-colab\n")
