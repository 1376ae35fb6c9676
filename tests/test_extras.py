"""Installed without extras: the base predicts, and what needs more names the extra in one line."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from packaging.requirements import Requirement

from ml_factory import pipeline
from ml_factory.errors import MissingPackageError
from ml_factory.lazy_module import EXTRAS, import_module_or_explain
from ml_factory.storage.workspace import Workspace
from utils.runtime import read_requirement_lines

ROOT = Path(__file__).resolve().parents[1]
# Required for what imports them in turn: they are a notebook's kernel, its widgets, and the two halves of gcsfs.
NEVER_IMPORTED = {"nbformat", "ipykernel", "fsspec", "onnxscript"}
# Imported and not required: parts of Colab, of PyTorch on TPUs, and of packages that bring them along.
NEVER_REQUIRED = {"google", "torch_xla", "jax", "IPython", "pydantic"}
MODULES = {
    "scikit-learn": "sklearn",
    "adbc-driver-postgresql": "adbc_driver_postgresql",
    "prometheus-client": "prometheus_client",
    "pillow": "PIL",
    "pyyaml": "yaml",
}

# Runs the command line with each list of words, in an interpreter that has none of the packages of extras.
WITHOUT_EXTRAS = """
import contextlib, importlib.abc, importlib.metadata, io, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name, installed=importlib.metadata.version):
    if name in EXTRAS:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

EXTRAS, calls = json.loads(sys.argv[1]), json.loads(sys.argv[2])
importlib.metadata.version = version
sys.meta_path.insert(0, Absent())
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


def without_extras(*calls: list[str], folder: Path) -> list[tuple[int, str]]:
    """(exit code, output) of each call of the command line."""
    command = [sys.executable, "-W", "error", "-c", WITHOUT_EXTRAS, json.dumps(sorted(EXTRAS)), json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_base_installation_predicts_with_linear_model_trained_elsewhere(prepared, tmp_path):
    pipeline.train(prepared, "DEMO", 5, "linear", quick=True, mirror="off")
    where = ["--workspace", str(prepared.root), "--symbol", "DEMO", "--horizon", "5", "--model", "linear"]
    ((code, printed),) = without_extras(
        ["predict", *where, "--data", str(prepared.raw_bars("DEMO")), "--all"], folder=tmp_path
    )
    assert code == 0, printed
    assert list(prepared.results.rglob("predictions-linear-h5.parquet"))


def test_base_installation_prepares_bars(prepared, tmp_path):
    Workspace(tmp_path / "workspace")
    pd.read_parquet(prepared.raw_bars("DEMO")).iloc[: 15 * 1380].to_csv(tmp_path / "bars.csv", index=False)
    words = ["prepare", "--workspace", str(tmp_path / "workspace"), "--symbol", "BASE", "--horizon", "5"]
    words += ["--data", str(tmp_path / "bars.csv"), "--calendar", "cme", "--tick", "0.25"]
    ((code, printed),) = without_extras(words, folder=tmp_path)
    assert code == 0, printed


def test_base_installation_refuses_training_before_it_writes_anything(prepared, tmp_path):
    before = sorted(prepared.results.rglob("*"))
    where = ["--workspace", str(prepared.root), "--symbol", "DEMO", "--horizon", "5", "--quick", "--model", "linear"]
    for code, printed in without_extras(*([verb, *where] for verb in ("train", "cross-validate")), folder=tmp_path):
        assert code == 1 and "The package sklearn is not installed" in printed and "ml_factory[train]" in printed
    assert sorted(prepared.results.rglob("*")) == before


def test_cli_verb_with_absent_package_names_extra_in_one_line(prepared, tmp_path):
    data = ["--workspace", str(prepared.root), "--symbol", "DEMO", "--horizon", "5"]
    lacking = {
        "xgboost": ["train", "--model", "xgboost", *data],
        "torch": ["train", "--model", "lstm", *data],
        "catboost": ["cross-validate", "--model", "catboost", *data],
        "papermill": ["run", "00"],
        "adbc_driver_postgresql": ["export-data", "--source", "postgresql://user@host/db", "--output", "a.csv"],
        "gcsfs": ["doctor", "--workspace", "gs://bucket/prefix"],
    }
    answers = without_extras(*lacking.values(), folder=tmp_path)
    for (package, words), (code, printed) in zip(lacking.items(), answers, strict=True):
        (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert code == 1 and f"The package {package} is not installed" in line, (words, printed)
        assert f"pip install 'ml_factory[{EXTRAS[package]}]'" in line


def test_cli_doctor_without_extras_advises_extras_and_reports_no_fault(prepared, tmp_path):
    ((code, printed),) = without_extras(["doctor", "--workspace", str(prepared.root)], folder=tmp_path)
    assert code == 0 and "ml_factory[train]" in printed and "ml_factory[track]" in printed and "!!" not in printed, (
        printed
    )


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
            for name in ("database", "onnx", "serve", "vision", "language", "compress")
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
