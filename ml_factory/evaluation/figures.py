"""Pictures of verdicts: each function takes plain data and returns a matplotlib Figure of its own.

No pyplot and no global state: a figure is garbage when nobody holds it. `drawing.to_svg` and `drawing.to_png` give
its form for a page or a notebook.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, PercentFormatter

from ml_factory.data.resample import Frame
from ml_factory.evaluation.drawing import (
    INK,
    NORMAL,
    SERIES,
    SMALL,
    axis_labels,
    broken_line,
    day_numbers,
    name_lines,
    new_figure,
    outline,
    signed,
    time_axis,
)
from ml_factory.evaluation.metrics import CLASS_NAMES, CLASSES, PROBABILITIES

BASELINES = ("prior", "last_move", "equal_pool")  # the last one beside a stack
_LABEL_INK = {"pass": "neutral", "act": "long", "ambiguous": "fourth"}
FEW_CUTS = 12  # of these each is named
_SPANS = {1: "1 min", 10: "10 min", 60: "1 h", 360: "6 h", 1440: "1 day", 10_080: "1 week", 100_800: "10 weeks"}


# ---- data ------------------------------------------------------------------------------------------------------


def split_on_price(
    close: pd.Series, splits: Mapping[str, Sequence], title: str = "The split, drawn on the price"
) -> Figure:
    """Price over time with each part of the split in its colour; rows in no part (purged, embargoed) stay grey.

    Parameters
    ----------
    close : index known_at.  splits : part ("train", "validation", "test" or others) → known_at of its rows.
    """
    figure, (ax,) = new_figure(title, 3.3)
    x, y = day_numbers(close.index), close.to_numpy(dtype=np.float64)
    silence = max(5.0, 0.02 * (x[-1] - x[0]))
    keep = outline(y)
    ax.plot(*broken_line(x[keep], y[keep], silence), color=INK["neutral"], linewidth=0.9)
    for number, (name, moments) in enumerate(splits.items()):
        colour = INK.get(name, SERIES[number % len(SERIES)])
        places = np.unique(np.searchsorted(x, day_numbers(moments)).clip(0, len(x) - 1))
        runs = np.split(places, np.flatnonzero(np.diff(places) > max(50, len(x) // 100)) + 1) if len(places) else []
        for run in runs:
            ax.axvspan(x[run[0]], x[run[-1]], color=colour, alpha=0.09, linewidth=0)
            inside = keep[(keep >= run[0]) & (keep <= run[-1])]
            ax.plot(*broken_line(x[inside], y[inside], silence), color=colour, linewidth=1.1)
        if runs:
            longest = max(runs, key=len)
            middle = (x[longest[0]] + x[longest[-1]]) / 2
            ax.annotate(
                f"{name}\n{len(places):,}", (middle, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 2),
                textcoords="offset points", ha="center", va="bottom", fontsize=SMALL, color=colour, linespacing=1.25,
            )  # fmt: skip
    ax.margins(x=0.01)
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    time_axis(ax)
    return figure


def cuts_on_price(
    close: pd.Series, cuts: Sequence[tuple[pd.Timestamp, str]], title: str = "Where the proof cut"
) -> Figure:
    """Price over time with a mark at each moment after which the future was disturbed; cuts : (moment, kind)."""
    figure, (ax,) = new_figure(title, 3.3)
    x, y = day_numbers(close.index), close.to_numpy(dtype=np.float64)
    keep = outline(y)
    ax.plot(*broken_line(x[keep], y[keep], max(5.0, 0.02 * (x[-1] - x[0]))), color=INK["neutral"], linewidth=0.9)
    at = day_numbers(pd.DatetimeIndex([moment for moment, _ in cuts]))
    for number, (moment, (_, kind)) in enumerate(zip(at, cuts, strict=True)):
        ax.axvline(moment, color=INK["accent"], alpha=0.5, linewidth=0.8)
        if len(cuts) <= FEW_CUTS:
            place, end = ((0.02, "bottom"), (0.98, "top"))[number % 2]  # neighbours stand at different ends
            ax.annotate(kind, (moment, place), xycoords=("data", "axes fraction"), xytext=(-2, 0), fontsize=SMALL,
                        textcoords="offset points", ha="right", va=end, rotation=90, color=INK["accent"],
                        bbox={"facecolor": INK["card"], "edgecolor": "none", "pad": 0.6, "alpha": 0.8})  # fmt: skip
    ax.margins(x=0.02)
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    time_axis(ax)
    return figure


def gaps_over_time(gaps: pd.DataFrame, title: str = "Every gap, and the reason for it") -> Figure:
    """A dot a gap: when, how long, and in the colour of its reason; index: the bar after it; columns minutes, kind."""
    figure, (ax,) = new_figure(title, 2.9)
    kinds = gaps["kind"].value_counts()
    for number, (kind, count) in enumerate(kinds.items()):
        mine, colour = gaps[gaps["kind"] == kind], SERIES[number] if number < len(SERIES) else INK["neutral"]
        label = f"{count:,} {kind.replace('_', ' ')}"
        ax.scatter(day_numbers(mine.index), mine["minutes"], s=14, alpha=0.75, linewidth=0, color=colour, label=label)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(FixedLocator(list(_SPANS)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda minutes, _: _SPANS.get(int(minutes), "")))
    ax.yaxis.set_minor_locator(FixedLocator([]))
    ax.margins(x=0.01, y=0.1)
    if len(gaps):
        time_axis(ax)
        name_lines(ax, len(kinds))
    return figure


def label_balance(balance: pd.DataFrame, title: str = "Label balance by horizon") -> Figure:
    """Shares of each label per row of `balance` (index: horizon; columns: what the labels are called, ambiguous)."""
    columns = list(balance.columns)
    counts = balance[columns].to_numpy(dtype=np.float64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
    figure, (ax,) = new_figure(title, 1.15 + 0.42 * len(balance))
    start, rows = np.zeros(len(balance)), np.arange(len(balance))
    for name, share in zip(columns, shares.T, strict=True):
        ax.barh(rows, share, left=start, height=0.66, color=INK[_LABEL_INK.get(name, name)], label=name)
        for row, value in enumerate(share):
            if value >= 0.08:
                ax.text(start[row] + value / 2, row, f"{value:.0%}", ha="center", va="center", fontsize=NORMAL,
                        color=INK["ink" if name in ("neutral", "pass") else "card"], fontweight="bold")  # fmt: skip
        start = start + share
    ax.set_yticks(rows, [f"H = {value}" for value in balance.index])
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.grid(False)
    name_lines(ax, len(columns))
    return figure


def frame_alignment(
    base: Frame, coarse: Sequence[Frame], visible: Sequence[np.ndarray], row: int, hours: float = 3.0,
    title: str = "What a row may see",
) -> Figure:  # fmt: skip
    """Which coarse bar each base row sees: the newest one that was complete at the row's `known_at`.

    Parameters
    ----------
    visible : per coarse frame int64 (len(base),), position of the bar joined to each base row, -1 for none.
    row : the base row looked at; `hours` of bars around it are drawn.
    """
    now, hour = int(base.known_at[row]), 3_600_000_000_000
    first, last = now - int(hours * hour * 0.72), now + int(hours * hour * 0.28)
    figure, (ax,) = new_figure(title, 1.35 + 0.62 * (len(coarse) + 1))
    lanes = [base, *coarse]
    for lane, frame in enumerate(lanes):
        seen = row if lane == 0 else int(visible[lane - 1][row])
        near = np.flatnonzero((frame.known_at > first) & (frame.start < last))
        for bar in near:
            left, right = max(int(frame.start[bar]), first), min(int(frame.known_at[bar]), last)
            colour = INK["accent"] if bar == seen else INK["neutral"] if frame.known_at[bar] <= now else INK["card"]
            edge = INK["card"] if frame.known_at[bar] <= now else INK["neutral"]
            a, b = day_numbers(pd.to_datetime([left, right]))
            ax.barh(lane, b - a, left=a, height=0.5, color=colour, edgecolor=edge, linewidth=0.8,
                    linestyle="-" if frame.known_at[bar] <= now else (0, (2, 1.5)))  # fmt: skip
        if seen >= 0 and frame.known_at[seen] > first:
            age = (now - int(frame.known_at[seen])) / 60_000_000_000
            end = day_numbers(pd.to_datetime([frame.known_at[seen]]))[0]
            word = "this row" if lane == 0 else "just closed" if age == 0 else f"{age:.0f} min old"
            ax.annotate(word, (end, lane - 0.27), xytext=(-1, 2), textcoords="offset points", fontsize=SMALL,
                        color=INK["accent"], ha="right", va="bottom")  # fmt: skip
    at = day_numbers(pd.to_datetime([now]))[0]
    ax.axvline(at, color=INK["short"], linewidth=1.2)
    ax.annotate("known_at", (at, 1.0), xycoords=("data", "axes fraction"), xytext=(3, 2), textcoords="offset points",
                fontsize=SMALL, color=INK["short"], va="bottom")  # fmt: skip
    ax.set_yticks(range(len(lanes)), [f"{frame.minutes} min" if frame.minutes else "base bars" for frame in lanes])
    ax.set_ylim(len(lanes) - 0.5, -0.75)
    ax.set_xlim(*day_numbers(pd.to_datetime([first, last])))
    ax.grid(False)
    time_axis(ax)
    return figure


# ---- training --------------------------------------------------------------------------------------------------


def learning_curves(
    history: pd.DataFrame, best_epoch: int | None = None, prior: float | None = None, resumed_from: int | None = None,
    title: str = "Learning curves",
) -> Figure:  # fmt: skip
    """Training and validation loss per epoch or booster block; columns epoch, train_loss, val_loss.

    prior : the class prior's log loss on the validation rows: a curve that stays above it has learnt nothing.
    """
    figure, (ax,) = new_figure(title, 3.1)
    epoch = history["epoch"].to_numpy(dtype=np.float64)
    style = {"linewidth": 1.8, "marker": "o" if len(epoch) < 3 else None, "markersize": 4}
    ax.plot(epoch, history["train_loss"], color=INK["neutral"], label="train", **style)
    if history["val_loss"].notna().any():
        ax.plot(epoch, history["val_loss"], color=INK["accent"], label="validation", **style)
    if prior is not None:
        ax.axhline(prior, color=INK["muted"], linewidth=1.1, linestyle=(0, (4, 3)))
        ax.annotate("class prior", (1, prior), xycoords=("axes fraction", "data"), xytext=(0, 3), fontsize=SMALL,
                    textcoords="offset points", ha="right", va="bottom", color=INK["muted"])  # fmt: skip
    if best_epoch is not None and (history["epoch"] == best_epoch).any():
        best = float(history.loc[history["epoch"] == best_epoch, "val_loss"].iloc[0])
        ax.plot([best_epoch], [best], "o", color=INK["accent"], markeredgecolor=INK["card"], markersize=8, zorder=5)
        ax.annotate(f"best {best:.4f}", (best_epoch, best), xytext=(0, 9), textcoords="offset points", ha="center",
                    fontsize=SMALL, color=INK["accent"])  # fmt: skip
    if resumed_from is not None:
        ax.axvline(resumed_from, color=INK["third"], linewidth=1.1, linestyle=(0, (1, 2)))
        ax.annotate("resumed", (resumed_from, 0), xycoords=("data", "axes fraction"), xytext=(4, 4), fontsize=SMALL,
                    textcoords="offset points", color=INK["third"])  # fmt: skip
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.margins(y=0.14)
    axis_labels(ax, "epoch or booster block", "log loss (nats)")
    name_lines(ax, 2)
    return figure


def path_scores(paths: pd.DataFrame) -> Figure:
    """`fold_scores` of whole paths; they share rows and folds, so their spread is no standard error."""
    return fold_scores(paths.rename(columns={"path": "fold"}), "Gain over the class prior, path by path", unit="path")


def fold_scores(
    folds: pd.DataFrame,
    title: str = "Gain over the class prior, fold by fold",
    *,
    unit: str = "fold (in time order)",
) -> Figure:
    """Gain in log loss of each fold with its 95 % interval, and their mean; positive beats the prior.

    folds : a row per fold (and `name`, where several forecasts are compared): fold, log_loss_gain, gain_se.
    """
    figure, (ax,) = new_figure(title, 3.1)
    names = list(dict.fromkeys(folds["name"])) if "name" in folds.columns else [""]
    ax.axhline(0, color=INK["muted"], linewidth=1.1)
    for number, name in enumerate(names):
        rows = folds[folds["name"] == name] if "name" in folds.columns else folds
        colour = INK["neutral"] if name in BASELINES else SERIES[number % len(SERIES)]
        gain, error = (rows[key].to_numpy(dtype=np.float64) for key in ("log_loss_gain", "gain_se"))
        said = name if name in BASELINES else f"{name} mean {gain.mean():+.4f}".strip().replace("-", "−")
        x = rows["fold"].to_numpy(dtype=np.float64) + 0.16 * (number - (len(names) - 1) / 2)
        ax.errorbar(x, gain, 1.96 * np.nan_to_num(error), fmt="o", color=colour, markersize=6, elinewidth=1.6,
                    markeredgecolor=INK["card"], label=said or None)  # fmt: skip
        if name not in BASELINES:
            ax.axhline(gain.mean(), color=colour, linewidth=1.1, linestyle=(0, (4, 3)), alpha=0.8)
    ax.set_xticks(sorted(folds["fold"].unique()))
    ax.margins(x=0.08, y=0.12)
    ax.yaxis.set_major_formatter(FuncFormatter(signed))
    axis_labels(ax, unit, "nats per row")
    name_lines(ax, len(names))
    return figure


# ---- verdicts --------------------------------------------------------------------------------------------------


def metrics_bar(
    table: pd.DataFrame, reference: str = "prior", title: str = "Gain in log loss over the class prior"
) -> Figure:
    """Each forecast's gain with its 95 % interval (`metrics_table`); right of the line beats the reference."""
    rows = table[[str(name) != reference for name in table.index]]
    figure, (ax,) = new_figure(title, 1.15 + 0.52 * max(1, len(rows)))
    place = np.arange(len(rows))
    gain, error = (rows[key].to_numpy(dtype=np.float64) for key in ("log_loss_gain", "gain_se"))
    low, high = (rows[key].to_numpy(dtype=np.float64) for key in ("gain_low", "gain_high"))
    colours = [INK["muted"] if str(name) in BASELINES else INK["accent"] for name in rows.index]
    ax.axvline(0, color=INK["muted"], linewidth=1.1)
    ax.hlines(place, np.where(np.isfinite(low), low, gain), np.where(np.isfinite(high), high, gain), colors=colours,
              linewidth=3, alpha=0.45)  # fmt: skip
    ax.scatter(gain, place, s=52, c=colours, edgecolors=INK["card"], zorder=3)
    names = [" · ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in rows.index]
    ax.set_yticks(
        place, [f"{name}\n{a:+.4f} ± {b:.4f}".replace("-", "−") for name, a, b in zip(names, gain, error, strict=True)]
    )
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.grid(True, axis="x", color=INK["grid"], linewidth=0.8)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(signed))
    axis_labels(ax, f"nats per row; 0 is the {reference}")
    return figure


