"""Meta-labels: whether to take the side of a primary model or rule (AFML 3.6).

A model trained on them learns when the primary side is right, and its probability sizes the bet.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import SettingsError
from ml_factory.targets.barrier_kernels import SLACK, log_price_ratio_kernel
from ml_factory.targets.label_table import build_label_table, find_labelable_rows, simulate_label_exits
from ml_factory.targets.labels import LabelSpec, triple_barrier_prices


def meta_labels(
    base: ResampledBars,
    minute_bars: ResampledBars | None,
    side: pd.Series,
    spec: LabelSpec,
    market: MarketSpec,
    *,
    session_close: np.ndarray | None = None,
) -> pd.DataFrame:
    """Label each bet 1 if it returns more than the round-trip cost, else 0; rows without a side are left out.

    Returns the columns of `triple_barrier_labels` and `side`. label is int8, 0 or 1; ret, mae and mfe are those of the
    bet, so a short that falls has ret > 0; barrier, up and down stay those of the price. An ambiguous row has label 0,
    ret NaN and weight 0. Uniqueness counts the bets alone.

    Parameters
    ----------
    side : -1, 0 or +1 for rows of `base`, index known_at: the primary model's side at that moment, from bars up to it
    spec : `k_up` is the distance of the profit, `k_down` that of the loss; for a short they are exchanged

    Raises
    ------
    SettingsError : sides of other rows
    BarsError : a price that is not positive
    """
    at, sides = _positions(base, side)
    bets = np.zeros(len(base), np.int8)
    bets[at] = sides
    up, down = triple_barrier_prices(base, spec, market)
    short_up, short_down = triple_barrier_prices(base, replace(spec, k_up=spec.k_down, k_down=spec.k_up), market)
    up, down = np.where(bets < 0, short_up, up), np.where(bets < 0, short_down, down)
    entry, last = find_labelable_rows(base, spec.session_end, (bets != 0) & ~np.isnan(up))
    rows = simulate_label_exits(
        base, minute_bars, entry, last, np.minimum(entry + spec.horizon, last), up, down, market, spec.horizon
    )
    bet = bets[entry]
    ret, short = bet * rows.ret, bet < 0
    cost = np.log1p((spec.cost_ticks + SLACK) * (market.tick or 0.0) / base.close[entry])
    label = (ret > cost).astype(np.int8)
    seen = replace(rows, ret=ret, mae=np.where(short, -rows.mfe, rows.mae), mfe=np.where(short, -rows.mae, rows.mfe))
    facts = {
        "up": log_price_ratio_kernel(up, base.close, entry),
        "down": log_price_ratio_kernel(base.close, down, entry),
        "side": bet,
    }
    return build_label_table(base, seen, label, spec, market, session_close, facts)


def _positions(base: ResampledBars, side: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Return int64[M] positions of the sides' rows in the frame, and the sides as int8[M]."""
    values = np.asarray(side.to_numpy(), float)
    odd = np.flatnonzero(~np.isin(values, (-1.0, 0.0, 1.0)))
    if len(odd):
        raise SettingsError(
            "A side is -1, 0 or 1",
            where=f"side at {side.index[odd[0]]} and {len(odd) - 1} more",
            got=values[odd[0]],
            wanted="-1 (short), 0 (none) or 1 (long)",
            next_step="give numpy.sign of the primary model's forecast, 0 where it has none",
        )
    known_at = pd.DatetimeIndex(side.index).as_unit("ns").asi8
    at = np.minimum(np.searchsorted(base.known_at, known_at), len(base) - 1)
    unknown = np.flatnonzero(base.known_at[at] != known_at) if len(base) else np.arange(len(known_at))
    if len(unknown) or len(np.unique(known_at)) < len(known_at):
        raise SettingsError(
            "Sides must belong to rows of the base frame, one a row",
            where="the index of side",
            got=f"no bar for {side.index[unknown[0]]}, {len(unknown)} in all" if len(unknown) else "repeated rows",
            wanted="moments at which a base bar is complete (known_at), each once",
            next_step="build the sides on the index of the features",
        )
    return at, values.astype(np.int8)
