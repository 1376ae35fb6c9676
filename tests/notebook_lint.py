"""The notebooks' own linter: `python -m tests.notebook_lint` (make lint runs it).

A notebook is a window on the library: outputs empty, one annotated parameters form, the bootstrap cell identical
everywhere, short cells, every name it uses existing in the library.
"""

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import nbformat  # noqa: E402

from ml_factory.errors import SettingsError  # noqa: E402
from ml_factory.notebook import NOTEBOOKS  # noqa: E402
from ml_factory.notebook_parameters import PARAMETERS_TITLE, SHARED, parse_notebook_parameters  # noqa: E402
from utils.notebook_bootstrap import FOLDED, bootstrap_cell_text  # noqa: E402

FOLDER = ROOT / "colab_notebooks"
HEADINGS = ("**Question.**", "**Reads**", "**Writes**", "**Minutes**")
LEAST_LINES, MOST_LINES = 2, 6
CELL_KEYS = {"cell_type", "id", "metadata", "source", "outputs", "execution_count"}
NOTEBOOK_KEYS = {"colab", "kernelspec", "language_info"}
RETIRED = {
    r"v2-8": "TPU v2-8 was retired in September 2025",
    r"xmp\.spawn|nprocs\s*=\s*8": "Colab TPUs have one chip",
    r"COLAB_TPU_ADDR|cloud-tpu-client|pytorch-xla-env-setup": "the old TPU runtime is gone",
    r"torch\.cuda\.amp\b": "torch.amp replaced it",
}
KEPT_PACKAGES = r"(?:pip|uv)\b[^\n]*\binstall\b[^\n]*\b(?:torch|torch_xla|numpy|pandas)\b"
SECRET = r"\b[0-9a-f]{40}\b|(?i:api_?key|token|password)\s*=\s*['\"]\w"


def lint_all(folder: Path = FOLDER) -> list[str]:
    """Every complaint about every notebook in the folder, one line each; empty when clean."""
    complaints = [f"{name}.ipynb is absent" for name in NOTEBOOKS if not (folder / f"{name}.ipynb").is_file()]
    for path in sorted(folder.rglob("*.ipynb")):
        if ".ipynb_checkpoints" not in path.parts:
            complaints += [f"{path.name}: {complaint}" for complaint in lint(path)]
    return complaints


def lint(path: Path) -> Iterator[str]:
    """Complaints about one notebook file."""
    text = path.read_text(encoding="utf-8")
    try:
        notebook = json.loads(text)
        ids = [cell.get("id") for cell in notebook["cells"]]
        if len(set(ids)) < len(ids):
            yield "not a valid notebook: cell ids are not unique"
            return
        nbformat.validate(nbformat.from_dict(notebook))
    except (json.JSONDecodeError, KeyError, nbformat.ValidationError) as error:
        yield f"not a valid notebook: {str(error).splitlines()[0]}"
        return
    if text != canonical(notebook):
        yield "not in its canonical JSON form (make badges writes it)"
    yield from _form(notebook)
    yield from _words(path, notebook)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    yield from _opening(code)
    for number, cell in enumerate(code[2:], start=2):
        split = any(
            _is_checks(other) for other in code[number + 1 : number + 2]
        )  # its asserts stand collapsed behind it
        least = 1 if split or _is_compared(cell) else LEAST_LINES
        yield from (f"code cell {number}: {complaint}" for complaint in _window(source_of(cell), least))
    yield from _habits([source_of(cell) for cell in code[2:]])
    if not any(_is_compared(cell) for cell in code):
        yield "marks no cell for nbval (the tag nbval-check-output)"
    yield from _names([source_of(cell) for cell in code[2:]])


def canonical(notebook: dict) -> str:
    """The one way these notebooks are written: small diffs, no churn."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def source_of(cell: dict) -> str:
    return "".join(cell["source"])


def owner_and_ref() -> tuple[str, str]:
    """(OWNER/name, pinned ref), from their one place."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ml_factory"]
    return table["repository"], table["ref"]


def _form(notebook: dict) -> Iterator[str]:
    """What a run leaves behind must not be committed."""
    if (notebook["nbformat"], notebook["nbformat_minor"]) != (4, 5):
        yield "wants nbformat 4.5, whose cells have ids"
    if set(notebook["metadata"]) - NOTEBOOK_KEYS:
        yield f"metadata left behind: {sorted(set(notebook['metadata']) - NOTEBOOK_KEYS)}"
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "wants the kernel named python3"
    for number, cell in enumerate(notebook["cells"]):
        if cell.get("outputs") or cell.get("execution_count") is not None:
            yield f"cell {number}: outputs are not empty"
        if set(cell["metadata"]) - {"tags", "cellView", "jupyter"} or set(cell) - CELL_KEYS:
            yield f"cell {number}: metadata left behind"


def _words(path: Path, notebook: dict) -> Iterator[str]:
    """What the reader is told first and last, and what nobody should be told any more."""
    slug, _ = owner_and_ref()
    head = source_of(notebook["cells"][0]) if notebook["cells"][0]["cell_type"] == "markdown" else ""
    folder = "recipes/" if path.parent.name == "recipes" else ""
    badge = f"https://colab.research.google.com/github/{slug}/blob/main/colab_notebooks/{folder}{path.name}"
    yield from (f"the first cell lacks {part}" for part in (*HEADINGS, badge) if part not in head)
    everything = "\n".join(source_of(cell) for cell in notebook["cells"])
    yield from (f"retired advice: {why}" for pattern, why in RETIRED.items() if re.search(pattern, everything))
    if re.search(KEPT_PACKAGES, everything):
        yield "installs torch, numpy or pandas over the runtime's own"
    if re.search(SECRET, everything):
        yield "holds what looks like a secret"


