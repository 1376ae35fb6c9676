"""What notebooks share: the bootstrap text, checked parameters, what was found and written, pictures.

Light on purpose: the validation cell imports this file before anything is installed on a fresh Colab machine.
"""

import ast
import importlib
import json
import os
import re
import time
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
from IPython import get_ipython
from IPython.display import Image, display
from matplotlib.figure import Figure

from ml_factory.errors import NotPreparedError, SettingsError, did_you_mean
from ml_factory.keys import redact
from ml_factory.models.registry import available_models, spec_of
from ml_factory.runs import mounts
from ml_factory.runs.courier import status_line
from ml_factory.runs.storage import disk_errors, is_file, names_in
from ml_factory.runs.workspace import Workspace, check_symbol
from ml_factory.units.restoring import check_source

NOTEBOOKS = (
    "00_setup",
    "01_data_pipeline",
    "02_train_tabular",
    "03_train_sequence",
    "04_train_advanced",
    "05_train_ensemble",
    "06_cross_validation",
    "07_inference",
)

# The first code cell of every notebook. The linter holds each notebook to this text.
BOOTSTRAP = """\
#@title Find the code, or fetch it { display-mode: "form" }
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = os.environ.get("ML_FACTORY_REPOSITORY", "https://github.com/{slug}")
REF = os.environ.get("ML_FACTORY_REF", "{ref}")
SECRET = r"//[^/@\\s]*@"  # a token in the address is for git alone: no output, no folder's name
SHOWN = re.sub(SECRET, "//", REPOSITORY)


def is_checkout(folder):
    return (folder / "ml_factory" / "__init__.py").is_file() and (folder / "utils" / "colab_setup.py").is_file()


def git(*words):
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(["git", *map(str, words)], capture_output=True, text=True, env=quiet)
    except FileNotFoundError:
        return False, "git is not installed"
    return done.returncode == 0, (done.stdout or done.stderr).strip()


def fetch(place):
    aside = place.with_name(f"{place.name}.{os.getpid()}")  # moved into place when complete, so never half there
    git("init", "--quiet", aside)
    for wanted in (REF, "HEAD"):
        good, said = git("-C", aside, "fetch", "--quiet", "--depth=1", REPOSITORY, wanted)
        if good and git("-C", aside, "checkout", "--quiet", "--detach", "FETCH_HEAD")[0]:
            if wanted != REF:
                print(f"{SHOWN} has no {REF} yet: took its default branch instead.")
            return aside.rename(place)
    shutil.rmtree(aside, ignore_errors=True)
    advice = "Next: look at the network, or set ML_FACTORY_REPOSITORY and ML_FACTORY_REF."
    raise RuntimeError(f"Could not fetch {REF} from {SHOWN}: {re.sub(SECRET, '//', said)}. {advice}")


if "COLAB_RELEASE_TAG" in os.environ or Path("/var/colab/hostname").exists():
    kept = Path("/content/ml_factory_code")  # the machine's own disk, never Drive
else:
    kept = Path.home() / ".cache" / "ml_factory" / re.sub(r"[^\\w.-]+", "-", f"{SHOWN}-{REF}")
above = [folder for folder in (Path.cwd(), *Path.cwd().parents) if is_checkout(folder)]
if not above and not is_checkout(kept):
    kept.parent.mkdir(parents=True, exist_ok=True)
    fetch(kept)
CODE = (above or [kept])[0]
sys.path.insert(0, str(CODE))
known, version = git("-C", CODE, "describe", "--always", "--dirty")
print(f"Code: {CODE} ({version if known else 'not under git'})")
"""

PARAMETERS_TITLE = "#@title Parameters"
INJECTED_TITLE = "# Parameters"  # papermill's

# Meant the same in every notebook; one that does not use a name accepts it, so one command line fits all eight.
SHARED: dict[str, type] = {
    "SYMBOL": str,
    "HORIZON": int,
    "MODEL": str,
    "WORKSPACE": str,
    "SEED": int,
    "QUICK": bool,
    "FRESH": bool,
}
KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


