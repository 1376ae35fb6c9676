"""Reading order = data order = import order of the packages, from the syntax tree; and each dependency's home."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ml_factory"

# The packages and modules of ml_factory, as in docs/architecture.md. Each imports only from those before it.
LAYERS_TEXT = """
process_identity redaction errors background seeding lazy_module progress interrupt
storage numba_cache checkpoints tracking argument_checks own_modules code_fingerprint
data features targets datasets leakage models training evaluation ensemble settings result runs inference workflows
serving tpu pipeline notebook notebook_panel notebook_parameters notebook_suite doctor cli_output
recipes commands cli __main__
"""
LAYERS = LAYERS_TEXT.split()

# dependency -> the only packages that may import it
HOMES = {
    "torch": {"storage", *LAYERS[LAYERS.index("datasets") :]},
    "torch_xla": {"models", "training"},
    "wandb": {"tracking"},
    "gcsfs": {"storage"},
    "matplotlib": {"evaluation", "notebook"},
    "ipywidgets": {"notebook_panel"},
    "IPython": {"notebook", "notebook_panel", "notebook_parameters"},
    "papermill": {"notebook_suite"},
    "onnx": {"inference"},
    "onnxmltools": {"inference"},
    "onnxruntime": {"inference"},
    "fastapi": {"serving"},
    "uvicorn": {"serving"},
    "prometheus_client": {"serving"},
    "adbc_driver_postgresql": {"data"},
    "transformers": {"recipes"},
    "tokenizers": {"recipes"},
    "datasets": {"recipes"},
    "optuna": {"workflows"},
    "ray": {"workflows"},
    "webdataset": {"recipes"},
    "torchvision": {"recipes"},
    "tensorboardX": {"recipes"},
    "utils": set(),  # the wheel has neither utils nor tests
    "tests": set(),
}
# A recipe adds data, a network and a loss: these belong to the loop, its devices and its checkpoints.
NOT_IN_RECIPES = (
    "torch.optim", "torch_xla", "ml_factory.training.optim", "ml_factory.checkpoints.checkpoint_folder",
    "ml_factory.storage.checkpoint_file",
)  # fmt: skip
IMPORTERS = ("import_module", "import_module_or_explain", "LazyModule")  # functions that import by name
HEAVY = ("torch", "xgboost", "lightgbm", "catboost", "sklearn", "numba", "pandas", "matplotlib", "wandb", "IPython")
LIBRARY = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imports(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands, also by importlib or LazyModule."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, item.name) for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = [*package[: len(package) - node.level + 1]] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{item.name}") for item in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IMPORTERS):
            yield from ((node.lineno, name.value) for name in node.args[:1] if isinstance(name, ast.Constant))


def complaints(path: Path, source: str) -> Iterator[str]:
    """What one file imports from a later package, or from outside its home."""
    here = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for line, name in imports(source, path.relative_to(ROOT).parent.parts):
        top, *rest = name.split(".")
        if here == "recipes" and f"{name}.".startswith(tuple(f"{one}." for one in NOT_IN_RECIPES)):
            yield f"{path}:{line} imports {name}, which is the loop's own"
        elif top == "ml_factory" and here != "__main__" and rest[:1] != [here]:
            if rest and rest[0] in LAYERS[LAYERS.index(here) :]:
                yield f"{path}:{line} imports {name}, which comes later"
        elif here not in HOMES.get(top, {here}):
            yield f"{path}:{line} imports {name}, whose home is {sorted(HOMES[top])}"


def test_layers_are_the_packages_and_modules_of_the_library_in_the_order_of_the_page():
    there = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in LIBRARY}
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert sorted(there) == sorted(LAYERS)
    assert re.findall(r"^\| \[(\w+)\]\(\.\./ml_factory/", page, re.MULTILINE) == LAYERS


def test_imports_follow_order_of_packages_and_dependency_homes():
    assert [one for path in LIBRARY for one in complaints(path, path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("data/validation", "def late():\n    from ml_factory.pipeline import train\n"),
        ("data/validation", "from ..pipeline import train"),
        ("data/validation", "later = LazyModule('ml_factory.pipeline')"),
        ("features/build", "import torch.nn"),
        ("inference/predict", "import importlib\nimportlib.import_module('matplotlib.figure')"),
        ("pipeline", "from utils.colab_setup import setup_colab_environment"),
        ("recipes/shards", "from torch import optim"),
        ("recipes/shards", "from ml_factory.checkpoints.checkpoint_folder import CheckpointFolder"),
    ],
)
def test_import_check_with_broken_rule_reports_one_complaint(name, source):
    assert len(list(complaints(PACKAGE / f"{name}.py", source))) == 1


def test_xla_tests_import_no_contract_test():
    """Their environment has neither the command line's packages nor the boosters."""
    begun = sorted(Path(__file__).with_name("xla").glob("*.py"))
    for path in begun:
        for name in re.findall(r"^from tests\.(\S+) import", path.read_text(), re.M):
            found = Path(__file__).parent / f"{name.replace('.', '/')}.py"
            assert not name.startswith("contract"), path
            begun += [found] if found not in begun else []


def test_library_files_are_used_by_library_notebooks_or_utils():
    """A file that only tests or benchmarks import is not what a user runs."""
    others = [*PACKAGE.rglob("*.py"), *(ROOT / "utils").rglob("*.py"), *(ROOT / "colab_notebooks").rglob("*.ipynb")]
    texts = "".join(path.read_text(encoding="utf-8") for path in others)
    dotted = set(re.findall(r"\bml_factory(?:\.\w+)+", texts))
    for path in LIBRARY:
        package = path.relative_to(ROOT).parent.parts
        dotted |= {name for _, name in imports(path.read_text(encoding="utf-8"), package)}
    named = {".".join(name.split(".")[:length]) for name in dotted for length in range(2, name.count(".") + 2)}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in LIBRARY if path.stem != "__init__"}
    assert sorted(modules - named - {"ml_factory.__main__"}) == []


def test_import_ml_factory_loads_no_heavy_package():
    ask = f"import sys, ml_factory; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
