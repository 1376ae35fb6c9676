"""A second process on a run that a living one works on is refused, and leaves no trace in it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ml_factory import pipeline
from ml_factory.data.sources import import_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import CheckpointError
from ml_factory.runs.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"mirror": "off", "model_settings": {"rounds": 20, "depth": 2, "threads": 1}}
FIRST = """
import json
import sys
from ml_factory import pipeline

def wait(epoch, metrics):
    print("working", flush=True)
    sys.stdin.readline()

pipeline.train(sys.argv[1], "MES", 5, "lightgbm", callbacks=[wait], **json.loads(sys.argv[2]))
"""


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_second_is_refused_and_the_first_finishes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    workspace = Workspace(tmp_path / "workspace")
    import_bars(synthetic_bars(days=8, seed=2).reset_index(), workspace, "MES")
    pipeline.prepare(workspace, "MES", (5,))
    command = [sys.executable, "-c", FIRST, str(workspace.root), json.dumps(OPTIONS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "working\n"
            before = content(workspace.results) | content(tmp_path / "cache")
            with pytest.raises(CheckpointError, match="Another process is working"):
                pipeline.train(workspace, "MES", 5, "lightgbm", **OPTIONS)
            assert content(workspace.results) | content(tmp_path / "cache") == before
        finally:
            first.communicate("\n\n\n", timeout=60)
    assert first.returncode == 0
    assert pipeline.train(workspace, "MES", 5, "lightgbm", **OPTIONS).reused
