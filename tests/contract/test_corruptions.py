"""Each named corruption at five random places of four real markets: the report changes by exactly these rows."""

import numpy as np
import pytest

from ml_factory.errors import BarsError
from tests.contract.doors import validate_bars
from tests.data.corruptions import CORRUPTIONS
from tests.data.real_markets import STRETCHES, Market, Pair, Spoiled, pairs_of

DOES_NOT_APPLY = {
    ("ES", "run without volume"): "the file has no volume",
    ("BTCUSD", "shifted clock"): "a market that never closes shows no clock",
    ("BTCUSD", "bars in the halt"): "it has no halt",
}
CASES = [(s, kind) for s in STRETCHES for kind in CORRUPTIONS if (s, kind) not in DOES_NOT_APPLY]


def difference(market: Market, spoiled: Spoiled) -> tuple[set[Pair], set[Pair]]:
    """(gained, lost) pairs of the spoiled table's report against the clean one's, in rows of the spoiled table.

    Refused bars have no report: the error's findings are what is gained, and nothing was refused before.
    """
    try:
        now = pairs_of(validate_bars(spoiled.table, market=market.spec)[1].findings)
    except BarsError as error:
        assert all(found.severity == "refused" for found in error.findings)
        return set(pairs_of(error.findings)), in_new_rows(spoiled, spoiled.lost)
    before = in_new_rows(spoiled, market.pairs)
    return set(now - before), set(before - now)


def in_new_rows(spoiled: Spoiled, found) -> set[Pair]:
    """The pairs whose rows are still there, by their new row numbers."""
    kept = np.flatnonzero(spoiled.source >= 0)
    new_row = dict(zip(spoiled.source[kept].tolist(), kept.tolist(), strict=True))
    return {(kind, new_row[row]) for kind, row in found if row in new_row}


def test_corruptions_every_market_has_at_least_20_kinds():
    assert all(sum(symbol == s for s, _ in CASES) >= 20 for symbol in STRETCHES)
    assert len(DOES_NOT_APPLY) == 3


@pytest.mark.parametrize(("symbol", "kind"), CASES)
def test_check_bars_with_injected_corruption_reports_exactly_injected_rows(real_markets, symbol, kind):
    spoiled = CORRUPTIONS[kind](real_markets[symbol], np.random.default_rng([3, len(kind)]))
    assert len({row for _, row in spoiled.added}) >= 5
    gained, lost = difference(real_markets[symbol], spoiled)
    assert gained == spoiled.added
    assert lost == in_new_rows(spoiled, spoiled.lost)