def bootstrap_text(slug: str, ref: str) -> str:
    """The bootstrap cell for the repository github.com/`slug` at the pinned `ref`."""
    return BOOTSTRAP.replace("{slug}", slug).replace("{ref}", ref).rstrip("\n")


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: NAME: kind = default  #@param ..."""

    name: str
    kind: type
    default: Any


def read_parameters(source: str) -> dict[str, Parameter]:
    """The declared parameters of a cell's source, in order. Unannotated or computed ones raise SettingsError."""
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
        found[node.target.id] = Parameter(node.target.id, kind, ast.literal_eval(node.value))
    return found


def notebook_parameters(path: str | Path) -> dict[str, Parameter]:
    """What a notebook file declares in its cell tagged `parameters`, without running it."""
    for cell in json.loads(Path(path).read_text(encoding="utf-8"))["cells"]:
        if "parameters" in cell["metadata"].get("tags", ()):
            return read_parameters("".join(cell["source"]))
    raise SettingsError("No cell is tagged `parameters`", where=path)


def convert_parameters(path: str | Path, given: Mapping[str, str]) -> dict[str, Any]:
    """Texts from a command line as the types the notebook declares; an unknown name or unfit text is refused."""
    declared = {name: item.kind for name, item in notebook_parameters(path).items()}
    values = {}
    for name, text in given.items():
        kind = _kind_of(name, declared, where=Path(path).name)
        values[name] = _convert(name, kind, text)
    return values


