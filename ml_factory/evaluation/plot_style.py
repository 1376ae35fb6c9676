"""Style of all plots: colours, axes, time, and conversion to SVG for a page.

A figure is drawn once, in the colours of a light page. `figure_to_svg` converts it to inline SVG whose colours are CSS
variables, so that one drawing serves a light and a dark page, a phone and a desktop.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import dates as mdates
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

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
BEHIND = {"facecolor": INK["card"], "edgecolor": "none", "alpha": 0.8, "pad": 1.0}  # background of text on lines


def new_styled_figure(
    title: str, height: float, rows: int = 1, columns: int = 1, **options
) -> tuple[Figure, list[Axes]]:
    """Return a figure `height` inches high, and its rows x columns panels in reading order; `options` go to
    `subplots`.
    """
    figure = Figure(
        figsize=(WIDTH if columns == 1 else PANELS_WIDTH, height), layout="constrained", facecolor=INK["card"]
    )
    figure.suptitle(title, x=0.008, ha="left", fontsize=LARGE, fontweight="bold", color=INK["ink"])
    figure.get_layout_engine().set(h_pad=0.06, hspace=0.04)
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for ax in axes:
        ax.set_facecolor("none")
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0, labelsize=NORMAL, labelcolor=INK["muted"], pad=5)
        ax.grid(True, axis="y", color=INK["grid"], linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def set_axis_labels(ax: Axes, x: str = "", y: str = "") -> None:
    """Set the labels of both axes."""
    ax.set_xlabel(x, fontsize=NORMAL, color=INK["muted"])
    ax.set_ylabel(y, fontsize=NORMAL, color=INK["muted"])


def add_legend_row(owner: Axes | Figure, columns: int, **options) -> None:
    """Add a legend in one row, by default between a panel and the figure's title."""
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2}
    look = {"frameon": False, "fontsize": NORMAL, "labelcolor": INK["muted"], "handlelength": 1.2}
    owner.legend(ncols=columns, columnspacing=1.2, handletextpad=0.5, **look, **(options or above))


def format_signed_tick(value: float, _=None) -> str:
    """Format a tick of an axis through 0: −0.02, 0, +0.02."""
    return "0" if abs(value) < 1e-12 else f"{value:+.10g}".replace("-", "−")


def set_price_ticks(ax: Axes, most: int) -> None:
    """Format the y axis as prices, with at most so many steps."""
    ax.yaxis.set_major_locator(MaxNLocator(most))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def set_horizontal_bar_rows(ax: Axes, names: Sequence[str]) -> None:
    """Set up a row per name from top to bottom, for horizontal bars, with vertical grid lines."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.grid(True, axis="x", color=INK["grid"], linewidth=0.8)


def to_matplotlib_dates(index) -> np.ndarray:
    """Convert moments to matplotlib's day numbers, UTC."""
    moments = pd.DatetimeIndex(index)
    moments = moments.tz_convert("UTC").tz_localize(None) if moments.tz is not None else moments
    return mdates.date2num(moments.to_numpy())


def set_time_axis(ax: Axes) -> None:
    locator = mdates.AutoDateLocator(minticks=3, maxticks=7)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))
    ax.xaxis.get_offset_text().set(fontsize=SMALL, color=INK["muted"])


def downsample_line(values: np.ndarray, most: int = POINTS) -> np.ndarray:
    """Return positions of at most `most` values that keep a line's shape: the lowest and highest of each bucket."""
    values = np.asarray(values, dtype=np.float64)
    if len(values) <= most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), most // 2 + 1).astype(np.int64)
    pairs = [(a + int(np.argmin(values[a:b])), a + int(np.argmax(values[a:b]))) for a, b in pairwise(edges)]
    return np.unique(np.concatenate([np.ravel(pairs), [0, len(values) - 1]]))


# ---- the form inside a page ------------------------------------------------------------------------------------


def figure_to_svg(figure: Figure, name: str) -> str:
    """Return the figure as an `<svg>` element for HTML, deterministically.

    name : unique among the figures of the page; ids inside begin with it.
    """
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name with a dollar sign is a name
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), _laid_out(figure):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _for_html(buffer.getvalue(), name)


@contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Lay the figure out now, without a layout engine inside the block: `savefig` would draw all of it once more for
    that.
    """
    engine, canvas = figure.get_layout_engine(), figure.canvas
    FigureCanvasSVG(figure)  # measures text as the page does
    for ax in figure.axes:
        ax.apply_aspect()
    engine.execute(figure)
    figure.set_layout_engine(None)
    try:
        yield
    finally:
        figure.set_layout_engine(engine)
        figure.set_canvas(canvas)


def _short_path(path: re.Match) -> str:
    """Round a path to tenths of a point, on one line."""
    numbers = re.sub(r"(\.\d)\d+", r"\1", " ".join(path[1].split()))
    return f' d="{numbers}"'


def _for_html(svg: str, name: str) -> str:
    """Strip what a stand-alone file needs, shorten numbers, prefix ids, and replace colours and font by CSS
    variables.
    """
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|<defs>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg role="img" viewBox="\1">', svg)
    svg = re.sub(r' d="([^"]*)"', _short_path, svg)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", svg)  # in `font:` or `font-family:`, by matplotlib's version
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"', "", svg)
    for colour, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{colour})")
    return svg
