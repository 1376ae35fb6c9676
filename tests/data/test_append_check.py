"""Bars checked as they come are told what a check of the whole file tells."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data import append_check
from ml_factory.data.append_check import canonicalize_for_append, check_appended_bars
from ml_factory.data.prefix_hash import PrefixHasher
from ml_factory.data.sessions import resolve_market_spec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.data.validation import validate_bars
from tests.data.corruptions import CORRUPTIONS

BARS = synthetic_bars(days=30, seed=4)
FIRST = 24_000  # more than the detectors' look-back


def blemished() -> pd.DataFrame:
    """A hole and a spike before FIRST and after it, and a run of one price after it."""
    bars = BARS.copy()
    for row in (5_000, 26_500):
        bars.iloc[row, bars.columns.get_loc("high")] *= 1.05
    price = bars["close"].iloc[29_999]
    bars.iloc[30_000:30_090, :4] = price
    return bars.drop(bars.index[np.r_[9_000:9_400, 27_000:27_500]])


def reported_in_steps(bars: pd.DataFrame, *stops: int, market=None) -> dict | None:
    """The report after a check of the bars up to the first stop, continued at each of the others."""
    market = market or resolve_market_spec("ODD", bars.iloc[: stops[0]])
    _, report = validate_bars(bars.iloc[: stops[0]].reset_index(), market=market)
    reported, old = report.to_dict(), stops[0]
    for stop in stops[1:]:
        reported, old = check_appended_bars(PrefixHasher(bars.iloc[:stop]), old, reported, market), stop
    return reported


def rows_reported(reported: dict) -> dict[str, tuple]:
    """Kind -> how many, which in words, and the first of them; what the whole file is blamed for has no rows."""
    return {one["kind"]: (one["count"], one["which"], one["rows"]) for one in reported["findings"] if one["count"]}


@pytest.mark.parametrize("stops", [(FIRST,), (FIRST, 26_501, 26_502, 26_800), (25_001, 29_600)])
def test_check_appended_in_steps_gives_report_of_whole_file_check(stops):
    bars = blemished()
    _, whole = validate_bars(bars.reset_index(), symbol="ODD", market=resolve_market_spec("ODD", bars))
    reported, wanted = reported_in_steps(bars, *stops, len(bars)), whole.to_dict()
    assert {"spike", "stale_run", "download_hole"} <= set(whole.kinds) | {"download_hole"}
    for name in ("rows", "first", "last", "minutes", "fingerprint", "facts"):
        assert reported[name] == wanted[name]
    found = {one["kind"]: one for one in reported["findings"]}
    assert found.keys() == {one["kind"] for one in wanted["findings"]}
    for one in wanted["findings"]:
        for name in ("severity", "count", "which", "rows"):
            assert found[one["kind"]][name] == one[name], one["kind"]


@pytest.mark.parametrize("what", ["a low above the high", "a bar twice", "minutes of five"])
def test_check_appended_invalid_or_other_spacing_bars_returns_none(what):
    bars = BARS.copy()
    if what == "a low above the high":
        bars.iloc[25_000, bars.columns.get_loc("low")] *= 2
    elif what == "a bar twice":
        bars = pd.concat([bars[:25_001], bars[25_000:]])
    else:
        bars = pd.concat([bars[:25_000], bars[25_000:][::5]])
    head, report = validate_bars(BARS[:FIRST].reset_index(), symbol="ODD")
    assert (
        check_appended_bars(PrefixHasher(BARS), FIRST, report.to_dict(), resolve_market_spec("ODD", head)) is not None
    )
    assert check_appended_bars(PrefixHasher(bars), FIRST, report.to_dict(), resolve_market_spec("ODD", head)) is None


def test_as_canonical_accepts_only_tables_in_canonical_form():
    table = BARS[:100].reset_index()
    assert canonicalize_for_append(table).equals(validate_bars(table)[0])
    assert canonicalize_for_append(table.assign(volume=0.0)).equals(validate_bars(table.assign(volume=0.0))[0])
    assert canonicalize_for_append(table.rename(columns={"close": "last"})) is None
    assert canonicalize_for_append(table.assign(timestamp=table["timestamp"].dt.tz_localize(None))) is None
    assert canonicalize_for_append(table.assign(close=table["close"].astype(str))) is None
    assert canonicalize_for_append(table.assign(volume=table["volume"].where(table.index > 3))) is None


# ---- at the seam -----------------------------------------------------------------------------------------------------


def edited(first: int, count: int, change) -> pd.DataFrame:
    """The bars with `change(prices)` of `count` bars."""
    bars = BARS.copy()
    bars.iloc[first : first + count, :4] = change(bars.iloc[first : first + count, :4])
    return bars


def stood_still(first: int) -> pd.DataFrame:
    price = BARS["close"].iloc[first - 1]
    return edited(first, 90, lambda prices: prices * 0 + price)


def spiked(first: int) -> pd.DataFrame:
    bars = BARS.copy()
    bars.iloc[first, [1, 3]] = 1.05 * bars["close"].iloc[first - 1]
    return bars


STRANGE = {
    "spike": spiked,
    "stale_run": stood_still,
    "unit": lambda first: edited(first, 30, lambda prices: prices * 100),
    "adjustment": lambda first: edited(first, 150, lambda prices: prices * 3),
    "roll": lambda first: edited(first, 150, lambda prices: prices * 1.04),
    "off_tick": lambda first: edited(first, 3, lambda prices: prices.assign(high=prices["high"] + 0.1)),
    "missing": lambda first: BARS.drop(BARS.index[first : first + 75]),
    "zero_volume": lambda first: BARS.assign(
        volume=BARS["volume"].where((np.arange(len(BARS)) < first) | (np.arange(len(BARS)) >= first + 60), 0.0)
    ),
}


@pytest.mark.parametrize("place", [-200, -40, -2, -1, 0, 1, 30])
@pytest.mark.parametrize("kind", STRANGE)
def test_check_appended_defect_near_append_point_gives_rows_of_whole_file_check(kind, place):
    """Also what only bars after the seam can tell of one before it, and where bars come one by one."""
    bars = STRANGE[kind](FIRST + place)
    market = resolve_market_spec("ODD", bars, tick=0.25)
    _, whole = validate_bars(bars.reset_index(), market=market)
    wanted = rows_reported(whole.to_dict())
    assert kind in wanted
    reported = reported_in_steps(bars, FIRST, FIRST + 1, FIRST + 2, FIRST + 100, len(bars), market=market)
    assert rows_reported(reported) == wanted


REPORTED = [
    "off-tick price", "one-bar spike up", "one-bar spike down", "bad high wick", "bad low wick", "stale run",
    "missing block", "absent day", "paging holes", "split", "roll", "another unit", "run without volume",
    "bars in the halt",
]  # fmt: skip


@pytest.mark.parametrize(("symbol", "corruption"), [("SPY", one) for one in REPORTED if one != "bars in the halt"]
                         + [("ES", one) for one in REPORTED if one != "run without volume"])  # fmt: skip
def test_check_appended_corruption_in_real_bars_gives_rows_of_whole_file_check(real_markets, symbol, corruption):
    """The seam is one bar after the first of the last injected rows: one side of it is spoiled by the other."""
    market = real_markets[symbol]
    spoiled = CORRUPTIONS[corruption](market, np.random.default_rng([5, len(corruption)]))
    bars = canonicalize_for_append(spoiled.table)
    wanted = rows_reported(validate_bars(spoiled.table, market=market.spec)[1].to_dict())
    last = max(row for _, row in spoiled.added)
    for seam in (last, last + 1):
        assert rows_reported(reported_in_steps(bars, seam, len(bars), market=market.spec)) == wanted


# What the last hours or weeks before the seam make ordinary; without them it would be told.
BEHIND = slice(FIRST - 700, FIRST)


def with_flat_bars() -> pd.DataFrame:
    bars, rng = BARS.copy(), np.random.default_rng(0)
    flat = np.zeros(len(bars), bool)
    flat[BEHIND] = rng.random(700) < 0.6
    flat[FIRST + 5 : FIRST + 35] = True
    close = bars["close"].where(~flat).ffill()
    for name in ("open", "high", "low", "close"):
        bars[name] = np.where(flat, close, bars[name])
    return bars


def with_bars_without_volume() -> pd.DataFrame:
    volume, rng = BARS["volume"].to_numpy().copy(), np.random.default_rng(0)
    volume[BEHIND] *= rng.random(700) < 0.4
    volume[FIRST + 5 : FIRST + 35] = 0
    return BARS.assign(volume=volume)


def with_silent_minutes() -> pd.DataFrame:
    kept = np.ones(len(BARS), bool)
    kept[FIRST - 1_400 : FIRST] = np.random.default_rng(0).random(1_400) < 0.4
    kept[FIRST + 5 : FIRST + 35] = False
    return BARS[kept]


def with_wild_moves() -> pd.DataFrame:
    """Prices that jump to and fro, and one bar after them that would be a spike anywhere else."""
    bars, rng = BARS.copy(), np.random.default_rng(0)
    factor = np.ones(len(bars))
    factor[BEHIND] = np.exp(0.004 * rng.standard_normal(700))
    factor[FIRST] = 1.02
    bars[["open", "high", "low", "close"]] = bars[["open", "high", "low", "close"]].mul(factor, axis=0)
    return bars


def with_a_daily_pause() -> pd.DataFrame:
    """Forty minutes of each session, from the third on."""
    minute = BARS.index.hour * 60 + BARS.index.minute
    return BARS[~((minute >= 720) & (minute < 760) & (np.arange(len(BARS)) > 4_000))]


ORDINARY = {
    with_flat_bars: 50,
    with_bars_without_volume: 50,
    with_silent_minutes: 50,
    with_wild_moves: 50,
    with_a_daily_pause: 5_000,
}


def reported_of(made) -> tuple[dict, dict]:
    """What is told at a seam of these bars, and of them all at once."""
    bars = made()
    seam = int(bars.index.searchsorted(BARS.index[FIRST]))
    market = resolve_market_spec("ODD", bars)
    _, whole = validate_bars(bars.reset_index(), market=market)
    return rows_reported(reported_in_steps(bars, seam, len(bars), market=market)), rows_reported(whole.to_dict())


@pytest.mark.parametrize("made", ORDINARY)
def test_check_appended_pattern_usual_in_earlier_bars_gives_rows_of_whole_file_check(made):
    reported, wanted = reported_of(made)
    assert reported == wanted


@pytest.mark.parametrize(("made", "few"), ORDINARY.items())
def test_check_appended_with_short_look_back_differs_from_whole_file_check(made, few, monkeypatch):
    """So the look-back is long enough for every detector's habit, and would be missed."""
    monkeypatch.setattr(append_check, "LOOK_BACK", few)
    reported, wanted = reported_of(made)
    assert reported != wanted
