"""Plots of bars, labels and splits: each function takes plain data and returns a matplotlib Figure."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, PercentFormatter

from ml_factory.data.resample import ResampledBars
from ml_factory.evaluation.plot_style import (
    INK,
    LABEL_INK,
    NORMAL,
    SERIES,
    SMALL,
    add_legend_row,
    downsample_line,
    new_styled_figure,
    set_price_ticks,
    set_time_axis,
    to_matplotlib_dates,
)

FEW_CUTS = 12  # up to so many cuts are annotated
_SPANS = {1: "1 min", 10: "10 min", 60: "1 h", 360: "6 h", 1440: "1 day", 10_080: "1 week", 100_800: "10 weeks"}


def plot_split(
    close: pd.Series, splits: Mapping[str, Sequence], title: str = "The split, drawn on the price"
) -> Figure:
    """Plot price over time with each split in its colour; rows in no split (purged, embargoed) stay grey.

    Parameters
    ----------
    close : index known_at.
    splits : split ("train", "validation", "test" or others) → known_at of its rows.
    """
    figure, (ax,) = new_styled_figure(title, 3.3)
    x, y = to_matplotlib_dates(close.index), close.to_numpy(dtype=np.float64)
    silence = max(5.0, 0.02 * (x[-1] - x[0]))
    keep = downsample_line(y)
    ax.plot(*_break_line_at_gaps(x[keep], y[keep], silence), color=INK["neutral"], linewidth=0.9)
    for number, (name, moments) in enumerate(splits.items()):
        colour = INK.get(name, SERIES[number % len(SERIES)])
        places = np.unique(np.searchsorted(x, to_matplotlib_dates(moments)).clip(0, len(x) - 1))
        runs = np.split(places, np.flatnonzero(np.diff(places) > max(50, len(x) // 100)) + 1) if len(places) else []
        for run in runs:
            ax.axvspan(x[run[0]], x[run[-1]], color=colour, alpha=0.09, linewidth=0)
            inside = keep[(keep >= run[0]) & (keep <= run[-1])]
            ax.plot(*_break_line_at_gaps(x[inside], y[inside], silence), color=colour, linewidth=1.1)
        if runs:
            longest = max(runs, key=len)
            middle = (x[longest[0]] + x[longest[-1]]) / 2
            ax.annotate(
                f"{name}\n{len(places):,}", (middle, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 2),
                textcoords="offset points", ha="center", va="bottom", fontsize=SMALL, color=colour, linespacing=1.25,
            )  # fmt: skip
    ax.margins(x=0.01)
    set_price_ticks(ax, 5)
    set_time_axis(ax)
    return figure


def plot_cuts(close: pd.Series, cuts: Sequence[tuple[pd.Timestamp, str]], title: str = "Where the proof cut") -> Figure:
    """Plot price over time with a mark at each moment after which the future was disturbed; cuts : (moment, kind)."""
    figure, (ax,) = new_styled_figure(title, 3.3)
    x, y = to_matplotlib_dates(close.index), close.to_numpy(dtype=np.float64)
    keep = downsample_line(y)
    ax.plot(
        *_break_line_at_gaps(x[keep], y[keep], max(5.0, 0.02 * (x[-1] - x[0]))), color=INK["neutral"], linewidth=0.9
    )
    at = to_matplotlib_dates(pd.DatetimeIndex([moment for moment, _ in cuts]))
    for number, (moment, (_, kind)) in enumerate(zip(at, cuts, strict=True)):
        ax.axvline(moment, color=INK["accent"], alpha=0.5, linewidth=0.8)
        if len(cuts) <= FEW_CUTS:
            place, end = ((0.02, "bottom"), (0.98, "top"))[number % 2]  # alternate between both ends
            ax.annotate(kind, (moment, place), xycoords=("data", "axes fraction"), xytext=(-2, 0), fontsize=SMALL,
                        textcoords="offset points", ha="right", va=end, rotation=90, color=INK["accent"],
                        bbox={"facecolor": INK["card"], "edgecolor": "none", "pad": 0.6, "alpha": 0.8})  # fmt: skip
    ax.margins(x=0.02)
    set_price_ticks(ax, 5)
    set_time_axis(ax)
    return figure


def plot_gaps(gaps: pd.DataFrame, title: str = "Every gap, and the reason for it") -> Figure:
    """Plot each gap by time and length, coloured by its reason; index: the bar after it; columns minutes, kind."""
    figure, (ax,) = new_styled_figure(title, 2.9)
    kinds = gaps["kind"].value_counts()
    for number, (kind, count) in enumerate(kinds.items()):
        of_kind, colour = gaps[gaps["kind"] == kind], SERIES[number] if number < len(SERIES) else INK["neutral"]
        label = f"{count:,} {kind.replace('_', ' ')}"
        ax.scatter(
            to_matplotlib_dates(of_kind.index),
            of_kind["minutes"],
            s=14,
            alpha=0.75,
            linewidth=0,
            color=colour,
            label=label,
        )
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(FixedLocator(list(_SPANS)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda minutes, _: _SPANS.get(int(minutes), "")))
    ax.yaxis.set_minor_locator(FixedLocator([]))
    ax.margins(x=0.01, y=0.1)
    if len(gaps):
        set_time_axis(ax)
        add_legend_row(ax, len(kinds))
    return figure


def plot_label_balance(balance: pd.DataFrame, title: str = "Label balance by horizon") -> Figure:
    """Plot the shares of each label per row of `balance` (index: horizon; columns: label names, ambiguous)."""
    columns = list(balance.columns)
    counts = balance[columns].to_numpy(dtype=np.float64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
    figure, (ax,) = new_styled_figure(title, 1.15 + 0.42 * len(balance))
    start, rows = np.zeros(len(balance)), np.arange(len(balance))
    for name, share in zip(columns, shares.T, strict=True):
        ax.barh(rows, share, left=start, height=0.66, color=INK[LABEL_INK.get(name, name)], label=name)
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
    add_legend_row(ax, len(columns))
    return figure


def plot_frame_alignment(
    base: ResampledBars, coarse: Sequence[ResampledBars], visible: Sequence[np.ndarray], row: int, hours: float = 3.0,
    title: str = "Bars that a row may read",
) -> Figure:  # fmt: skip
    """Plot the coarse bar that each base row reads: the newest one that was complete at the row's `known_at`.

    Parameters
    ----------
    visible : per coarse frame int64 (len(base),), position of the bar joined to each base row, -1 for none.
    row : the base row to mark; `hours` of bars around it are drawn.
    """
    now, hour = int(base.known_at[row]), 3_600_000_000_000
    first, last = now - int(hours * hour * 0.72), now + int(hours * hour * 0.28)
    figure, (ax,) = new_styled_figure(title, 1.35 + 0.62 * (len(coarse) + 1))
    lanes = [base, *coarse]
    for lane, frame in enumerate(lanes):
        seen = row if lane == 0 else int(visible[lane - 1][row])
        near = np.flatnonzero((frame.known_at > first) & (frame.start < last))
        for bar in near:
            left, right = max(int(frame.start[bar]), first), min(int(frame.known_at[bar]), last)
            colour = INK["accent"] if bar == seen else INK["neutral"] if frame.known_at[bar] <= now else INK["card"]
            edge = INK["card"] if frame.known_at[bar] <= now else INK["neutral"]
            a, b = to_matplotlib_dates(pd.to_datetime([left, right]))
            ax.barh(lane, b - a, left=a, height=0.5, color=colour, edgecolor=edge, linewidth=0.8,
                    linestyle="-" if frame.known_at[bar] <= now else (0, (2, 1.5)))  # fmt: skip
        if seen >= 0 and frame.known_at[seen] > first:
            age = (now - int(frame.known_at[seen])) / 60_000_000_000
            end = to_matplotlib_dates(pd.to_datetime([frame.known_at[seen]]))[0]
            word = "this row" if lane == 0 else "just closed" if age == 0 else f"{age:.0f} min old"
            ax.annotate(word, (end, lane - 0.27), xytext=(-1, 2), textcoords="offset points", fontsize=SMALL,
                        color=INK["accent"], ha="right", va="bottom")  # fmt: skip
    at = to_matplotlib_dates(pd.to_datetime([now]))[0]
    ax.axvline(at, color=INK["short"], linewidth=1.2)
    ax.annotate("known_at", (at, 1.0), xycoords=("data", "axes fraction"), xytext=(3, 2), textcoords="offset points",
                fontsize=SMALL, color=INK["short"], va="bottom")  # fmt: skip
    ax.set_yticks(range(len(lanes)), [f"{frame.minutes} min" if frame.minutes else "base bars" for frame in lanes])
    ax.set_ylim(len(lanes) - 0.5, -0.75)
    ax.set_xlim(*to_matplotlib_dates(pd.to_datetime([first, last])))
    ax.grid(False)
    set_time_axis(ax)
    return figure


def _break_line_at_gaps(x: np.ndarray, y: np.ndarray, longest: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the line with a break (NaN) in every gap longer than `longest`."""
    cuts = np.flatnonzero(np.diff(x) > longest) + 1
    return np.insert(x, cuts, x[cuts]), np.insert(y.astype(np.float64), cuts, np.nan)
