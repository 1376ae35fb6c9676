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
# The three seams of the library by the names that tests replace; waits and sizes are constants in capitals.
SEAMS = {
    "clock": {"time", "sleep", "runtime_start_time", "expected_hours_left", "fit_seconds", "fit_cost"},
    "disk": {"flock", "free_bytes", "get", "list_files", "names", "push", "put", "renew", "replace", "save"},
    "process start": {"fetch_file", "install_missing_packages", "mount_drive", "subprocess"},
}
PATCHED = {  # what else a test replaces in the library, each by its name, and why
    "SelectedRows": "a signal comes while rows are read",
    "Workspace": "a set-up that opens a bucket ends there",
    "_FEATURES": "own features of one test are not those of the next",
    "app": "a server that would not end",
    "build_model": "a restored model is not trained again",
    "concentration_finding": "the gains that a finding reads, which no file holds",
    "display": "stands in for Jupyter's",
    "fit_on_rows": "a fit dies inside a fold, or a restored one is not fitted again",
    "label_loss": "a training dies in mid-epoch, where it has no callback",
    "load_certified_dataset": "labels of one class, which no certified data set has",
    "load_or_make_predictions": "predictions of a look-back that no small model has",
    "overfit_finding": "as concentration_finding",
    "prepared_dataset_metrics": "losses whose winners differ between validation and test rows",
    "read_bars_table": "a line is written in halves while it is read",
    "step": "a process of several dies in a step",
    "RUNS[module]": "a recipe that trains nothing, for its command line",
    "name": "a killed call of one of several functions",
    "run_sdce": "as RUNS[module]",
    "run_t5": "as RUNS[module]",
    "train": "a verb that trains nothing, for its command line",
    "train_resnet50": "as RUNS[module]",
    "verb.replace('-', '_')": "as train",
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


def patched_names(path: Path) -> dict[str, int]:
    """The names that a file replaces in the library or in an object of it, with the line of each."""
    tree, names = ast.parse(path.read_text()), {}
    foreign = {(one.asname or one.name).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import)
               for one in node.names if not one.name.startswith("ml_factory")}  # fmt: skip
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if getattr(call.func, "attr", "") != "setattr" and getattr(call.func, "id", "") != "setattr":
            continue
        owner = ast.unparse(call.args[0]).lstrip("f").strip("'\"")
        by_string = isinstance(call.args[0], ast.Constant | ast.JoinedStr)
        if owner.split(".")[0] in foreign or (by_string and not owner.startswith("ml_factory")):
            continue
        name = owner.rsplit(".", 1)[1] if by_string else ast.unparse(call.args[1]).strip("'\"")
        names[name.strip("{}")] = call.lineno
    return names


def test_contract_files_patch_constants_seams_and_listed_names_of_the_library_alone():
    patched = {name: f"{path.name}:{line}" for path in FILES for name, line in patched_names(path).items()}
    listed = {name for names in SEAMS.values() for name in names} | set(PATCHED)
    names = {name for name in patched if not name.isupper() or name.startswith("_")}
    assert names - listed == set(), {name: patched[name] for name in names - listed}
    assert listed - names == set()  # what is replaced no more leaves the list
