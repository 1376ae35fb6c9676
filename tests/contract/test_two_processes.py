"""A second process on a run that a living one works on is refused, and leaves no trace in it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import CheckpointError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import import_bars
from tests.small_data import SMALL_DATA

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"mirror": "off", "model_settings": {"rounds": 20, "depth": 2, "threads": 1}}
BASES = ["linear", "lightgbm"]
VERBS = {
    "train": (["lightgbm"], OPTIONS),
    "cross_validate": (["lightgbm"], {**OPTIONS, "folds": 2}),
    "stack": ([BASES], {"mirror": "off", "folds": 2, "quick": True}),
}
# It stands still where a fit, or a fold of the last model begins.
FIRST = """
import json
import sys
from ml_factory import pipeline
from ml_factory.workflows import folds, train

def stop_before(owner, name, after):
    whole, calls = getattr(owner, name), []
    def stopped(*given, **named):
        calls.append(1)
        if len(calls) > after:
            print("working", flush=True)
            sys.stdin.readline()
        return whole(*given, **named)
    setattr(owner, name, stopped)

verb, given, named = sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
if verb == "train":
    stop_before(train.FitCheckpoints, "save", 1)
else:
    stop_before(folds, "fit_on_rows", 3 if verb == "stack" else 1)
getattr(pipeline, verb)(sys.argv[1], "MES", 5, *given, **named)
"""


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def market(tmp_path_factory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("two") / "workspace")
    import_bars(synthetic_bars(days=8, seed=2).reset_index(), workspace, "MES")
    pipeline.prepare(workspace, "MES", (5,), settings=SMALL_DATA)
    return workspace


@pytest.mark.soak_except("train")
@pytest.mark.parametrize("verb", VERBS)
def test_second_process_on_running_run_raises_and_first_finishes(verb, market, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    workspace = Workspace(shutil.copytree(market.root, tmp_path / "workspace"))
    given, named = VERBS[verb]
    command = [sys.executable, "-c", FIRST, str(workspace.root), verb, json.dumps(given), json.dumps(named)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "working\n"
            before = content(workspace.results) | content(tmp_path / "cache")
            received = []
            with pytest.raises(CheckpointError, match="Another process is working"):
                getattr(pipeline, verb)(workspace, "MES", 5, *given, **named, on_status=received.append)
            # That it is locked comes first; a stack's run is known once its finished base models are found.
            assert [line for line in received if verb != "stack" or "Found stack" in line] == []
            assert content(workspace.results) | content(tmp_path / "cache") == before
        finally:
            first.communicate("\n" * 200, timeout=120)
    assert first.returncode == 0
    again = getattr(pipeline, verb)(workspace, "MES", 5, *given, **named)
    assert "is loaded" in again.found and again.reused and again.resumed_from is None
