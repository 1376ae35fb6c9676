"""The notebooks run: each alone in an empty folder, through papermill and through nbval.

They share one workspace in the order of their numbers, as a user's do; each has a home and a folder of its own, where
the code is not, so each fetches it from a bare repository.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.notebook import NOTEBOOKS
from ml_factory.storage.workspace import Workspace
from tests.notebook_lint import FOLDER, ROOT, owner_and_ref
from tests.utils.test_notebook_bootstrap import git

pytestmark = [pytest.mark.notebooks, pytest.mark.slow]
CARRIED = ("ml_factory", "utils", "requirements", "requirements.txt", "pyproject.toml")
DAYS = 12
COMPILING = ("01_data_pipeline", "07_inference")
SHORTEST = ["-p", "HORIZON", "20", "-p", "MODEL", "xgboost"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Everything these tests write: origin.git, workspace, and the executed notebooks."""
    folder = tmp_path_factory.mktemp("notebooks")
    work = folder / "work"
    work.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in CARRIED:
        source = ROOT / name
        shutil.copytree(source, work / name, ignore=ignored) if source.is_dir() else shutil.copy(source, work / name)
    git("init", "--quiet", "--initial-branch=main", folder=work)
    git("add", ".", folder=work)
    git("commit", "--quiet", "-m", "the code as it stands", folder=work)
    git("tag", owner_and_ref()[1], folder=work)
    git("clone", "--quiet", "--bare", work, folder / "origin.git", folder=folder)
    shutil.rmtree(work)
    for name in ("executed", "workspace", "user"):
        (folder / name).mkdir()
    # The demo market, shorter than the one a user gets: same bars, same code, less to learn from.
    ensure_synthetic_demo_market(Workspace(folder / "workspace"), "DEMO", days=DAYS)
    return folder


def settings(home: Path) -> dict[str, str]:
    """The environment of a quick, quiet, separate user."""
    hidden = ("ML_FACTORY", "COLAB", "WANDB", "PYTEST", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)} | {
        "HOME": str(home / "user"),
        "ML_FACTORY_REPOSITORY": str(home / "origin.git"),
        "ML_FACTORY_ROOT": str(home / "workspace"),
        "ML_FACTORY_QUICK": "1",
        "ML_FACTORY_WANDB": "off",
    }


