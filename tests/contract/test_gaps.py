"""Every gap of a file has one kind, and the right one: against a minute-by-minute count and by hand."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.doors import GAP_KINDS, MINUTE_NS, assign_sessions, find_gaps, synthetic_bars


def minutes_of(calendar: str, days: int, start: str, missing: float = 0.0) -> np.ndarray:
    bars = synthetic_bars(days, "null", seed=2, calendar=calendar, start=start, missing=missing)
    return bars.index.as_unit("ns").asi8


def gaps_of(start_ns: np.ndarray, calendar: str = "cme", minutes: int = 1):
    return find_gaps(start_ns, calendar, minutes)


def at(start_ns: np.ndarray, moment: str) -> int:
    return int(np.searchsorted(start_ns, pd.Timestamp(moment, tz="America/Chicago").value))


def without(start_ns: np.ndarray, since: str, until: str) -> np.ndarray:
    return np.delete(start_ns, np.arange(at(start_ns, since), at(start_ns, until)))


def kind_before(start_ns: np.ndarray, moment: str, calendar: str = "cme") -> str:
    gaps = gaps_of(start_ns, calendar)
    return str(gaps.kind[gaps.row == at(start_ns, moment)][0])


@pytest.fixture(scope="module")
def spring() -> np.ndarray:
    """Four weeks that hold Good Friday, the end of winter time and Presidents' Day's early close."""
    return minutes_of("cme", 40, "2024-02-12")


@pytest.mark.parametrize("calendar", ["cme", "us_equity", "fx", "24h"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_find_gaps_random_bars_each_gap_has_one_kind_and_counted_open_minutes(calendar, data):
    start = np.datetime64(data.draw(st.sampled_from(["2024-03-25", "2024-11-25", "2024-06-17"])), "ns").astype(np.int64)
    seed, share = data.draw(st.integers(0, 10**6)), data.draw(st.floats(0.002, 0.9))
    rng = np.random.default_rng(seed)
    grid = start + np.arange(12 * 1440) * MINUTE_NS
    starts = grid[rng.random(len(grid)) < share]
    for first in rng.integers(0, max(len(starts) - 1, 1), 3):  # whole stretches absent too
        starts = np.delete(starts, np.arange(first, min(first + int(rng.integers(1, 900)), len(starts) - 2)))
    gaps = gaps_of(starts, calendar)
    expected = np.flatnonzero(np.diff(starts) != MINUTE_NS) + 1
    assert np.array_equal(gaps.row, expected) and set(gaps.kind) <= set(GAP_KINDS)  # each once, and nothing else
    if calendar in ("fx", "24h"):  # no early closes: the sessions alone say what is open
        open_now = np.concatenate([[0], np.cumsum(assign_sessions(grid, calendar).inside)])
        k = (starts - start) // MINUTE_NS
        assert np.array_equal(gaps.open, open_now[k[expected]] - open_now[k[expected - 1] + 1])


def test_find_gaps_closed_times_get_weekend_holiday_or_early_close_kind(spring):
    gaps = gaps_of(spring)
    assert {kind: int((gaps.kind == kind).sum()) for kind in GAP_KINDS if (gaps.kind == kind).any()} == {
        "session": 30,
        "weekend": 8,
        "early_close": 1,  # 19 February
    }  # forty sessions
    friday = without(spring, "2024-03-28 17:00", "2024-03-31 17:00")  # Good Friday
    assert kind_before(friday, "2024-03-31 17:00") == "holiday"
    assert kind_before(spring, "2024-02-19 17:00") == "early_close"
    assert kind_before(spring, "2024-03-10 17:00") == "weekend"


def test_find_gaps_holiday_with_bars_counts_as_open_between_first_and_last_bar(spring):
    short = without(spring, "2024-03-29 08:15", "2024-03-31 17:00")  # Good Friday until 8:15
    assert kind_before(short, "2024-03-31 17:00") == "holiday"
    hole = without(short, "2024-03-29 02:00", "2024-03-29 04:00")
    gaps = gaps_of(hole)
    mine = gaps.row == at(hole, "2024-03-29 04:00")
    assert gaps.kind[mine] == "missing" and gaps.open[mine] == 120
    quiet = without(short, "2024-03-29 02:00", "2024-03-29 02:02")
    assert kind_before(quiet, "2024-03-29 02:02") == "no_trade"


def test_find_gaps_one_bar_or_weekend_bars_only_gives_no_missing_gap():
    saturday = pd.Timestamp("2024-03-02 12:00", tz="UTC").value + np.array([0, 1, 5]) * MINUTE_NS
    assert len(gaps_of(saturday[:1]).row) == 0
    assert gaps_of(saturday).kind.tolist() == ["weekend"]


def test_find_gaps_silence_longer_than_usual_for_market_is_missing(spring):
    five = without(spring, "2024-03-05 09:00", "2024-03-05 09:05")
    assert kind_before(five, "2024-03-05 09:05") == "no_trade"
    twelve = without(spring, "2024-03-05 09:00", "2024-03-05 09:12")
    assert kind_before(twelve, "2024-03-05 09:12") == "missing"
    thin = minutes_of("cme", 10, "2024-03-04", missing=0.49)
    same = without(thin, "2024-03-05 09:00", "2024-03-05 09:12")
    assert kind_before(same, "2024-03-05 09:12") == "no_trade"
    late = without(spring, "2024-03-04 17:00", "2024-03-04 18:30")  # the open is late by an hour and a half
    gaps = gaps_of(late)
    mine = gaps.row == at(late, "2024-03-04 18:30")
    assert gaps.kind[mine] == "missing" and gaps.open[mine] == 90 and gaps.length[mine] == 150


def test_find_gaps_5_minute_bars_counts_open_minutes_of_missing_bars():
    starts = minutes_of("cme", 10, "2024-03-04")
    five = np.unique(starts // (5 * MINUTE_NS)) * 5 * MINUTE_NS
    gaps = gaps_of(five, minutes=5)
    assert set(gaps.kind) == {"session", "weekend"} and set(gaps.length) == {60, 2940, 2880}
    hole = np.delete(five, np.arange(500, 525))
    gaps = gaps_of(hole, minutes=5)
    assert gaps.row[gaps.kind == "missing"].tolist() == [500] and gaps.open[gaps.kind == "missing"] == 125


def paused(days: list[int]) -> list[str]:
    """Kinds of the gaps of thirty 24-hour days that fall silent at 10:00 on some of them, each for another while."""
    starts = minutes_of("24h", 30, "2024-03-04")
    day, minute = np.divmod((starts - starts[0]) // MINUTE_NS, 1440)
    silent = np.isin(day, days) & (minute >= 600) & (minute < 615 + day * 7 % 11)
    return gaps_of(starts[~silent], "24h").kind.tolist()


def test_find_gaps_halt_needs_10_days_and_half_of_days_between():
    assert paused(list(range(5, 15))) == ["session"] * 10
    assert paused(list(range(5, 14))) == ["missing"] * 9  # nine days are no habit
    assert paused(list(range(0, 20, 2))) == ["session"] * 10  # ten of nineteen
    assert paused([*range(0, 18, 2), 20]) == ["missing"] * 10  # ten of twenty-one
    assert paused([*range(0, 18, 2), 19]) == ["session"] * 10  # ten of twenty: just half


def test_find_gaps_index_futures_1515_pause_is_session_before_july_2021_only():
    """Three days of 2019 are too few for a habit; after June 2021 the same silence is strange."""
    for start, kinds in (("2019-03-04", {"session"}), ("2022-03-07", {"missing"})):
        starts = minutes_of("cme", 3, start)
        chicago = pd.DatetimeIndex(starts, tz="UTC").tz_convert("America/Chicago")
        clock = chicago.hour * 60 + chicago.minute
        gaps = gaps_of(starts[(clock < 15 * 60 + 15) | (clock >= 15 * 60 + 30)])
        assert set(gaps.kind[gaps.length == 15]) == kinds and (gaps.length == 15).sum() == 3
        assert set(gaps.open[gaps.length == 15]) == ({0} if kinds == {"session"} else {15})