def calibration_plot(
    tables: Mapping[str, pd.DataFrame], title: str = "Said against happened", classes: Mapping[str, int] | None = None
) -> Figure:
    """Reliability per class: on the diagonal, what was said is what happened. `tables`: name → `reliability(…)`.

    classes : what the labels are called, where they are not short, neutral and long.
    """
    classes = classes or dict(zip(CLASS_NAMES, CLASSES, strict=True))
    figure, axes = new_figure(title, 3.3, 1, len(classes))
    both = pd.concat(list(tables.values()))
    for ax, (word, code) in zip(axes, classes.items(), strict=True):
        mine = both.loc[both["class"] == code, ["probability", "frequency"]].to_numpy()
        low, high = (float(mine.min()), float(mine.max())) if len(mine) else (0.0, 1.0)
        pad = max(0.02, 0.1 * (high - low))
        low, high = max(0.0, low - pad), min(1.0, high + pad)
        ax.plot([low, high], [low, high], color=INK["muted"], linewidth=1.1, linestyle=(0, (4, 3)))
        for number, (name, table) in enumerate(tables.items()):
            part, colour = table[table["class"] == code], SERIES[number % len(SERIES)]
            said, happened, error = (part[key] for key in ("probability", "frequency", "error"))
            _, _, bars = ax.errorbar(said, happened, 1.96 * error, fmt="o-", label=name, color=colour, markersize=4.5,
                                     linewidth=1.4, elinewidth=1.2, markeredgecolor=INK["card"])  # fmt: skip
            for bar in bars:
                bar.set_alpha(0.4)
        ax.set(xlim=(low, high), ylim=(low, high))
        ax.set_title(word, loc="left", fontsize=NORMAL, fontweight="bold", color=INK["ink"], pad=6)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(4))
            axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis_labels(ax, "said", "happened")
    if len(tables) > 1:
        handles, names = axes[0].get_legend_handles_labels()
        name_lines(figure, len(names), handles=handles, labels=names, loc="outside lower left")
    return figure


