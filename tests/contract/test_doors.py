"""The contract tests know promised names and `doors`, nothing else of the library."""

import ast
from pathlib import Path

import pytest

# Modules that CONTRACTS.md names, and the errors that every message is one of.
PROMISED = {
    "ml_factory", "ml_factory.checkpoints.manager", "ml_factory.data.synthetic", "ml_factory.errors",
    "ml_factory.evaluation.backtest", "ml_factory.evaluation.luck", "ml_factory.models.registry", "ml_factory.pipeline",
    "ml_factory.recipes.sdce", "ml_factory.recipes.shards", "ml_factory.storage.workspace",
}  # fmt: skip
PATCHED = {  # by a name in a string, and why
    "ml_factory.checkpoints.manager.RENEW_SECONDS": "else a heartbeat takes a minute",
    "ml_factory.notebook.display": "stands in for Jupyter's",
    "ml_factory.recipes.": "a recipe that trains nothing",
    "ml_factory.workflows.export_data.SelectedRows": "a signal comes while rows are read",
}
REGISTRY = {"available_models", "build_model"}
FILES = sorted(path for path in Path(__file__).parent.rglob("*.py") if path.name != "doors.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_contract_file_imports_promised_names_and_doors_alone(path):
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom | ast.Import)]
    for node in imports:
        modules = [node.module] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
        for module in modules:
            assert module.split(".")[0] != "ml_factory" or module in PROMISED, f"line {node.lineno}: {module}"
            if module == "ml_factory.models.registry":
                assert {name.name for name in node.names} <= REGISTRY, f"line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_contract_file_patches_no_name_of_the_library_in_a_string_but_those_of_the_list(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    for call in (node for node in calls if getattr(node.func, "attr", "") == "setattr"):
        name = ast.unparse(call.args[0]).lstrip("f").strip("'\"")
        assert not name.startswith("ml_factory") or name.startswith(tuple(PATCHED)), f"line {call.lineno}: {name}"
