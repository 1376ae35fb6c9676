"""Labels against a second labeller in plain Python, against mirrors and absurd futures."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import SettingsError
from tests.contract.doors import (
    BARRIERS,
    SESSION_ENDS,
    LabelSpec,
    MarketSpec,
    ResampledBars,
    assign_sessions,
    average_uniqueness,
    resample_bars,
    segments_between_rolls,
    triple_barrier_labels,
    triple_barrier_prices,
)
from tests.targets.markets import MINUTE, absurd, assert_same_bits, close_of, frame, gappy

BITCOIN = MarketSpec("BTC", "24h", None, False)


# ---- the twin: one row at a time, minute by minute, nothing shared with the library but the frames -----------------


def reference_sigma(base: ResampledBars, span: int) -> list[float]:
    """Root of the weighted mean of squared returns up to each row, by its definition."""
    sigmas, seen = [], []
    ages = (1 - 2 / (span + 1)) ** np.arange(20 * span)[::-1]
    for i in range(len(base)):
        if i and base.segment[i] == base.segment[i - 1]:
            seen.append(math.log(base.close[i] / base.close[i - 1]) ** 2)
        recent = seen[-20 * span :]  # older ones weigh less than 1e-17 of the whole
        weights = ages[len(ages) - len(recent) :]
        enough = len(seen) >= span
        sigmas.append(math.sqrt(np.dot(weights, recent) / weights.sum()) if enough else math.nan)
    return sigmas


def reference_barriers(
    base: ResampledBars, i: int, sigma: float, spec: LabelSpec, tick: float | None
) -> tuple[float, float]:
    close, scale = float(base.close[i]), sigma * spec.horizon**0.5
    least = math.log((close + max(1.0, spec.cost_ticks) * (tick or 0.0)) / close)
    up = close * math.exp(max(spec.k_up * scale, least))
    down = close / math.exp(max(spec.k_down * scale, least))
    prices = (base.open[i], base.high[i], base.low[i], base.close[i])
    if tick and all(abs(price / tick - round(price / tick)) < 1e-4 for price in prices):
        up, down = math.ceil(up / tick - 1e-6) * tick, math.floor(down / tick + 1e-6) * tick
    return up, down


def reference_exit(path, up, down):
    """Walk (bar, open, high, low) until a barrier is met: (barrier, price, step) or None."""
    for step, (_, open_, high, low) in enumerate(path):
        if open_ >= up or open_ <= down:
            return ("upper" if open_ >= up else "lower"), open_, step
        if high >= up and low <= down:
            return "ambiguous", math.nan, step
        if high >= up:
            return "upper", up, step
        if low <= down:
            return "lower", down, step
    return None


def reference(
    base: ResampledBars, minute_bars: ResampledBars | None, spec: LabelSpec, market: MarketSpec, close_at: np.ndarray
) -> list[dict]:
    """The rows of `triple_barrier_labels`. Every label walks ALL its minutes, not only those of the touching bar."""
    n, sigmas, rows = len(base), reference_sigma(base, spec.sigma_span), []
    spans, segment = spec.session_end == "span", base.segment
    if spans:  # one number a contract
        segment = np.zeros(n) if base.chain is None else np.unique(base.chain, return_inverse=True)[1]
    finest = base if minute_bars is None else minute_bars
    minutes = [[] for _ in range(n)]
    for f in range(len(finest)):  # each belongs to the bar that began last, where that was not over yet
        begin = int(finest.start[f])
        j = int(np.searchsorted(base.start, begin, side="right")) - 1
        if j >= 0 and begin < base.known_at[j]:
            minutes[j].append((float(finest.open[f]), float(finest.high[f]), float(finest.low[f])))
    for i in range(n):
        if math.isnan(sigmas[i]) or i + 1 >= n or segment[i + 1] != segment[i]:
            continue
        up, down = reference_barriers(base, i, sigmas[i], spec, market.tick)
        if not down < base.close[i] < up:
            continue
        end, left = i, True
        while left and end < i + spec.horizon:
            left = end + 1 < n and segment[end + 1] == segment[i]
            end += left
        path = [(j, *minute) for j in range(i + 1, end + 1) for minute in minutes[j]]
        slack = 1e-6 * (market.tick or 0.0)
        hit = reference_exit(path, up - slack, down + slack)
        if hit is not None:
            barrier, price, step = hit
            price = up if price == up - slack else down if price == down + slack else price
            j = path[step][0]
            proof = int(base.known_at[j])
        else:
            j, price = end, float(base.close[end])
            barrier = "vertical" if end == i + spec.horizon else "session"
            proof = int(base.known_at[end])
            if barrier == "session" and (spans or base.known_at[end] < close_at[end]):
                proof = int(base.known_at[end + 1]) if end + 1 < n else None
        if spec.session_end == "drop":
            proof = int(base.known_at[end]) if end == i + spec.horizon else None
        row = {
            "known_at": int(base.known_at[i]), "entry_bar": i, "exit_bar": j, "label_end": proof, "barrier": barrier,
            "label": {"upper": 1, "lower": -1}.get(barrier, 0), "up": math.log(up / base.close[i]),
            "down": math.log(base.close[i] / down), "ret": math.log(price / base.close[i]),
        }  # fmt: skip
        rows.append(row)
    open_on = np.zeros(n)
    for row in rows:
        for t in range(row["entry_bar"] + 1, row["exit_bar"] + 1):
            open_on[t] += 1
    for row in rows:
        row["uniqueness"] = np.mean([1 / open_on[t] for t in range(row["entry_bar"] + 1, row["exit_bar"] + 1)])
    return [row for row in rows if row["label_end"] is not None]


def assert_equal_to_reference(found: pd.DataFrame, rows: list[dict]) -> None:
    wanted = pd.DataFrame(rows)
    assert len(found) == len(wanted) > 0
    assert found.index.as_unit("ns").asi8.tolist() == wanted["known_at"].tolist()
    assert pd.DatetimeIndex(found["label_end"]).as_unit("ns").asi8.tolist() == wanted["label_end"].tolist()
    for name in ("label", "barrier", "entry_bar", "exit_bar"):
        assert found[name].tolist() == wanted[name].tolist(), name
    for name in ("ret", "up", "down", "uniqueness"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-12, err_msg=name)


def labels_of(bars: pd.DataFrame, market: MarketSpec, spec: LabelSpec, minutes: int = 5) -> pd.DataFrame:
    return triple_barrier_labels(resample_bars(bars, market, minutes), resample_bars(bars, market, 1), spec, market)


def test_label_spec_shortest_and_longest_spans_are_accepted_and_the_next_refused():
    assert [LabelSpec(sigma_span=span).sigma_span for span in (2, 100_000)] == [2, 100_000]
    for span in (1, 100_001):
        with pytest.raises(SettingsError, match="sigma_span"):
            LabelSpec(sigma_span=span)


HAND = LabelSpec(horizon=3, sigma_span=20, cost_ticks=4.0)  # 4 ticks of 0.25 = 1.0: wider than sigma here
TICKED = MarketSpec("X", "24h", 0.25, False)


# ---- worked by hand ----------------------------------------------------------------------------------------------

# after 30 calm bars that end at 100.0 the barriers stand at 101.0 and 99.0
CASES = {
    "touches above": ([(100, 100.5, 99.5, 100), (100, 101, 99.5, 100)], "upper", 1.0, 101.0),
    "touches below": ([(100, 100.5, 99.0, 100), (100, 105, 99.5, 100)], "lower", 0.0, 99.0),
    "opens above": ([(102.5, 103, 98, 99)], "upper", 0.0, 102.5),
    "opens below, high beyond": ([(97.0, 103, 96, 99)], "lower", 0.0, 97.0),
    "both in one bar": ([(100, 101.5, 98.5, 100)], "ambiguous", 0.0, None),
    "neither": ([(100, 100.5, 99.5, 100)] * 2 + [(100, 100.75, 99.5, 100.5)], "vertical", 2, 100.5),
    "one tick short": ([(100, 100.75, 99.25, 100)] * 3, "vertical", 2, 100.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_triple_barrier_equals_hand_computed_label(name):
    path, barrier, last_bar, price = CASES[name]
    calm = [(100.0, 100.25, 99.75, 100.0)] * 30
    base = frame(calm + path + [(100, 100, 100, 100)] * 4)
    row = triple_barrier_labels(base, None, HAND, TICKED).loc[pd.Timestamp(30 * 5 * MINUTE, tz="UTC")]
    assert row["barrier"] == barrier
    assert row["label"] == {"upper": 1, "lower": -1}.get(barrier, 0)
    assert row["label_end"].value == (31 + last_bar) * 5 * MINUTE
    assert row["up"] == pytest.approx(math.log(1.01)) and row["down"] == pytest.approx(-math.log(0.99))
    if price is None:
        assert math.isnan(row["ret"])
    else:
        assert row["ret"] == pytest.approx(math.log(price / 100), abs=1e-15)


def test_triple_barrier_minute_bars_decide_bar_that_touches_both_barriers():
    calm = [(100.0, 100.25, 99.75, 100.0)] * 30
    base = frame([*calm, (100, 101.5, 98.5, 100), (100, 100, 100, 100)])
    inside = {  # the five minutes of bar 30
        "lower": [(100, 100.5, 99.5, 100), (100, 100, 98.5, 99.5), (99.5, 101.5, 99.5, 101)],
        "upper": [(100, 100.5, 99.5, 100), (101.25, 101.5, 98.5, 99), (99, 99, 98.5, 99)],
        "ambiguous": [(100, 100.5, 99.5, 100), (100, 101.5, 98.5, 99), (99, 99, 98.5, 99)],
    }
    for barrier, minutes in inside.items():
        minute_bars = frame(minutes, minutes=1, start=30 * 5 * MINUTE)
        row = triple_barrier_labels(base, minute_bars, HAND, TICKED).iloc[-1]
        assert (row["barrier"], row["label_end"].value) == (barrier, 31 * 5 * MINUTE)
        left_at = {"lower": 0.99, "upper": 1.0125, "ambiguous": math.nan}[barrier]
        assert row["ret"] == pytest.approx(math.log(left_at), nan_ok=True)


@pytest.mark.parametrize("shown", [True, False])
def test_triple_barrier_roll_inside_bucket_ignores_minutes_of_new_contract(shown):
    """The roll is two minutes into a bucket: what is left of the old contract there is known at minute 3, a minute of
    the new one later. In its second minute the price reaches 101; the new contract opens at 98.

    shown : whether the feed of minutes has that second one. Without it nothing inside the bar settles the touch, and
    least of all a minute of another bar.
    """
    calm, minutes = (100.0, 100.25, 99.75, 100.0), pd.date_range("2024-03-04", periods=5 * 31, freq="1min", tz="UTC")
    path = [calm] * (5 * 30) + [
        calm,
        (100, 101, 99.75, 100.5),
        (98, 98.25, 97.5, 98),
        (98, 98, 98, 98),
        (98, 98, 98, 98),
    ]
    bars = pd.DataFrame(path, minutes, ["open", "high", "low", "close"], float)
    bars = bars.assign(contract=["A"] * (5 * 30 + 2) + ["B"] * 3, chain=1.0)
    base = resample_bars(bars, TICKED, 5)
    assert ((base.known_at[-2:] - base.start[-2:]) // MINUTE).tolist() == [3, 3]  # they share a minute
    minute_bars = resample_bars(bars if shown else bars.drop(minutes[151]), TICKED, 1)
    row = triple_barrier_labels(base, minute_bars, replace(HAND, session_end="span"), TICKED).loc[minutes[150]]
    assert (row["barrier"], row["exit_bar"], row["label_end"]) == ("upper", 30, minutes[153])
    assert row["ret"] == pytest.approx(math.log(1.01))


def test_triple_barrier_label_ends_at_segment_end_with_proven_label_end():
    calm = [(100.0, 100.25, 99.75, 100.0)] * 40
    base = frame(calm, segment=[0] * 32 + [1] * 8)
    row = triple_barrier_labels(base, None, HAND, TICKED).loc[pd.Timestamp(base.known_at[29], tz="UTC")]
    assert (row["barrier"], row["label"], row["exit_bar"]) == ("session", 0, 31)
    assert row["label_end"].value == base.known_at[32]  # the next bar that exists says the segment is over
    base = frame(calm, segment=[0] * 32 + [1] * 8, start=(1440 - 32 * 5) * MINUTE)
    late = triple_barrier_labels(base, None, HAND, TICKED)
    row = late.loc[pd.Timestamp(base.known_at[29], tz="UTC")]
    assert row["label_end"].value == base.known_at[31]  # here the calendar says so, one bar earlier
    assert late["entry_bar"].tolist()[-1] == 36  # 37, 38 wait for bars to come; 39, 31 have none to ask about
    assert 31 not in late["entry_bar"].tolist()
    dropped = triple_barrier_labels(base, None, replace(HAND, session_end="drop"), TICKED)
    assert dropped["entry_bar"].tolist() == [*range(20, 29), *range(32, 37)]
    assert set(dropped["barrier"]) == {"vertical"}


# ---- over sessions' ends and holes, where that is asked ----------------------------------------------------------


def rolls(bars: pd.DataFrame, at: pd.DatetimeIndex, adjusted: bool = False) -> pd.DataFrame:
    """The bars as contracts two per cent apart that change at these moments; `adjusted`: joined without a step."""
    number = at.searchsorted(bars.index, side="right")
    named = bars.assign(contract=np.array(["A", "B", "C"])[number])
    if adjusted:
        return named.assign(chain=1.0)
    step = 1.02**number
    return named.assign(chain=1 / step, **{name: bars[name] * step for name in ("open", "high", "low", "close")})


@pytest.mark.parametrize("adjusted", [True, False])
@pytest.mark.parametrize("minute", [0, 2, 4])
def test_triple_barrier_with_span_crosses_sessions_but_not_unadjusted_rolls(adjusted, minute):
    """minute : of the bucket, at which the contract rolls inside it; at the last one its old part is left out."""
    market = MarketSpec("MES", "cme", None, False)
    for seed, horizon in ((1, 3), (2, 40)):
        bars = gappy(seed, None)
        at = bars.index[[int(0.4 * len(bars)), int(0.7 * len(bars))]]  # in mid-session
        at = at.floor("5min") + pd.Timedelta(minutes=minute)
        bars = rolls(bars, at, adjusted)
        base, minute_bars = resample_bars(bars, market, 5), resample_bars(bars, market, 1)
        spec = LabelSpec(horizon=horizon, k_up=0.5, k_down=0.7, sigma_span=30, session_end="span")
        found, close = triple_barrier_labels(base, minute_bars, spec, market), close_of(base, market)
        assert_equal_to_reference(found, reference(base, minute_bars, spec, market, close))
        stays = replace(spec, session_end="session")
        inside = triple_barrier_labels(base, minute_bars, stays, market)
        assert_equal_to_reference(inside, reference(base, minute_bars, stays, market, close))

        def crossed(labels, marks):
            return marks[labels["exit_bar"]] != marks[labels["entry_bar"]]

        assert not crossed(inside, base.segment).any()  # without being asked none leaves its segment
        assert crossed(found, base.session).any() and crossed(found, base.segment).sum() > 10
        contract = segments_between_rolls(base)
        assert not crossed(found, contract).any() and len(np.unique(contract)) == (1 if adjusted else 3)
        # What cuts a label short is a step of the contract alone, and a bar of the next one proves it.
        short = found[found["barrier"] == "session"]
        assert len(short) == 0 if adjusted else len(short) > 0
        ends = np.flatnonzero(np.diff(contract))
        assert set(short["exit_bar"]) <= set(ends)
        assert (pd.DatetimeIndex(short["label_end"]).asi8 == base.known_at[short["exit_bar"] + 1]).all()


# ---- against the twin ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session_end", ["session", "drop"])
@pytest.mark.parametrize("tick", [0.25, 0.01, None])
def test_triple_barrier_on_synthetic_bars_equals_reference(tick, session_end):
    for seed, horizon in ((1, 3), (2, 24)):
        market = MarketSpec("MES", "cme", tick, False)
        bars = gappy(seed, tick)
        base, minute_bars = resample_bars(bars, market, 5), resample_bars(bars, market, 1)
        spec = LabelSpec(horizon=horizon, k_up=0.5, k_down=0.7, sigma_span=30, session_end=session_end)
        found = triple_barrier_labels(base, minute_bars, spec, market)
        assert_equal_to_reference(found, reference(base, minute_bars, spec, market, close_of(base, market)))
        coarse = triple_barrier_labels(base, None, spec, market)
        assert_equal_to_reference(coarse, reference(base, None, spec, market, close_of(base, market)))
        if session_end == "session":
            assert set(found["barrier"]) >= {"upper", "lower", "vertical", "session"}
            assert (coarse["barrier"] == "ambiguous").sum() > (found["barrier"] == "ambiguous").sum()


def after_the_early_close() -> pd.DataFrame:
    """24 December 2024 stops at 12:15 Chicago by the calendar; these bars trade on until the regular close."""
    columns = ["open", "high", "low", "close"]
    bars = synthetic_bars(days=30, kind="null", seed=5, start="2024-11-18", missing=0)[columns]
    more = synthetic_bars(days=1, kind="null", seed=6, start="2024-11-18", missing=0)[columns].iloc[:225]
    more.index = pd.date_range("2024-12-24 18:15", periods=225, freq="1min", tz="UTC", name=bars.index.name)
    return pd.concat([bars, more]).sort_index().loc["2024-12-16":"2024-12-26"]


@pytest.mark.parametrize("minutes", [30, 60])
def test_triple_barrier_early_close_inside_bucket_equals_reference(minutes):
    bars, market, spec = after_the_early_close(), MarketSpec("MES", "cme", 0.25, False), LabelSpec(6, sigma_span=30)
    base, minute_bars = resample_bars(bars, market, minutes), resample_bars(bars, market, 1)
    shared = np.flatnonzero(base.start == pd.Timestamp("2024-12-24 18:15", tz="UTC").value) - 1
    assert len(shared) == 1  # the close cuts one bucket in two
    whole = triple_barrier_labels(base, minute_bars, spec, market)
    assert_equal_to_reference(whole, reference(base, minute_bars, spec, market, close_of(base, market)))
    for known in base.known_at[shared[0] - 3 : shared[0] + 10]:
        cut = int(np.searchsorted(bars.index.as_unit("ns").asi8, known))
        assert_same_bits(whole, labels_of(bars.iloc[:cut], market, spec, minutes), int(known))


# ---- nothing to come changes what is proven --------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(data=st.data(), horizon=st.integers(1, 40), end=st.sampled_from(SESSION_ENDS), minute_bars=st.booleans())
def test_triple_barrier_with_later_bars_changed_keeps_finished_labels(data, horizon, end, minute_bars):
    seed = data.draw(st.integers(0, 3))
    market = MarketSpec("MES", "cme", 0.25, False)
    bars = gappy(seed, 0.25, days=3)
    at = bars.index[[len(bars) // 3, len(bars) // 2]]
    cut = data.draw(st.integers(700, len(bars) - 1))
    spec = LabelSpec(horizon=horizon, sigma_span=40, session_end=end)

    def judge(some):
        some = rolls(some, at)
        minutes = resample_bars(some, market, 1) if minute_bars else None
        return triple_barrier_labels(resample_bars(some, market, 5), minutes, spec, market)

    whole, known = judge(bars), bars.index.as_unit("ns").asi8[cut - 1] + MINUTE
    assert_same_bits(whole, judge(bars.iloc[:cut]), known)
    assert_same_bits(whole, judge(absurd(bars, cut, np.random.default_rng(cut))), known)


def test_triple_barrier_real_bars_with_later_bars_changed_keep_labels(shared_data):
    bars = pd.read_parquet(shared_data / "bars" / "ES_1m.parquet").set_index("timestamp")
    bars = bars[["open", "high", "low", "close"]].iloc[:30_000]
    market, spec = MarketSpec("ES", "cme", 0.25, False), LabelSpec()
    whole, rng = labels_of(bars, market, spec), np.random.default_rng(7)
    session = assign_sessions(bars.index.as_unit("ns").asi8, "cme").id
    silent = np.flatnonzero(np.diff(bars.index.as_unit("ns").asi8) > MINUTE) + 1
    cuts = [*rng.integers(2_000, len(bars), 4), *(np.flatnonzero(np.diff(session))[5:8] + 1), *silent[-3:]]
    for cut in map(int, cuts):
        known = bars.index.as_unit("ns").asi8[cut - 1] + MINUTE
        assert assert_same_bits(whole, labels_of(bars.iloc[:cut], market, spec), known) > 100
        assert_same_bits(whole, labels_of(absurd(bars, cut, rng), market, spec), known)


def test_triple_barrier_label_is_available_at_label_end():
    """A label_end later than needed would purge rows for nothing: at label_end the row is there."""
    bars, market, spec = gappy(3, 0.25, days=3), MarketSpec("MES", "cme", 0.25, False), LabelSpec(sigma_span=40)
    whole = labels_of(bars, market, spec)
    ends = bars.index.as_unit("ns").asi8 + MINUTE
    for row in whole.sample(40, random_state=1).itertuples():
        if row.label_end.value not in ends:
            continue
        cut = int(np.searchsorted(ends, row.label_end.value, side="right"))
        known = labels_of(bars.iloc[:cut], market, spec)
        assert row.Index in known.index and (known["label_end"] <= row.label_end).all()
        assert row.Index not in labels_of(bars.iloc[: cut - 1], market, spec).index or row.barrier == "session"


# ---- no lean ---------------------------------------------------------------------------------------------------


def test_triple_barrier_mirrored_prices_give_opposite_labels():
    bars = gappy(11, None, days=5)
    mirrored = pd.DataFrame(
        {"open": 1 / bars["open"], "high": 1 / bars["low"], "low": 1 / bars["high"], "close": 1 / bars["close"]}
    )
    market, spec = MarketSpec("MES", "cme", None, False), LabelSpec(sigma_span=40)
    one, two = labels_of(bars, market, spec), labels_of(mirrored, market, spec)
    assert (one["label"].abs().sum() > 500) and (one["label"] == -two["label"]).all()
    pd.testing.assert_series_equal(one["ret"], -two["ret"], check_names=False, atol=1e-12)


def test_triple_barrier_real_markets_have_10_to_50_percent_neutral_labels(shared_data):
    for symbol, calendar, tick in (("NQ", "cme", 0.25), ("ES", "cme", 0.25), ("BTCUSD", "24h", None)):
        bars = pd.read_parquet(shared_data / "bars" / f"{symbol}_1m.parquet").set_index("timestamp").iloc[:100_000]
        market = MarketSpec(symbol, calendar, tick, False)
        base, minute_bars = resample_bars(bars, market, 5), resample_bars(bars, market, 1)
        for horizon in (5, 60):
            labels = triple_barrier_labels(base, minute_bars, LabelSpec(horizon=horizon), market)
            assert 0.10 < (labels["label"] == 0).mean() < 0.50, (symbol, horizon)


# ---- the table, and what is refused ----------------------------------------------------------------------------


def test_triple_barrier_table_has_documented_columns_and_types():
    labels = labels_of(gappy(1, 0.25), MarketSpec("MES", "cme", 0.25, False), LabelSpec())
    assert labels.index.name == "known_at" and str(labels.index.dtype) == "datetime64[ns, UTC]"
    assert labels.index.is_unique and labels.index.is_monotonic_increasing
    assert labels["label"].dtype == np.int8 and str(labels["label_end"].dtype) == "datetime64[ns, UTC]"
    assert tuple(labels["barrier"].cat.categories) == BARRIERS
    assert (labels["label_end"] > labels.index).all() and labels["uniqueness"].between(0, 1).all()
    assert (labels[["up", "down"]] > 0).all(axis=None)
    sides = labels.groupby("barrier", observed=True)["label"].unique().map(list).to_dict()
    assert sides == {"upper": [1], "lower": [-1]} | {name: [0] for name in sides if name not in ("upper", "lower")}


def test_triple_barrier_barriers_are_on_tick_and_beyond_cost():
    market = MarketSpec("MES", "cme", 0.25, False)
    bars = gappy(2, 0.25)
    base = resample_bars(bars, market, 5)
    labels = triple_barrier_labels(base, None, LabelSpec(horizon=1, k_up=1e-3, k_down=1e-3, cost_ticks=3.0), market)
    close = base.close[labels["entry_bar"]]
    for price in (close * np.exp(labels["up"]), close * np.exp(-labels["down"])):
        np.testing.assert_allclose(np.abs(price - close), 0.75, atol=1e-6)
    off = resample_bars(bars * 1.000123, market, 5)
    loose = triple_barrier_labels(off, None, LabelSpec(), market)["up"] * off.close[0] / 0.25
    assert (np.abs(loose - loose.round()) > 0.01).mean() > 0.9


def test_triple_barrier_without_cost_barriers_are_at_least_one_tick():
    base = resample_bars(gappy(2, 0.25), MarketSpec("MES", "cme", 0.25, False), 5)
    spec = LabelSpec(horizon=1, k_up=1e-3, k_down=1e-3, cost_ticks=0.0)
    labels = triple_barrier_labels(base, None, spec, MarketSpec("MES", "cme", 0.25, False))
    close = base.close[labels["entry_bar"]]
    np.testing.assert_allclose(close * np.expm1(labels["up"]), 0.25, rtol=1e-9)
    np.testing.assert_allclose(-close * np.expm1(-labels["down"]), 0.25, rtol=1e-9)


def test_triple_barrier_constant_prices_without_tick_give_no_labels():
    still = frame([(100.0,) * 4] * 200)
    assert triple_barrier_labels(still, None, LabelSpec(), BITCOIN).empty
    with_tick = triple_barrier_labels(still, None, LabelSpec(), TICKED)
    assert len(with_tick) == 80 and set(with_tick["barrier"]) == {"vertical"}


def test_triple_barrier_too_few_bars_give_empty_table():
    nothing = resample_bars(synthetic_bars(days=1).iloc[:0], MarketSpec("MES", "cme", 0.25, False), 5)
    for base in (nothing, frame([(1.0,) * 4]), frame([(1.0,) * 4] * 50)):
        labels = triple_barrier_labels(base, None, LabelSpec(), BITCOIN)
        assert labels.empty and labels["label"].dtype == np.int8 and "label_end" in labels


def test_average_uniqueness_equals_afml_example():
    """AFML, section 4.5.3: three labels on returns 0-2, 2-3, 4-5."""
    shares = average_uniqueness(np.array([0, 2, 4]), np.array([2, 3, 5]), 6)
    np.testing.assert_allclose(shares, [5 / 6, 3 / 4, 1.0], rtol=1e-15)


@pytest.mark.parametrize("tick", [0.25, None])
def test_barriers_of_bars_after_10000_fold_price_stay_positive(tick):
    """One bar 10,000 times too high: the volatility after it puts the lower barrier under the first tick."""
    path = np.round(100 * np.exp(np.cumsum(np.random.default_rng(5).standard_normal((400, 4)) * 1e-3)) / 0.25) * 0.25
    path = path.reshape(400, 4)
    bars = np.stack([path[:, 0], path.max(axis=1), path.min(axis=1), path[:, 3]], axis=1)
    bars[200] *= 10_000.0
    base, market = frame(bars.tolist()), MarketSpec("X", "24h", tick, False)
    up, down = triple_barrier_prices(base, LabelSpec(200), market)
    known = ~np.isnan(up)
    assert known[100:].all() and (down[known] > 0).all() and np.isfinite(up[known]).all()
    assert down[201] < 0.25 < 0.25 * np.floor(down[150] / 0.25)  # under one tick after the jump, far above it before
    assert (down[known] < base.close[known]).all() and (up[known] > base.close[known]).all()
    labels = triple_barrier_labels(base, None, LabelSpec(200), market)
    assert np.isfinite(labels[["up", "down"]].to_numpy()).all() and len(labels) > 50
