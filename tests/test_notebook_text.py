"""The notebooks as text: our linter finds nothing in them, and `make badges` writes the owner."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ml_factory.notebook import NOTEBOOKS
from tests.notebook_lint import FOLDER, ROOT, lint, lint_all, owner_and_ref, source_of
from utils.notebook_bootstrap import bootstrap_cell_text


def test_notebook_lint_finds_no_fault_in_shipped_notebooks():
    assert lint_all() == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("SEED: int = 0", 'SEED: int = \\"0\\"', "is not of its type"),
        ("pipeline.prepare(", "pipeline.prepere(", "no name prepere in ml_factory.pipeline"),
        ('"outputs": []', '"outputs": [{"name": "stdout", "output_type": "stream", "text": "a"}]', "not empty"),
    ],
)
def test_notebook_lint_reports_an_injected_fault(old, new, complaint, tmp_path):
    text = (FOLDER / "02_train_tabular.ipynb").read_text(encoding="utf-8")
    (tmp_path / "02_train_tabular.ipynb").write_text(text.replace(old, new, 1), encoding="utf-8")
    assert any(complaint in line for line in lint(tmp_path / "02_train_tabular.ipynb"))


@pytest.fixture
def copied(tmp_path) -> Path:
    """What `make badges` touches, in a folder of its own."""
    names = [".ci/badges.py", "pyproject.toml", "utils/__init__.py", "utils/notebook_bootstrap.py"]
    names += ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff"]
    names += [f"colab_notebooks/{name}.ipynb" for name in NOTEBOOKS]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def badges(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, folder / ".ci" / "badges.py", *words], capture_output=True, text=True, cwd=folder, check=False
    )


def test_make_badges_writes_owner_to_all_files_and_is_reversible(copied):
    written = (".ipynb", ".md", ".toml", ".cff")
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.suffix in written}
    slug, ref = owner_and_ref()
    owner, repository = slug.split("/")
    assert badges(copied, "some-one").returncode == 0
    for path in before:
        text = path.read_text(encoding="utf-8")
        assert f"/{slug}" not in text and f'"{slug}"' not in text, path
    for name in ("README.md", "SECURITY.md", "CITATION.cff", "pyproject.toml"):
        assert f"/some-one/{repository}" in (copied / name).read_text(encoding="utf-8"), name
    opened = json.loads((copied / "colab_notebooks" / "02_train_tabular.ipynb").read_text(encoding="utf-8"))
    cells = {cell["id"]: cell for cell in opened["cells"]}
    assert source_of(cells["bootstrap"]) == bootstrap_cell_text(f"some-one/{repository}", ref)
    assert f"github/some-one/{repository}/blob" in source_of(cells["title"])
    assert badges(copied, owner).returncode == 0
    assert {path: path.read_bytes() for path in before} == before


def test_make_badges_with_invalid_owner_exits_2_without_changes(copied):
    before = (copied / "pyproject.toml").read_bytes()
    for owner in ("", "-x", "a b", "x" * 40, 'x";import os'):
        done = badges(copied, owner)
        assert done.returncode == 2 and "OWNER=name" in done.stderr
        assert (copied / "pyproject.toml").read_bytes() == before
