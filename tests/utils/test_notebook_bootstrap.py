"""The bootstrap cell alone: a fresh interpreter without any installed package, in an empty folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook_lint import source_of
from utils.notebook_bootstrap import bootstrap_cell_text, wheel_cell_text

ROOT = Path(__file__).resolve().parents[2]
TEXT = bootstrap_cell_text("OWNER/ml_factory", "v0.1.0")
WHERE = "import importlib.util; print('from', pathlib.Path(importlib.util.find_spec('ml_factory').origin).parents[1])"


def git(*words: object, folder: Path) -> None:
    who = ["-c", "user.name=tests", "-c", "user.email=tests@example.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *map(str, words)], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    """A bare repository of this checkout's code as it stands, with the pinned tag on its first commit."""
    folder = tmp_path_factory.mktemp("origin")
    work = folder / "work"
    for name in ("ml_factory/__init__.py", "utils/__init__.py", "utils/runtime.py"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, work / name)
    git("init", "--quiet", "--initial-branch=main", folder=work)
    git("add", ".", folder=work)
    git("commit", "--quiet", "-m", "first", folder=work)
    git("tag", "v0.1.0", folder=work)
    (work / "later.txt").write_text("after the tag")
    git("add", ".", folder=work)
    git("commit", "--quiet", "-m", "second", folder=work)
    git("clone", "--quiet", "--bare", work, folder / "origin.git", folder=folder)
    return folder / "origin.git"


@pytest.fixture
def run(tmp_path, origin):
    """Run the cell, then print where ml_factory comes from; (exit code, output)."""
    (tmp_path / "home").mkdir()
    (tmp_path / "empty").mkdir()

    def call(folder: Path = tmp_path / "empty", **environment: str) -> tuple[int, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("ML_FACTORY", "COLAB"))}
        settings = clean | {"HOME": str(tmp_path / "home"), "ML_FACTORY_REPOSITORY": str(origin)} | environment
        text = f"{TEXT}\n{WHERE}"
        done = subprocess.run(
            [sys.executable, "-S", "-c", text], cwd=folder, env=settings, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return call


def kept(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "ml_factory").glob("*"))


def test_bootstrap_cells_have_at_most_eight_lines():
    wheel = wheel_cell_text("ml_factory-0.1.0-py3-none-any.whl", "ml_factory-0.1.0-0123")
    assert max(len(text.splitlines()) for text in (TEXT, wheel)) <= 8


def test_bootstrap_cell_inside_checkout_uses_checkout(run, tmp_path):
    code, printed = run(ROOT / "colab_notebooks" / "recipes")
    assert code == 0 and f"from {ROOT}\n" in printed
    assert not kept(tmp_path / "home")


def test_bootstrap_cell_in_empty_folder_clones_pinned_ref_once(run, tmp_path, origin):
    code, printed = run()
    assert code == 0, printed
    (place,) = kept(tmp_path / "home")
    assert f"from {place}\n" in printed and not (place / "later.txt").exists()
    assert list((tmp_path / "empty").iterdir()) == []
    shutil.move(origin, origin.with_name("away"))  # the second run needs no network
    try:
        assert f"from {place}\n" in run()[1]
    finally:
        shutil.move(origin.with_name("away"), origin)


def test_bootstrap_cell_with_absent_tag_clones_default_branch_and_says_so(run, tmp_path, origin):
    git("tag", "--delete", "v0.1.0", folder=origin)
    try:
        code, printed = run()
    finally:
        git("tag", "v0.1.0", "main~1", folder=origin)
    assert code == 0 and "Remote branch v0.1.0 not found" in printed, printed
    assert (kept(tmp_path / "home")[0] / "later.txt").exists()


def test_bootstrap_cell_with_unreachable_repository_prints_reason_without_password(run, tmp_path):
    code, printed = run(ML_FACTORY_REPOSITORY="https://someone:SECRET-TOKEN@127.0.0.1:9/x/y")
    assert code == 1 and "127.0.0.1" in printed and "Next: upload what `make colab` writes" in printed
    assert "SECRET" not in printed and not kept(tmp_path / "home")
    assert run()[0] == 0


# ---- notebooks that were uploaded alone, with the wheel of `make colab` ---------------------------------------------


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory) -> Path:
    """What `make colab` writes, and nothing else of the checkout."""
    folder = tmp_path_factory.mktemp("uploaded")
    command = [sys.executable, "-S", str(ROOT / ".ci" / "colab.py"), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def written_for(shipped: Path, folder: Path) -> Path:
    """What `make colab` wrote of a notebook of this checkout."""
    return folder / shipped.relative_to(ROOT / "colab_notebooks")


def test_make_colab_writes_eight_notebooks_recipes_and_one_installable_wheel(uploaded, tmp_path):
    assert len(list(uploaded.glob("0?_*.ipynb"))) == 8
    for shipped in (ROOT / "colab_notebooks").rglob("*.ipynb"):
        here, there = (json.loads(path.read_text())["cells"] for path in (shipped, written_for(shipped, uploaded)))
        assert [one["id"] for one, other in zip(here, there, strict=True) if one != other] == ["bootstrap"]
    (wheel,) = uploaded.glob("*.whl")
    options = ["--no-index", "--no-deps", "-q", "--target", tmp_path / "site"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, wheel], check=True, capture_output=True)
    assert (tmp_path / "site" / "utils" / "colab_setup.py").read_bytes() == (ROOT / "utils/colab_setup.py").read_bytes()
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ml_factory").rglob("*.py")}
    assert wanted <= {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.py")}


def test_make_colab_notebook_on_colab_unpacks_wheel_of_drive_once(uploaded, tmp_path):
    """A stand-in for google.colab.drive: mounting brings the uploaded folder."""
    package = tmp_path / "shim" / "google" / "colab"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    mount = "import shutil\ndef mount(place):\n"
    mount += f"    shutil.copytree({str(uploaded)!r}, place + '/MyDrive/ml_factory', dirs_exist_ok=True)\n"
    (package / "drive.py").write_text(mount)
    (tmp_path / "home").mkdir()
    for name in ("02_train_tabular.ipynb", "recipes/t5.ipynb"):
        cell = source_of(json.loads((uploaded / name).read_text())["cells"][1])
        text = cell.replace("/content", str(tmp_path / "content")) + "\n" + WHERE
        done = subprocess.run(
            [sys.executable, "-S", "-c", text], cwd=tmp_path / "home", capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "shim")}, check=False,
        )  # fmt: skip
        (code,) = (tmp_path / "content").glob("ml_factory-0.1.0-*")
        assert done.returncode == 0 and f"from {code}\n" in done.stdout, done.stderr
        assert (code / "requirements" / "colab-gpu.txt").is_file()
