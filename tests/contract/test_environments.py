"""Environments: the base predicts, and what needs more names the extra in one line; `serve` predicts from a graph."""

import ast
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
import pandas as pd
import pytest
from packaging.requirements import Requirement

from ml_factory import Bundle, Workspace, pipeline
from ml_factory.errors import MissingPackageError
from tests.contract.doors import EXTRAS, import_module_or_explain
from utils.runtime import read_requirement_lines

ROOT = Path(__file__).resolve().parents[2]
# Required and not imported: a notebook's kernel, and what torch writes ONNX with.
NEVER_IMPORTED = {"ipykernel", "onnxscript"}
# Imported and not required: parts of Colab, of PyTorch on TPUs, and of packages that bring them along.
NEVER_REQUIRED = {"google", "torch_xla", "jax", "IPython", "pydantic"}
MODULES = {
    "scikit-learn": "sklearn",
    "adbc-driver-postgresql": "adbc_driver_postgresql",
    "prometheus-client": "prometheus_client",
    "pillow": "PIL",
    "pyyaml": "yaml",
}

# In an interpreter that has none of the packages named, as JSON, in its first argument.
WITHOUT_PACKAGES = """
import importlib.abc, importlib.metadata, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name, installed=importlib.metadata.version):
    if name in ABSENT:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

ABSENT = json.loads(sys.argv[1])
importlib.metadata.version = version
sys.meta_path.insert(0, Absent())
"""
# Runs the command line with each list of words.
COMMAND_LINE = (
    WITHOUT_PACKAGES
    + """
import contextlib, io
calls = json.loads(sys.argv[2])
from ml_factory.__main__ import main
for words in calls:
    sys.argv, said, code = ["ml_factory", *words], io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, said.getvalue()]))
"""
)


# What is absent -> a verb that needs it.
LACKING = {
    "sklearn": ["train", "--model", "linear", "--seed", "1"],
    "xgboost": ["train", "--model", "xgboost"],
    "torch": ["train", "--model", "lstm"],
    "catboost": ["cross-validate", "--model", "catboost"],
    "papermill": ["run", "00"],
    "adbc_driver_postgresql": ["export-data", "--source", "postgresql://user@host/db", "--output", "a.csv"],
    "gcsfs": ["doctor", "--workspace", "gs://bucket/prefix"],
}


@pytest.fixture(scope="module")
def base(prepared_template, tmp_path_factory) -> tuple[dict[str, tuple[int, str]], set[str]]:
    """What the command line answers where no extra is installed: call -> (exit code, output); and the new files."""
    folder = tmp_path_factory.mktemp("base")
    prepared = Workspace(shutil.copytree(prepared_template, folder / "workspace"))
    pipeline.train(prepared, "DEMO", 5, "linear", quick=True, mirror="off")
    bars = prepared.raw_bars("DEMO")
    pd.read_parquet(bars).iloc[: 15 * 1380].to_csv(folder / "bars.csv", index=False)
    data = ["--workspace", str(prepared.root), "--symbol", "DEMO", "--horizon", "5"]
    quick = [*data, "--quick"]
    calls = {name: [*words, *quick * (words[0] in ("train", "cross-validate"))] for name, words in LACKING.items()} | {
        "doctor": ["doctor", "--workspace", str(prepared.root)],
        "prepare": ["prepare", "--workspace", str(folder / "new"), "--symbol", "BASE", "--horizon", "5", "--data",
                    str(folder / "bars.csv"), "--calendar", "cme", "--tick", "0.25"],
        "predict": ["predict", *data, "--model", "linear", "--data", str(bars), "--all"],
    }  # fmt: skip
    before = set(folder.rglob("*"))
    words = [json.dumps(sorted(EXTRAS)), json.dumps([*calls.values()])]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMMAND_LINE, *words], capture_output=True, text=True, cwd=folder,
        env=os.environ | {"ML_FACTORY_WANDB": "off"}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    return dict(zip(calls, answers, strict=True)), {path.name for path in set(folder.rglob("*")) - before}


def test_base_installation_prepares_bars_and_predicts_with_linear_model_trained_elsewhere(base):
    answers, made = base
    assert [answers[verb][0] for verb in ("prepare", "predict")] == [0, 0], answers
    assert {"predictions-linear-h5.parquet", "BASE_1m.parquet"} <= made


