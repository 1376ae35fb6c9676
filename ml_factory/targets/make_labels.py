"""Labels of every kind that models can learn, by `LabelSpec.kind`: triple barrier, direction, trend, meta-labels.

All kinds share the index, `label_end`, uniqueness and the rule near a session's end of `triple_barrier_labels`.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
from numba import njit

from ml_factory.data.resample import ResampledBars, apply_roll_adjustment, known_at_index
from ml_factory.data.sessions import MarketSpec
from ml_factory.features.build import FeatureRows, FeatureSpec, find_column_family
from ml_factory.features.engine import compute_family_columns
from ml_factory.targets.barrier_kernels import SESSION, SLACK, VERTICAL
from ml_factory.targets.label_table import (
    LabelExits,
    build_label_table,
    find_labelable_rows,
    mark_inferred_labels,
    simulate_label_exits,
)
from ml_factory.targets.labels import LabelSpec, barrier_distances, triple_barrier_labels, triple_barrier_prices

SHORTEST_TREND = 5
NEUTRAL_BAND = 0.43  # half its width, in units of sigma * sqrt(horizon): leaves a third of normal returns neutral


def make_labels(
    base: ResampledBars, minute_bars: ResampledBars | None, spec: LabelSpec, market: MarketSpec
) -> pd.DataFrame:
    """Return the labels of `spec.kind`: short, neutral or long (-1, 0, 1), and the columns that all kinds share.

    Where facts of the market were inferred, column `inferred` marks the rows of those sessions
    (`label_table.mark_inferred_labels`).

    triple_barrier : the barrier reached first
    direction : the sign of the return after `horizon` bars, neutral inside a band of the row's own volatility
    trend_scanning : the sign of the strongest trend of up to `horizon` bars
    meta : whether the bet of a primary side pays: 1 act, 0 pass, and no row without a bet
    """
    if spec.kind == "direction":
        labels = direction_labels(base, spec, market)
    elif spec.kind == "trend_scanning":
        labels = trend_scanning_labels(base, spec, market)
    elif spec.kind == "meta":
        labels = meta_labels(base, minute_bars, primary_rule_side(base, spec, market).to_numpy(), spec, market)
    else:
        labels = triple_barrier_labels(base, minute_bars, spec, market)
    return mark_inferred_labels(labels, base, market)


def direction_labels(base: ResampledBars, spec: LabelSpec, market: MarketSpec) -> pd.DataFrame:
    """Label rows by the sign of the return after `horizon` bars, 0 inside `NEUTRAL_BAND` of the row's own volatility.

    Returns the columns of `triple_barrier_labels`; up and down are the band's log distances, never less than a tick or
    the round-trip cost. A close on the band's edge is beyond it, as a touched barrier is. A label is proven when its
    last bar is complete, whatever the price did before.
    """
    up, down = triple_barrier_prices(base, replace(spec, k_up=NEUTRAL_BAND, k_down=NEUTRAL_BAND), market)
    rows = _to_the_vertical(base, spec, market, ~np.isnan(up))
    slack, close = SLACK * (market.tick or 0.0), base.close[rows.exit_bar]
    label = (close >= up[rows.entry] - slack).astype(np.int8) - (close <= down[rows.entry] + slack).astype(np.int8)
    return build_label_table(base, rows, label, spec, market, barrier_distances(base, rows.entry, up, down))


def label_lives_to_the_vertical(base: ResampledBars, spec: LabelSpec, market: MarketSpec) -> pd.DataFrame:
    """Return the rows of labels that no barrier ends, each with label 0: of all labels those proven last."""
    rows = _to_the_vertical(base, spec, market, None)
    labels = build_label_table(base, rows, np.zeros(len(rows.entry), np.int8), spec, market, {})
    return mark_inferred_labels(labels, base, market)


def _to_the_vertical(base: ResampledBars, spec: LabelSpec, market: MarketSpec, selected) -> LabelExits:
    entry, last = find_labelable_rows(base, spec.session_end, selected)
    return _without_barriers(base, spec, market, entry, last, np.minimum(entry + spec.horizon, last))


def _without_barriers(base, spec, market, entry, last, end) -> LabelExits:
    beyond = np.full(len(base), np.inf)
    return simulate_label_exits(base, None, entry, last, end, beyond, -beyond, market, spec.horizon)


def trend_scanning_labels(base: ResampledBars, spec: LabelSpec, market: MarketSpec) -> pd.DataFrame:
    """Label rows by the sign of the trend with the largest |t| among those of `SHORTEST_TREND` to `horizon` bars.

    Lopez de Prado, *Machine Learning for Asset Managers*, 2020, section 5.4. Returns the columns of
    `triple_barrier_labels` without up and down, and t_value and trend_bars, the chosen trend's length; ret is the
    trend's. The choice needs every horizon, so a label lives, for overlap and for its proof, until the longest
    is known. (The book's t1 is the trend's own end; purged by it, rows would train on later information.) A row with
    fewer bars left in its segment than the shortest trend has no label.
    """
    shortest = min(SHORTEST_TREND, spec.horizon)
    entry, last = find_labelable_rows(base, spec.session_end)
    longest = np.minimum(entry + spec.horizon, last)
    chosen, t_value = strongest_trend(base.close, entry, longest, shortest)
    rows = _without_barriers(base, spec, market, entry, last, chosen)
    whole = np.where(longest == entry + spec.horizon, VERTICAL, SESSION).astype(np.int8)
    rows, facts = replace(rows, exit_bar=longest, barrier=whole), {"t_value": t_value, "trend_bars": chosen - entry}
    label = np.sign(t_value).astype(np.int8)
    return build_label_table(base, rows, label, spec, market, facts, kept=last - entry >= shortest)


@njit(cache=True, nogil=True)
def strongest_trend(close, entry, longest, shortest):
    """Return (last bar int64[R], t-value float64[R]) of the strongest trend that starts on each row `entry`.

    Horizons end on bars entry + shortest to longest, int64[R]; of equals the shortest is chosen; of none, `longest`
    with 0. Each further bar costs O(1): slope and mean are updated, and the residual sum of squares grows by the square
    of the recursive residual (Brown, Durbin and Evans 1975, lemma 2), so nothing cancels and only the row's own bars
    are used. A constant price has t = 0, a perfect line an infinite one.
    """
    n = len(close)
    log_close = np.empty(n)
    for i in range(n):
        log_close[i] = np.log(close[i])
    chosen, t_value = np.empty(len(entry), np.int64), np.empty(len(entry))
    for r in range(len(entry)):
        i = entry[r]
        slope = log_close[i + 1] - log_close[i]
        mean, residual, strongest, best, best_end = 0.5 * slope, 0.0, -1.0, 0.0, longest[r]
        for bar in range(i + 2, longest[r] + 1):
            points = float(bar - i)  # before this one, at times 0 to points - 1
            spread = points * (points * points - 1.0) / 12.0  # sum of squares of the times about their mean
            ahead = 0.5 * (points + 1.0)  # from their mean to this point's time
            y = log_close[bar] - log_close[i]
            innovation = y - (mean + slope * ahead)
            variance = 1.0 + 1.0 / points + ahead * ahead / spread
            residual += innovation * innovation / variance
            slope += innovation * ahead / (spread * variance)
            mean += (y - mean) / (points + 1.0)
            if bar < i + shortest:
                continue
            spread = (points + 1.0) * ((points + 1.0) * (points + 1.0) - 1.0) / 12.0
            error = np.sqrt(residual / ((points - 1.0) * spread))
            t = slope / error if error > 0.0 else (np.inf * slope if slope != 0.0 else 0.0)
            if abs(t) > strongest:
                strongest, best, best_end = abs(t), t, bar
        chosen[r], t_value[r] = best_end, best
    return chosen, t_value


def meta_labels(
    base: ResampledBars, minute_bars: ResampledBars | None, side: np.ndarray, spec: LabelSpec, market: MarketSpec
) -> pd.DataFrame:
    """Label each bet 1 if it returns more than the round-trip cost, else 0 (AFML 3.6); rows without a side have none.

    A model trained on them learns when the primary side is right, and its probability sizes the bet. Returns the
    columns of `triple_barrier_labels` and `side`. label is int8, 0 or 1; ret is that of the bet, so a short that
    falls has ret > 0; barrier, up and down stay those of the price. An ambiguous row has label 0, ret NaN
    and weight 0. Uniqueness counts the bets alone.

    side : int8[N], -1, 0 or +1 for each row of `base`: the primary model's side at that moment, from bars up to it
    spec : `k_up` is the distance of the profit, `k_down` that of the loss; for a short they are exchanged
    """
    up, down = triple_barrier_prices(base, spec, market)
    short_up, short_down = triple_barrier_prices(base, replace(spec, k_up=spec.k_down, k_down=spec.k_up), market)
    up, down = np.where(side < 0, short_up, up), np.where(side < 0, short_down, down)
    entry, last = find_labelable_rows(base, spec.session_end, (side != 0) & ~np.isnan(up))
    end = np.minimum(entry + spec.horizon, last)
    rows = simulate_label_exits(base, minute_bars, entry, last, end, up, down, market, spec.horizon)
    bet = side[entry]
    ret = bet * rows.ret
    cost = np.log1p((spec.cost_ticks + SLACK) * (market.tick or 0.0) / base.close[entry])
    facts = barrier_distances(base, entry, up, down) | {"side": bet}
    return build_label_table(base, replace(rows, ret=ret), (ret > cost).astype(np.int8), spec, market, facts)


# ---- the primary rule of meta-labels (AFML 3.6): the side is the sign of a column of the row -------------------------


def primary_rule_side(base: ResampledBars, spec: LabelSpec, market: MarketSpec) -> pd.Series:
    """Return the side, int8, index known_at of `base`: +1 or -1, and 0 without a bet.

    The sign of the column `spec.primary` where it is at least `spec.primary_least` from 0; the other side with
    `spec.against`. Columns are centred and look back only, so a side is known with its row; until a column's window is
    full there is none. Raises SettingsError for a column that the base bars do not have.
    """
    family = find_column_family(market, spec.primary)
    columns = compute_family_columns(family, apply_roll_adjustment(base), market, coarse=False)
    return _sides(columns[spec.primary], base.known_at, spec)


def primary_rule_features(market: MarketSpec, features: FeatureSpec, spec: LabelSpec) -> FeatureSpec:
    """Return the columns that a feed needs for the side; float64 rows of them go into `primary_side_of_rows`.

    Raises SettingsError for a column that the base bars do not have.
    """
    family = find_column_family(market, spec.primary)
    return FeatureSpec(features.base_minutes, frames=(), families=(family.__name__,))


def primary_side_of_rows(rows: FeatureRows, spec: LabelSpec) -> pd.Series:
    """Return the side of each row of `primary_rule_features`: that of `primary_rule_side` on the bars so far."""
    return _sides(rows.values[:, rows.names.index(spec.primary)], rows.known_at, spec)


def _sides(values: np.ndarray, known_at: np.ndarray, spec: LabelSpec) -> pd.Series:
    bet = np.isfinite(values) & (np.abs(values) >= spec.primary_least)
    side = np.where(bet, np.sign(values), 0.0).astype(np.int8)
    return pd.Series(-side if spec.against else side, index=known_at_index(known_at), name="side")