def _opening(code: list[dict]) -> Iterator[str]:
    """Bootstrap, parameters, validation, in this order."""
    if not code or source_of(code[0]) != bootstrap_cell_text(*owner_and_ref()):
        yield "the first code cell is not the bootstrap text of utils/notebook_bootstrap.py (make badges writes it)"
    elif code[0]["metadata"] != FOLDED:
        yield "the bootstrap cell is not folded (make badges does it)"
    tagged = [number for number, cell in enumerate(code) if "parameters" in cell["metadata"].get("tags", ())]
    if tagged != [1]:
        yield f"wants one cell tagged `parameters`, the second code cell; got {tagged}"
        return
    yield from _parameters(source_of(code[1]))
    if len(code) < 3 or not re.search(r"^chosen = check_parameters\(", source_of(code[2]), re.MULTILINE):
        yield "the cell after the parameters does not check them"


def _parameters(source: str) -> Iterator[str]:
    if not source.startswith(PARAMETERS_TITLE):
        yield f"the parameters cell does not begin with {PARAMETERS_TITLE}"
    try:
        declared = parse_notebook_parameters(source)
    except (SettingsError, SyntaxError, ValueError) as error:
        yield f"parameters: {error}"
        return
    for name, item in declared.items():
        if SHARED.get(name, item.kind) is not item.kind:
            yield f"parameter {name} is {item.kind.__name__}, wanted {SHARED[name].__name__}"
        if type(item.default) is not item.kind:
            yield f"parameter {name}: the default {item.default!r} is not of its type"
        if not re.search(rf"^{name}: \w+ = [^#\n]+  #@param ", source, re.MULTILINE):
            yield f"parameter {name} has no #@param form field"
    if "WORKSPACE" not in declared:
        yield "WORKSPACE is not among the parameters"
    if "QUICK" in declared and declared["QUICK"].default is not False:
        yield "QUICK ships as False"


def _is_checks(cell: dict) -> bool:
    """Whether it is a collapsed cell of asserts."""
    return "checks" in cell["metadata"].get("tags", ())


def _is_compared(cell: dict) -> bool:
    """Whether nbval compares this cell's output: by its tag, or by the older comment."""
    return "nbval-check-output" in cell["metadata"].get("tags", ()) or "# NBVAL_CHECK_OUTPUT" in source_of(cell)


def _window(source: str, least: int = LEAST_LINES) -> Iterator[str]:
    """Short cells that call the library."""
    lines = [line for line in source.splitlines() if line.strip()]
    if not least <= len(lines) <= MOST_LINES:
        yield f"{len(lines)} lines, wanted {LEAST_LINES} to {MOST_LINES}"
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield f"not plain Python: {error.msg}"
        return
    helpers = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    if any(isinstance(node, helpers) and not _is_feature(node) for node in ast.walk(tree)):
        yield "defines a helper; it belongs in the library"


def _is_feature(node: ast.AST) -> bool:
    """Whether it is a feature of the user's own: `@feature(...)` takes what a cell defines."""
    calls = [item for item in getattr(node, "decorator_list", ()) if isinstance(item, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == "feature" for call in calls)


def _habits(sources: list[str]) -> Iterator[str]:
    text = "\n".join(sources)
    if not re.search(r"^assert ", text, re.MULTILINE):
        yield "claims nothing: no assert"
    if not re.search(r"^show\(.*(plot\(|draw_)", text, re.MULTILINE):
        yield "shows no picture"
    if not sources or "finish(" not in sources[-1]:
        yield "the last code cell does not say what was written and what is next: finish(...)"


def _names(sources: list[str]) -> Iterator[str]:
    """Every import of ours exists, and so does every `module.name` used of an imported module of ours."""
    modules: dict[str, str] = {}
    trees = [ast.parse(source) for source in sources if _parses(source)]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            yield from (f"no module {item.name}" for item in node.names if _ours(item.name) and not _file(item.name))
        elif isinstance(node, ast.ImportFrom) and node.module and _ours(node.module):
            for item in node.names:
                if _file(f"{node.module}.{item.name}"):
                    modules[item.asname or item.name] = f"{node.module}.{item.name}"
                elif item.name not in _top_names(node.module):
                    yield f"no name {item.name} in {node.module}"
    used = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in used:
        module = modules.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if module and node.attr not in _top_names(module):
            yield f"no name {node.attr} in {module}"


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _ours(module: str) -> bool:
    return module.split(".")[0] in ("ml_factory", "utils")


def _file(module: str) -> Path | None:
    """The source of one of our modules, if there is one."""
    stem = ROOT.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def _top_names(module: str) -> set[str]:
    """Names a module of ours gives, read from its source so that nothing heavy is imported."""
    path = _file(module)
    if path is None:
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in tree.body if isinstance(node, named)}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(item.asname or item.name).split(".")[0] for item in node.names}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        # names that a package gives on demand stand as keys of its _HOMES
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and "_HOMES" in names:
            names |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return names


def main() -> int:
    complaints = lint_all()
    print("\n".join(complaints) if complaints else f"notebooks: {len(NOTEBOOKS)} are as they should be")
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
