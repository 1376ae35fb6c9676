"""Plots of bars, labels and splits: each function takes plain data and returns a matplotlib Figure."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MINUTE_NS
from ml_factory.evaluation.plot_style import (
    INK,
    LABEL_INK,
    NORMAL,
    SERIES,
    SMALL,
    add_legend_row,
    downsample_line,
    new_styled_figure,
    set_time_axis,
    to_matplotlib_dates,
)

FEW_CUTS = 16  # up to so many cuts are annotated
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
    figure, ax = _price_figure(close, title)
    for number, (name, moments) in enumerate(splits.items()):
        colour = INK.get(name, SERIES[number % len(SERIES)])
        places = np.unique(np.searchsorted(close.index, moments).clip(0, len(close) - 1))
        runs = np.split(places, np.flatnonzero(np.diff(places) > max(50, len(close) // 100)) + 1) if len(places) else []
        for run in runs:
            ax.axvspan(*to_matplotlib_dates(close.index[run[[0, -1]]]), color=colour, alpha=0.09, linewidth=0)
            _draw_price(ax, close.iloc[run[0] : run[-1] + 1], colour)
        if runs:
            longest = max(runs, key=len)
            middle = to_matplotlib_dates(close.index[longest[[len(longest) // 2]]])[0]
            ax.annotate(f"{name}\n{len(places):,}", (middle, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 2),
                        textcoords="offset points", ha="center", va="bottom", fontsize=SMALL, color=colour)  # fmt: skip
    return figure


def plot_cuts(close: pd.Series, cuts: Sequence[tuple[pd.Timestamp, str]], title: str = "Where the proof cut") -> Figure:
    """Plot price over time with a mark at each moment after which the future was disturbed; cuts : (moment, kind)."""
    figure, ax = _price_figure(close, title)
    for number, (moment, kind) in enumerate(cuts):
        at = to_matplotlib_dates([moment])[0]
        ax.axvline(at, color=INK["accent"], alpha=0.5, linewidth=0.8)
        if len(cuts) <= FEW_CUTS:
            place, end = ((0.02, "bottom"), (0.98, "top"))[number % 2]  # alternate between both ends
            ax.annotate(kind, (at, place), xycoords=("data", "axes fraction"), fontsize=SMALL, ha="right", va=end,
                        rotation=90, color=INK["accent"])  # fmt: skip
    return figure


def _price_figure(close: pd.Series, title: str) -> tuple[Figure, Axes]:
    """Return a figure of a price over time, in grey."""
    figure, (ax,) = new_styled_figure(title, 3.3)
    _draw_price(ax, close, INK["neutral"])
    ax.margins(x=0.02)
    ax.yaxis.set_major_formatter("{x:,.10g}")
    set_time_axis(ax)
    return figure, ax


def _draw_price(ax: Axes, close: pd.Series, colour: str) -> None:
    """Draw a price with a break in every gap of more than 5 days or a fiftieth of the axis' time."""
    keep = downsample_line(close.to_numpy())
    x, y = to_matplotlib_dates(close.index[keep]), close.to_numpy(dtype=np.float64)[keep]
    gaps = np.flatnonzero(np.diff(x) > max(5.0, 0.02 * (x[-1] - x[0]))) + 1
    ax.plot(np.insert(x, gaps, x[gaps]), np.insert(y, gaps, np.nan), color=colour, linewidth=1.0)


def plot_gaps(gaps: pd.DataFrame, title: str = "Every gap, and the reason for it") -> Figure:
    """Plot each gap by time and length, coloured by its reason; index: the bar after it; columns minutes, kind."""
    figure, (ax,) = new_styled_figure(title, 2.9)
    kinds = gaps["kind"].value_counts()
    for number, (kind, count) in enumerate(kinds.items()):
        one, colour = gaps[gaps["kind"] == kind], SERIES[number] if number < len(SERIES) else INK["neutral"]
        ax.scatter(to_matplotlib_dates(one.index), one["minutes"], s=14, alpha=0.75, linewidth=0, color=colour,
                   label=f"{count:,} {kind.replace('_', ' ')}")  # fmt: skip
    ax.set_yscale("log")
    ax.set_yticks(list(_SPANS), list(_SPANS.values()))
    ax.minorticks_off()
    if len(gaps):
        set_time_axis(ax)
        add_legend_row(ax, len(kinds))
    return figure


