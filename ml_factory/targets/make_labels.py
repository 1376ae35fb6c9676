"""Labels of every kind that models can learn, by `LabelSpec.kind`."""

from collections.abc import Callable

import pandas as pd

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.targets.fixed_horizon import fixed_horizon_labels
from ml_factory.targets.label_table import mark_inferred_labels
from ml_factory.targets.labels import KINDS, LabelSpec, triple_barrier_labels
from ml_factory.targets.meta_labels import meta_labels
from ml_factory.targets.primary_rule import primary_rule_side
from ml_factory.targets.trend_scanning import trend_scanning_labels

SHORTEST_TREND = 5

_MAKERS: dict[str, Callable] = {
    "triple_barrier": triple_barrier_labels,
    "direction": lambda base, minute_bars, spec, market: fixed_horizon_labels(base, spec, market),
    "trend_scanning": lambda base, minute_bars, spec, market: trend_scanning_labels(
        base, spec, market, shortest=min(SHORTEST_TREND, spec.horizon)
    ),
    "meta": lambda base, minute_bars, spec, market: meta_labels(
        base, minute_bars, primary_rule_side(base, spec, market), spec, market
    ),
}
assert tuple(_MAKERS) == KINDS


def make_labels(
    base: ResampledBars, minute_bars: ResampledBars | None, spec: LabelSpec, market: MarketSpec
) -> pd.DataFrame:
    """Return the labels of `spec.kind`: short, neutral or long (-1, 0, 1), and the columns that all kinds share.

    Where facts of the market were inferred, column `inferred` marks the rows of those sessions
    (`label_table.mark_inferred_labels`). A return itself is a number and no class: call `fixed_horizon_return` for it.

    triple_barrier : the barrier reached first
    direction : the sign of the return after `horizon` bars, neutral inside a band of the row's own volatility
    trend_scanning : the sign of the strongest trend of up to `horizon` bars
    meta : whether the bet of a primary side pays: 1 act, 0 pass, and no row without a bet
    """
    return mark_inferred_labels(_MAKERS[spec.kind](base, minute_bars, spec, market), base, market)
