"""A notebook killed with SIGKILL while it trains, and run again: it goes on, and ends as if nothing had happened."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pandas as pd
import psutil
import pytest

from ml_factory import pipeline
from ml_factory.checkpoints.latest_training import checkpoint_history
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.runs import progress_words
from ml_factory.storage.workspace import Workspace
from tests.tracking.metrics_table import read_log

pytestmark = [pytest.mark.notebooks, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "colab_notebooks"
HORIZON = 5


@pytest.fixture(scope="module")
def market(tmp_path_factory) -> Path:
    """The root of a workspace with two weeks of the made-up market, prepared: training takes seconds, not moments."""
    workspace = Workspace(tmp_path_factory.mktemp("market") / "workspace")
    ensure_synthetic_demo_market(workspace, "DEMO", days=14)
    pipeline.prepare(workspace, "DEMO", (HORIZON,))
    return workspace.root


def start(notebook: str, model: str, root: Path, out: Path, home: Path) -> subprocess.Popen:
    """papermill, as typed, on a machine with a home of its own; every finished epoch or block is saved, for a machine
    that may vanish at any moment."""
    home.mkdir()
    words = ["-p", "HORIZON", str(HORIZON), "-p", "MODEL", model, "--no-progress-bar"]
    settings = {"ML_FACTORY_ROOT": str(root), "ML_FACTORY_WANDB": "off", "ML_FACTORY_SAVE_MINUTES": "0"}
    settings |= {"HOME": str(home)}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ML_FACTORY", "PYTEST", "XDG"))}
    return subprocess.Popen(
        [sys.executable, "-m", "papermill", f"{notebook}.ipynb", str(out), *words],
        cwd=FOLDER, env=clean | settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def newest(root: Path, model: str) -> tuple[int, str]:
    """The epoch, block or fold of the newest whole checkpoint of the run under way, and what is told of it; 0 before
    there is one."""
    for path in (root / "results").glob("*/*/run.json"):
        folds = list(path.parent.glob(f"fold-{model}-*.state"))
        if folds:
            return len(folds), f"fold {len(folds)} of"
        with CheckpointManager(root / "checkpoints", run=path.parent.name) as manager:
            found = manager.load_latest_checkpoint(f"train_{model}")
        if found is not None:
            return len(checkpoint_history(found["state"])), progress_words(found["metrics"])
    return 0, ""


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to papermill and its kernel at once, as a machine that vanishes does."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in family:
        one.send_signal(signal.SIGKILL)
    process.communicate()
    psutil.wait_procs(family, timeout=30)


def texts(notebook: Path) -> str:
    cells = [cell for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"]
    return "\n".join(output.get("text", "") for cell in cells for output in cell.outputs)


@pytest.mark.parametrize(
    ("notebook", "model"),
    [
        ("02_train_tabular", "xgboost"),
        ("03_train_sequence", "lstm"),
        ("04_train_advanced", "patchtst"),
        ("06_cross_validation", "xgboost"),
    ],
)
def test_notebook_killed_after_second_epoch_or_fold_resumes_bit_exact(notebook, model, market, tmp_path):
    shutil.copytree(market, tmp_path / "killed")
    process = start(notebook, model, tmp_path / "killed", tmp_path / "first.ipynb", tmp_path / "first home")
    deadline = time.monotonic() + 300
    while newest(tmp_path / "killed", model)[0] < 2:
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "no second epoch in five minutes"
        time.sleep(0.02)
    kill(process)
    assert not list((tmp_path / "killed" / "models").rglob("artifact.json")), "it had finished: nothing was interrupted"
    reached, reported = newest(tmp_path / "killed", model)
    assert reached >= 2

    again = start(notebook, model, tmp_path / "killed", tmp_path / "second.ipynb", tmp_path / "second home")
    assert again.wait(timeout=600) == 0, again.communicate()[1][-3000:]
    again.stderr.close()
    printed = texts(tmp_path / "second.ipynb")
    assert re.search(r"found as prepared before", printed)
    assert f"Found {model} on DEMO, horizon {HORIZON}: unfinished at {reported}" in printed, printed
    assert "Resumes from there." in printed and "bit-exact" not in printed
    if notebook.startswith("06"):
        assert f"{reached} folds found done" in printed
        return
    assert re.search(rf"resumed after (epoch|block) {reached},", printed), printed

    shutil.copytree(market, tmp_path / "whole")
    whole = pipeline.train(tmp_path / "whole", "DEMO", HORIZON, model, mirror="off")
    assert whole.resumed_from is None and len(whole.history) > reached
    resumed = pipeline.load_predictions(tmp_path / "killed", "DEMO", HORIZON, model)
    pd.testing.assert_frame_equal(
        resumed, pipeline.load_predictions(tmp_path / "whole", "DEMO", HORIZON, model), check_exact=True
    )
    log = read_log(next((tmp_path / "killed" / "results" / "DEMO").glob(f"train-{model}-*/log")))
    assert list(log["step"]) == list(whole.history["epoch"])  # each epoch once, in order
    kept = pipeline.train(tmp_path / "killed", "DEMO", HORIZON, model, mirror="off")
    assert (kept.artifact_hash, kept.predictions_hash) == (whole.artifact_hash, whole.predictions_hash)
