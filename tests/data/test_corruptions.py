"""Each named corruption at five random places of four real markets: the report changes by exactly these rows.

And no threshold leans on one file: what all other files do, clean and spoiled, leaves room for the one left out.
"""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.bars import check_bars
from ml_factory.data.sessions import market_for
from ml_factory.errors import BarsError
from tests.data.corruptions import CORRUPTIONS, Market, Pair, Spoiled

# contiguous stretches, so that all of it takes seconds; the whole files give the same (docs/log.md)
STRETCHES = {
    "ES": ("2025-01-20", "2025-04-05"),
    "SPY": ("2024-07-08", "2024-11-02"),
    "XAUUSD": ("2026-01-05", "2026-03-21"),
    "BTCUSD": ("2017-03-01", "2017-04-20"),
}
DOES_NOT_APPLY = {
    ("ES", "run without volume"): "the file has no volume",
    ("BTCUSD", "shifted weeks"): "a market that never closes shows no clock",
    ("BTCUSD", "bars in the halt"): "it has no halt",
}
CASES = [(s, kind) for s in STRETCHES for kind in CORRUPTIONS if (s, kind) not in DOES_NOT_APPLY]


def pairs(findings) -> frozenset[Pair]:
    return frozenset((found.kind, int(row)) for found in findings for row in found.rows)


@pytest.fixture(scope="module")
def markets(shared_data) -> dict[str, Market]:
    built = {}
    for symbol, (since, until) in STRETCHES.items():
        raw = pd.read_parquet(shared_data / "bars" / f"{symbol}_1m.parquet")
        inside = (raw["timestamp"] >= pd.Timestamp(since, tz="UTC")) & (
            raw["timestamp"] < pd.Timestamp(until, tz="UTC")
        )
        table = raw[inside].reset_index(drop=True)
        spec = market_for(symbol, table.set_index("timestamp"))
        built[symbol] = Market(table, spec, pairs(check_bars(table, market=spec)[1].findings))
    return built


def difference(market: Market, spoiled: Spoiled) -> tuple[set[Pair], set[Pair]]:
    """(gained, lost) pairs of the spoiled table's report against the clean one's, in rows of the spoiled table.

    Refused bars have no report: the error's findings are what is gained, and nothing was refused before.
    """
    try:
        now = pairs(check_bars(spoiled.table, market=market.spec)[1].findings)
    except BarsError as error:
        assert all(found.severity == "refused" for found in error.findings)
        return set(pairs(error.findings)), in_new_rows(spoiled, spoiled.lost)
    before = in_new_rows(spoiled, market.pairs)
    return set(now - before), set(before - now)


def in_new_rows(spoiled: Spoiled, found) -> set[Pair]:
    """The pairs whose rows are still there, by their new row numbers."""
    kept = np.flatnonzero(spoiled.source >= 0)
    new_row = dict(zip(spoiled.source[kept].tolist(), kept.tolist(), strict=True))
    return {(kind, new_row[row]) for kind, row in found if row in new_row}


def test_there_are_twenty_kinds_for_every_market():
    assert all(sum(symbol == s for s, _ in CASES) >= 20 for symbol in STRETCHES)
    assert len(DOES_NOT_APPLY) == 3


@pytest.mark.parametrize(("symbol", "kind"), CASES)
def test_the_report_changes_by_the_injected_rows_and_no_others(markets, symbol, kind):
    spoiled = CORRUPTIONS[kind](markets[symbol], np.random.default_rng([3, len(kind)]))
    assert len({row for _, row in spoiled.added}) >= 5
    gained, lost = difference(markets[symbol], spoiled)
    assert gained == spoiled.added
    assert lost == in_new_rows(spoiled, spoiled.lost)
