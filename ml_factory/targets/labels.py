"""Triple-barrier labels and the settings of all labels.

Triple barrier (Lopez de Prado, *Advances in Financial Machine Learning*, 2018, chapter 3), with barriers symmetric in
log price so that a log-driftless walk gives balanced classes, and with a `label_end` that holds whatever bars come
after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.argument_checks import LABEL_KINDS, check_settings
from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import DAY_NS, MarketSpec, scheduled_session_days
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.targets.barrier_kernels import barrier_prices_kernel
from ml_factory.targets.label_table import (
    SESSION_ENDS,
    SIDE,
    build_label_table,
    find_labelable_rows,
    simulate_label_exits,
)

_SIDES = {"short": -1, "neutral": 0, "long": 1}
_BETS = {"pass": 0, "act": 1}
_TREND = "trend_scanning"  # of one bar has no residual


@dataclass(frozen=True)
class LabelSpec:
    """Settings of labels.

    horizon : existing bars of the base frame until the vertical barrier
    k_up, k_down : barrier distance in units of sigma * sqrt(horizon); sigma is one bar's volatility
    sigma_span : span, in bars, of the exponentially weighted volatility; the first label needs as many returns
    cost_ticks : round-trip cost; no barrier is nearer than this, nor nearer than one tick
    session_end : "session" ends a label at the last bar of its session or before a hole; "drop" leaves out every row
        with fewer than `horizon` bars left there, touched or not; "span" continues into the next session and over
        holes, and ends only at a roll's step in the price. The volatility is that of bars within sessions in any case
    kind : one of LABEL_KINDS (`make_labels.make_labels`); kinds other than triple_barrier ignore some fields above
    primary, primary_least, against : of "meta": the side of the bet is the sign of this column of the base bars where
        it is at least so far from 0, or the opposite side (`targets.make_labels.primary_rule_side`)
    """

    horizon: int = 20
    k_up: float = 0.8
    k_down: float = 0.8
    sigma_span: int = 100
    cost_ticks: float = 2.0
    session_end: str = "session"
    kind: str = "triple_barrier"
    primary: str = ""
    primary_least: float = 0.0
    against: bool = False

    def __post_init__(self) -> None:
        least = 2 if self.kind == _TREND else 1
        check_settings(
            self, kind=LABEL_KINDS, horizon=f"[{least}, 10000]", sigma_span="[2, 100000]", session_end=SESSION_ENDS,
            k_up="[1e-6, inf)", k_down="[1e-6, inf)", cost_ticks="[0, inf)", primary_least="[0, inf)",
        )  # fmt: skip
        if self.kind == "meta" and not self.primary:
            raise SettingsError("A bet has no side", where="primary", got="''", wanted="a column of the base bars",
                                next_step="give primary= (prepare --primary), such as macd_12_26")  # fmt: skip
        if self.kind != "meta" and (self.primary or self.against or self.primary_least):
            step = "set kind to meta (prepare --target meta), or leave the primary side out"
            raise SettingsError("Only meta-labels have a primary side", where="kind", got=repr(self.kind),
                                wanted="meta", next_step=step)  # fmt: skip


def label_classes(kind: str) -> dict[str, int]:
    """Return class name -> label of a kind of labels: three sides, or of "meta" a bet's two."""
    return _BETS if kind == "meta" else _SIDES


def expected_label_classes(kind: str) -> dict[str, int]:
    """Return the classes that rows of any market should have: a trend is neutral only if the price is constant."""
    classes = label_classes(kind)
    return {name: label for name, label in classes.items() if label or kind != _TREND}


def stored_label_kind(settings: Mapping) -> str:
    """Return the kind of labels in the settings that data and bundles are stored with."""
    return settings.get("data", {}).get("labels", {}).get("kind", LABEL_KINDS[0])


def stored_label_classes(settings: Mapping) -> tuple[int, ...]:
    """Return the labels of the classes in these settings."""
    return tuple(label_classes(stored_label_kind(settings)).values())


