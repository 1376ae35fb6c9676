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
