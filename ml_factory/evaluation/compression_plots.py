"""Picture of a network's compressed variants: latency, quality and size."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from ml_factory.evaluation.plot_style import INK, SMALL, new_styled_figure, set_axis_labels


def draw_compression(rows: Sequence[Mapping[str, Any]], quality: str, title: str) -> Figure:
    """Draw each variant at its latency and quality, with the interval, and at its size and quality.

    rows : with method, p50_ms, bytes, quality, low, high and pareto, which is drawn filled.
    """
    figure, panels = new_styled_figure(title, 3.8, 1, 2, sharey=True)
    for ax, (name, scale, label) in zip(
        panels,
        (("p50_ms", 1, "median latency of one row (ms)"), ("bytes", 1e-6, "size (MB)")),
        strict=True,
    ):
        for row in rows:
            x, colour = row[name] * scale, INK["accent" if row["pareto"] else "muted"]
            # An interval's end that is not known is left out.
            ends = [max(value, 0.0) if value == value else 0.0
                    for value in (row["quality"] - row["low"], row["high"] - row["quality"])]  # fmt: skip
            ax.errorbar([x], [row["quality"]], [[ends[0]], [ends[1]]], fmt="o", color=colour, capsize=3,
                        markerfacecolor=colour if row["pareto"] else INK["card"])  # fmt: skip
            ax.annotate(row["method"], (x, row["quality"]), xytext=(6, 4), textcoords="offset points", fontsize=SMALL,
                        color=colour)  # fmt: skip
        ax.margins(x=0.25)
        set_axis_labels(ax, label, quality if name == "p50_ms" else "")
    return figure
