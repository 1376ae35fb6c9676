"""Plots of trainings and evaluations: each function takes plain data and returns a matplotlib Figure.

No pyplot and no global state: a figure is freed with its last reference. `plot_style.figure_to_svg` converts it for a
page.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.metrics import CLASS_NAMES, PROBABILITIES
from ml_factory.evaluation.plot_style import (
    BEHIND,
    DASHED,
    INK,
    LABEL_INK,
    SERIES,
    SIGNED,
    SMALL,
    add_legend_row,
    new_styled_figure,
    set_axis_labels,
    set_horizontal_bar_rows,
    set_time_axis,
    to_matplotlib_dates,
)
from ml_factory.models.rows import CLASSES

REFERENCES = (*BASELINES, "equal_pool")  # reference forecasts; the last one for stacks
SPREAD = "middle 80 % of rows"
SHOWN = 15  # variables of a network
LAST = 600  # predictions


# ---- training --------------------------------------------------------------------------------------------------


def plot_learning_curves(
    history: pd.DataFrame, best_epoch: int | None = None, prior: float | None = None, resumed_from: int | None = None
) -> Figure:
    """Plot training and validation loss per epoch or booster block; columns epoch, train_loss, val_loss.

    prior : weighted loss of the class prior on validation rows; a curve that stays above it has learnt nothing.
    """
    figure, (ax,) = new_styled_figure("Learning curves", 3.1)
    style = {"linewidth": 1.8, "marker": "o" if len(history) < 3 else None, "markersize": 4}
    ax.plot(history["epoch"], history["train_loss"], color=INK["neutral"], label="train", **style)
    if history["val_loss"].notna().any():
        ax.plot(history["epoch"], history["val_loss"], color=INK["accent"], label="validation", **style)
    if prior is not None:  # named in the legend: the best loss may be annotated at the line
        ax.axhline(prior, color=INK["muted"], linewidth=1.1, linestyle=DASHED, label=f"class prior {prior:.4f}")
    for best in history.loc[history["epoch"] == best_epoch, "val_loss"].dropna():
        ax.plot([best_epoch], [best], "o", color=INK["accent"], markeredgecolor=INK["card"], markersize=8, zorder=5)
        # Below: it is the lowest point of its curve.
        ax.annotate(f"best {best:.4f}", (best_epoch, best), xytext=(0, -8), textcoords="offset points", ha="center",
                    va="top", fontsize=SMALL, color=INK["accent"], zorder=6, bbox=BEHIND)  # fmt: skip
    if resumed_from is not None:
        ax.axvline(resumed_from, color=INK["third"], linewidth=1.1, linestyle=":", label="resumed")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.margins(y=0.14)
    set_axis_labels(ax, "epoch or booster block", "weighted log loss (nats)")
    add_legend_row(ax, 2)
    return figure


def plot_fold_scores(folds: pd.DataFrame, paths: pd.DataFrame | None = None) -> Figure:
    """Plot the gain in log loss of each fold with its 95 % interval, and their mean; positive beats the prior.

    folds : a row per fold and forecast: fold, name, log_loss_gain, gain_se.
    paths : the same per path, plotted instead; they share rows and folds, so their spread is no standard error.
    """
    unit = "fold" if paths is None else "path"
    folds = folds if paths is None else paths.rename(columns={"path": "fold"})
    figure, (ax,) = new_styled_figure(f"Gain over the class prior, {unit} by {unit}", 3.1)
    ax.axhline(0, color=INK["muted"], linewidth=1.1)
    groups = list(folds.groupby("name", sort=False))
    for number, (name, rows) in enumerate(groups):
        colour = _reference_color(name, SERIES[number % len(SERIES)])
        mean = rows["log_loss_gain"].mean()
        shift = 0.16 * (number - (len(groups) - 1) / 2)
        ax.errorbar(rows["fold"] + shift, rows["log_loss_gain"], 1.96 * rows["gain_se"].fillna(0), fmt=_marker(name),
                    color=colour, markersize=6, elinewidth=1.6, markeredgecolor=INK["card"],
                    label=name if name in REFERENCES else f"{name} mean {mean:+.4f}")  # fmt: skip
        if name not in REFERENCES:
            ax.axhline(mean, color=colour, linewidth=1.1, linestyle=DASHED, alpha=0.8)
    ax.set_xticks(sorted(folds["fold"].unique()))
    ax.yaxis.set_major_formatter(SIGNED)
    set_axis_labels(ax, "fold (in time order)" if paths is None else unit, "nats per row")
    add_legend_row(ax, min(len(groups), 3))
    return figure


# ---- verdicts --------------------------------------------------------------------------------------------------


def plot_metrics(table: pd.DataFrame) -> Figure:
    """Plot the gain of each forecast over the best baseline with its 95 % interval (`compute_forecast_metrics`); right
    of 0 is better.

    Models are circles; each baseline is a diamond in a colour of its own.
    """
    reference = str(table["best_baseline"].iloc[0])
    rows = table[table.index.map(str) != reference]
    figure, (ax,) = new_styled_figure(f"Gain over the best baseline ({reference})", 1.2 + 0.52 * len(rows))
    ax.axvline(0, color=_reference_color(reference), linewidth=1.4)
    for place, (name, row) in enumerate(rows.iterrows()):
        colour = _reference_color(name, INK["accent"])
        ax.hlines(place, row["gain_best_low"], row["gain_best_high"], colors=colour, linewidth=3, alpha=0.45)
        ax.plot(row["gain_best"], place, _marker(name), color=colour, markeredgecolor=INK["card"], markersize=7.5)
    set_horizontal_bar_rows(ax, [f"{name}\n{gain:+.4f}".replace("-", "−") for name, gain in rows["gain_best"].items()])
    ax.xaxis.get_major_locator().set_params(nbins=5)
    ax.xaxis.set_major_formatter(SIGNED)
    set_axis_labels(ax, f"nats per row; 0 is {reference}. Bars: 95 %")
    return figure


def _reference_color(name: str, other: str = INK["neutral"]) -> str:
    """Return the colour of a reference forecast, the same in every figure; `other` for a model."""
    return INK[name] if name in REFERENCES else other


def _marker(name: str) -> str:
    return "D" if name in REFERENCES else "o"


def plot_calibration(table: pd.DataFrame, classes: Mapping[str, int] | None = None) -> Figure:
    """Plot the reliability diagram of each class: on the diagonal predicted equals observed. `reliability_table(…)`.

    classes : names of the labels, where they are not short, neutral and long.
    """
    classes = classes or dict(zip(CLASS_NAMES, CLASSES, strict=True))
    figure, (ax,) = new_styled_figure("Predicted and observed", 3.6)
    ax.axline((0.5, 0.5), slope=1, color=INK["muted"], linewidth=1.1, linestyle=DASHED)
    for name, label in classes.items():
        part = table[table["class"] == label]
        ax.errorbar(part["probability"], part["frequency"], 1.96 * part["error"], fmt="o-", label=name, markersize=4.5,
                    color=INK[LABEL_INK.get(name, name)], linewidth=1.4, elinewidth=0.6)  # fmt: skip
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_ylim(bottom=0)
    set_axis_labels(ax, "predicted", "observed")
    add_legend_row(ax, len(classes))
    return figure


def plot_equity(curves: pd.DataFrame, model: str) -> Figure:
    """Plot the equity of a model next to always long, the clock and its shifted forecasts, and its drawdown below.

    curves : of the result of `workflows.backtest.backtest`.
    """
    figure, (top, bottom) = new_styled_figure(
        "Equity after costs, and drawdown", 4.2, 2, 1, sharex=True, height_ratios=(3, 1)
    )
    x = to_matplotlib_dates(curves.index)
    top.fill_between(x, curves["shifted_low"], curves["shifted_high"], color=INK["neutral"], alpha=0.25, linewidth=0)
    colours = {"always_long": INK["fourth"], "clock": INK["clock"], "shifted": INK["muted"], model: INK["accent"]}
    names = {"always_long": "always long", "shifted": "shifted in time"}
    for name, colour in colours.items():
        top.plot(x, curves[name], color=colour, linewidth=2.0 if name == model else 1.2, label=names.get(name, name))
    top.axhline(0, color=INK["muted"], linewidth=0.8)
    bottom.fill_between(x, curves["drawdown"], 0, color=INK["short"], alpha=0.6, linewidth=0)
    for ax, steps in ((top, 5), (bottom, 2)):
        ax.yaxis.get_major_locator().set_params(nbins=steps)
        ax.yaxis.set_major_formatter("{x:,.10g}")
    set_time_axis(bottom)
    set_axis_labels(top, "", "currency")
    set_axis_labels(bottom, "", "drawdown")
    add_legend_row(top, 2)
    return figure


def plot_months(months: pd.DataFrame) -> Figure:
    """Plot the gain in nats per row of each month; index month, columns rows and gain (sum)."""
    gain = months["gain"] / months["rows"]
    figure, ax = _signed_bars("Gain by month", np.arange(len(gain)), gain)
    shown = range(0, len(gain), -(-len(gain) // 7) or 1)
    ax.set_xticks(shown, [f"{months.index[at]}\n{months['rows'].iloc[at]:,} rows" for at in shown])
    set_axis_labels(ax, "", "nats per row")
    return figure


def plot_deciles(table: pd.DataFrame) -> Figure:
    """Plot the mean log return of each decile of p_long - p_short with its 95 % interval, in basis points.

    table : as of `metrics.decile_returns`.
    """
    figure, ax = _signed_bars("Realised return by decile of the forecast", table.index, table["ret_bp"])
    ax.vlines(table.index, table["low_bp"], table["high_bp"], color=INK["ink"], linewidth=1.4)
    ax.set_xticks(table.index)
    set_axis_labels(ax, "decile of p_long − p_short, lowest to highest", "basis points")
    return figure


def _signed_bars(title: str, places: Sequence[int], values: pd.Series) -> tuple[Figure, Axes]:
    """Return a figure of bars from 0, in the colour of the side that each value speaks for."""
    figure, (ax,) = new_styled_figure(title, 2.9)
    ax.axhline(0, color=INK["muted"], linewidth=1.1)
    ax.bar(places, values, width=0.7, color=np.where(values >= 0, INK["long"], INK["short"]), alpha=0.75)
    ax.yaxis.set_major_formatter(SIGNED)
    return figure, ax


# ---- features and networks ---------------------------------------------------------------------------------------


def _bars(
    title: str, names: Sequence[str], values: pd.Series, label: str = "", ends: tuple | None = None,
    equal: float | None = None,
) -> Figure:  # fmt: skip
    """Return a figure of bars from top to bottom; ends : of lines on them; equal : a dashed line there."""
    figure, (ax,) = new_styled_figure(title, 1.1 + 0.27 * len(values))
    place = np.arange(len(values))
    ax.axvline(0, color=INK["muted"], linewidth=1.1)
    ax.barh(place, values, height=0.62, color=INK["accent"], alpha=0.6, linewidth=0)
    if ends is not None:
        ax.hlines(place, *ends, color=INK["ink"], linewidth=1.4)
    if equal is not None:
        ax.axvline(equal, color=INK["muted"], linewidth=1.1, linestyle=DASHED)
    set_horizontal_bar_rows(ax, list(names))
    ax.xaxis.get_major_locator().set_params(nbins=4)
    set_axis_labels(ax, label)
    return figure


def plot_stack_weights(weights: pd.DataFrame) -> Figure:
    """Plot `Stack.weights()` as bars; 0 ignores a model."""
    names = [f"{name}  {weight:.2f}" for name, weight in weights["weight"].items()]
    return _bars("Weights of the stack", names, weights["weight"])


def plot_importances(table: pd.DataFrame) -> Figure:
    """Plot `feature_importance_table`, largest first: log loss added by permutation, with two standard deviations.

    The share of gain follows each name.
    """
    table = table.sort_values("permuted", ascending=False, kind="stable")
    names, value = [f"{name}  {gain:.0%}" for name, gain in table["gain"].items()], table["permuted"]
    label = "log loss added when permuted, nats per row\n(behind the names: share of gain)"
    ends = value - 2 * table["spread"], value + 2 * table["spread"]
    return _bars("Feature importances", names, value, label, ends)


def plot_variable_shares(shares: pd.DataFrame) -> Figure:
    """Plot the largest shares of variables, with the middle 80 % of the rows; dashed: equal shares.

    shares : index feature; share (mean over rows, 1 in sum), low and high (percentiles 10 and 90).
    """
    rows = shares.sort_values("share", ascending=False).head(SHOWN)
    names = [f"{name}  {share:.1%}" for name, share in rows["share"].items()]
    label = f"share of the selection, mean and {SPREAD}\n{len(shares)} variables, {rows['share'].sum():.0%} of it shown"
    return _bars("What the network selects", names, rows["share"], label, (rows["low"], rows["high"]), 1 / len(shares))


def plot_attention(attention: pd.DataFrame) -> Figure:
    """Plot mean attention of each step of the window, with the middle 80 % of the rows; dashed: equal attention.

    attention : index bars_back (0: the newest bar); attention (1 in sum), low and high.
    """
    figure, (ax,) = new_styled_figure("Where in the window the network looks", 2.9)
    x = -attention.index.to_numpy()
    ax.fill_between(x, attention["low"], attention["high"], color=INK["accent"], alpha=0.15, linewidth=0, label=SPREAD)
    ax.plot(x, attention["attention"], color=INK["accent"], linewidth=1.8, label="mean over rows")
    ax.axhline(1 / len(x), color=INK["muted"], linewidth=1.1, linestyle=DASHED, label="equal attention")
    ax.set_ylim(bottom=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    set_axis_labels(ax, "bars from the newest", "share of attention")
    add_legend_row(ax, 2)
    return figure


# ---- predictions -------------------------------------------------------------------------------------------------


def plot_probabilities(predictions: pd.DataFrame, close: pd.Series) -> Figure:
    """Plot the last rows: price above, stacked class probabilities below. Rows are evenly spaced.

    predictions : index known_at; p_short, p_neutral, p_long; of meta-labels also the `side` of the bet, and then two
        classes.
    close : index known_at, at least the same rows.
    """
    part, answers = predictions.iloc[-LAST:], dict(zip(CLASS_NAMES, PROBABILITIES, strict=True))
    if "side" in part:
        answers = {"pass": "p_neutral", "act": "p_long"}
    figure, (top, bottom) = new_styled_figure(
        "Probabilities under the price", 4.2, 2, 1, sharex=True, height_ratios=(3, 2)
    )
    x = np.arange(len(part))
    top.plot(x, close.reindex(part.index), color=INK["ink"], linewidth=1.1)
    top.yaxis.set_major_formatter("{x:,.10g}")
    colours = [INK[LABEL_INK.get(name, name)] for name in answers]
    bottom.stackplot(x, part[list(answers.values())].T, colors=colours, labels=list(answers), linewidth=0)
    bottom.set(ylim=(0, 1), xmargin=0)
    bottom.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ticks = x[len(x) // 6 :: max(len(x) // 3, 1)]
    bottom.set_xticks(ticks, [part.index[i].strftime("%d %b %Y\n%H:%M") for i in ticks])
    add_legend_row(top, len(answers), handles=bottom.get_legend_handles_labels()[0])
    return figure
