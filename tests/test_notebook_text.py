"""The notebooks as text: our linter finds nothing in them, and finds each fault put in on purpose."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ml_factory.notebook import NOTEBOOKS
from tests.notebook_lint import FOLDER, ROOT, canonical, lint, lint_all, owner_and_ref, source_of
from utils.notebook_bootstrap import bootstrap_cell_text

CLEAN = json.loads((FOLDER / "02_train_tabular.ipynb").read_text(encoding="utf-8"))


def cell(notebook: dict, name: str) -> dict:
    return next(item for item in notebook["cells"] if item["id"] == name)


def replace(name: str, old: str, new: str):
    """A fault: `old` becomes `new` in the cell called `name`."""

    def fault(notebook: dict) -> None:
        text = source_of(cell(notebook, name))
        assert old in text, f"{old!r} is not in cell {name}: the test has gone stale"
        cell(notebook, name)["source"] = text.replace(old, new)

    return fault


def left_output(notebook):
    cell(notebook, "train")["outputs"] = [{"name": "stdout", "output_type": "stream", "text": "left"}]


def left_metadata(notebook):
    cell(notebook, "train")["metadata"]["executionInfo"] = {"user": "someone"}


def untagged(notebook):
    cell(notebook, "parameters")["metadata"]["tags"] = []


def no_source(notebook):
    del cell(notebook, "train")["source"]


def drop(*names: str):
    def fault(notebook: dict) -> None:
        notebook["cells"] = [item for item in notebook["cells"] if item["id"] not in names]

    return fault


FAULTS = {
    "outputs are not empty (output)": left_output,
    "metadata left behind (cell)": left_metadata,
    "wants one cell tagged `parameters`": untagged,
    "not a valid notebook (schema)": no_source,
    "does not check them": drop("check"),
    "is not the bootstrap text": replace("bootstrap", "--depth=1", "--depth=2"),
    "holds only lines NAME: type = value": replace("parameters", "HORIZON: int =", "HORIZON ="),
    "parameter HORIZON is str": replace("parameters", "HORIZON: int = 20", 'HORIZON: str = "20"'),
    "the default '0' is not of its type": replace("parameters", "SEED: int = 0", 'SEED: int = "0"'),
    "has no #@param form field": replace("parameters", 'SEED: int = 0  #@param {type: "integer"}', "SEED: int = 0"),
    "QUICK ships as False": replace("parameters", "QUICK: bool = False", "QUICK: bool = True"),
    "WORKSPACE is not among": replace("parameters", "WORKSPACE:", "FOLDER:"),
    "defines a helper (a function)": replace("metrics", "columns =", "@one()\ndef helper():\n    return 1\ncolumns ="),
    "not plain Python": replace("predictions", "show(predictions.tail(4))", "!ls"),
    "installs torch (in code)": replace("setup", "workspace = ", "%pip install --upgrade numpy\nworkspace = "),
    "looks like a secret": replace("setup", "workspace = ", 'api_key = "abc"\nworkspace = '),
    "no name prepere in ml_factory.pipeline": replace("prepare", "pipeline.prepare(", "pipeline.prepere("),
    "no name shew in ml_factory.notebook": replace("check", "show", "shew"),
    "no module ml_factory.piper": replace("prepare", "from ml_factory import pipeline", "import ml_factory.piper"),
    "claims nothing": drop("curves-checks", "metrics-checks", "predictions-checks"),
    "lacks https://colab.research": replace("title", "02_train_tabular.ipynb)", "03_train_sequence.ipynb)"),
}


def test_notebook_lint_finds_no_fault_in_shipped_notebooks():
    assert lint_all() == []


@pytest.mark.parametrize("complaint", FAULTS)
def test_notebook_lint_reports_each_injected_fault(complaint, tmp_path):
    broken = copy.deepcopy(CLEAN)
    FAULTS[complaint](broken)
    path = tmp_path / "02_train_tabular.ipynb"
    path.write_text(canonical(broken), encoding="utf-8")
    found = list(lint(path))
    assert any(re.sub(r" \(.*\)$", "", complaint) in line for line in found), found


def test_notebook_lint_reports_non_canonical_json(tmp_path):
    path = tmp_path / "02_train_tabular.ipynb"
    path.write_text(json.dumps(CLEAN), encoding="utf-8")
    assert list(lint(path)) == ["not in its canonical JSON form (make badges writes it)"]


def test_notebook_lint_reports_absent_notebook(tmp_path):
    assert lint_all(tmp_path) == [f"{name}.ipynb is absent" for name in NOTEBOOKS]


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
    assert source_of(cell(opened, "bootstrap")) == bootstrap_cell_text(f"some-one/{repository}", ref)
    assert f"github/some-one/{repository}/blob" in source_of(cell(opened, "title"))
    assert badges(copied, owner).returncode == 0
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("owner", ["", "a/b", "-x", "a b", "x" * 40, 'x";import os'])
def test_make_badges_with_invalid_owner_exits_2_without_changes(copied, owner):
    before = (copied / "pyproject.toml").read_bytes()
    done = badges(copied, owner)
    assert done.returncode == 2 and "OWNER=name" in done.stderr
    assert (copied / "pyproject.toml").read_bytes() == before