def barrier_trials(trials: pd.DataFrame, title: str = "Barriers that were tried") -> Figure:
    """What the labels of each trial can teach over how far its barriers stand; hollow: it breaks the balance.

    trials : a row a trial with k_up, k_down, value and kept (bool).
    """
    figure, (ax,) = new_figure(title, 3.0)
    k, value = trials[["k_up", "k_down"]].mean(axis=1).to_numpy(), trials["value"].to_numpy(dtype=np.float64)
    for kept, name in ((True, "keeps the balance"), (False, "breaks the balance")):
        at = trials["kept"].to_numpy() == kept
        face = INK["accent"] if kept else "none"
        ax.scatter(k[at], value[at], s=26, facecolors=face, edgecolors=INK["accent"], label=name)
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK["muted"])
    axis_labels(ax, "barrier, in sigma * sqrt(horizon)", "bits a training row")
    return figure


def stack_weights(weights: pd.DataFrame, title: str = "Weights of the stack") -> Figure:
    """`Stack.weights()` as bars: 0 leaves a model out, 1 takes it as it is."""
    figure, (ax,) = new_figure(title, 1.0 + 0.42 * len(weights))
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


def importance_bars(table: pd.DataFrame, title: str = "What the features are worth") -> Figure:
    """`importance_table`: what is lost when a feature is permuted, with two spreads; its share of gain beside it."""
    figure, (ax,) = new_figure(title, 1.1 + 0.27 * len(table))
    place, (rise, spread) = np.arange(len(table)), (table[key].to_numpy(dtype=float) for key in ("permuted", "spread"))
    ax.axvline(0, color=INK["muted"], linewidth=1.1)
    ax.barh(place, rise, height=0.62, color=INK["accent"])
    ax.hlines(place, rise - 2 * spread, rise + 2 * spread, color=INK["muted"], linewidth=1.4)
    ax.set_yticks(place, [f"{name}  {gain:.0%}" for name, gain in table["gain"].items()])
    ax.set_ylim(len(table) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.grid(True, axis="x", color=INK["grid"], linewidth=0.8)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(signed))
    axis_labels(ax, "log loss added when permuted, nats per row; beside the names their share of gain")
    return figure