def triple_barrier_labels(
    base: ResampledBars, minute_bars: ResampledBars | None, spec: LabelSpec, market: MarketSpec
) -> pd.DataFrame:
    """Label every row of `base` by the barrier its price reaches first.

    Entry is the row's close; scanning starts at the next bar and never leaves the row's segment, or with
    session_end="span" the bars up to a roll's step. A bar that opens beyond a barrier exits at its open. The bar that
    reaches a barrier is walked through `minute_bars`, with the same rule; a finest bar that contains both barriers is
    "ambiguous", label 0, return NaN.

    Parameters
    ----------
    base : N bars
    minute_bars : the raw bars of the same feed, or None when base is the finest
    spec : the labels
    market : calendar and tick

    Returns
    -------
    DataFrame, index `known_at` (UTC, ns; unique, increasing, some of the base rows), with
        label int8 (-1, 0, 1), label_end (UTC, ns), ret (log return to the exit), barrier (one of BARRIERS),
        uniqueness (mean of 1/concurrency over the label's lifetime, open rows included),
        up, down (log distances of the barriers, positive), entry_bar, exit_bar (int64 positions in base; a label
        lives on bars entry_bar + 1 to exit_bar).
    `label_end` is when the outcome is proven, so rows with label_end <= cut are the same bits whatever follows the cut:
    the touching bar's known_at; for a segment that stops, the session's scheduled close if its last bar reaches it,
    else the known_at of the next existing bar. Rows that the feed has not proven are left out. With session_end="drop"
    a row is proven to be kept only when all its bars exist, so it ends at the last of them; with "span" only a bar of
    the next contract proves that a label was cut short.
    """
    up, down = triple_barrier_prices(base, spec, market)
    entry, last = find_labelable_rows(base, spec.session_end, ~np.isnan(up))
    rows = simulate_label_exits(
        base, minute_bars, entry, last, np.minimum(entry + spec.horizon, last), up, down, market, spec.horizon
    )
    distances = barrier_distances(base, entry, up, down)
    return build_label_table(base, rows, SIDE[rows.barrier], spec, market, distances)


def barrier_distances(base: ResampledBars, entry: np.ndarray, up: np.ndarray, down: np.ndarray) -> dict:
    """Return the columns up and down of these rows: log distances of the barriers' prices, each float64[N]."""
    close = base.close[entry]
    return {"up": np.log(up[entry] / close), "down": np.log(close / down[entry])}


def triple_barrier_prices(base: ResampledBars, spec: LabelSpec, market: MarketSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return upper and lower barrier prices float64[N] of every row, NaN where the volatility is not known yet.

    They are rounded outwards to the market's tick on rows whose own bar is on it (a back-adjusted bar is not).
    """
    up, down = np.empty(len(base)), np.empty(len(base))
    barrier_prices_kernel(
        (base.open, base.high, base.low, base.close), base.segment, int(spec.sigma_span),
        (float(spec.k_up), float(spec.k_down)), int(spec.horizon), float(market.tick or 0.0), float(spec.cost_ticks),
        (up, down),
    )  # fmt: skip
    return up, down


# ---- enough to train on ----------------------------------------------------------------------------------------------


def longest_session_bars(start_ns: np.ndarray, calendar: str, base_minutes: int) -> int:
    """Return the base bars of the longest scheduled session around these bars' starts (int64 ns, UTC)."""
    first, last = int(start_ns[0] // DAY_NS) - 7, int(start_ns[-1] // DAY_NS) + 7
    return int(scheduled_session_days(calendar, first, last)[1].max()) // base_minutes


def check_horizon_fits_session(horizon: int, session_end: str, longest: int) -> None:
    """Refuse a horizon that no session holds, unless labels span sessions.

    Parameters
    ----------
    horizon : bars of the base frame
    session_end : as in `LabelSpec`
    longest : bars of the longest session

    Raises
    ------
    FactoryError : the horizon is too long
    """
    if horizon >= longest and session_end != "span":
        raise FactoryError(
            "The horizon is longer than a session", where=f"horizon {horizon}",
            got=f"{horizon} bars, while the longest session has {longest}",
            wanted=f"at most {longest - 1} bars, so that a label can reach its horizon",
            next_step="use a smaller horizon, or labels that continue into the next session: "
            "LabelSpec(session_end='span')",
        )  # fmt: skip


def check_class_sufficiency(labels: pd.DataFrame, splits: Mapping[str, np.ndarray], classes: Mapping[str, int]) -> None:
    """Refuse a split whose training rows lack a class, or whose validation or test rows are of a single class.

    Parameters
    ----------
    labels : columns label and barrier; ambiguous rows are ignored
    splits : name -> positions
    classes : name -> label

    Raises
    ------
    FactoryError : a part lacks a class
    """
    clear = (labels["barrier"] != "ambiguous").to_numpy()
    for part, rows in splits.items():
        y = labels["label"].to_numpy()[rows[clear[rows]]]
        counts = {name: int((y == label).sum()) for name, label in classes.items()}
        present = [name for name, count in counts.items() if count]
        if (part == "train" and len(present) < len(classes)) or len(present) < 2:
            wanted = "every class" if part == "train" else "at least two classes"
            raise FactoryError(
                f"The {part} rows lack a class", where=f"{len(rows):,} {part} rows",
                got=", ".join(f"{name} {count:,}" for name, count in counts.items()), wanted=wanted,
                next_step="give more bars, nearer or farther barriers (k_up, k_down), or another horizon",
            )  # fmt: skip