def _convert(name: str, kind: type, text: str) -> Any:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return words[text.strip().lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = "True or False" if kind is bool else kind.__name__
        raise SettingsError("A parameter cannot be read", where=name, got=repr(text), wanted=wanted) from None


def _kind_of(name: str, declared: Mapping[str, type], *, where: str) -> type:
    """The type of a parameter that this notebook declares or that all share."""
    known = SHARED | dict(declared)
    if name not in known:
        raise SettingsError(
            "Unknown parameter",
            where=where,
            got=name,
            next_step=did_you_mean(name, declared),
        )
    return known[name]


def check_parameters(family: str = "", *, shell: Any = None) -> types.SimpleNamespace:
    """The notebook's parameters, checked, as .symbol .horizon ...; the line to read is printed.

    Called by the cell right after the parameters, with what papermill injected between the two. Raises SettingsError
    on an unknown name, a value of another type than declared, an illegal symbol, a horizon below 1, or a model that
    another notebook trains (`family` given: tabular, sequence or advanced).
    """
    shell = shell or get_ipython()
    cells = list(shell.user_ns.get("In", ()))
    starts = [number for number, text in enumerate(cells) if text.startswith(PARAMETERS_TITLE)]
    if starts:
        declared = {name: item.kind for name, item in read_parameters(cells[starts[-1]]).items()}
        cells = cells[starts[-1] + 1 :]
    else:  # a runner that keeps no history, as nbval: the annotations are still there
        declared = {name: kind for name, kind in shell.user_ns.get("__annotations__", {}).items() if name.isupper()}
    if not declared:
        raise SettingsError("The parameters are not set", next_step="run the cell above, titled Parameters, first")
    injected = [name for text in cells if text.startswith(INJECTED_TITLE) for name in _assigned(text)]
    known = declared | {name: _kind_of(name, declared, where="-p") for name in injected}
    values = {name: _checked(name, kind, shell.user_ns[name]) for name, kind in known.items()}
    _check_values(values, family)
    if os.environ.get("ML_FACTORY_QUICK") == "1" and "QUICK" in values:
        values["QUICK"] = True
    print(redact(" · ".join(f"{name} {values[name]!r}" for name in declared)))
    unused = [name for name in injected if name not in declared]
    if unused:
        print(f"Not used in this notebook: {', '.join(unused)}")
    return types.SimpleNamespace(**{name.lower(): value for name, value in values.items()})


def _assigned(source: str) -> list[str]:
    """Names that a cell's own lines assign."""
    nodes = ast.parse(source).body
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _checked(name: str, kind: type, value: Any) -> Any:
    """The value if it is of this type; a whole number also serves as a float."""
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


def _check_values(values: dict[str, Any], family: str) -> None:
    """What types cannot say; BASE_MODELS becomes a tuple of names."""
    if "SYMBOL" in values:
        check_symbol(values["SYMBOL"])
    for name, least in (("HORIZON", 1), ("SEED", 0), ("FOLDS", 2)):
        if name in values and values[name] < least:
            raise SettingsError("A parameter is too small", where=name, got=values[name], wanted=f"{least} or more")
    if "SOURCE" in values:
        check_source(values["SOURCE"])
    if "BASE_MODELS" in values:
        values["BASE_MODELS"] = tuple(name.strip() for name in values["BASE_MODELS"].split(",") if name.strip())
        for name in values["BASE_MODELS"]:
            spec_of(name)
    if "MODEL" in values:
        spec = spec_of(values["MODEL"])
        if family and spec.family != family:
            wanted = ", ".join(name for name in available_models() if spec_of(name).family == family)
            raise SettingsError(
                "This notebook does not train that model", where="MODEL", got=spec.name, wanted=wanted,
                next_step=f"open {spec.notebook}.ipynb",
            )  # fmt: skip


def show(*things: Any) -> None:
    """Display figures as pictures, tables as tables, text as text."""
    for thing in things:
        if hasattr(thing, "savefig"):
            display(_picture(thing))
        elif isinstance(thing, str):
            print(thing)
        elif isinstance(thing, pd.DataFrame):
            with pd.option_context("display.max_colwidth", 200):
                numbers = dict.fromkeys(thing.select_dtypes("number"), 4)
                display(thing.round(numbers)) if len(thing) else print("(nothing to list)")
        else:
            display(thing)


def _picture(figure: Figure) -> Image:
    png = BytesIO()
    figure.savefig(png, format="png", dpi=110, bbox_inches="tight")
    return Image(data=png.getvalue(), format="png")


class EpochLine:
    """A training callback that keeps one line up to date, whatever the number of epochs: large outputs hang Colab."""

    def __init__(self):
        self._handle = None

    def __call__(self, epoch: int, metrics: Mapping[str, float | None]) -> None:
        shown = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        text = f"epoch {epoch} · " + " · ".join(f"{name} {value:.4g}" for name, value in shown.items())
        kept = status_line()  # how far the checkpoint has come: this disk, the mount, never more than is known
        text += f" · {kept}" if kept else ""
        line = {"text/plain": text}
        if self._handle is None:
            self._handle = display(line, raw=True, display_id=True)
        else:
            self._handle.update(line, raw=True)


class LiveCurves(EpochLine):
    """An `EpochLine` that draws the learning curves above itself anew after an epoch, where somebody looks."""

    SECONDS_BETWEEN = 2.0

    def __init__(self):
        super().__init__()
        self._history: list[dict] = []
        self._resumed: int | None = None
        self._picture, self._drawn = None, float("-inf")

    def remember(self, history: Iterable[Mapping]) -> None:
        """Stand behind the epochs of an earlier session: drawn at once, with a mark where this one goes on."""
        self._history = [dict(epoch) for epoch in history]
        self._resumed = self._history[-1]["epoch"]
        self._show()

    def __call__(self, epoch: int, metrics: Mapping[str, float | None]) -> None:
        self._history.append({"epoch": epoch, **metrics})
        self._show()
        super().__call__(epoch, metrics)

    def _show(self) -> None:
        if on_screen() and time.monotonic() - self._drawn >= self.SECONDS_BETWEEN:
            self._draw()
            self._drawn = time.monotonic()

    def _draw(self) -> None:
        # By name: figures need packages that the first cell of a fresh machine does not have yet.
        figures = importlib.import_module("ml_factory.evaluation.figures")
        image = _picture(figures.learning_curves(pd.DataFrame(self._history), resumed_from=self._resumed))
        if self._picture is None:
            self._picture = display(image, display_id=True)
        else:
            self._picture.update(image)


def on_screen() -> bool:
    """Whether this kernel's outputs are looked at while it runs: Colab, Jupyter, VS Code; not papermill or nbval."""
    known = ("COLAB_RELEASE_TAG", "JPY_SESSION_NAME")  # Colab's, and what a Jupyter server gives its kernels
    return any(name in os.environ for name in known) or "__vsc_ipynb_file__" in getattr(get_ipython(), "user_ns", ())


def markets(workspace: Workspace) -> pd.DataFrame:
    """Raw files of the workspace: symbol, megabytes."""
    names = [name for name in names_in(workspace.raw) if name.endswith("_1m.parquet")]
    with disk_errors(workspace.raw):
        sizes = [mounts.size(workspace.raw / name) for name in names]
    rows = [
        {"symbol": name.removesuffix("_1m.parquet"), "MB": size / 1e6} for name, size in zip(names, sizes, strict=True)
    ]
    return pd.DataFrame(rows, columns=["symbol", "MB"]).round(2)


def progress(workspace: Workspace, symbol: str) -> dict[str, list[str]]:
    """What each notebook has left in the workspace for this symbol: notebook -> what is there."""
    models, results = workspace.models / symbol, workspace.results / symbol
    left = {name: _holds(models, f"model-{name}-", "artifact.json") for name in available_models()}
    found = {notebook: [] for notebook in NOTEBOOKS[1:]}
    for name, there in left.items():
        found[spec_of(name).notebook] += [name] if there else []
    predicted = [name for name in names_in(results) if re.fullmatch(r"predictions-.*\.parquet", name)]
    for notebook, name, there in (
        ("01_data_pipeline", "prepared", "current.json" in names_in(workspace.processed(symbol))),
        ("05_train_ensemble", "stack", _holds(models, "stack-", "artifact.json")),
        ("06_cross_validation", "folds", _holds(results, "", "folds.parquet")),
        ("07_inference", "predictions", bool(predicted)),
    ):
        found[notebook] += [name] if there else []
    return found


def _holds(folder: Path, start: str, file: str) -> bool:
    """Whether one of the folders in it whose names begin like this has that file."""
    return any(name.startswith(start) and is_file(folder / name / file) for name in names_in(folder))


def draw_progress(done: Mapping[str, list[str]], symbol: str) -> Figure:
    """The notebooks as a row of stations: filled when what they write for `symbol` is there."""
    figure = Figure(figsize=(9, 1.7), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, len(done) - 1], [0, 0], color="#a9b2bf", linewidth=2, zorder=1)
    for place, (name, things) in enumerate(done.items()):
        axes.scatter(place, 0, s=240, zorder=2, color="#2b6fc7" if things else "white", edgecolor="#2b6fc7")
        axes.annotate(name[:2], (place, 0.35), ha="center", fontweight="bold")
        axes.annotate(
            "\n".join([name[3:].replace("_", " "), *things]), (place, -0.3), ha="center", va="top", fontsize=8
        )
    axes.set(xlim=(-0.6, len(done) - 0.4), ylim=(-1.6, 0.8), title=f"{symbol}: what is there")
    axes.axis("off")
    return figure


def finish(paths: Iterable[Path], *, following: str = "") -> None:
    """The last cell: what now lies in the workspace, and the notebook that goes on from there."""
    for path in map(Path, paths):
        with disk_errors(path):
            kind, sizes = mounts.kind(path), mounts.sizes(path)
        if not kind:
            raise NotPreparedError("A file that this notebook should have written is absent", where=path)
        print(f"wrote {path}  ({sum(sizes) / 1e6:,.2f} MB in {len(sizes)} file{'s' * (len(sizes) != 1)})")
    print(f"Next: {following}.ipynb" if following else "This was the last one.")
