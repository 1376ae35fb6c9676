"""The bootstrap cell alone: a fresh interpreter without any installed package, in an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from utils.notebook_bootstrap import bootstrap_cell_text

ROOT = Path(__file__).resolve().parents[1]
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
    for name in ("ml_factory/__init__.py", "utils/__init__.py", "utils/notebook_bootstrap.py"):
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


def test_bootstrap_cell_inside_checkout_uses_checkout(run, tmp_path):
    code, printed = run(ROOT / "colab_notebooks")
    assert code == 0 and f"from {ROOT}\n" in printed
    assert not kept(tmp_path / "home")


def test_bootstrap_cell_in_empty_folder_fetches_pinned_ref_once(run, tmp_path, origin):
    code, printed = run()
    assert code == 0, printed
    (place,) = kept(tmp_path / "home")
    assert f"Code: {place}" in printed and f"from {place}\n" in printed
    assert not (place / "later.txt").exists()
    assert list((tmp_path / "empty").iterdir()) == []
    shutil.move(origin, origin.with_name("away"))  # the second run needs no network
    try:
        assert run()[1].count(str(place)) == 2
    finally:
        shutil.move(origin.with_name("away"), origin)


def test_bootstrap_cell_with_other_ref_uses_separate_folder(run, tmp_path):
    assert run()[0] == 0
    code, printed = run(ML_FACTORY_REF="main")
    assert code == 0, printed
    assert [(place / "later.txt").exists() for place in kept(tmp_path / "home")] == [True, False]


def test_bootstrap_cell_with_absent_ref_takes_default_branch_and_reports(run, tmp_path):
    code, printed = run(ML_FACTORY_REF="v9.9.9")
    assert code == 0 and "has no v9.9.9 yet: took its default branch instead" in printed, printed
    assert (kept(tmp_path / "home")[0] / "later.txt").exists()


def test_bootstrap_cell_with_unreachable_repository_exits_1_and_leaves_no_clone(run, tmp_path):
    code, printed = run(ML_FACTORY_REPOSITORY=str(tmp_path / "nowhere.git"))
    assert code == 1
    assert "Could not fetch v0.1.0 from" in printed and "ML_FACTORY_REPOSITORY" in printed
    assert not kept(tmp_path / "home")
    code, printed = run()
    assert code == 0, printed


@pytest.mark.parametrize(
    "address",
    [
        "https://someone:SECRET-TOKEN@127.0.0.1:9/x/y",
        "https://SECRET-TOKEN@127.0.0.1:9/x/y",
        "https://127.0.0.1:9/x/y?private_token=SECRET-TOKEN",
        "https://127.0.0.1:9/x/y?a=1&access_token=SECRET-TOKEN",
        "https://127.0.0.1:9/x/y#token=SECRET-TOKEN",
        "https://127.0.0.1:9/x/y;token=SECRET-TOKEN",
        "https://someone:SECRET%40TOKEN@127.0.0.1:9/x/y?key=SECRET-TOKEN",
    ],
)
def test_bootstrap_cell_with_token_in_address_prints_no_token(address, run, tmp_path):
    code, printed = run(ML_FACTORY_REPOSITORY=address)
    assert code != 0 and "127.0.0.1:9/x/y" in printed
    assert "SECRET" not in printed and "TOKEN" not in printed
    assert not any("SECRET" in path.name for path in (tmp_path / "home").rglob("*"))


def test_bootstrap_cell_with_token_in_address_leaves_no_token_on_disk(run, tmp_path, origin):
    """git itself would keep the address in the clone's configuration."""
    code, printed = run(ML_FACTORY_REPOSITORY=f"file://someone@localhost{origin}")
    (place,) = kept(tmp_path / "home")
    assert code == 0, printed
    holders = [path for path in place.rglob("*") if path.is_file() and b"someone@" in path.read_bytes()]
    assert holders == []