def test_base_installation_names_extra_in_one_line_and_writes_nothing_and_doctor_finds_no_fault(base):
    answers, made = base
    for package in LACKING:
        code, printed = answers[package]
        (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert code == 1 and f"The package {package} is not installed" in line, (package, printed)
        assert f"pip install 'ml_factory[{EXTRAS[package]}]'" in line
    assert not {"run.json", "a.csv"} & made
    code, printed = answers["doctor"]
    assert code == 0 and "ml_factory[train]" in printed and "ml_factory[track]" in printed, printed
    assert "!!" not in printed, printed


def test_import_of_scipy_in_an_image_without_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "scipy.special", raising=False)
    with pytest.raises(MissingPackageError, match=r"The package scipy is not installed.*pip install scipy"):
        import_module_or_explain("scipy.special")


def test_requirements_equal_imported_packages_of_library():
    names = ("base", *sorted(set(EXTRAS.values())))
    required = {name: read_requirement_lines(ROOT / "requirements" / f"{name}.txt") for name in names}
    modules = {name: {MODULES.get(one, one) for one in map(name_of, lines)} for name, lines in required.items()}
    imported = {module for path in (ROOT / "ml_factory").rglob("*.py") for module in imports_of(path)}
    outside = imported - sys.stdlib_module_names - {"ml_factory"} - NEVER_REQUIRED
    assert outside | NEVER_IMPORTED == set.union(*modules.values()) | NEVER_IMPORTED
    assert {package: name for name in names[1:] for package in modules[name]} | {"IPython": "notebooks"} == EXTRAS


def test_requirements_version_ranges_have_lower_and_upper_bound():
    for path in [
        ROOT / "requirements.txt",
        ROOT / "requirements" / "gs.txt",
        *(
            ROOT / "requirements" / f"{name}.txt"
            for name in ("database", "onnx", "serve", "vision", "language", "compress", "auto", "ray")
        ),
    ]:
        for line in read_requirement_lines(path):
            assert {part.operator for part in Requirement(line).specifier} == {">=", "<"}, line


def name_of(line: str) -> str:
    return Requirement(line).name


def imports_of(path: Path) -> set[str]:
    """Packages that a file imports, by name or with a plain text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "import_module_or_explain", "LazyModule")
        ):
            found |= {item.value for item in node.args[:1] if isinstance(item, ast.Constant)}
    return {name.partition(".")[0] for name in found}


# ---- the extra serve ---------------------------------------------------------------------------------------------

SMALL = {"xgboost": {"rounds": 30, "depth": 3}, "lstm": {"epochs": 1, "hidden": 4, "lookback": 8, "batch": 128}}
NEVER_IN_SERVE = (
    "torch", "xgboost", "lightgbm", "catboost", "matplotlib", "sklearn", "scipy", "pyarrow", "wandb", "onnx",
    "onnxscript",
)  # fmt: skip
# Predicts the bars of a CSV file; prints what was imported from outside.
CHILD = (
    WITHOUT_PACKAGES
    + """
import pandas
import ml_factory.serving.app
from ml_factory import Bundle

bundle = Bundle.load(sys.argv[2])
frame = bundle.predict(pandas.read_csv(sys.argv[3]))
known = importlib.metadata.packages_distributions()
used = {name for top in {name.partition(".")[0] for name in sys.modules} for name in known.get(top, [])}
print(json.dumps({"engine": bundle.engine, "p": frame.iloc[:, :3].to_numpy().tolist(), "used": sorted(used)}))
"""
)


@pytest.fixture(scope="module")
def raw_bars(prepared_template) -> pd.DataFrame:
    return pd.read_parquet(Workspace(prepared_template).raw_bars("DEMO"))


@pytest.fixture(scope="module")
def predicted(request, prepared_template, raw_bars, tmp_path_factory) -> dict:
    """Answer of the child: engine, p and the distributions that it used."""
    place, model = tmp_path_factory.mktemp("slim"), request.param
    workspace = shutil.copytree(prepared_template, place / "workspace")
    pipeline.train(workspace, "DEMO", 5, model, mirror="off", model_settings=SMALL[model])
    path = pipeline.export(workspace, "DEMO", 5, model, formats=("bundle", "onnx"), out=place).paths["bundle"]
    raw_bars.to_csv(place / "bars.csv", index=False)
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        CHILD,
        json.dumps([*NEVER_IN_SERVE, "scikit-learn"]),
        str(path),
        str(place / "bars.csv"),
    ]
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
    assert sizes.keys().isdisjoint({*NEVER_IN_SERVE, "scikit-learn"} - {"pyarrow", "scipy"})
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
