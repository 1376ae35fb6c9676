"""Every benchmark on few rows: its sides agree, and each line is JSON with the facts a reader needs. Never how fast."""

import ast
import importlib
import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

FEW = {
    "backtest": ("--rows", "20000"),
    "pipeline": ("--rows", "60000"),
    "export_data": ("--rows", "20000"),
}
NEEDS = {"pipeline": "polars", "export_data": "psycopg"}


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_benchmark_imports_from_ml_factory_exist(path):
    """Also of those that are too long to run here."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ml_factory":
            capacity = importlib.import_module(node.module)
            for item in node.names:
                assert hasattr(capacity, item.name) or importlib.import_module(f"{node.module}.{item.name}"), item.name


@pytest.mark.soak
@pytest.mark.parametrize("name", FEW)
def test_benchmark_on_few_rows_agrees_with_peers_and_prints_json_timings(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="peers are installed by make bench")
    lines = _lines(name, *FEW[name], "--repeats", "1")
    assert all("bench" in line for line in lines)
    clocked = [line for line in lines if "wall_s" in line]
    assert clocked and all(line["wall_s"] > 0 and line["cpu_s"] > 0 and line["median_wall_s"] > 0 for line in clocked)


@pytest.mark.soak
def test_benchmark_checkpoints_times_all_peers_and_loads_saved_state_unchanged():
    lines = _lines("checkpoints", "--mb", "12", "--repeats", "1")
    assert all(line["bench"] == "checkpoints" for line in lines)
    assert {line["ratio"] for line in lines if "ratio" in line} == {"blocking", "written"}
    assert {"ours", "torch.save", "safetensors", "DCP async"} <= {line.get("side") for line in lines}
    assert [line["same"] for line in lines if "same" in line] == [True]


def _lines(name: str, *options: str) -> list[dict]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
