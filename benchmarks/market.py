"""Bars for the benchmarks: a made-up market of any length, or a file."""

import numpy as np
import pandas as pd

from ml_factory.data.resample import resample_bars
from ml_factory.data.sessions import MINUTE_NS, MarketSpec, resolve_market_spec

COLUMNS = ("open", "high", "low", "close", "volume")
MADE_UP = MarketSpec("BTC", "24h", None, True)


def market_bars(rows: int, seed: int = 0) -> pd.DataFrame:
    """A 24-hour market with one minute in twenty missing, and some hours."""
    rng = np.random.default_rng(seed)
    minute = np.cumsum(1 + (rng.random(rows) < 0.05) + 300 * (rng.random(rows) < 1e-5))
    close = np.round(20_000 * np.exp(np.cumsum(rng.normal(0, 2e-4, rows))), 2)
    opens = np.concatenate([close[:1], close[:-1]])
    spread = np.round(rng.exponential(2, (2, rows)), 2)
    prices = opens, np.maximum(opens, close) + spread[0], np.minimum(opens, close) - spread[1], close
    start = np.datetime64("2015-01-01", "ns").astype(np.int64) + minute * MINUTE_NS
    table = dict(zip(COLUMNS, (*prices, rng.integers(1, 500, rows).astype(float)), strict=True))
    return pd.DataFrame(table, index=pd.DatetimeIndex(start.astype("datetime64[ns]"), tz="UTC", name="timestamp"))


def file_bars(path: str, symbol: str) -> tuple[pd.DataFrame, MarketSpec]:
    """A file of checked one-minute bars with a column `timestamp`; only those inside the market's sessions."""
    bars = pd.read_parquet(path).set_index("timestamp").astype(float)
    market = resolve_market_spec(symbol, bars)
    inside = resample_bars(bars, market, 1).start
    return bars[np.isin(bars.index.as_unit("ns").asi8, inside)], market
