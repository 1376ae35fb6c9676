"""Output of notebooks: tables and figures, the workspace's contents and progress, files written.

The validation cell imports this file before anything is installed on a new Colab machine: it needs only preinstalled
packages.
"""

import os
import re
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pandas as pd
from IPython import get_ipython
from IPython.display import Image, display

from ml_factory.argument_checks import DEMOS
from ml_factory.errors import NotPreparedError
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.redaction import redact_secrets
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace, parse_raw_bars_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

matplotlib_figure = LazyModule("matplotlib.figure")  # comes with the extra train
stores = LazyModule("ml_factory.datasets.store")
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


def show(*things: Any) -> None:
    """Display figures as images, tables as tables, text as text."""
    for thing in things:
        if hasattr(thing, "savefig"):
            display(Image(data=figure_png(thing), format="png"))
        elif isinstance(thing, str):
            print(redact_secrets(thing))
        elif isinstance(thing, pd.DataFrame):
            with pd.option_context("display.max_colwidth", None):  # run ids are shown whole
                numbers = dict.fromkeys(thing.select_dtypes("number"), 4)
                display(thing.round(numbers)) if len(thing) else print("(nothing to list)")
        else:
            display(thing)


def is_interactive_notebook() -> bool:
    """Return True in an interactive notebook: Colab, Jupyter, VS Code; False under papermill or nbval."""
    known = ("COLAB_RELEASE_TAG", "JPY_SESSION_NAME")  # set by Colab, and by a Jupyter server for its kernels
    shell = get_ipython()
    return any(name in os.environ for name in known) or "__vsc_ipynb_file__" in getattr(shell, "user_ns", ())


def figure_png(figure: "Figure") -> bytes:
    """Return the figure as a PNG file."""
    png = BytesIO()
    figure.savefig(png, format="png", dpi=110, bbox_inches="tight")
    return png.getvalue()


def markets(workspace: Workspace) -> pd.DataFrame:
    """List the raw files of the workspace: symbol, minutes of a bar, megabytes."""
    found = {name: facts for name in files.names(workspace.raw) if (facts := parse_raw_bars_name(name))}
    rows = [(*facts, files.size(workspace.raw / name) / 1e6) for name, facts in found.items()]
    return pd.DataFrame(rows, columns=["symbol", "minutes", "MB"]).round(2)


def progress(workspace: Workspace, symbol: str) -> dict[str, list[str]]:
    """Return the finished outputs of each notebook for this symbol: notebook -> names."""
    models, results = workspace.models / symbol, workspace.results / symbol
    left = {name: _holds(models, f"model-{name}-", "artifact.json") for name in available_models()}
    found: dict[str, list[str]] = {notebook: [] for notebook in NOTEBOOKS[1:]}
    for name, there in left.items():
        found[find_model_spec(name).notebook] += [name] if there else []
    predicted = [name for name in files.names(results) if re.fullmatch(r"predictions-.*\.parquet", name)]
    for notebook, name, there in (
        ("01_data_pipeline", "prepared", "current.json" in files.names(workspace.processed(symbol))),
        ("05_train_ensemble", "stack", _holds(models, "stack-", "artifact.json")),
        ("06_cross_validation", "folds", _holds(results, "", "folds.parquet")),
        ("07_inference", "predictions", bool(predicted)),
    ):
        found[notebook] += [name] if there else []
    return found


def list_workspace_choices(workspace: Workspace, chosen: SimpleNamespace) -> dict[str, list]:
    """Return what the workspace has of the parameters `symbol`, `horizon` and `model`, those that `chosen` has.

    Symbols have raw bars, or are synthetic; horizons are prepared and models finished for the chosen symbol. Models are
    those of the notebook's family, where it has one.
    """
    processed = workspace.processed(chosen.symbol)
    prepared = "current.json" in files.names(processed)
    done = sorted(name for names in progress(workspace, chosen.symbol).values() for name in names)
    found = {
        "symbol": sorted({*DEMOS, *markets(workspace)["symbol"]}),
        "horizon": sorted(stores.DatasetStore.current(processed).horizons) if prepared else [],
        "model": [
            name for name in done if name in available_models() and chosen.family in ("", find_model_spec(name).family)
        ],
    }
    return {name: there for name, there in found.items() if hasattr(chosen, name)}


def _holds(folder: Path, start: str, file: str) -> bool:
    """Return True where a folder whose name begins like this holds that file."""
    return any(name.startswith(start) and files.is_file(folder / name / file) for name in files.names(folder))


def draw_finished_notebooks(done: Mapping[str, list[str]], symbol: str) -> "Figure":
    """Draw the notebooks as a row of stations: filled when their output for `symbol` exists."""
    figure = matplotlib_figure.Figure(figsize=(9, 1.7), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, len(done) - 1], [0, 0], color="#a9b2bf", linewidth=2, zorder=1)
    for place, (name, things) in enumerate(done.items()):
        axes.scatter(place, 0, s=240, zorder=2, color="#2b6fc7" if things else "white", edgecolor="#2b6fc7")
        axes.annotate(name[:2], (place, 0.35), ha="center", fontweight="bold")
        axes.annotate(
            "\n".join([name[3:].replace("_", " "), *things]), (place, -0.3), ha="center", va="top", fontsize=8
        )
    axes.set(xlim=(-0.6, len(done) - 0.4), ylim=(-1.6, 0.8), title=f"{symbol}: finished steps")
    axes.axis("off")
    return figure


def finish(paths: Iterable[Path], *, following: str = "", answer: str = "") -> None:
    """Print the files written, the answer to the notebook's question, and the next notebook: its last cell."""
    for path in map(Path, paths):
        if not path.exists():
            raise NotPreparedError("A file that this notebook should have written is absent", where=path)
        sizes = [one.stat().st_size for one in [path, *path.rglob("*")] if one.is_file()]
        print(f"wrote {path}  ({sum(sizes) / 1e6:,.2f} MB in {len(sizes)} file{'s' * (len(sizes) != 1)})")
    if answer:
        print(f"Answer: {answer}")
    print(f"Next: {following}.ipynb" if following else "This was the last notebook.")
