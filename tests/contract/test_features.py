"""Every family of features, on every calendar, with and without volume: the past stays the same bits.

The market is synthetic, so nothing here skips where there is no real data.
"""

import numpy as np
import pandas as pd
import pytest

from tests.contract import doors

MINUTE_NS = 60_000_000_000
CALENDARS = ("cme", "us_equity", "fx", "24h")  # one for each trading hours: the groups of CME differ on holidays alone
CASES = [
    (family, calendar, volume)
    for calendar in CALENDARS
    for volume in (True, False)
    for family in doors.FAMILIES
    if volume or family != "volume"
]


@pytest.fixture(scope="module")
def market():
    """(calendar, volume) -> bars, facts; made once."""
    kept = {}

    def of(calendar: str, volume: bool):
        if (calendar, volume) not in kept:
            kept[calendar, volume] = doors.calendar_market(calendar, volume)
        return kept[calendar, volume]

    return of


def disturbed(bars: pd.DataFrame, cut: int) -> pd.DataFrame:
    """The bars up to `cut`, then another market: reversed, 1.7 times as high, a tenth of the minutes missing."""
    rng = np.random.default_rng(cut)
    future = bars.iloc[cut:][::-1] * 1.7
    future.index = bars.index[cut:]
    return pd.concat([bars.iloc[:cut], future[rng.random(len(future)) < 0.9]])


@pytest.mark.parametrize(("family", "calendar", "volume"), CASES)
def test_family_rows_before_cut_are_same_bits_whatever_follows(market, family, calendar, volume):
    bars, facts = market(calendar, volume)
    known_at, values, names = doors.feature_rows(bars, facts, (family,))
    assert len(names) == values.shape[1] > 0 and np.isfinite(values).all()
    for cut in (int(0.7 * len(bars)), int(0.9 * len(bars)) + 2):
        moment = bars.index[cut - 1].value + MINUTE_NS
        rows = int(np.searchsorted(known_at, moment, side="right"))
        assert rows > 50
        for future in (bars.iloc[:cut], disturbed(bars, cut)):
            known, other, same_names = doors.feature_rows(future, facts, (family,))
            assert same_names == names
            np.testing.assert_array_equal(known[:rows], known_at[:rows])
            np.testing.assert_array_equal(other[:rows].view(np.int32), values[:rows].view(np.int32))
        assert family == "calendar" or not np.array_equal(other[rows : rows + 50], values[rows : rows + 50])


@pytest.mark.parametrize("volume", [True, False])
@pytest.mark.parametrize("calendar", CALENDARS)
def test_bars_pushed_in_any_chunks_and_restored_are_rows_of_whole_file(market, calendar, volume):
    bars, facts = market(calendar, volume)
    families = doors.families_with_columns(facts)
    known_at, values, _ = doors.feature_rows(bars, facts, families)
    rng = np.random.default_rng(3)
    sizes = rng.choice([1, 2, 7, 60, 800], 4000).cumsum()
    cuts = [int(cut) for cut in sizes if cut < len(bars)]
    restored = set(rng.choice(len(cuts), 10, replace=False).tolist())
    known, streamed = doors.streamed_rows(bars, facts, families, cuts, restored)
    np.testing.assert_array_equal(known, known_at)
    np.testing.assert_array_equal(streamed.view(np.int32), values.view(np.int32))


@pytest.mark.parametrize("calendar", CALENDARS)
def test_row_is_known_only_when_its_bar_is_complete(market, calendar):
    """A row stands at the end of its base bar, and reads coarse bars that are complete by then."""
    bars, facts = market(calendar, True)
    known_at, _, _ = doors.feature_rows(bars, facts, ("momentum",))
    starts, ends = bars.index.asi8, bars.index.asi8 + MINUTE_NS
    assert (np.diff(known_at) > 0).all()
    assert (known_at % (5 * MINUTE_NS) == 0).all()
    newest = ends[np.searchsorted(ends, known_at, side="right") - 1]
    assert (known_at - newest < 5 * MINUTE_NS).all(), "the base bar holds at least one minute that was traded"
    assert (known_at[-1] <= starts[-1] + MINUTE_NS).all()


@pytest.mark.parametrize("calendar", doors.CALENDARS)
def test_columns_follow_from_calendar_and_volume_alone(market, calendar):
    names = {volume: doors.feature_column_names(market(calendar, volume)[1]) for volume in (True, False)}
    assert [name for name in names[True] if name in names[False]] == names[False]
    assert set(names[True]) > set(names[False])
    assert len(set(names[True])) == len(names[True])