def probabilities(
    predictions: pd.DataFrame, close: pd.Series, last: int = 600, title: str = "Probabilities under the price"
) -> Figure:
    """The last rows: price above, probabilities of the classes stacked below. Rows are evenly spaced.

    predictions : index known_at; p_short, p_neutral, p_long; of meta-labels also the `side` of the bet, and then the
    two answers to it.  close : index known_at, at least the same rows.
    """
    part = predictions.iloc[-last:]
    price = close.reindex(part.index).to_numpy(dtype=np.float64)
    answers = (
        {"pass": "p_neutral", "act": "p_long"} if "side" in part else dict(zip(CLASS_NAMES, PROBABILITIES, strict=True))
    )
    p_NC = part[list(answers.values())].to_numpy(dtype=np.float64)
    colours = [INK[_LABEL_INK.get(name, name)] for name in answers]
    figure, (top, bottom) = new_figure(title, 4.2, 2, 1, sharex=True, height_ratios=(3, 2))
    x = np.arange(len(part))
    top.plot(x, price, color=INK["ink"], linewidth=1.1)
    top.yaxis.set_major_locator(MaxNLocator(4))
    top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    bottom.stackplot(x, p_NC.T, colors=colours, labels=list(answers), linewidth=0)
    bottom.set_ylim(0, 1)
    bottom.yaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
    bottom.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ticks = np.unique(np.linspace(0, len(part) - 1, 7).astype(np.int64))[1:-1:2] if len(part) > 6 else x
    bottom.set_xticks(ticks, [part.index[i].strftime("%d %b %Y\n%H:%M") for i in ticks])
    bottom.margins(x=0)
    handles, names = bottom.get_legend_handles_labels()
    name_lines(top, len(names), handles=handles, labels=names, loc="lower left", bbox_to_anchor=(0, 1.0))
    return figure
