"""Rolls against a plain twin, hand-worked pairs and a real stretch with two expiries; the past never changes."""

from datetime import date

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_factory.errors import BarsError, SettingsError
from tests.contract import doors

MARKET = doors.MarketSpec("ES", "24h", None, True)
CME = doors.MarketSpec("ES", "cme", 0.25, True)
MIDNIGHT = pd.Timestamp("2024-03-07", tz="UTC")  # the open of the session the pair below rolls into
NOON = pd.Timestamp("2024-03-06 12:00", tz="UTC")
FORCED = doors.RollSpec(first="ESH4", forced=(("ESM4", str(NOON)),))


def one_contract(name: str, close: np.ndarray, index: pd.DatetimeIndex, volume) -> pd.DataFrame:
    opens = np.concatenate([close[:1], close[:-1]])
    columns = {"contract": name, "open": opens, "high": np.maximum(opens, close), "low": np.minimum(opens, close)}
    return pd.DataFrame(columns | {"close": close, "volume": volume}, index=index)


def stacked(*parts: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(parts).sort_index(kind="stable").rename_axis("timestamp")


@pytest.fixture(scope="module")
def walk() -> pd.Series:
    """Closes of 4, 5, 6 and 7 March 2024, every minute of the 24 hours: neither rule can hide behind a gap."""
    index = pd.date_range("2024-03-04", periods=4 * 1440, freq="1min", tz="UTC")
    steps = np.random.default_rng(7).normal(0, 3e-4, len(index))
    return pd.Series(5000 * np.exp(np.cumsum(steps)), index=index)


def pair(walk: pd.Series, times: float = 1.0, plus: float = 0.0) -> pd.DataFrame:
    """ESH4, and ESM4 = ESH4 * times + plus, which trades more from 6 March on."""
    day = walk.index.day
    near = one_contract("ESH4", walk.to_numpy(), walk.index, np.where(day < 6, 90.0, 10.0))
    far = one_contract("ESM4", walk.to_numpy() * times + plus, walk.index, np.where(day < 6, 20.0, 80.0))
    return stacked(near, far)


@pytest.mark.parametrize("forced", [False, True])
def test_continuous_keeps_traded_prices_and_chains_returns_across_roll(walk, forced):
    table = pair(walk, times=1.05)
    spec = doors.RollSpec(first="ESH4", forced=FORCED.forced if forced else ())
    bars, rolls = doors.build_continuous_contract(table, spec, MARKET)
    at = NOON if forced else MIDNIGHT
    assert rolls["at"].tolist() == [walk.index[0], at]
    assert rolls["why"].tolist() == ["first", "forced" if forced else "volume"]
    assert rolls["common"][1] == at - pd.Timedelta("1min") and bars.index.equals(walk.index)
    assert np.flatnonzero(np.diff(bars["contract"])).tolist() == [bars.index.get_loc(at) - 1]
    before = bars.index < at
    for name, part in (("ESH4", before), ("ESM4", ~before)):
        own = table[table["contract"] == name]
        assert (bars.loc[part, [*doors.PRICES, "volume"]] == own.loc[part, [*doors.PRICES, "volume"]]).all().all()
    assert np.allclose(bars["close"] * bars["chain"], walk, rtol=1e-12)  # for features: the returns of what was held


def check_labels_and_windows(bars: pd.DataFrame, market: doors.MarketSpec, at: pd.Timestamp, horizon: int) -> None:
    """Around a roll with no gap and no session edge: only the contract can stop a label there."""
    stamps = bars.index.as_unit("ns").asi8
    row = int(np.searchsorted(stamps, at.value))
    assert stamps[row] - stamps[row - 1] == doors.MINUTE_NS
    assert (np.diff(doors.assign_sessions(stamps[row - 1 : row + 1], market.calendar).id) == 0).all()
    base, minute_bars = doors.resample_bars(bars, market, 5), doors.resample_bars(bars, market, 1)
    labels = doors.triple_barrier_labels(base, minute_bars, doors.LabelSpec(horizon=horizon), market)
    crossing = (base.start[labels["entry_bar"]] < at.value) & (base.start[labels["exit_bar"]] >= at.value)
    assert not crossing.any()
    near = labels[labels.index.isin(at - pd.to_timedelta(np.arange(1, horizon) * 5, unit="min"))]
    assert len(near) and (near["label_end"] <= at + pd.Timedelta("5min")).all()  # the next bar proves the end
    after = int(np.searchsorted(base.start, at.value))
    rows = np.arange(after - 10, after + 20)
    whole = doors.mask_rows_with_full_window(base.segment, rows, 10)
    assert whole.tolist() == [not after <= one < after + 9 for one in rows]
    plain = doors.resample_bars(bars.drop(columns="contract"), market, 5)  # and without the contract it would cross
    assert plain.segment[after - 1] == plain.segment[after] and base.segment[after - 1] < base.segment[after]


def test_continuous_real_bars_of_two_expiries_join_at_last_common_minute(shared_data):
    table = pd.read_parquet(shared_data / "bars" / "ES_contracts_lean_1m.parquet")
    table = table[table["timestamp"].dt.date.astype(str) == "2013-12-18"].set_index("timestamp")
    at = pd.Timestamp("2013-12-18 15:00", tz="UTC")
    spec = doors.RollSpec(first="ES201312", forced=(("ES201403", str(at)),))
    bars, rolls = doors.build_continuous_contract(table.sort_index(kind="stable"), spec, CME)
    assert bars.loc[at, "contract"] == 201403 and bars.loc[at - pd.Timedelta("1min"), "contract"] == 201312
    # 14:59: ES201312 closed at 1783.25, ES201403 at 1777.00
    assert rolls[["close_previous", "close"]].iloc[1].tolist() == [1783.25, 1777.0]
    row = bars.index.get_loc(at)
    step, chained = (np.diff(np.log(one))[row - 1] for one in (bars["close"], bars["close"] * bars["chain"]))
    assert abs(step) > 0.003 and abs(chained) < 0.001  # 6.25 points are 0.35 %, a quiet minute is 0.02 %
    assert (bars[list(doors.PRICES)] % 0.25 == 0).all().all()  # as traded, on the tick
    check_labels_and_windows(bars, CME, at, 12)


def test_continuous_real_es_contracts_roll_by_volume_at_known_dates(shared_data):
    table = pd.read_parquet(shared_data / "bars" / "ES_contracts_lean_1m.parquet").set_index("timestamp")
    bars, rolls = doors.build_continuous_contract(table.sort_index(kind="stable"), doors.RollSpec(), CME)
    assert rolls["contract"].tolist() == ["ES201312", "ES201403", "ES202003"]
    assert rolls["at"][1] == pd.Timestamp("2013-12-18 23:00", tz="UTC")  # 18 December is the first day March leads
    assert pd.isna(rolls["common"][2])  # six years without a minute in common
    assert not bars.index.has_duplicates and bars.index.is_monotonic_increasing


# ---- the rule, against a plain twin ----------------------------------------------------------------------------------

NAMES = ["ESH4", "ESM4", "ESU4", "ESZ4", "ESH5"]


def random_table(seed: int) -> pd.DataFrame:
    """Twelve days, a few minutes each, five contracts that come and go, volumes without any order."""
    rng = np.random.default_rng(seed)
    parts = []
    for k, name in enumerate(NAMES):
        days = [day for day in range(12) if rng.random() < 0.8 and day >= k - 1]
        minutes = [day * 1440 + m for day in days for m in sorted(rng.choice(1440, 4, replace=False))]
        minutes = [m // 10 * 10 for m in minutes]  # so that contracts meet in some minutes
        index = pd.Timestamp("2024-03-04", tz="UTC") + pd.to_timedelta(sorted(set(minutes)), unit="min")
        if len(index):
            close = 100.0 + 3 * k + rng.normal(0, 1, len(index)).cumsum().round(2)
            parts.append(one_contract(name, close, index, rng.integers(0, 9, len(index)).astype(float)))
    return stacked(*parts)


def reference_rolls(table: pd.DataFrame, by: str, days_before: int = 6) -> list[tuple[pd.Timestamp, str]]:
    """The rule in words, one session after the other."""
    last_day = {name: doors.parse_contract_code(name, table.index[0]).last_holding_day() for name in NAMES}
    present, rolls, earlier = None, [], None
    for day, bars in table.groupby(table.index.date):
        if earlier is not None:
            later = [n for n in NAMES if present is None or NAMES.index(n) > NAMES.index(present)]
            if by == "volume":
                traded = {n: float(earlier.loc[earlier["contract"] == n, "volume"].sum()) for n in NAMES}
                best = max(later, key=lambda n: (traded[n], -NAMES.index(n)), default=None)
                wins = best is not None and traded[best] > (traded[present] if present else 0.0)
            else:
                before = set(table.loc[table.index.date < day, "contract"])
                weekdays = {n: len(pd.bdate_range(day, last_day[n])) - 1 for n in NAMES}  # all third Fridays
                best = next((n for n in later if n in before and weekdays[n] > days_before), None)
                wins = best is not None and (present is None or weekdays[present] <= days_before)
            if wins:
                present = best
                rolls.append((pd.Timestamp(day, tz="UTC"), best))
        earlier = bars
    return rolls


@pytest.mark.parametrize("by", ["volume", "date"])
def test_continuous_random_contracts_roll_at_times_of_reference(by):
    changes = 0
    for seed in range(30):
        table = random_table(seed)
        bars, rolls = doors.build_continuous_contract(table, doors.RollSpec(by=by), MARKET)
        expected = reference_rolls(table, by)
        assert list(zip(rolls["at"], rolls["contract"], strict=True)) == expected, seed
        changes += len(expected) - 1
        held = pd.Series([name for _, name in expected], [at for at, _ in expected])
        due = held.reindex(table.index.normalize(), method="ffill").to_numpy()
        kept = table[table["contract"].to_numpy() == due]
        assert bars.index.equals(kept.index) and (bars["close"] == kept["close"]).all()
    assert changes > 20


# ---- whatever comes after --------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    share=st.floats(0.02, 1.0),
    by=st.sampled_from(["volume", "date"]),
    absurd=st.booleans(),
)
def test_continuous_with_later_bars_appended_keeps_earlier_rows_and_rolls(seed, share, by, absurd):
    table = random_table(seed)
    cut = max(1, int(share * len(table)))
    while cut < len(table) and table.index[cut] == table.index[cut - 1]:
        cut += 1  # what is known is known for whole minutes
    part = table.iloc[:cut]
    if absurd:
        later = table.iloc[cut:].copy()
        later[[*doors.PRICES, "volume"]] *= 7.3
        part = pd.concat([part, later])
    spec = doors.RollSpec(by=by)
    whole, rolls = doors.build_continuous_contract(table, spec, MARKET)
    cut_bars, cut_rolls = doors.build_continuous_contract(part, spec, MARKET)
    until = table.index[cut - 1]
    known, cut_known = whole[whole.index <= until], cut_bars[cut_bars.index <= until]
    pd.testing.assert_frame_equal(known, cut_known, check_exact=True)
    rolls, cut_rolls = (one[one["at"] <= until].reset_index(drop=True) for one in (rolls, cut_rolls))
    pd.testing.assert_frame_equal(rolls, cut_rolls, check_exact=True)


# ---- codes and mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "first_bar", "number", "last_day"),
    [
        ("ESZ3", "2013-10-06", 201312, date(2013, 12, 20)),  # the file's own ES201312 ends that morning
        ("ESH3", "2013-12-18", 202303, date(2023, 3, 17)),  # March 2013 was over
        ("ES201403", "2013-10-06", 201403, date(2014, 3, 21)),
        ("NQ-202406", "2024-03-01", 202406, date(2024, 6, 21)),
        ("MESM24", "2024-03-01", 202406, date(2024, 6, 21)),
        ("GC201402", "2013-10-07", 201402, date(2014, 1, 31)),
        ("MGCG2020", "2019-11-01", 202002, date(2020, 1, 31)),
        ("SIZ99", "1999-05-01", 199912, None),  # from a code of two digits
        ("20131220", "2013-10-06", 20131220, date(2013, 12, 20)),
    ],
)
def test_read_contract_code_gives_number_and_last_day(code, first_bar, number, last_day):
    contract = doors.parse_contract_code(code, pd.Timestamp(first_bar, tz="UTC"))
    assert contract.number == number and (last_day is None or contract.last_holding_day() == last_day)