def test_bootstrap_cell_with_commit_as_ref_checks_out_commit(run, tmp_path, origin):
    commit = subprocess.run(["git", "rev-parse", "v0.1.0"], cwd=origin, capture_output=True, text=True).stdout.strip()
    code, printed = run(ML_FACTORY_REPOSITORY=f"file://{origin}", ML_FACTORY_REF=commit)
    (place,) = kept(tmp_path / "home")
    assert ":" not in str(place)  # a worker process is given import paths that colons part
    assert code == 0 and "default branch" not in printed and not (place / "later.txt").exists(), printed


def test_bootstrap_cell_has_at_most_14_lines():
    assert len(TEXT.splitlines()) <= 14


def test_bootstrap_cell_without_git_exits_1_and_names_setting(run, tmp_path):
    code, printed = run(PATH=str(tmp_path))
    assert code == 1 and "git: not found" in printed and "ML_FACTORY_REPOSITORY" in printed


# ---- notebooks that were uploaded alone, with the wheel of `make colab` ---------------------------------------------

PLACEHOLDER = "https://github.com/OWNER/ml_factory"


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory) -> Path:
    """What `make colab` writes, and nothing else of the checkout."""
    folder = tmp_path_factory.mktemp("uploaded")
    command = [sys.executable, "-S", str(ROOT / ".ci" / "colab.py"), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_make_colab_writes_eight_notebooks_recipes_and_one_installable_wheel(uploaded, tmp_path):
    assert len(list(uploaded.glob("0?_*.ipynb"))) == 8
    recipes = {path.name: path.read_bytes() for path in (ROOT / "colab_notebooks" / "recipes").glob("*.ipynb")}
    assert recipes and {path.name: path.read_bytes() for path in (uploaded / "recipes").iterdir()} == recipes
    (wheel,) = uploaded.glob("*.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-deps",
        "-q",
        "--target",
        tmp_path / "site",
        wheel,
    ]
    subprocess.run(pip, check=True, capture_output=True)
    assert (tmp_path / "site" / "utils" / "colab_setup.py").read_bytes() == (ROOT / "utils/colab_setup.py").read_bytes()
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ml_factory").rglob("*.py")}
    assert wanted <= {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.py")}


def test_bootstrap_cell_next_to_wheel_unpacks_wheel_without_git(run, uploaded, tmp_path):
    where = {"ML_FACTORY_REPOSITORY": PLACEHOLDER, "PATH": str(tmp_path)}
    code, printed = run(uploaded, **where)
    (place,) = kept(tmp_path / "home")
    assert code == 0 and f"from {place}\n" in printed and "ml_factory-0.1.0-py3-none-any.whl" in printed, printed
    assert (place / "requirements" / "colab-gpu.txt").is_file()
    assert run(uploaded, **where)[1].count(str(place)) == 2 and kept(tmp_path / "home") == [place]


def test_bootstrap_cell_on_colab_with_placeholder_owner_takes_wheel_from_drive(run, uploaded, tmp_path):
    """A stand-in for google.colab.drive: mounting brings the uploaded folder."""
    package = tmp_path / "shim" / "google" / "colab"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    mount = f"import shutil\ndef mount(place):\n    shutil.copytree({str(uploaded)!r}, place + '/MyDrive/ml_factory')\n"
    (package / "drive.py").write_text(mount)
    cell = TEXT.replace("/content/drive", str(tmp_path / "drive"))
    assert cell != TEXT
    settings = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "shim"),
        "COLAB_RELEASE_TAG": "release",
        "HOME": str(tmp_path / "home"),
    }
    settings.pop("ML_FACTORY_REPOSITORY", None)
    text = f"{cell}\n{WHERE}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", text], cwd=tmp_path / "empty", env=settings, capture_output=True, text=True
    )
    (place,) = kept(tmp_path / "home")
    assert done.returncode == 0 and f"from {place}\n" in done.stdout and "ml_factory-0.1.0" in place.name, done.stderr


def test_bootstrap_cell_with_placeholder_owner_exits_1_without_fetch(run, tmp_path):
    code, printed = run(ML_FACTORY_REPOSITORY=PLACEHOLDER)
    assert (
        code == 1 and "is a placeholder" in printed and "make colab" in printed and "ML_FACTORY_REPOSITORY" in printed
    )
    assert not kept(tmp_path / "home")
