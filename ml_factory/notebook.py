"""Output of notebooks: tables and figures, a fit in progress, the workspace's progress, files written.

The validation cell imports this file before anything is installed on a new Colab machine: it needs only preinstalled
packages.
"""

import importlib
import re
import time
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from IPython.display import Image, display

from ml_factory.checkpoints.uploader import save_status_line
from ml_factory.errors import NotPreparedError
from ml_factory.heartbeat import is_interactive_notebook
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.redaction import redact_secrets
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace, parse_raw_bars_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

matplotlib_figure = LazyModule("matplotlib.figure")  # comes with the extra train
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
            display(_picture(thing))
        elif isinstance(thing, str):
            print(redact_secrets(thing))
        elif isinstance(thing, pd.DataFrame):
            with pd.option_context("display.max_colwidth", None):  # run ids are shown whole
                numbers = dict.fromkeys(thing.select_dtypes("number"), 4)
                display(thing.round(numbers)) if len(thing) else print("(nothing to list)")
        else:
            display(thing)


def _picture(figure: "Figure") -> Image:
    png = BytesIO()
    figure.savefig(png, format="png", dpi=110, bbox_inches="tight")
    return Image(data=png.getvalue(), format="png")


class EpochLine:
    """A training callback that keeps one line up to date, whatever the number of epochs: large outputs freeze Colab."""

    def __init__(self) -> None:
        self._handle = None

    def __call__(self, epoch: int, metrics: Mapping[str, float | None]) -> None:
        shown = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        text = f"epoch {epoch} · " + " · ".join(f"{name} {value:.4g}" for name, value in shown.items())
        kept = save_status_line()  # progress of the checkpoint: local disk, mount
        text += f" · checkpoint {kept}" if kept else ""
        line = {"text/plain": text}
        if self._handle is None:
            self._handle = display(line, raw=True, display_id=True)
        else:
            self._handle.update(line, raw=True)


class LiveCurves(EpochLine):
    """An `EpochLine` that also redraws the learning curves after an epoch, in an interactive notebook."""

    SECONDS_BETWEEN = 2.0

    def __init__(self) -> None:
        super().__init__()
        self._history: list[dict] = []
        self._resumed: int | None = None
        self._picture, self._drawn = None, float("-inf")

    def remember(self, history: Iterable[Mapping]) -> None:
        """Prepend the epochs of an earlier session: drawn at once, with a mark where this session resumes."""
        self._history = [dict(epoch) for epoch in history]
        self._resumed = self._history[-1]["epoch"]
        self._show()

    def __call__(self, epoch: int, metrics: Mapping[str, float | None]) -> None:
        self._history.append({"epoch": epoch, **metrics})
        self._show()
        super().__call__(epoch, metrics)

    def _show(self) -> None:
        if is_interactive_notebook() and time.monotonic() - self._drawn >= self.SECONDS_BETWEEN:
            self._draw()
            self._drawn = time.monotonic()

    def _draw(self) -> None:
        # By name: figures need packages that a new machine does not have yet in the first cell.
        figures = importlib.import_module("ml_factory.evaluation.plots")
        image = _picture(figures.plot_learning_curves(pd.DataFrame(self._history), resumed_from=self._resumed))
        if self._picture is None:
            self._picture = display(image, display_id=True)
        else:
            self._picture.update(image)


def markets(workspace: Workspace) -> pd.DataFrame:
    """List the raw files of the workspace: symbol, minutes of a bar, megabytes."""
    found = {name: facts for name in workspace.files.names(workspace.raw) if (facts := parse_raw_bars_name(name))}
    rows = [(*facts, workspace.files.size(workspace.raw / name) / 1e6) for name, facts in found.items()]
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
        if not files.kind(path):
            raise NotPreparedError("A file that this notebook should have written is absent", where=path)
        sizes = files.sizes(path)
        print(f"wrote {path}  ({sum(sizes) / 1e6:,.2f} MB in {len(sizes)} file{'s' * (len(sizes) != 1)})")
    if answer:
        print(f"Answer: {answer}")
    print(f"Next: {following}.ipynb" if following else "This was the last notebook.")