def test_continuous_contracts_of_any_market_roll_by_last_days_in_their_codes(walk):
    table = pair(walk, times=1.05).replace({"ESH4": "front", "ESM4": "next"})
    with pytest.raises(BarsError, match=r"expiry cannot be read.*front.*ES20131220"):
        doors.build_continuous_contract(table, doors.RollSpec(), MARKET)
    table = table.replace({"front": "ZZ20240315", "next": "ZZ-20240621"})
    bars, rolls = doors.build_continuous_contract(table, doors.RollSpec(by="date"), MARKET)
    # six weekdays before Friday 15 March is Thursday 7 March
    assert rolls["at"].tolist() == [pd.Timestamp("2024-03-05", tz="UTC"), MIDNIGHT]
    assert set(bars["contract"]) == {20240315, 20240621}
    with pytest.raises(BarsError, match=r"last day .* not known.*ZZH4.*ZZ20131220"):
        table = pair(walk).replace({"ESH4": "ZZH4", "ESM4": "ZZM4"})
        doors.build_continuous_contract(table, doors.RollSpec(by="date"), MARKET)


def test_continuous_metals_roll_through_active_months_only(walk):
    parts = [one_contract(name, walk.to_numpy(), walk.index, 1.0) for name in ("GCH4", "GCJ4", "GCK4", "GCM4")]
    _, rolls = doors.build_continuous_contract(stacked(*parts), doors.RollSpec(by="date"), MARKET)
    assert rolls["contract"].tolist() == ["GCJ4"]
    _, rolls = doors.build_continuous_contract(
        stacked(*parts), doors.RollSpec(by="date", months=(3, 5), days_before=0), MARKET
    )
    assert rolls["contract"].tolist() == ["GCK4"]  # March is left before 29 February


def test_continuous_invalid_contracts_or_columns_raise_error(walk):
    table = pair(walk)
    with pytest.raises(SettingsError, match=r"No such contract \[first\].*ESH4"):
        doors.build_continuous_contract(table, doors.RollSpec(first="ESH5"), MARKET)
    with pytest.raises(SettingsError, match="earlier contract"):
        doors.build_continuous_contract(table, doors.RollSpec(first="ESM4", forced=(("ESH4", str(NOON)),)), MARKET)
    with pytest.raises(BarsError, match="roll by date"):
        doors.build_continuous_contract(table.drop(columns="volume"), doors.RollSpec(), MARKET)
    with pytest.raises(BarsError, match="twice for ESH4"):
        doors.build_continuous_contract(table.replace("ESM4", "ESH4"), doors.RollSpec(), MARKET)
    with pytest.raises(BarsError, match="several markets"):
        doors.build_continuous_contract(table.replace("ESM4", "NQM4"), doors.RollSpec(), MARKET)
