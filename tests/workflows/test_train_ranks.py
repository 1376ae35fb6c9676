"""torchrun from the command line: two processes, the numbers of one, and one of them writes."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import train
from tests.conftest import ROOT

SETTINGS = {"dropout": 0.0, "epochs": 2, "hidden": 8, "lookback": 6, "threads": 1, "precision": "fp32", "device": "cpu"}


def two_processes(root, model: str, settings: dict) -> tuple[dict, str]:
    """What `torchrun --nproc-per-node 2 -m ml_factory train` prints: the facts, and what it says beside them."""
    given = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    words = ["--workspace", root, "--symbol", "DEMO", "--horizon", "5", "--model", model, "--quick", "--json", *given]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    alike = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*start, "ml_factory", "train", *map(str, words)], cwd=ROOT, env=alike, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr  # two of them would not be JSON


@pytest.fixture
def second(prepared, tmp_path) -> Workspace:
    """A second copy of the prepared workspace."""
    shutil.copytree(prepared.root, tmp_path / "beside")
    return Workspace(tmp_path / "beside")


@pytest.mark.soak
def test_torchrun_train_in_two_processes_gives_losses_of_one_and_one_run(prepared, second):
    alone = pipeline.train(prepared, "DEMO", 5, "gru", quick=True, model_settings=SETTINGS)
    reported, _ = two_processes(second.root, "gru", SETTINGS)
    together = pipeline.train(second, "DEMO", 5, "gru", quick=True, model_settings=SETTINGS)
    assert together.reused and reported["run_id"] == together.run_id == alone.run_id
    for name in ("train_loss", "val_loss"):
        np.testing.assert_allclose(together.history[name], alone.history[name], rtol=1e-6)
    # One attempt, one record, one artifact: the second process left nothing behind.
    runs = [path.name for path in (second.results / "DEMO").iterdir() if path.is_dir()]
    assert runs == [alone.run_id]
    logged = {path.name.split("-")[0] for path in (together.report_path.parent / "log").glob("*.jsonl")}
    assert logged == {"0001"}
    assert reported["artifact_hash"] == together.artifact_hash
    # What is finished is found, and the second process does not wait for a fit that does not come.
    again, _ = two_processes(second.root, "gru", SETTINGS)
    assert again["reused"] and again["artifact_hash"] == reported["artifact_hash"]


@pytest.fixture
def further_rank(monkeypatch):
    """Make this process rank 1 of a torchrun group, as far as the environment says it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "group")
    monkeypatch.setenv("RANK", "1")


def files_of(workspace: Workspace) -> dict:
    return {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*") if path.is_file()}


def test_train_of_booster_in_further_rank_returns_none_and_writes_nothing(prepared, further_rank):
    before = files_of(prepared)
    assert pipeline.train(prepared, "DEMO", 5, "lightgbm", quick=True) is None
    assert files_of(prepared) == before


def test_train_of_network_in_further_rank_fits_on_training_rows_and_writes_nothing(prepared, further_rank, monkeypatch):
    monkeypatch.setattr(train, "broadcast_fit_decision", lambda spec, fitting=False: True)
    honest, fitted, before = train.build_untrained_model, [], files_of(prepared)

    class Recorded:
        def fit(self, x, y, w, *, validation):
            fitted.append((len(x), len(validation[0])))

    def observed(data, spec):
        model, train_rows, held_out, limits = honest(data, spec)
        wanted.append((len(train_rows), len(held_out)))
        Recorded.lookback = model.lookback
        return Recorded(), train_rows, held_out, limits

    wanted = []
    monkeypatch.setattr(train, "build_untrained_model", observed)
    assert pipeline.train(prepared, "DEMO", 5, "gru", quick=True, model_settings=SETTINGS) is None
    assert len(fitted) == 1 and 0 < fitted[0][0] <= wanted[0][0] and 0 < fitted[0][1] <= wanted[0][1]
    assert files_of(prepared) == before
