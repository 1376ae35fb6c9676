"""Contents of `pip install .`: the library and its command, and neither utils nor tests."""

import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from utils import runtime

ROOT = Path(__file__).resolve().parents[2]


def pip(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the tree so that no build folder stays in it."""
    folder = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "workspace", "build", "dist", "*.egg-info", "shared")
    shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    done = pip("wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder), ".", cwd=folder / "tree")
    assert done.returncode == 0, done.stderr[-2000:]
    return next(folder.glob("*.whl"))


def text_of(wheel: Path, ending: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith(ending))).decode()


def test_wheel_contains_only_ml_factory(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"ml_factory"}
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ml_factory").rglob("*.py")}
    assert wanted | {"ml_factory/py.typed"} <= set(names)
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_wheel_metadata_matches_requirements_files(wheel):
    metadata = message_from_string(text_of(wheel, ".dist-info/METADATA"))
    calls = {str(Requirement(line)) for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert calls == {
        str(Requirement(line)) for line in runtime.read_requirement_lines(ROOT / "requirements" / "base.txt")
    }
    extras = {name: set() for name in metadata.get_all("Provides-Extra")}
    for line in metadata.get_all("Requires-Dist"):
        for name in extras:
            extras[name] |= {Requirement(line).name} if f'extra == "{name}"' in line else set()
    listed = {path.stem for path in (ROOT / "requirements").glob("*.txt")}
    for name in extras.keys() - {"all"}:
        lines = runtime.read_requirement_lines(ROOT / "requirements" / f"{name}.txt")
        assert name in listed and extras[name] == {Requirement(line).name for line in lines}
    assert extras["all"] == set().union(*(extras[name] for name in extras if name != "all"))
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"


def test_wheel_installed_command_runs_without_checkout(wheel, tmp_path):
    done = pip("install", "--no-deps", "--no-index", "-q", "--prefix", str(tmp_path), str(wheel))
    assert done.returncode == 0, done.stderr
    site = next(tmp_path.glob("lib*/python*/site-packages"))
    script = tmp_path / ("Scripts" if sys.platform == "win32" else "bin") / "ml-factory"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site), "HOME": str(tmp_path)}
    done = subprocess.run(
        [script, "--help"], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "prepare" in done.stdout and "train" in done.stdout
    # `make setup` puts the checkout on the path of this interpreter; a machine that has only the wheel lacks it.
    code = (
        f"import sys; sys.path[:] = [folder for folder in sys.path if folder != {str(ROOT)!r}]\n"
        "import ml_factory, importlib.util as u; assert u.find_spec('utils') is None; print(ml_factory.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(site)
