"""Which question is asked of each row: the kinds of labels that models of three classes can learn."""

from collections.abc import Callable

import pandas as pd

from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.targets.forward import direction
from ml_factory.targets.labels import KINDS, LabelSpec, triple_barrier
from ml_factory.targets.trend_scanning import trend_scanning

SHORTEST_TREND = 5

_MAKERS: dict[str, Callable] = {
    "triple_barrier": triple_barrier,
    "direction": lambda base, fine, spec, market: direction(base, spec, market),
    "trend_scanning": lambda base, fine, spec, market: trend_scanning(
        base, spec, market, shortest=min(SHORTEST_TREND, spec.horizon)
    ),
}
assert tuple(_MAKERS) == KINDS


def make_labels(base: Frame, fine: Frame | None, spec: LabelSpec, market: MarketSpec) -> pd.DataFrame:
    """The labels of `spec.kind`: short, neutral or long (-1, 0, 1) and the columns that all kinds share.

    triple_barrier : which barrier is reached first.  direction : the sign of the return after `horizon` bars, neutral
    inside a band of the row's own volatility.  trend_scanning : the sign of the straightest trend of up to `horizon`
    bars. A return itself is a number and no class, and a meta-label needs another model's side: `forward_return` and
    `meta_labels` are called directly.
    """
    return _MAKERS[spec.kind](base, fine, spec, market)