def plot_label_balance(balance: pd.DataFrame) -> Figure:
    """Plot the shares of each label per row of `balance` (index: horizon; columns: label names, ambiguous)."""
    shares = balance.astype(float).div(balance.sum(axis=1), axis=0).fillna(0.0)
    figure, (ax,) = new_styled_figure("Label balance by horizon", 1.15 + 0.42 * len(balance))
    start, rows = np.zeros(len(balance)), np.arange(len(balance))
    for name, share in shares.items():
        bars = ax.barh(rows, share, left=start, height=0.66, color=INK[LABEL_INK.get(name, name)], label=name)
        ax.bar_label(bars, [f"{value:.0%}" if value >= 0.08 else "" for value in share], label_type="center",
                     fontsize=NORMAL, color=INK["ink" if name in ("neutral", "pass") else "card"])  # fmt: skip
        start = start + share.to_numpy()
    ax.set_yticks(rows, [f"H = {value}" for value in balance.index])
    ax.set(xlim=(0, 1), yinverted=True)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.grid(False)
    add_legend_row(ax, len(shares.columns))
    return figure


def plot_frame_alignment(
    base: ResampledBars, coarse: Sequence[ResampledBars], visible: Sequence[np.ndarray], row: int
) -> Figure:
    """Plot the coarse bar that each base row reads: the newest one that was complete at the row's `known_at`.

    Parameters
    ----------
    visible : per coarse frame int64 (len(base),), position of the bar joined to each base row, -1 for none.
    row : the base row to mark; three hours of bars around it are drawn.
    """
    now, hour = int(base.known_at[row]), 60 * MINUTE_NS
    edges = np.array([now - 2.16 * hour, now, now + 0.84 * hour]).astype(np.int64)
    figure, (ax,) = new_styled_figure("Bars that a row may read", 1.35 + 0.62 * (len(coarse) + 1))
    lanes = [(base, row), *((frame, int(seen[row])) for frame, seen in zip(coarse, visible, strict=True))]
    for lane, (frame, seen) in enumerate(lanes):
        near = np.flatnonzero((frame.known_at > edges[0]) & (frame.start < edges[2]))
        left, right = to_matplotlib_dates(frame.start[near]), to_matplotlib_dates(frame.known_at[near])
        closed = frame.known_at[near] <= now
        face = np.where(near == seen, INK["accent"], np.where(closed, INK["neutral"], INK["card"]))
        ax.barh(lane, right - left, left=left, height=0.5, color=face, linewidth=0.8,
                edgecolor=np.where(closed, INK["card"], INK["neutral"]))  # fmt: skip
        if seen in near:
            age = (now - int(frame.known_at[seen])) / MINUTE_NS
            word = "this row" if lane == 0 else "just closed" if age == 0 else f"{age:.0f} min old"
            ax.annotate(word, (right[near == seen][0], lane - 0.3), fontsize=SMALL, color=INK["accent"], ha="right",
                        va="bottom")  # fmt: skip
    first, at, last = to_matplotlib_dates(edges)
    ax.axvline(at, color=INK["short"], linewidth=1.2)
    ax.annotate("known_at", (at, 1.0), xycoords=("data", "axes fraction"), xytext=(3, 2), textcoords="offset points",
                fontsize=SMALL, color=INK["short"], va="bottom")  # fmt: skip
    ax.set_yticks(range(len(lanes)), [f"{frame.minutes} min" if frame.minutes else "base bars" for frame, _ in lanes])
    ax.set(ylim=(len(lanes) - 0.5, -0.75), xlim=(first, last))
    ax.grid(False)
    set_time_axis(ax)
    return figure
