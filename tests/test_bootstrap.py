"""The bootstrap cell alone: a fresh interpreter without any installed package, in an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ml_factory.bootstrap import bootstrap_text

ROOT = Path(__file__).resolve().parents[1]
TEXT = bootstrap_text("OWNER/ml_factory", "v0.1.0")


def git(*words: object, folder: Path) -> None:
    who = ["-c", "user.name=tests", "-c", "user.email=tests@example.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *map(str, words)], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    """A bare repository of this checkout's code as it stands, with the pinned tag on its first commit."""
    folder = tmp_path_factory.mktemp("origin")
    work = folder / "work"
    for name in ("ml_factory/__init__.py", "ml_factory/compiled.py", "ml_factory/keys.py", "utils/colab_setup.py"):
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
        text = TEXT + "\nimport ml_factory\nprint('from', Path(ml_factory.__file__).parents[1])"
        done = subprocess.run(
            [sys.executable, "-S", "-c", text], cwd=folder, env=settings, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return call


def kept(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "ml_factory").glob("*"))


def test_a_checkout_above_is_used(run, tmp_path):
    code, said = run(ROOT / "colab_notebooks")
    assert code == 0 and f"from {ROOT}\n" in said
    assert not kept(tmp_path / "home")


def test_an_empty_folder_fetches_the_pinned_ref_once(run, tmp_path, origin):
    code, said = run()
    assert code == 0, said
    (place,) = kept(tmp_path / "home")
    assert f"Code: {place}" in said and f"from {place}\n" in said
    assert not (place / "later.txt").exists()
    assert list((tmp_path / "empty").iterdir()) == []
    shutil.move(origin, origin.with_name("away"))  # the second run needs no network
    try:
        assert run()[1].count(str(place)) == 2
    finally:
        shutil.move(origin.with_name("away"), origin)


def test_another_ref_has_a_place_of_its_own(run, tmp_path):
    assert run()[0] == 0
    assert run(ML_FACTORY_REF="main")[0] == 0
    assert [(place / "later.txt").exists() for place in kept(tmp_path / "home")] == [True, False]


def test_a_ref_that_is_not_there_yet_falls_back_aloud(run, tmp_path):
    code, said = run(ML_FACTORY_REF="v9.9.9")
    assert code == 0 and "has no v9.9.9 yet: took its default branch instead" in said
    assert (kept(tmp_path / "home")[0] / "later.txt").exists()


def test_no_repository_is_said_with_the_way_out_and_leaves_nothing_to_trip_over(run, tmp_path):
    code, said = run(ML_FACTORY_REPOSITORY=str(tmp_path / "nowhere.git"))
    assert code == 1
    assert "Could not fetch v0.1.0 from" in said and "ML_FACTORY_REPOSITORY" in said
    assert not kept(tmp_path / "home")
    code, said = run()
    assert code == 0, said


def test_a_token_in_the_address_is_not_shown(run, tmp_path):
    code, said = run(ML_FACTORY_REPOSITORY="https://someone:SECRET-TOKEN@127.0.0.1:9/x/y")
    assert code != 0 and "127.0.0.1:9/x/y" in said
    assert "SECRET-TOKEN" not in said
    assert not any("SECRET" in path.name for path in (tmp_path / "home").rglob("*"))


def test_without_git_it_says_so(run, tmp_path):
    code, said = run(PATH=str(tmp_path))
    assert code == 1 and "git is not installed" in said
