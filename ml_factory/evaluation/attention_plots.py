"""Plots of a network's explanation: selected variables, and attention over the window."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ml_factory.evaluation.plot_style import (
    DASHED,
    INK,
    NORMAL,
    add_legend_row,
    new_styled_figure,
    set_axis_labels,
    set_horizontal_bar_rows,
)

SPREAD = "middle 80 % of rows"


def plot_variable_shares(shares: pd.DataFrame, top: int = 15, title: str = "What the network selects") -> Figure:
    """Plot the largest shares of variables, with the middle 80 % of the rows; dashed: equal shares.

    shares : index feature; share (mean over rows, 1 in sum), low and high (percentiles 10 and 90).
    """
    rows, even = shares.sort_values("share", ascending=False).head(top), 1 / len(shares)
    figure, (ax,) = new_styled_figure(title, 1.1 + 0.27 * len(rows))
    place = np.arange(len(rows))
    ax.barh(place, rows["share"], height=0.62, color=INK["accent"], alpha=0.45, linewidth=0, label="mean over rows")
    ax.hlines(place, rows["low"], rows["high"], color=INK["ink"], linewidth=1.4, label=SPREAD)
    ax.axvline(even, color=INK["muted"], linewidth=1.1, linestyle=DASHED, label="equal shares")
    set_horizontal_bar_rows(ax, [f"{name}  {share:.1%}" for name, share in rows["share"].items()])
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    set_axis_labels(ax, f"share of the selection\n{len(shares)} variables, {rows['share'].sum():.0%} of it shown")
    add_legend_row(figure, 2, loc="outside lower left")  # below: long names leave no space above on a phone
    return figure


def plot_attention(attention: pd.DataFrame, title: str = "Where in the window the network looks") -> Figure:
    """Plot mean attention of each step of the window, with the middle 80 % of the rows; dashed: equal attention.

    attention : index bars_back (0: the newest bar); attention (1 in sum), low and high.
    """
    figure, (ax,) = new_styled_figure(title, 2.9)
    x, even = -attention.index.to_numpy(), 1 / len(attention)
    ax.fill_between(x, attention["low"], attention["high"], color=INK["accent"], alpha=0.15, linewidth=0, label=SPREAD)
    ax.plot(x, attention["attention"], color=INK["accent"], linewidth=1.8, label="mean over rows")
    ax.axhline(even, color=INK["muted"], linewidth=1.1, linestyle=DASHED, label="equal attention")
    ax.set_ylim(bottom=0)
    ax.margins(x=0.01)
    ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.tick_params(labelsize=NORMAL)
    set_axis_labels(ax, "bars from the newest", "share of attention")
    add_legend_row(ax, 2)
    return figure