@pytest.fixture(scope="module")
def call(home):
    """Run a Python module as its own process."""

    def run(*words: object, cwd: Path, **more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", *map(str, words)]
        return subprocess.run(
            command, cwd=cwd, env=settings(home) | more, capture_output=True, text=True, timeout=900, check=False
        )

    return run


def papermill(call, source: Path, target: Path, *words: str, **options) -> subprocess.CompletedProcess:
    return call("papermill", source, target, "--no-progress-bar", *words, **options)


def texts(notebook: Path) -> Iterator[str]:
    """What each code cell printed, in order."""
    for cell in nbformat.read(notebook, 4).cells:
        if cell.cell_type == "code":
            yield "".join(output.get("text", "") for output in cell.outputs)


def pictures(notebook: Path) -> int:
    outputs = [output for cell in nbformat.read(notebook, 4).cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def is_compared(cell: nbformat.NotebookNode) -> bool:
    """Whether nbval compares its output: by the tag, or by the older comment."""
    return "nbval-check-output" in cell.metadata.get("tags", ()) or "NBVAL_CHECK_OUTPUT" in cell.source


def marked_numbers(notebook: Path) -> list[str]:
    """The outputs that nbval compares."""
    cells = [cell for cell in nbformat.read(notebook, 4).cells if is_compared(cell)]
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_alone_in_empty_folder_fetches_code_and_runs(name, home, call, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copy(FOLDER / f"{name}.ipynb", tmp_path / "empty")
    target = home / "executed" / f"{name}.ipynb"
    # Those that compile every kernel do it in the home of the tests below, so that it takes its minutes once.
    user = home / "user" if name in COMPILING else tmp_path / "user"
    user.mkdir(exist_ok=True)
    done = papermill(call, f"{name}.ipynb", target, cwd=tmp_path / "empty", HOME=str(user))
    assert done.returncode == 0, done.stderr[-3000:]
    printed = list(texts(target))
    place = re.search(r"^code +(\S+)", "".join(printed), re.MULTILINE)[1]
    assert Path(place).is_relative_to(user / ".cache")
    assert pictures(target) >= (5 if name == "01_data_pipeline" else 1)
    following = [f"Next: {later}.ipynb" for later in NOTEBOOKS[1:]] + ["This was the last notebook."]
    assert following[NOTEBOOKS.index(name)] in printed[-1]
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == [f"{name}.ipynb"]


def executed(home: Path) -> list[Path]:
    """The executed copies of the test above, all eight."""
    found = [home / "executed" / f"{name}.ipynb" for name in NOTEBOOKS]
    absent = [path.name for path in found if not path.is_file()]
    if absent:
        pytest.fail(f"not executed: {', '.join(absent)} (the test above must run first, in the same process)")
    return found


def nbval(call, *paths: Path, cwd: Path) -> subprocess.CompletedProcess:
    words = ["pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "--rootdir", str(cwd)]
    return call(*words, "--nbval-lax", *paths, cwd=cwd)


def test_nbval_passes_on_shipped_notebooks(call):
    done = nbval(call, *(FOLDER / f"{name}.ipynb" for name in NOTEBOOKS), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " failed" not in done.stdout


def test_nbval_passes_on_executed_notebooks_with_marked_outputs(home, call):
    done = nbval(call, *executed(home), cwd=home)
    assert done.returncode == 0, done.stdout[-3000:]
    assert all(marked_numbers(path) and all(marked_numbers(path)) for path in executed(home))


def test_notebook_02_rerun_with_fresh_reproduces_marked_numbers(home, call, tmp_path):
    again = tmp_path / "again.ipynb"
    done = papermill(call, FOLDER / "02_train_tabular.ipynb", again, "-p", "FRESH", "True", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained from the start" in "".join(texts(again))
    assert marked_numbers(again) == marked_numbers(executed(home)[2])


@pytest.mark.parametrize(
    ("cwd", "path"),
    [
        (ROOT, "colab_notebooks/02_train_tabular.ipynb"),
        (ROOT, "02_train_tabular.ipynb"),
        (FOLDER, "02_train_tabular.ipynb"),
    ],
)
def test_notebook_02_by_papermill_needs_only_raw_bars(cwd, path, home, call, tmp_path):
    executed(home)
    raw = tmp_path / "workspace" / "data" / "raw"
    raw.mkdir(parents=True)
    shutil.copy(home / "workspace" / "data" / "raw" / "DEMO_1m.parquet", raw / "MES_1m.parquet")
    words = ["-p", "SYMBOL", "MES", *SHORTEST]
    done = papermill(call, path, tmp_path / "out.ipynb", *words, cwd=cwd, ML_FACTORY_ROOT=str(tmp_path / "workspace"))
    assert done.returncode == 0, done.stderr[-3000:]
    printed = list(texts(tmp_path / "out.ipynb"))
    assert f"{ROOT}\n" in "".join(printed) and "MES" in "".join(printed) and not (raw / "DEMO_1m.parquet").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", "TYPO", "1"], "Unknown parameter [-p]. got 'TYPO'"),
        (["-p", "HORIZON", "twenty"], "HORIZON"),
        (["-p", "SYMBOL", "1E5"], "write -r SYMBOL"),
        (["-p", "MODEL", "lstm"], "open 03_train_sequence.ipynb"),
    ],
)
def test_notebook_02_with_wrong_parameter_fails_in_validation_cell(words, message, call, tmp_path):
    target = tmp_path / "out.ipynb"
    done = papermill(call, FOLDER / "02_train_tabular.ipynb", target, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.split("PapermillExecutionError")[-1]
    (failed,) = [
        cell.id
        for cell in json.loads(
            target.read_text(encoding="utf-8"), object_hook=lambda item: nbformat.NotebookNode(item)
        ).cells
        if cell.cell_type == "code" and any(output.output_type == "error" for output in cell.outputs)
    ]
    assert failed == "check"
    assert not list(tmp_path.rglob("*.parquet"))
