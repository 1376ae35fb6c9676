"""Clean stretches of real markets, and what a spoiled copy of one is."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.sessions import ExchangeSessions, MarketSpec, assign_sessions, resolve_market_spec
from ml_factory.data.validation import validate_bars

PLACES = 5
# contiguous stretches, so that all of it takes seconds; the whole files give the same (docs/log.md)
STRETCHES = {
    "ES": ("2025-01-20", "2025-04-05"),
    "SPY": ("2024-07-08", "2024-11-02"),
    "XAUUSD": ("2026-01-05", "2026-03-21"),
    "BTCUSD": ("2017-03-01", "2017-04-20"),
}
PRICES = ["open", "high", "low", "close"]
Pair = tuple[str, int]


@dataclass(frozen=True)
class Market:
    """A clean stretch: its table (rows numbered from 0), its market, and the pairs its own report holds."""

    table: pd.DataFrame
    spec: MarketSpec
    pairs: frozenset[Pair]

    @property
    def start_ns(self) -> np.ndarray:
        return self.table["timestamp"].dt.as_unit("ns").astype("int64").to_numpy()

    @property
    def sessions(self) -> ExchangeSessions:
        return assign_sessions(self.start_ns, self.spec.calendar)

    @property
    def quantum(self) -> float:
        return self.spec.tick or 0.01

    def places(
        self, rng: np.random.Generator, before: int = 30, after: int = 30, allowed: np.ndarray | bool = True
    ) -> list[int]:
        """PLACES random rows far apart, of those allowed (bool[N]): inside sessions, nothing reported near them, and at
        the edges of the stretch to be spoiled bars with a range, on the tick, each a minute after the one before it."""
        count = len(self.table)
        reported = [row for kind, row in self.pairs if kind not in ("no_trade", "off_tick")]
        sessions = self.sessions
        bad = ~sessions.inside | sessions.session_start_mask() | np.isin(np.arange(count), reported)
        total = np.concatenate([[0], np.cumsum(bad)])
        plain = (self.table["high"] > self.table["low"]).to_numpy(copy=True)
        plain[[row for kind, row in self.pairs if kind in ("off_tick", "no_trade")]] = False
        rows = np.arange(before + 30, count - after - 30)
        clear = total[rows + after + 15] == total[rows - before - 15]
        clear &= np.broadcast_to(allowed, count)[rows]
        for offset in (-1, 0, 1, 2, after - 1, after):
            clear &= plain[rows + offset]
        chosen: list[int] = []
        for row in rng.permutation(rows[clear]).tolist():
            if all(abs(row - other) > before + after + 400 for other in chosen):
                chosen.append(row)
            if len(chosen) == PLACES:
                return sorted(chosen)
        raise AssertionError("the stretch has no five such places")


def pairs_of(findings) -> frozenset[Pair]:
    return frozenset((found.kind, int(row)) for found in findings for row in found.rows)


def clean_markets(bars: Path) -> dict[str, Market]:
    """The stretches of the files in this folder, each with its own report."""
    built = {}
    for symbol, days in STRETCHES.items():
        raw = pd.read_parquet(bars / f"{symbol}_1m.parquet")
        since, until = (pd.Timestamp(day, tz="UTC") for day in days)
        table = raw[(raw["timestamp"] >= since) & (raw["timestamp"] < until)].reset_index(drop=True)
        spec = resolve_market_spec(symbol, table.set_index("timestamp"))
        built[symbol] = Market(table, spec, pairs_of(validate_bars(table, market=spec)[1].findings))
    return built


@dataclass(frozen=True)
class Spoiled:
    """table : the spoiled bars.  source : int64, the original row of each, -1 if put in.
    added : pairs the report gains, in rows of `table`.  lost : pairs it loses, in rows of the original.
    """

    table: pd.DataFrame
    source: np.ndarray
    added: set[Pair]
    lost: set[Pair] = field(default_factory=set)
