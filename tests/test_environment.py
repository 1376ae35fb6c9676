"""The script that sets the environment up: reused while the pins stand, and honest about what a machine lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "environment.py"


def run(folder: Path, pins: Path, *, before: str = "") -> subprocess.CompletedProcess:
    """The script as its own process, after the line `before`."""
    line = f"{before}\nimport runpy, sys\nsys.argv = {['environment.py', str(folder), str(pins)]!r}\n"
    text = f"{line}runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=quiet, check=False)


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_environment_script_without_venv_module_names_apt_package(module, tmp_path):
    (tmp_path / "pins.txt").touch()
    done = run(tmp_path / "env", tmp_path / "pins.txt", before=f"import sys; sys.modules[{module!r}] = None")
    assert done.returncode == 1
    assert f"apt-get install python3.{sys.version_info[1]}-venv" in done.stderr and "python3-venv" in done.stderr
    assert not (tmp_path / "env").exists()


def test_environment_script_on_old_python_names_wanted_version(tmp_path):
    (tmp_path / "pins.txt").touch()
    done = run(tmp_path / "env", tmp_path / "pins.txt", before="import sys; sys.version_info = (3, 9, 0)")
    assert done.returncode == 1 and "got Python 3.9, wanted 3.11 or newer" in done.stderr


def test_environment_script_without_pins_file_names_file(tmp_path):
    done = run(tmp_path / "env", tmp_path / "pins.txt")
    assert done.returncode == 1 and "pins.txt is absent" in done.stderr


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


def test_environment_script_with_uninstallable_pins_leaves_no_stamp(tmp_path):
    (tmp_path / "pins.txt").write_text("./there-is-no-such-folder\n")
    done = run(tmp_path / "env", tmp_path / "pins.txt")
    assert done.returncode != 0 and "make again to retry" in done.stdout
    assert not (tmp_path / "env" / ".pins").exists()
