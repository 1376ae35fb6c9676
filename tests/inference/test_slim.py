"""The extra `serve`: a bundle with a graph predicts raw bars without torch, boosters, plotting, SciPy and PyArrow."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ml_factory import Bundle, pipeline
from tests.inference.conftest import H

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "torch", "xgboost", "lightgbm", "catboost", "matplotlib", "sklearn", "scipy", "pyarrow", "optuna", "wandb", "onnx",
    "onnxscript",
)  # fmt: skip
# Predicts the bars of a CSV file where these packages cannot be imported; prints what was imported from outside.
CHILD = """
import importlib.abc, importlib.metadata, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name, installed=importlib.metadata.version):
    if name in ABSENT or name == "scikit-learn":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

ABSENT = json.loads(sys.argv[1])
sys.meta_path.insert(0, Absent())
importlib.metadata.version = version
import pandas
from ml_factory import Bundle

bundle = Bundle.load(sys.argv[2])
frame = bundle.predict(pandas.read_csv(sys.argv[3]))
known = importlib.metadata.packages_distributions()
used = {name for top in {name.partition(".")[0] for name in sys.modules} for name in known.get(top, [])}
print(json.dumps({"engine": bundle.engine, "p": frame.iloc[:, :3].to_numpy().tolist(), "used": sorted(used)}))
"""


@pytest.fixture(scope="module")
def predicted(trained, raw_bars, tmp_path_factory) -> dict:
    """Answer of the child: engine, p and the distributions that it used."""
    place = tmp_path_factory.mktemp("slim")
    path = pipeline.export(trained, "DEMO", H, "xgboost", formats=("bundle", "onnx"), out=place).paths["bundle"]
    raw_bars.to_csv(place / "bars.csv", index=False)
    command = [sys.executable, "-W", "error", "-c", CHILD, json.dumps(ABSENT), str(path), str(place / "bars.csv")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"bundle": path}


def test_bundle_with_graph_predicts_raw_bars_without_torch_boosters_scipy_and_pyarrow(predicted, raw_bars):
    assert predicted["engine"] == "onnx"
    wanted = Bundle.load(predicted["bundle"]).predict(raw_bars).iloc[:, :3].to_numpy()
    np.testing.assert_allclose(np.array(predicted["p"]), wanted, rtol=0, atol=1e-6)
    assert "onnxruntime" in predicted["used"] and len(wanted) > 50


def test_packages_of_prediction_with_graph_take_at_most_420_megabytes(predicted):
    sizes = {name: megabytes(name) for name in (*predicted["used"], "llvmlite")}
    assert 200 < sum(sizes.values()) < 420, sizes


def test_packages_of_prediction_with_parquet_and_scipy_take_at_most_700_megabytes(predicted):
    sizes = {name: megabytes(name) for name in {*predicted["used"], "llvmlite", "pyarrow", "scipy"}}
    assert sum(sizes.values()) < 700, sizes


def megabytes(name: str) -> float:
    """Size of the files that a distribution installed, without compiled Python."""
    files = importlib.metadata.files(name) or ()
    paths = (Path(one.locate()) for one in files if one.suffix != ".pyc")
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6
