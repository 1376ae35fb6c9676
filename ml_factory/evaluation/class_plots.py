"""Pictures of labelled rows and of predicted classes."""

from collections.abc import Mapping, Sequence

import numpy as np
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
    width = 0.8 / len(lengths)
    for number, (part, rows) in enumerate(lengths.items()):
        counts.bar([at + number * width for at in range(len(labels))], [len(rows.get(label, ())) for label in labels],
                   width, label=part, color=SERIES[number % len(SERIES)])  # fmt: skip
    counts.set_xticks([at + 0.4 - width / 2 for at in range(len(labels))], [label[:16] for label in labels])
    add_legend_row(counts, len(lengths))
    set_axis_labels(counts, "label", "rows")
    together = {label: [size for part in lengths.values() for size in part.get(label, ())] for label in labels}
    most = max(max(values, default=1) for values in together.values())
    edges = np.geomspace(1, most + 1, 31)
    for number, (label, values) in enumerate(together.items()):
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
    rows, columns = sorted(set(truth))[:SHOWN], sorted({*truth, *predicted})[:SHOWN]
    counts = np.array([[sum(a == row and b == column for a, b in zip(truth, predicted, strict=True))
                        for column in columns] for row in rows])  # fmt: skip
    matrix.imshow(counts / np.maximum(counts.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1.6)
    matrix.grid(False)
    matrix.set_xticks(range(len(columns)), [one[:12] for one in columns])
    matrix.set_yticks(range(len(rows)), [one[:12] for one in rows])
    for at, values in enumerate(counts):
        for column, value in enumerate(values):
            matrix.text(column, at, f"{value:,}", ha="center", va="center", fontsize=SMALL, color=INK["ink"])
    set_axis_labels(matrix, "predicted", "true")
    scores.barh(list(bars), list(bars.values()), color=[INK["accent"], *[INK["neutral"]] * (len(bars) - 1)])
    scores.invert_yaxis()
    for at, value in enumerate(bars.values()):
        scores.text(value, at, f" {value:.1%}", va="center", fontsize=SMALL, color=INK["ink"])
    scores.set_xlim(0, 1.25)
    set_axis_labels(scores, "accuracy")
    return figure
