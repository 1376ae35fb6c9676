"""A network trained on XLA, its bundle read where there is no XLA, and its graph where there is no torch."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.storage.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
CPU, SERVE = (ROOT / name / "bin" / "python" for name in (".venv", ".venv-serve"))
H = 5
PREDICT = """
import importlib.util, json, sys
import pandas
from ml_factory import Bundle
frame = Bundle.load(sys.argv[1])
packages = [name for name in ("torch_xla", "torch") if importlib.util.find_spec(name)]
engine, frame = frame.engine, frame.predict(pandas.read_csv(sys.argv[2]), all_rows=True)
print(json.dumps({"packages": packages, "engine": engine, "at": [str(one) for one in frame.index],
                  "p": frame.iloc[:, :3].to_numpy().tolist()}))
"""
EXPORT = """
import sys
from ml_factory import pipeline
pipeline.export(sys.argv[1], "DEMO", int(sys.argv[2]), "gru", formats=("bundle", "onnx"), out=sys.argv[3])
"""


def run_in(python: Path, code: str, *words: object) -> str:
    """What another environment prints."""
    env = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=600, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained_on_xla(tmp_path_factory):
    """Workspace, bundle and raw bars (CSV) of a network that XLA trained, and the frame that it predicts there."""
    place = tmp_path_factory.mktemp("xla")
    workspace = Workspace(place / "workspace")
    ensure_synthetic_demo_market(workspace, "DEMO", days=8)
    pipeline.prepare(workspace, "DEMO", (H,))
    settings = {"device": "xla", "epochs": 2, "hidden": 8, "lookback": 6, "batch": 128, "precision": "fp32"}
    pipeline.train(workspace, "DEMO", H, "gru", mirror="off", model_settings=settings)
    frame = pipeline.predict(workspace, "DEMO", H, "gru", all_rows=True).frame
    bundle = pipeline.export(workspace, "DEMO", H, "gru", formats=("bundle",), out=place).paths["bundle"]
    pd.read_parquet(workspace.raw_bars("DEMO")).to_csv(place / "bars.csv", index=False)
    return workspace, bundle, place / "bars.csv", frame


def check_frame(answer: str, wanted: pd.DataFrame, engine: str, packages: list[str], record_property) -> None:
    got = json.loads(answer)
    assert (got["engine"], got["packages"]) == (engine, packages)
    assert got["at"] == [str(one) for one in wanted.index] and len(wanted) > 500
    wanted_N3 = wanted.iloc[:, :3].to_numpy()
    assert wanted_N3.std(axis=0).min() > 1e-4  # another model would differ
    off = float(np.abs(np.array(got["p"]) - wanted_N3).max())
    record_property(
        "told", f"trained on XLA, predicted elsewhere ({engine}): {len(wanted)} rows, at most {off:.1e} off"
    )
    assert off <= 1e-5


@pytest.mark.skipif(not CPU.exists(), reason="no .venv (make setup)")
def test_bundle_trained_on_xla_predicts_the_same_on_cpu_without_torch_xla(trained_on_xla, record_property):
    _, bundle, bars, frame = trained_on_xla
    check_frame(run_in(CPU, PREDICT, bundle, bars), frame, "native", ["torch"], record_property)


@pytest.mark.skipif(not (CPU.exists() and SERVE.exists()), reason="no .venv or .venv-serve (make test-xla)")
def test_graph_trained_on_xla_predicts_the_same_without_torch(trained_on_xla, tmp_path, record_property):
    workspace, _, bars, frame = trained_on_xla
    run_in(CPU, EXPORT, workspace.root, H, tmp_path)
    answer = run_in(SERVE, PREDICT, tmp_path / f"DEMO-h{H}-gru.bundle", bars)
    check_frame(answer, frame, "onnx", [], record_property)
