"""Fixed-horizon labels: the return over `horizon` bars, and its sign.

Both use every bar up to the vertical one, so a label is proven when that bar is complete, whatever the price did
before. Rows near a session's end follow `LabelSpec.session_end`, as in `triple_barrier_labels`.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import SettingsError
from ml_factory.targets.barrier_kernels import SLACK, log_price_ratio_kernel
from ml_factory.targets.label_table import (
    LabelExits,
    build_label_table,
    find_labelable_rows,
    simulate_label_exits,
    unreachable_barriers,
)
from ml_factory.targets.labels import LabelSpec, triple_barrier_prices


def fixed_horizon_return(
    base: ResampledBars, spec: LabelSpec, market: MarketSpec, *, session_close: np.ndarray | None = None
) -> pd.DataFrame:
    """Compute the log return to the close `spec.horizon` bars later (AFML 3.2, the fixed horizon).

    Of `spec` only horizon and session_end are used. Returns the columns of `triple_barrier_labels` without up and
    down; label is `ret` itself (float64) and barrier "vertical" or "session". Raises BarsError for a price that is not
    positive.
    """
    rows = _to_the_vertical(base, spec, market, *find_labelable_rows(base, spec.session_end))
    return build_label_table(base, rows, rows.ret, spec, market, session_close, {})


def fixed_horizon_labels(
    base: ResampledBars,
    spec: LabelSpec,
    market: MarketSpec,
    *,
    band: float = 0.43,
    session_close: np.ndarray | None = None,
) -> pd.DataFrame:
    """Label rows by the sign of the forward return, 0 inside a neutral band set by the row's own volatility.

    Returns the columns of `triple_barrier_labels`; up and down are the band's log distances. A close on the band's
    edge is beyond it, as a touched barrier is. Raises SettingsError for a band that is not a positive number.

    band : half its width in units of sigma * sqrt(horizon), instead of `spec`'s k_up and k_down; never less than a tick
        or the round-trip cost. 0.43 leaves a third of normal returns neutral
    """
    if isinstance(band, bool) or not isinstance(band, int | float) or not 1e-6 <= band < np.inf:
        raise SettingsError(
            "A direction cannot be labelled like this",
            where="band",
            got=repr(band),
            wanted="a finite number above 0, in units of sigma * sqrt(horizon)",
            next_step="use band=0.43, or 1e-6 for hardly any neutral row",
        )
    up, down = triple_barrier_prices(base, replace(spec, k_up=band, k_down=band), market)
    rows = _to_the_vertical(base, spec, market, *find_labelable_rows(base, spec.session_end, ~np.isnan(up)))
    slack, close = SLACK * (market.tick or 0.0), base.close[rows.exit_bar]
    label = (close >= up[rows.entry] - slack).astype(np.int8) - (close <= down[rows.entry] + slack).astype(np.int8)
    distances = {
        "up": log_price_ratio_kernel(up, base.close, rows.entry),
        "down": log_price_ratio_kernel(base.close, down, rows.entry),
    }
    return build_label_table(base, rows, label, spec, market, session_close, distances)


def _to_the_vertical(
    base: ResampledBars, spec: LabelSpec, market: MarketSpec, entry: np.ndarray, last: np.ndarray
) -> LabelExits:
    end = np.minimum(entry + spec.horizon, last)
    return simulate_label_exits(base, None, entry, last, end, *unreachable_barriers(base), market, spec.horizon)
