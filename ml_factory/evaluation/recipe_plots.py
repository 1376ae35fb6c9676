"""Plots of the recipes: labelled rows, predicted classes, epochs of several trainings, compressed networks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ml_factory.evaluation.plot_style import (
    INK,
    SERIES,
    SMALL,
    add_legend_row,
    new_styled_figure,
    set_axis_labels,
)

SHOWN = 12  # classes of a picture, at most


def draw_labelled_rows(lengths: Mapping[str, Mapping[str, Sequence[int]]], title: str, unit: str) -> Figure:
    """Draw how many rows each label has in each part, and how long its rows are.

    lengths : part -> label -> length of each row, in the unit.
    """
    figure, (counts, sizes) = new_styled_figure(title, 3.2, 1, 2)
    labels = sorted({label for part in lengths.values() for label in part})[:SHOWN]
    rows = pd.DataFrame({part: {label: len(of.get(label, ())) for label in labels} for part, of in lengths.items()})
    rows.rename(index=lambda label: label[:16]).plot.bar(ax=counts, color=SERIES, width=0.8, rot=0, legend=False)
    add_legend_row(counts, len(lengths))
    set_axis_labels(counts, "label", "rows")
    together = [[size for part in lengths.values() for size in part.get(label, ())] for label in labels]
    edges = np.geomspace(1, max(map(max, filter(None, together)), default=1) + 1, 31)
    for number, (label, values) in enumerate(zip(labels, together, strict=True)):
        sizes.hist(values, edges, histtype="step", linewidth=1.6, label=label[:16], color=SERIES[number % len(SERIES)])
    sizes.set_xscale("log")
    add_legend_row(sizes, min(len(labels), 4))
    set_axis_labels(sizes, unit, "rows")
    return figure


def draw_class_results(
    history: Sequence[Mapping], truth: Sequence[str], predicted: Sequence[str], bars: Mapping[str, float], title: str
) -> Figure:
    """Draw the losses of the epochs, the counts of true and predicted classes, and the accuracy next to others.

    bars : name -> accuracy.
    """
    figure, (losses, matrix, scores) = new_styled_figure(title, 3.4, 1, 3)
    for name, colour in (("train_loss", "neutral"), ("val_loss", "accent")):
        losses.plot([one["epoch"] for one in history], [one[name] for one in history], marker="o", markersize=4,
                    color=INK[colour], label=name.replace("_", " "))  # fmt: skip
    add_legend_row(losses, 2)
    set_axis_labels(losses, "epoch", "nats a row")
    counts = pd.crosstab(np.asarray(truth), np.asarray(predicted)).iloc[:SHOWN, :SHOWN]
    matrix.imshow(counts.div(counts.sum(axis=1).clip(lower=1), axis=0), cmap="Blues", vmin=0, vmax=1.6)
    matrix.grid(False)
    matrix.set_xticks(range(counts.shape[1]), [one[:12] for one in counts.columns])
    matrix.set_yticks(range(counts.shape[0]), [one[:12] for one in counts.index])
    for (row, column), value in np.ndenumerate(counts):
        matrix.text(column, row, f"{value:,}", ha="center", va="center", fontsize=SMALL, color=INK["ink"])
    set_axis_labels(matrix, "predicted", "true")
    drawn = scores.barh(list(bars), list(bars.values()), color=[INK["accent"], *[INK["neutral"]] * (len(bars) - 1)])
    scores.bar_label(drawn, [f" {value:.1%}" for value in bars.values()], fontsize=SMALL, color=INK["ink"])
    scores.invert_yaxis()
    scores.set_xlim(0, 1.25)
    set_axis_labels(scores, "accuracy")
    return figure


def draw_epoch_curves(
    histories: Mapping[str, Sequence[Mapping]], values: Mapping[str, str], title: str = "Epoch by epoch"
) -> Figure:
    """Draw a panel for each value, and in it a curve for each training.

    histories : name of a training -> its epochs, each with "epoch" and the values.
    values : name of a value -> label of its axis.
    """
    figure, axes = new_styled_figure(title, 3.1, 1, len(values))
    for ax, (name, label) in zip(axes, values.items(), strict=True):
        for (training, epochs), colour in zip(histories.items(), SERIES, strict=False):
            ax.plot([one["epoch"] for one in epochs], [one[name] for one in epochs], label=training, linewidth=1.8,
                    color=colour, marker="o", markersize=4)  # fmt: skip
        ax.xaxis.get_major_locator().set_params(integer=True)
        set_axis_labels(ax, "epoch", label)
        add_legend_row(ax, len(histories))
    return figure


def draw_compression(rows: Sequence[Mapping[str, Any]], quality: str, title: str) -> Figure:
    """Draw each variant at its latency and quality, with the interval, and at its size and quality.

    rows : with method, p50_ms, bytes, quality, low, high and pareto, which is drawn filled.
    """
    figure, panels = new_styled_figure(title, 3.8, 1, 2, sharey=True)
    values = (("p50_ms", 1, "median latency of one row (ms)"), ("bytes", 1e-6, "size (MB)"))
    for ax, (name, scale, label) in zip(panels, values, strict=True):
        for row in rows:
            x, colour = row[name] * scale, INK["accent" if row["pareto"] else "muted"]
            # An interval's end that is not known is left out.
            ends = np.nan_to_num([[row["quality"] - row["low"]], [row["high"] - row["quality"]]]).clip(min=0)
            ax.errorbar([x], [row["quality"]], ends, fmt="o", color=colour, capsize=3,
                        markerfacecolor=colour if row["pareto"] else INK["card"])  # fmt: skip
            ax.annotate(row["method"], (x, row["quality"]), xytext=(6, 4), textcoords="offset points", fontsize=SMALL,
                        color=colour)  # fmt: skip
        ax.margins(x=0.25)
        set_axis_labels(ax, label, quality if name == "p50_ms" else "")
    return figure
