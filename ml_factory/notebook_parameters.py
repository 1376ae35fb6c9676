"""Parameters cell of a notebook: read without running it, and checked after papermill's injection.

The validation cell imports this file before anything is installed on a new Colab machine: it needs only preinstalled
packages.
"""

import ast
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_factory.argument_checks import SOURCES, quick_from_environment
from ml_factory.errors import SettingsError, check_known
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import (
    available_models,
    check_registered_model_settings,
    find_model_spec,
    split_settings_by_model,
)
from ml_factory.models.setting_names import parse_named_settings
from ml_factory.redaction import redact_secrets
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.workspace import BAR_MINUTES, check_symbol

ipython, notebook_panel = LazyModule("IPython"), LazyModule("ml_factory.notebook_panel")

PARAMETERS_TITLE = "#@title Parameters"
INJECTED_TITLE = "# Parameters"  # papermill's
_LARGEST_NOTEBOOK = 1 << 25  # bytes, with the pictures in its outputs

# Same meaning in every notebook; a notebook accepts unused names, so one command line fits all eight.
SHARED: dict[str, type] = {
    "SYMBOL": str,
    "HORIZON": int,
    "MODEL": str,
    "WORKSPACE": str,
    "SEED": int,
    "QUICK": bool,
    "FRESH": bool,
    "SETTINGS": str,
}
KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class NotebookParameter:
    """One line of a parameters cell: NAME: kind = default  #@param ..."""

    name: str
    kind: type
    default: Any


def parse_notebook_parameters(source: str) -> dict[str, NotebookParameter]:
    """Parse the declared parameters of a cell's source, in order. Raises SettingsError for unannotated or computed
    ones.
    """
    found = {}
    for node in ast.parse(source).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None):
            raise SettingsError("A parameters cell holds only lines NAME: type = value", got=ast.unparse(node))
        kind = KINDS.get(ast.unparse(node.annotation))
        if kind is None:
            raise SettingsError(
                "A parameter's type cannot be used",
                where=node.target.id,
                got=ast.unparse(node.annotation),
                wanted=", ".join(KINDS),
            )
        found[node.target.id] = NotebookParameter(node.target.id, kind, ast.literal_eval(node.value))
    return found


def read_notebook(path: str | Path) -> Any:
    """Read a notebook file; its outputs may hold NaN. Raises FileError, or ValueError for text that is not JSON."""
    return parse_json(files.read(path, _LARGEST_NOTEBOOK), finite=False)


def read_notebook_parameters(path: str | Path) -> dict[str, NotebookParameter]:
    """Return the parameters that a notebook file declares in its cell tagged `parameters`, without running it."""
    try:
        cells = read_notebook(path)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", ())]
        if sources:
            return parse_notebook_parameters(sources[0])
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError) as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(
            "This notebook cannot be read", where=path, got=f"{type(error).__name__}: {error}"[:200],
            next_step="fetch it again",
        ) from error  # fmt: skip
    raise SettingsError("No cell is tagged `parameters`", where=path)


def convert_notebook_parameters(path: str | Path, given: Mapping[str, str]) -> dict[str, Any]:
    """Convert texts of a command line to the declared types. Raises SettingsError for an unknown name or unfit text."""
    declared = {name: item.kind for name, item in read_notebook_parameters(path).items()}
    where = Path(path).name
    return {name: _convert(name, _kind_of(name, declared, where=where), text) for name, text in given.items()}


