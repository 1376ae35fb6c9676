"""Other futures are lawful feeds, leave the past alone, and are other ones; cuts go where leaks live."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.sessions import MINUTE_NS
from ml_factory.data.validation import validate_bars
from ml_factory.leakage.cuts import PERTURBATIONS, SAME_TIMES, TRUNCATE, choose_cut_points, perturb_future_bars
from ml_factory.leakage.tables import COLUMNS, ROWS, Table, compare
from tests.leakage.catalogue import bars_with_events

FIRST = 20_000


@pytest.fixture(scope="module")
def bars() -> pd.DataFrame:
    return bars_with_events()


@pytest.mark.parametrize("way", [*PERTURBATIONS, TRUNCATE])
@pytest.mark.parametrize("first", [FIRST, 30_001])
def test_perturb_keeps_bars_before_cut_and_changes_bars_after(way, first, bars):
    other = perturb_future_bars(bars, first, way)
    assert other.index[:first].equals(bars.index[:first])
    assert other[bars.columns].iloc[:first].to_numpy().tobytes() == bars.iloc[:first].to_numpy().tobytes()
    if way == TRUNCATE:
        assert len(other) == first
        return
    assert not other[bars.columns].iloc[first:].equals(bars.iloc[first:])
    if way in SAME_TIMES:
        assert other.index.equals(bars.index)
    # Lawful: the contract of bars takes it as it is.
    checked, _ = validate_bars(other.reset_index(), symbol="DEMO")
    assert checked.index.equals(other.index) and (other.index.asi8 % MINUTE_NS == 0).all()


@pytest.mark.parametrize("way", PERTURBATIONS)
def test_perturb_bars_without_volume_or_with_contracts_stays_valid(way, bars):
    contracts = bars.drop(columns="volume").assign(contract=np.arange(len(bars), dtype=np.int32) // 10_000)
    other = perturb_future_bars(contracts, FIRST, way)
    assert other["contract"].iloc[:FIRST].equals(contracts["contract"].iloc[:FIRST])
    assert other.index.is_monotonic_increasing and other.index.is_unique
    assert ("volume" in other) == (way == "rewrite")
    assert other["contract"].is_monotonic_increasing  # an inserted bar is of the contract of its day
    assert np.isfinite(other[["open", "high", "low", "close"]].to_numpy()).all()


def test_perturb_rethin_removes_and_adds_bars_and_follows_its_seed(bars):
    other = perturb_future_bars(bars, FIRST, "rethin")
    assert len(bars.index[FIRST:].difference(other.index)) > 1_000
    assert len(other.index[FIRST:].difference(bars.index)) > 100
    one, again, other = (perturb_future_bars(bars, FIRST, "rewrite", seed) for seed in (1, 1, 2))
    assert one.equals(again) and not one.equals(other)
    assert all(len(perturb_future_bars(bars, len(bars) - 1, way)) >= len(bars) - 1 for way in PERTURBATIONS)


def test_choose_cuts_stand_at_moments_given_by_reason(bars):
    cuts = choose_cut_points(bars, "cme", 60, earliest=9_000)
    assert len(cuts) == 60 == len({cut.first for cut in cuts})
    assert (
        cuts
        == choose_cut_points(bars, "cme", 60, earliest=9_000)
        != choose_cut_points(bars, "cme", 60, seed=1, earliest=9_000)
    )
    start = bars.index.as_unit("ns").asi8
    for cut in cuts:
        assert cut.first >= 9_000
        assert cut.at == start[cut.first - 1] + MINUTE_NS and cut.quiet == start[cut.first]
        silent = (cut.quiet - cut.at) // MINUTE_NS
        if cut.why == "session end":
            assert silent >= 60
        if cut.why == "gap":
            assert silent > 0
        if cut.why == "frame edge":
            assert pd.Timestamp(cut.quiet).minute % 15 == 0
    clocks = [pd.Timestamp(cut.quiet, tz="UTC") for cut in cuts if cut.why == "daylight saving"]
    assert clocks and clocks[0].date() == pd.Timestamp("2024-03-10").date()


def test_choose_cuts_cover_a_short_day_and_the_last_bar_of_a_session(bars):
    short = bars.drop(bars.index[(bars.index >= "2024-03-12 14:00") & (bars.index < "2024-03-12 22:00")])
    cuts = choose_cut_points(short, "cme", 60)
    (day,) = [pd.Timestamp(cut.at) for cut in cuts if cut.why == "short day"]
    assert pd.Timestamp("2024-03-12 13:30") < day <= pd.Timestamp("2024-03-12 14:00")
    ends = [cut for cut in cuts if cut.why == "one bar before a session end"]
    start = short.index.as_unit("ns").asi8
    assert ends and all(start[cut.first + 1] - start[cut.first] > 30 * MINUTE_NS for cut in ends)


def test_choose_cuts_random_cuts_spread_over_hours_of_week(bars):
    cuts = [cut for cut in choose_cut_points(bars, "cme", 400) if cut.why == "hour of the week"]
    hours = [pd.Timestamp(cut.quiet).weekday() * 24 + pd.Timestamp(cut.quiet).hour for cut in cuts]
    counts = pd.Series(hours).value_counts()
    open_hours = len({(moment.weekday(), moment.hour) for moment in bars.index})
    assert len(cuts) >= 20 and counts.max() <= -(-len(cuts) // open_hours) + 1


def rows(values, names=("a", "b")) -> pd.DataFrame:
    index = pd.DatetimeIndex(np.arange(len(values)), tz="UTC")
    return pd.DataFrame(np.asarray(values, np.float32), index=index, columns=names)


def test_differences_compare_bits():
    clean = rows([[1, 2], [3, np.nan], [5, 6]])
    assert compare("a", clean.astype(np.float64), clean, "it") == []  # a wider type of the same values
    (found,) = compare("a", rows([[1, 2], [3, np.nan], [5, np.nextafter(np.float32(6), 9)]]), clean, "it")
    assert (found.column, found.rows, pd.Timestamp(found.first_row).nanosecond) == ("b", 1, 2)
    (zero,) = compare("a", rows([[-0.0, 1]]), rows([[0.0, 1]]), "it")
    assert zero.column == "a"


def test_differences_added_or_missing_rows_and_columns_are_reported():
    clean = rows([[1, 2], [3, 4], [5, 6]])
    assert compare("a", clean.iloc[:2], clean, "it")[0].column == ROWS
    other = clean.rename(columns={"b": "c"})
    assert compare("a", other, clean, "it")[0].column.startswith(COLUMNS) and compare(
        "a", other, clean, "it", extra=True
    )
    assert compare("a", clean.assign(c=1), clean, "it") and not compare("a", clean.assign(c=1), clean, "it", extra=True)


def test_table_known_by_keeps_rows_that_are_proven_wherever_they_stand():
    assert Table(rows([[1, 2], [3, 4], [5, 6]]), np.array([0, 9, 2])).known_by(2)["a"].tolist() == [1, 5]
