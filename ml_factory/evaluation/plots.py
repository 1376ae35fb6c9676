"""Plots of trainings and evaluations: each function takes plain data and returns a matplotlib Figure.

No pyplot and no global state: a figure is freed with its last reference. `plot_style.figure_to_svg` converts it for a
page.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, PercentFormatter

from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.metrics import CLASS_NAMES, CLASSES, PROBABILITIES
from ml_factory.evaluation.plot_style import (
    BEHIND,
    DASHED,
    INK,
    LABEL_INK,
    NORMAL,
    SERIES,
    SMALL,
    add_legend_row,
    format_signed_tick,
    new_styled_figure,
    set_axis_labels,
    set_horizontal_bar_rows,
    set_price_ticks,
    set_time_axis,
    to_matplotlib_dates,
)

REFERENCES = (*BASELINES, "equal_pool")  # reference forecasts; the last one for stacks


# ---- training --------------------------------------------------------------------------------------------------


def plot_learning_curves(
    history: pd.DataFrame, best_epoch: int | None = None, prior: float | None = None, resumed_from: int | None = None,
    title: str = "Learning curves",
) -> Figure:  # fmt: skip
    """Plot training and validation loss per epoch or booster block; columns epoch, train_loss, val_loss.

    prior : weighted loss of the class prior on validation rows; a curve that stays above it has learnt nothing.
    """
    figure, (ax,) = new_styled_figure(title, 3.1)
    epoch = history["epoch"].to_numpy(dtype=np.float64)
    style = {"linewidth": 1.8, "marker": "o" if len(epoch) < 3 else None, "markersize": 4}
    ax.plot(epoch, history["train_loss"], color=INK["neutral"], label="train", **style)
    if history["val_loss"].notna().any():
        ax.plot(epoch, history["val_loss"], color=INK["accent"], label="validation", **style)
    if prior is not None:  # named in the legend: the best loss may be annotated at the line
        ax.axhline(prior, color=INK["muted"], linewidth=1.1, linestyle=DASHED, label=f"class prior {prior:.4f}")
    if best_epoch is not None and (history["epoch"] == best_epoch).any():
        best = float(history.loc[history["epoch"] == best_epoch, "val_loss"].iloc[0])
        ax.plot([best_epoch], [best], "o", color=INK["accent"], markeredgecolor=INK["card"], markersize=8, zorder=5)
        # Below: it is the lowest point of its curve.
        ax.annotate(f"best {best:.4f}", (best_epoch, best), xytext=(0, -8), textcoords="offset points", ha="center",
                    va="top", fontsize=SMALL, color=INK["accent"], zorder=6, bbox=BEHIND)  # fmt: skip
    if resumed_from is not None:
        ax.axvline(resumed_from, color=INK["third"], linewidth=1.1, linestyle=(0, (1, 2)))
        ax.annotate("resumed", (resumed_from, 0), xycoords=("data", "axes fraction"), xytext=(4, 4), fontsize=SMALL,
                    textcoords="offset points", color=INK["third"])  # fmt: skip
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.margins(y=0.14)
    set_axis_labels(ax, "epoch or booster block", "weighted log loss (nats)")
    add_legend_row(ax, 3)
    return figure


def plot_fold_scores(folds: pd.DataFrame, paths: pd.DataFrame | None = None) -> Figure:
    """Plot the gain in log loss of each fold with its 95 % interval, and their mean; positive beats the prior.

    folds : a row per fold (and `name`, where several forecasts are compared): fold, log_loss_gain, gain_se.
    paths : the same per path, plotted instead; they share rows and folds, so their spread is no standard error.
    """
    unit = "fold" if paths is None else "path"
    folds = folds if paths is None else paths.rename(columns={"path": "fold"})
    title = f"Gain over the class prior, {unit} by {unit}"
    figure, (ax,) = new_styled_figure(title, 3.1)
    names = list(dict.fromkeys(folds["name"])) if "name" in folds.columns else [""]
    ax.axhline(0, color=INK["muted"], linewidth=1.1)
    for number, name in enumerate(names):
        rows = folds[folds["name"] == name] if "name" in folds.columns else folds
        colour = _baseline_color(name) if name in REFERENCES else SERIES[number % len(SERIES)]
        gain, error = (rows[key].to_numpy(dtype=np.float64) for key in ("log_loss_gain", "gain_se"))
        label = name if name in REFERENCES else f"{name} mean {gain.mean():+.4f}".strip().replace("-", "−")
        x = rows["fold"].to_numpy(dtype=np.float64) + 0.16 * (number - (len(names) - 1) / 2)
        ax.errorbar(x, gain, 1.96 * np.nan_to_num(error), fmt="D" if name in REFERENCES else "o", color=colour,
                    markersize=5 if name in REFERENCES else 6, elinewidth=1.6,
                    markeredgecolor=INK["card"], label=label or None)  # fmt: skip
        if name not in REFERENCES:
            ax.axhline(gain.mean(), color=colour, linewidth=1.1, linestyle=DASHED, alpha=0.8)
    ax.set_xticks(sorted(folds["fold"].unique()))
    ax.margins(x=0.08, y=0.12)
    ax.yaxis.set_major_formatter(FuncFormatter(format_signed_tick))
    set_axis_labels(ax, "fold (in time order)" if paths is None else unit, "nats per row")
    add_legend_row(ax, len(names))
    return figure


# ---- verdicts --------------------------------------------------------------------------------------------------


def plot_metrics(table: pd.DataFrame, title: str = "") -> Figure:
    """Plot the gain of each forecast over the best baseline with its 95 % interval (`compute_forecast_metrics`); right
    of 0 is better.

    Models are circles; each baseline is a diamond in a colour of its own.
    """
    reference = str(table["best_baseline"].iloc[0])
    rows = table[[str(name) != reference for name in table.index]]
    figure, (ax,) = new_styled_figure(
        title or f"Gain over the best baseline ({reference})", 1.15 + 0.52 * max(1, len(rows))
    )
    gain, low, high = (rows[key].to_numpy(float) for key in ("gain_best", "gain_best_low", "gain_best_high"))
    ax.axvline(0, color=_baseline_color(reference), linewidth=1.4)
    names = [" · ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in rows.index]
    for place, (name, value) in enumerate(zip(names, gain, strict=True)):
        mark = {"marker": "D", "s": 40} if name in REFERENCES else {"marker": "o", "s": 60}
        colour = _baseline_color(name) if name in REFERENCES else INK["accent"]
        if np.isfinite([low[place], high[place]]).all():
            ax.hlines(place, low[place], high[place], colors=colour, linewidth=3, alpha=0.45)
        ax.scatter(value, place, color=colour, edgecolors=INK["card"], zorder=3, **mark)
    set_horizontal_bar_rows(
        ax, [f"{name}\n{value:+.4f}".replace("-", "−") for name, value in zip(names, gain, strict=True)]
    )
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(format_signed_tick))
    set_axis_labels(ax, f"nats per row; 0 is {reference}. Bars: 95 %")
    return figure


def _baseline_color(name: str) -> str:
    """Return the colour of a baseline, the same in every figure."""
    return INK.get(name, INK["neutral"])


def plot_calibration(
    table: pd.DataFrame, title: str = "Predicted and observed", classes: Mapping[str, int] | None = None
) -> Figure:
    """Plot the reliability diagram of each class: on the diagonal predicted equals observed. `reliability_table(…)`.

    classes : names of the labels, where they are not short, neutral and long.
    """
    classes = classes or dict(zip(CLASS_NAMES, CLASSES, strict=True))
    figure, (ax,) = new_styled_figure(title, 3.6)
    points = table[["probability", "frequency"]].to_numpy()
    low, high = (float(points.min()), float(points.max())) if len(points) else (0.0, 1.0)
    pad = max(0.02, 0.1 * (high - low))
    limits = max(0.0, low - pad), min(1.0, high + pad)
    ax.plot(limits, limits, color=INK["muted"], linewidth=1.1, linestyle=DASHED)
    for name, label in classes.items():
        part, colour = table[table["class"] == label], INK[LABEL_INK.get(name, name)]
        _, _, bars = ax.errorbar(
            part["probability"], part["frequency"], 1.96 * part["error"], fmt="o-", label=name, color=colour,
            markersize=4.5, linewidth=1.4, elinewidth=1.2, markeredgecolor=INK["card"],
        )  # fmt: skip
        for bar in bars:
            bar.set_alpha(0.4)
    ax.set(xlim=limits, ylim=limits)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(4))
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    set_axis_labels(ax, "predicted", "observed")
    add_legend_row(ax, len(classes))
    return figure


def plot_equity(curves: pd.DataFrame, model: str, title: str = "Equity after costs, and drawdown") -> Figure:
    """Plot the equity of a model next to always long, the clock and its shifted forecasts, and its drawdown below.

    curves : as of `workflows.backtest.BacktestResult`.
    """
    figure, (top, bottom) = new_styled_figure(title, 4.2, 2, 1, sharex=True, height_ratios=(3, 1))
    x = to_matplotlib_dates(curves.index)
    top.fill_between(x, curves["shifted_low"], curves["shifted_high"], color=INK["neutral"], alpha=0.25, linewidth=0)
    colours = {"always_long": INK["fourth"], "clock": INK["clock"], "shifted": INK["muted"], model: INK["accent"]}
    names = {"always_long": "always long", "shifted": "shifted in time"}
    for name, colour in colours.items():
        top.plot(x, curves[name], color=colour, linewidth=2.0 if name == model else 1.2, label=names.get(name, name))
    top.axhline(0, color=INK["muted"], linewidth=0.8)
    fall = curves[model] - np.maximum.accumulate(np.maximum(curves[model].to_numpy(), 0.0))
    bottom.fill_between(x, fall, 0, color=INK["short"], alpha=0.6, linewidth=0)
    for ax, steps in ((top, 5), (bottom, 2)):
        set_price_ticks(ax, steps)
    set_time_axis(bottom)
    set_axis_labels(top, "", "currency")
    add_legend_row(top, 2)
    return figure


def plot_months(months: pd.DataFrame, title: str = "Gain by month") -> Figure:
    """Plot the gain in nats per row of each month; index month, columns rows and gain (sum)."""
    figure, (ax,) = new_styled_figure(title, 2.9)
    gain, place = (months["gain"] / months["rows"]).to_numpy(dtype=np.float64), np.arange(len(months))
    ax.axhline(0, color=INK["muted"], linewidth=1.1)
    ax.bar(place, gain, width=0.7, color=[INK["long"] if value >= 0 else INK["short"] for value in gain], alpha=0.75)
    shown = place[:: -(-len(place) // 7)] if len(place) else place
    ax.set_xticks(shown, [str(months.index[at]) for at in shown])
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(format_signed_tick))
    set_axis_labels(ax, "", "nats per row")
    return figure


def plot_barrier_grid(grid: pd.DataFrame, title: str = "Grid of the barrier search") -> Figure:
    """Plot the value of the labels over the distance of their barriers; hollow: the class balance is violated.

    grid : a row per point with k, value and kept (bool).
    """
    figure, (ax,) = new_styled_figure(title, 3.0)
    k, value = grid["k"].to_numpy(), grid["value"].to_numpy(dtype=np.float64)
    for kept, name in ((True, "keeps the balance"), (False, "breaks the balance")):
        at = grid["kept"].to_numpy() == kept
        face = INK["accent"] if kept else "none"
        ax.scatter(k[at], value[at], s=26, facecolors=face, edgecolors=INK["accent"], label=name)
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK["muted"])
    set_axis_labels(ax, "barrier, in sigma * sqrt(horizon)", "bits a training row")
    return figure


def plot_stack_weights(weights: pd.DataFrame, title: str = "Weights of the stack") -> Figure:
    """Plot `Stack.weights()` as bars: 0 ignores a model, 1 takes it unchanged."""
    figure, (ax,) = new_styled_figure(title, 1.0 + 0.42 * len(weights))
    values, place = weights["weight"].to_numpy(dtype=np.float64), np.arange(len(weights))
    ax.barh(place, values, height=0.6, color=INK["accent"])
    for row, value in enumerate(values):
        ax.annotate(f"{value:.2f}", (value, row), xytext=(5, 0), textcoords="offset points", va="center",
                    fontsize=NORMAL, color=INK["ink"])  # fmt: skip
    ax.set_yticks(place, [str(name) for name in weights.index])
    ax.set_ylim(len(weights) - 0.4, -0.6)
    ax.set_xlim(0, max(1.0, values.max()) * 1.12)
    ax.grid(False)
    return figure


def plot_importances(table: pd.DataFrame, title: str = "Feature importances") -> Figure:
    """Plot `feature_importance_table`, largest first: log loss added by permutation, with two standard deviations.

    The share of gain follows each name.
    """
    table = table.sort_values("permuted", ascending=False, kind="stable")
    figure, (ax,) = new_styled_figure(title, 1.1 + 0.27 * len(table))
    place, (rise, spread) = np.arange(len(table)), (table[key].to_numpy(dtype=float) for key in ("permuted", "spread"))
    ax.axvline(0, color=INK["muted"], linewidth=1.1)
    ax.barh(place, rise, height=0.62, color=INK["accent"])
    ax.hlines(place, rise - 2 * spread, rise + 2 * spread, color=INK["muted"], linewidth=1.4)
    set_horizontal_bar_rows(ax, [f"{name}  {gain:.0%}" for name, gain in table["gain"].items()])
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(format_signed_tick))
    set_axis_labels(ax, "log loss added when permuted, nats per row\n(behind the names: share of gain)")
    return figure


def plot_deciles(table: pd.DataFrame, title: str = "Realised return by decile of the forecast") -> Figure:
    """Plot the mean log return of each decile of p_long - p_short with its 95 % interval, in basis points.

    table : as of `deciles.DecileReturns`.
    """
    figure, (ax,) = new_styled_figure(title, 2.9)
    place, ret = table.index.to_numpy(), table["ret_bp"].to_numpy(dtype=np.float64)
    colours = [INK["long"] if value >= 0 else INK["short"] for value in ret]
    ax.axhline(0, color=INK["muted"], linewidth=1.1)
    ax.bar(place, ret, width=0.7, color=colours, alpha=0.75)
    ax.vlines(place, table["low_bp"], table["high_bp"], color=INK["ink"], linewidth=1.4)
    ax.set_xticks(place)
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(format_signed_tick))
    set_axis_labels(ax, "decile of p_long − p_short, lowest to highest", "basis points")
    return figure


def plot_probabilities(
    predictions: pd.DataFrame, close: pd.Series, last: int = 600, title: str = "Probabilities under the price"
) -> Figure:
    """Plot the last rows: price above, stacked class probabilities below. Rows are evenly spaced.

    predictions : index known_at; p_short, p_neutral, p_long; of meta-labels also the `side` of the bet, and then two
        classes.
    close : index known_at, at least the same rows.
    """
    part = predictions.iloc[-last:]
    price = close.reindex(part.index).to_numpy(dtype=np.float64)
    answers = (
        {"pass": "p_neutral", "act": "p_long"} if "side" in part else dict(zip(CLASS_NAMES, PROBABILITIES, strict=True))
    )
    p_NC = part[list(answers.values())].to_numpy(dtype=np.float64)
    colours = [INK[LABEL_INK.get(name, name)] for name in answers]
    figure, (top, bottom) = new_styled_figure(title, 4.2, 2, 1, sharex=True, height_ratios=(3, 2))
    x = np.arange(len(part))
    top.plot(x, price, color=INK["ink"], linewidth=1.1)
    set_price_ticks(top, 4)
    bottom.stackplot(x, p_NC.T, colors=colours, labels=list(answers), linewidth=0)
    bottom.set_ylim(0, 1)
    bottom.yaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
    bottom.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ticks = np.unique(np.linspace(0, len(part) - 1, 7).astype(np.int64))[1:-1:2] if len(part) > 6 else x
    bottom.set_xticks(ticks, [part.index[i].strftime("%d %b %Y\n%H:%M") for i in ticks])
    bottom.margins(x=0)
    handles, names = bottom.get_legend_handles_labels()
    add_legend_row(top, len(names), handles=handles, labels=names, loc="lower left", bbox_to_anchor=(0, 1.0))
    return figure
