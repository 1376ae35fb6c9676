"""Which question is asked of each row: the kinds of labels that models can learn."""

from collections.abc import Callable

import pandas as pd

from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.targets.fixed_horizon import direction
from ml_factory.targets.label_table import marked
from ml_factory.targets.labels import KINDS, LabelSpec, triple_barrier
from ml_factory.targets.meta_labels import meta_labels
from ml_factory.targets.primary_rule import primary_side
from ml_factory.targets.trend_scanning import trend_scanning

SHORTEST_TREND = 5

_MAKERS: dict[str, Callable] = {
    "triple_barrier": triple_barrier,
    "direction": lambda base, fine, spec, market: direction(base, spec, market),
    "trend_scanning": lambda base, fine, spec, market: trend_scanning(
        base, spec, market, shortest=min(SHORTEST_TREND, spec.horizon)
    ),
    "meta": lambda base, fine, spec, market: meta_labels(base, fine, primary_side(base, spec, market), spec, market),
}
assert tuple(_MAKERS) == KINDS


def make_labels(base: Frame, fine: Frame | None, spec: LabelSpec, market: MarketSpec) -> pd.DataFrame:
    """The labels of `spec.kind`: short, neutral or long (-1, 0, 1), and the columns that all kinds share.

    triple_barrier : which barrier is reached first.  direction : the sign of the return after `horizon` bars, neutral
    inside a band of the row's own volatility.  trend_scanning : the sign of the straightest trend of up to `horizon`
    bars.  meta : whether the bet of a primary side pays: 1 act, 0 pass, and no row where nothing is bet.
    Where facts of the market were inferred, column `inferred` marks the rows of those sessions (`outcomes.marked`).
    A return itself is a number and no class: `forward_return` is called directly.
    """
    return marked(_MAKERS[spec.kind](base, fine, spec, market), base, market)