def _convert(name: str, kind: type, text: str) -> Any:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return words[text.strip().lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = "True or False" if kind is bool else kind.__name__
        raise SettingsError("A parameter cannot be read", where=name, got=repr(text), wanted=wanted) from None


def _kind_of(name: str, declared: Mapping[str, type], *, where: str) -> type:
    """Return the type of a parameter that this notebook declares or that all share."""
    known = SHARED | dict(declared)
    return known[check_known("Unknown parameter", where, name, known)]


def check_parameters(family: str = "", *, with_stack: bool = False, shell: Any = None) -> types.SimpleNamespace:
    """Return the notebook's parameters, checked, as .symbol .horizon ..., and its .family; prints them in one line.

    Called by the cell right after the parameters, with the values that papermill injected between the two. Raises
    SettingsError for an unknown name, a value of another type than declared, an illegal symbol, a horizon below 1, or a
    model of another notebook (`family` given: tabular, sequence or advanced).

    with_stack : MODEL may be "stack" too, the ensemble of notebook 05.
    """
    shell = shell or ipython.get_ipython()
    cells = list(shell.user_ns.get("In", ()))
    starts = [number for number, text in enumerate(cells) if text.startswith(PARAMETERS_TITLE)]
    if starts:
        declared = {name: item.kind for name, item in parse_notebook_parameters(cells[starts[-1]]).items()}
        cells = cells[starts[-1] + 1 :]
    else:  # a runner without history, as nbval: read the annotations
        declared = {name: kind for name, kind in shell.user_ns.get("__annotations__", {}).items() if name.isupper()}
    if not declared:
        raise SettingsError("The parameters are not set", next_step="run the cell above, titled Parameters, first")
    injected = [name for text in cells if text.startswith(INJECTED_TITLE) for name in _assigned(text)]
    known = declared | {name: _kind_of(name, declared, where="-p") for name in injected}
    values = {name: _checked(name, kind, shell.user_ns[name]) for name, kind in known.items()}
    for name, value in values.items():
        if redact_secrets(str(value)) != str(value):
            raise SettingsError(
                "This parameter holds a secret, which stays in the cell above and in every copy of this notebook",
                where=name, wanted="secrets in environment variables or Colab's secrets",
                next_step="remove it from the cell, delete executed copies, and replace the secret at its service",
            )  # fmt: skip
    _check_values(values, family, with_stack)
    notebook_panel.show_cell_panels()
    if "QUICK" in values:
        values["QUICK"] = quick_from_environment(values["QUICK"])
    print(redact_secrets(" · ".join(f"{name} {values[name]!r}" for name in declared)))
    unused = [name for name in injected if name not in declared]
    if unused:
        print(f"Not used in this notebook: {', '.join(unused)}")
    return types.SimpleNamespace(family=family, **{name.lower(): value for name, value in values.items()})


def _assigned(source: str) -> list[str]:
    """Return the names that a cell's own lines assign."""
    nodes = ast.parse(source).body
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _checked(name: str, kind: type, value: Any) -> Any:
    """Return the value if it has this type; a whole number also serves as a float."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    advice = (
        f"papermill reads -p {name} 1E5 or NAN or 123 as a number: write -r {name} ... for text" if kind is str else ""
    )
    raise SettingsError(
        "A parameter has another type",
        where=name,
        got=f"{value!r} ({type(value).__name__})",
        wanted=kind.__name__,
        next_step=advice,
    )


def _check_values(values: dict[str, Any], family: str, with_stack: bool) -> None:
    """Check values beyond their types; BASE_MODELS becomes a tuple of names."""
    if "SYMBOL" in values:
        check_symbol(values["SYMBOL"])
    for name, least in (("HORIZON", 1), ("SEED", 0), ("FOLDS", 2)):
        if name in values and values[name] < least:
            raise SettingsError("A parameter is too small", where=name, got=values[name], wanted=f"{least} or more")
    if values.get("BAR_MINUTES", 0) not in (0, *BAR_MINUTES):
        wanted = "0, or one of " + ", ".join(map(str, BAR_MINUTES))
        raise SettingsError(
            "Bars of this length are not read", where="BAR_MINUTES", got=values["BAR_MINUTES"], wanted=wanted
        )
    if "SOURCE" in values:
        check_known("Unknown source of models", "SOURCE", values["SOURCE"], SOURCES)
    if "BASE_MODELS" in values:
        values["BASE_MODELS"] = tuple(name.strip() for name in values["BASE_MODELS"].split(",") if name.strip())
        for name in values["BASE_MODELS"]:
            find_model_spec(name)
    stacked = with_stack and values["MODEL"] == "stack"
    if stacked and values["SETTINGS"]:
        raise SettingsError("A finished stack takes no settings", where="SETTINGS", got=values["SETTINGS"], wanted="''",
                            next_step="set those of its models in 05_train_ensemble.ipynb")  # fmt: skip
    if "SETTINGS" in values and not stacked:
        given = parse_named_settings(values["SETTINGS"])
        of_models = {values["MODEL"]: given} if "MODEL" in values else {}
        if "BASE_MODELS" in values:
            given = of_models = split_settings_by_model(values["BASE_MODELS"], given)
        for name, settings in of_models.items():
            check_registered_model_settings(name, settings)
        values["SETTINGS"] = given
    if "MODEL" in values and not stacked:
        spec = find_model_spec(values["MODEL"])
        if family and spec.family != family:
            wanted = ", ".join(name for name in available_models() if find_model_spec(name).family == family)
            raise SettingsError(
                "This notebook does not train this model", where="MODEL", got=spec.name, wanted=wanted,
                next_step=f"open {spec.notebook}.ipynb",
            )  # fmt: skip
