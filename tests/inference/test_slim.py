"""The extra `serve`: a bundle with a graph predicts raw bars without torch, boosters, plotting, SciPy and PyArrow."""

import csv
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from ml_factory import Bundle, pipeline
from tests.inference.conftest import H
from utils.runtime import read_requirement_lines

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "torch", "xgboost", "lightgbm", "catboost", "matplotlib", "sklearn", "scipy", "pyarrow", "wandb", "onnx",
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
import ml_factory.serving.server
from ml_factory import Bundle

bundle = Bundle.load(sys.argv[2])
frame = bundle.predict(pandas.read_csv(sys.argv[3]))
known = importlib.metadata.packages_distributions()
used = {name for top in {name.partition(".")[0] for name in sys.modules} for name in known.get(top, [])}
print(json.dumps({"engine": bundle.engine, "p": frame.iloc[:, :3].to_numpy().tolist(), "used": sorted(used)}))
"""


@pytest.fixture(scope="module")
def predicted(request, trained, raw_bars, tmp_path_factory) -> dict:
    """Answer of the child: engine, p and the distributions that it used."""
    place = tmp_path_factory.mktemp("slim")
    path = pipeline.export(trained, "DEMO", H, request.param, formats=("bundle", "onnx"), out=place).paths["bundle"]
    raw_bars.to_csv(place / "bars.csv", index=False)
    command = [sys.executable, "-W", "error", "-c", CHILD, json.dumps(ABSENT), str(path), str(place / "bars.csv")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"bundle": path}


@pytest.mark.parametrize("predicted", ["xgboost", "lstm"], indirect=True)
def test_bundle_with_graph_predicts_raw_bars_without_torch_boosters_scipy_and_pyarrow(predicted, raw_bars):
    assert predicted["engine"] == "onnx"
    wanted = Bundle.load(predicted["bundle"]).predict(raw_bars).iloc[:, :3].to_numpy()
    np.testing.assert_allclose(np.array(predicted["p"]), wanted, rtol=0, atol=1e-6)
    assert "onnxruntime" in predicted["used"] and len(wanted) > 50


def test_extra_serve_takes_at_most_700_megabytes_and_420_without_pyarrow_and_scipy():
    """Packages that pip would install here for the base and the extra; the files of their wheels, pip not counted."""
    sizes = {name: megabytes(name) for name in packages_of("base", "serve")}
    assert sizes.keys().isdisjoint({*ABSENT, "scikit-learn"} - {"pyarrow", "scipy"})
    assert {"numba", "onnxruntime", "pandas", "exchange-calendars", "fastapi"} <= sizes.keys()
    assert 500 < sum(sizes.values()) < 700, sizes
    assert 300 < sum(size for name, size in sizes.items() if name not in ("pyarrow", "scipy")) < 420, sizes


@pytest.mark.soak
@pytest.mark.parametrize("predicted", ["lstm"], indirect=True)
def test_extra_serve_installed_by_pip_predicts_and_keeps_its_size(predicted, tmp_path):
    """A new environment: pip installs the wheel with the extra, then PyArrow and SciPy are removed; kernels cold."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("ml_factory", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-compile", f"{tmp_path}[serve]"], check=True)
    assert 500 < megabytes_of(python) < 700
    subprocess.run([*pip, "uninstall", "--yes", "pyarrow", "scipy"], check=True)
    assert 300 < megabytes_of(python) < 420
    bars = predicted["bundle"].with_name("bars.csv")
    command = [python, "-W", "error", "-P", "-c", CHILD, "[]", predicted["bundle"], bars]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    env |= {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "env", env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.array(json.loads(done.stdout)["p"]), np.array(predicted["p"]), rtol=0, atol=1e-9)


def packages_of(*extras: str) -> set[str]:
    """Return the installed packages that these files of requirements bring, with those that they require."""
    waiting = [
        Requirement(line) for name in extras for line in read_requirement_lines(ROOT / "requirements" / f"{name}.txt")
    ]
    found: set[str] = set()
    while waiting:
        one = waiting.pop()
        name = canonical(one.name)
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {"", *one.extras}):
                waiting.append(needed)
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def megabytes(name: str) -> float:
    """Size of the files that a distribution installed, without compiled Python."""
    files = importlib.metadata.files(name) or ()
    paths = (Path(one.locate()) for one in files if one.suffix != ".pyc")
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def megabytes_of(python: Path) -> float:
    """Size of what the RECORD files of an environment list, without pip and what comes with it."""
    records = [path for path in python.parents[1].rglob("*.dist-info/RECORD")
               if not path.parent.name.startswith(("pip-", "setuptools-"))]  # fmt: skip
    places = {
        record.parents[1] / line[0]
        for record in records
        for line in csv.reader(record.read_text(encoding="utf-8").splitlines())
    }
    return sum(path.stat().st_size for path in places if path.suffix != ".pyc" and path.is_file()) / 1e6
