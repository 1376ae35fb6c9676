"""Style of all plots: colours, axes, time, and conversion to SVG for a page.

A figure is drawn in the colours of a light page. `figure_to_svg` replaces them by CSS variables, so that one drawing
serves a light and a dark page.
"""

import io
import re

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import dates as mdates
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text

# name → (on a light page, on a dark page). Blue and orange stay apart for the colour-blind; grey is never a claim.
# Each baseline has a colour of its own, and a diamond where models have a circle.
COLOURS = {
    "card": ("#fffffe", "#171c26"),
    "ink": ("#1c2430", "#e7ebf2"),
    "muted": ("#5f6b7c", "#98a4b6"),
    "grid": ("#e6e9ee", "#2a3240"),
    "short": ("#d3622f", "#f08a55"),
    "neutral": ("#a9b2bf", "#667285"),
    "long": ("#2b6fc7", "#5e9df0"),
    "accent": ("#2460b8", "#6ea8f5"),
    "second": ("#8a4fc2", "#bb8cf0"),
    "third": ("#138574", "#3fc1ac"),
    "fourth": ("#b3830f", "#e0b445"),
    "prior": ("#7b8796", "#8c98a8"),
    "last_move": ("#96633a", "#cf9a6c"),
    "clock": ("#c03a86", "#ec78b8"),
    "clock_volatility": ("#6f8a12", "#a9c74a"),
    "equal_pool": ("#4a4fb0", "#8f94f5"),
    "train": ("#2d6dc3", "#649ff0"),
    "validation": ("#b07d0a", "#e3b548"),
    "test": ("#8447be", "#bd90f2"),
}
INK = {name: light for name, (light, _) in COLOURS.items()}
LABEL_INK = {"pass": "neutral", "act": "long", "ambiguous": "fourth"}  # colours of the other label names
SERIES = [INK[name] for name in ("accent", "second", "third", "fourth", "short", "muted")]
POINTS = 1500  # points of a price line: more than columns of a screen, few enough for a small page
WIDTH, PANELS_WIDTH = 4.6, 8.6  # inches, of a figure with one panel and with panels side by side
SMALL, NORMAL, LARGE = 7.5, 8.5, 10.0  # points
DASHED = (0, (4, 3))
SIGNED = "{x:+.4g}"  # format of an axis through 0
BEHIND = {"facecolor": INK["card"], "edgecolor": "none", "alpha": 0.8, "pad": 1.0}  # background of text on lines


def new_styled_figure(title: str, height: float, rows: int = 1, columns: int = 1, **options) -> tuple[Figure, list]:
    """Return a figure `height` inches high, and its rows x columns panels in reading order; `options` go to
    `subplots`.
    """
    width = WIDTH if columns == 1 else PANELS_WIDTH
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=INK["card"])
    figure.suptitle(title, x=0.008, ha="left", fontsize=LARGE, fontweight="bold", color=INK["ink"])
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for ax in axes:
        ax.set(facecolor="none", axisbelow=True)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0, labelsize=NORMAL, labelcolor=INK["muted"], pad=5)
        ax.grid(True, axis="y", color=INK["grid"], linewidth=0.8)
    return figure, axes


def set_axis_labels(ax: Axes, x: str = "", y: str = "") -> None:
    """Set the labels of both axes."""
    ax.set_xlabel(x, fontsize=NORMAL, color=INK["muted"])
    ax.set_ylabel(y, fontsize=NORMAL, color=INK["muted"])


def add_legend_row(ax: Axes, columns: int, **options) -> None:
    """Add a legend in one row between the panel and the figure's title."""
    look = {"frameon": False, "fontsize": NORMAL, "labelcolor": INK["muted"], "handlelength": 1.2}
    ax.legend(ncols=columns, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2, columnspacing=1.2,
              handletextpad=0.5, **look, **options)  # fmt: skip


def set_horizontal_bar_rows(ax: Axes, names: list[str]) -> None:
    """Set up a row per name from top to bottom, for horizontal bars, with vertical grid lines."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.grid(True, axis="x", color=INK["grid"], linewidth=0.8)


def to_matplotlib_dates(index) -> np.ndarray:
    """Convert moments to matplotlib's day numbers, UTC."""
    return mdates.date2num(pd.DatetimeIndex(index).to_numpy())


def set_time_axis(ax: Axes) -> None:
    """Format the x axis as dates."""
    locator = mdates.AutoDateLocator(minticks=3, maxticks=7)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))
    ax.xaxis.get_offset_text().set(fontsize=SMALL, color=INK["muted"])


def downsample_line(values: np.ndarray) -> np.ndarray:
    """Return positions of at most POINTS values that keep a line's shape: the lowest and highest of each bucket."""
    values = np.asarray(values, dtype=np.float64)
    if len(values) <= POINTS:
        return np.arange(len(values))
    size = -(-2 * len(values) // POINTS)
    buckets = np.pad(values, (0, -len(values) % size), mode="edge").reshape(-1, size)
    found = np.arange(0, len(values), size) + np.stack([buckets.argmin(axis=1), buckets.argmax(axis=1)])
    return np.unique(np.append(found.clip(0, len(values) - 1), [0, len(values) - 1]))


def figure_to_svg(figure: Figure, name: str) -> str:
    """Return the figure as an `<svg>` element for HTML, deterministically.

    name : unique among the figures of the page; its hash is part of the ids inside.
    """
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name with a dollar sign is a name
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        # `figure.savefig` writes the same bytes, and draws twice.
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|<defs>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg role="img" viewBox="\1">', svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # nothing refers to a group
    # Paths in tenths of a point, on one line: half the page's size.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", " " + " ".join(path[0].split())), svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", svg)  # in `font:` or `font-family:`, by matplotlib's version
    for colour, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{colour})")
    return svg
