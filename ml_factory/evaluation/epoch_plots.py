"""Curves of values per epoch, of several trainings side by side."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ml_factory.evaluation.plot_style import INK, add_legend_row, new_styled_figure, set_axis_labels

COLOURS = ("neutral", "accent", "third")


def draw_epoch_curves(
    histories: Mapping[str, Sequence[Mapping]], values: Mapping[str, str], title: str = "Epoch by epoch"
) -> Figure:
    """Draw a panel for each value, and in it a curve for each training.

    histories : name of a training -> its epochs, each with "epoch" and the values.
    values : name of a value -> label of its axis.
    """
    figure, axes = new_styled_figure(title, 3.1, 1, len(values))
    for ax, (name, label) in zip(axes, values.items(), strict=True):
        for number, (training, epochs) in enumerate(histories.items()):
            ax.plot([one["epoch"] for one in epochs], [one[name] for one in epochs], label=training, linewidth=1.8,
                    color=INK[COLOURS[number % len(COLOURS)]], marker="o", markersize=4)  # fmt: skip
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5))
        set_axis_labels(ax, "epoch", label)
        if len(histories) > 1:
            add_legend_row(ax, len(histories))
    return figure
