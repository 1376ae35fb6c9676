"""Directions, trends and meta-labels against plain references; none sees past its proof."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import linregress

from ml_factory.errors import SettingsError
from tests.contract.doors import (
    NEUTRAL_BAND,
    SESSION_ENDS,
    LabelSpec,
    MarketSpec,
    ResampledBars,
    direction_labels,
    label_lives_to_the_vertical,
    meta_labels,
    purged_kfold,
    resample_bars,
    strongest_trend,
    training_weights,
    trend_scanning_labels,
    triple_barrier_labels,
)
from tests.targets.markets import absurd, assert_same_bits, close_of, frame, gappy

MES = MarketSpec("MES", "cme", 0.25, False)
SPEC = LabelSpec(horizon=12, sigma_span=40)


def momentum_sides(base: ResampledBars) -> np.ndarray:
    """A primary model's sides: the sign of the last four bars, none when they cancel."""
    move = np.zeros(len(base), np.int8)
    move[4:] = np.sign(base.close[4:] - base.close[:-4])
    return move


ASKED = {
    "vertical": lambda base, minute_bars, spec: label_lives_to_the_vertical(base, spec, MES),
    "direction": lambda base, minute_bars, spec: direction_labels(base, spec, MES),
    "trend_scanning": lambda base, minute_bars, spec: trend_scanning_labels(base, spec, MES),
    "meta_labels": lambda base, minute_bars, spec: meta_labels(base, minute_bars, momentum_sides(base), spec, MES),
}


def ask(name: str, bars: pd.DataFrame, spec: LabelSpec = SPEC) -> pd.DataFrame:
    return ASKED[name](resample_bars(bars, MES, 5), resample_bars(bars, MES, 1), spec)


# ---- what they say -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session_end", ["session", "drop"])
def test_labels_to_the_vertical_equal_row_by_row_reference(session_end):
    base = resample_bars(gappy(4, 0.25), MES, 5)
    found = label_lives_to_the_vertical(base, replace(SPEC, session_end=session_end), MES)
    wanted, close_at = [], close_of(base, MES)
    for i in range(len(base)):
        life = [j for j in range(i + 1, min(i + 13, len(base))) if base.segment[j] == base.segment[i]]
        whole = len(life) == 12
        if not life or (session_end == "drop" and not whole):
            continue
        end = life[-1]
        if whole or base.known_at[end] >= close_at[end]:
            proof = base.known_at[end]
        elif end + 1 < len(base):
            proof = base.known_at[end + 1]
        else:
            continue
        ret = math.log(base.close[end] / base.close[i])
        wanted.append((i, end, proof, ret, "vertical" if whole else "session"))
    columns = found.assign(label_end=pd.DatetimeIndex(found["label_end"]).asi8, barrier=found["barrier"].astype(str))
    columns = columns[["entry_bar", "exit_bar", "label_end", "ret", "barrier"]]
    assert list(columns.itertuples(index=False, name=None)) == wanted
    assert session_end == "drop" or {"vertical", "session"} == set(found["barrier"])


def test_direction_label_is_sign_of_return_outside_band():
    base = resample_bars(gappy(4, 0.25), MES, 5)
    found, plain = (
        direction_labels(base, SPEC, MES),
        label_lives_to_the_vertical(base, SPEC, MES).set_index("entry_bar"),
    )
    band = triple_barrier_labels(base, None, replace(SPEC, k_up=NEUTRAL_BAND, k_down=NEUTRAL_BAND), MES).set_index(
        "entry_bar"
    )
    assert (found["ret"].to_numpy() == plain.loc[found["entry_bar"], "ret"].to_numpy()).all()
    both = np.intersect1d(found["entry_bar"], band.index)
    kept = found.set_index("entry_bar").loc[both]
    assert (kept[["up", "down"]] == band.loc[both, ["up", "down"]]).all(axis=None) and len(both) > 400
    tiny = 1e-9  # of a return: a close on the edge is beyond it
    wanted = np.where(found["ret"] > found["up"] - tiny, 1, np.where(found["ret"] < tiny - found["down"], -1, 0))
    assert (found["label"] == wanted).all() and set(found["label"]) == {-1, 0, 1}
    on_edge = np.isclose(found["ret"], found["up"], atol=1e-9, rtol=0)
    assert on_edge.any() and (found.loc[on_edge, "label"] == 1).all()


def test_direction_default_band_leaves_a_third_of_normal_returns_neutral():
    close = 100 * np.exp(np.cumsum(np.random.default_rng(0).standard_normal(60_000) * 1e-3))
    base = frame(np.repeat(close[:, None], 4, axis=1).tolist())
    found = direction_labels(base, LabelSpec(horizon=1), MarketSpec("X", "24h", None, False))
    assert (found["label"] == 0).mean() == pytest.approx(1 / 3, abs=0.01)


def test_strongest_trend_equals_scipy_linregress():
    rng = np.random.default_rng(1)
    close = 100 * np.exp(np.cumsum(rng.standard_normal(400) * 1e-3))
    entry = np.arange(0, 370, 4)
    longest = entry + rng.integers(5, 30, len(entry))
    chosen, t_value = strongest_trend(close, entry, longest, 4)
    for r, i in enumerate(entry):
        fits = [linregress(np.arange(k + 1), np.log(close[i : i + k + 1])) for k in range(4, longest[r] - i + 1)]
        t_values = np.array([fit.slope / fit.stderr for fit in fits])
        best = int(np.argmax(np.abs(t_values)))
        assert chosen[r] == i + 4 + best
        assert t_value[r] == pytest.approx(t_values[best], rel=1e-9)


def test_trend_scanning_equals_hand_computed_labels():
    up = [100 * 1.001 ** max(k, 0) for k in range(-3, 30)]  # three bars that stand still, then a straight rise
    base = frame([(price,) * 4 for price in up])
    still = frame([(100.0,) * 4] * 33)
    market = MarketSpec("X", "24h", None, False)
    found = trend_scanning_labels(base, LabelSpec(horizon=8), market)
    assert found["entry_bar"].tolist() == list(range(25)) and (found["label"] == 1).all()
    assert (pd.DatetimeIndex(found["label_end"]).asi8 == base.known_at[8:33]).all()
    flat = trend_scanning_labels(still, LabelSpec(horizon=8), market)
    assert (flat["label"] == 0).all() and (flat["t_value"] == 0).all()
    with pytest.raises(SettingsError, match="horizon"):
        LabelSpec(horizon=1, kind="trend_scanning")


def test_trend_scanning_label_end_is_that_of_longest_trend():
    base = resample_bars(gappy(4, 0.25), MES, 5)
    found = trend_scanning_labels(base, SPEC, MES)
    plain = label_lives_to_the_vertical(base, SPEC, MES).set_index("entry_bar").loc[found["entry_bar"]]
    for name in ("label_end", "exit_bar", "barrier"):
        assert (found[name].to_numpy() == plain[name].to_numpy()).all(), name
    end = found["entry_bar"] + found["trend_bars"]
    assert (end <= found["exit_bar"]).all() and set(found["trend_bars"]) == set(range(5, 13))
    np.testing.assert_allclose(found["ret"], np.log(base.close[end] / base.close[found["entry_bar"]]), atol=1e-15)
    assert (np.sign(found["t_value"]) == found["label"]).all()


@pytest.mark.parametrize(("up", "down"), [(0.5, 0.5), (1.2, 0.4)])
def test_meta_labels_equal_triple_barrier_labels_of_same_side(up, down):
    bars = gappy(4, 0.25)
    base, minute_bars = resample_bars(bars, MES, 5), resample_bars(bars, MES, 1)
    spec = replace(SPEC, k_up=up, k_down=down)
    side = momentum_sides(base)
    found = meta_labels(base, minute_bars, side, spec, MES)
    long = triple_barrier_labels(base, minute_bars, spec, MES)
    short = triple_barrier_labels(base, minute_bars, replace(spec, k_up=down, k_down=up), MES)
    for sign, plain in ((1, long), (-1, short)):
        bets = found[found["side"] == sign]
        same = plain.loc[bets.index]
        assert len(bets) > 200 and (bets.index == plain.index[side[plain["entry_bar"]] == sign]).all()
        for name in ("barrier", "label_end", "exit_bar", "up", "down"):
            assert (bets[name].to_numpy() == same[name].to_numpy()).all(), name
        np.testing.assert_array_equal(bets["ret"], sign * same["ret"])
    cost = np.log1p(spec.cost_ticks * MES.tick / base.close[found["entry_bar"]])
    assert (found["label"] == (found["ret"] > cost * (1 + 1e-6))).all() and set(found["label"]) == {0, 1}
    profit = np.where(found["side"] > 0, "upper", "lower")
    taken, out = found[found["barrier"] == profit], found[found["barrier"].isin(["upper", "lower"])]
    assert taken["label"].mean() > 0.9 and (out.drop(taken.index)["label"] == 0).all()


def test_meta_labels_uniqueness_ignores_rows_with_side_0():
    bars = gappy(4, 0.25)
    base, side = resample_bars(bars, MES, 5), momentum_sides(resample_bars(bars, MES, 5))
    side[np.arange(len(side)) % 15 > 0] = 0
    found = meta_labels(base, None, side, SPEC, MES)
    assert (found["uniqueness"] > 1 - 1e-9).mean() > 0.9 and len(found) > 20


# ---- what holds for each -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ASKED)
def test_label_tables_have_columns_for_splits_and_weights(name):
    found = ask(name, gappy(1, 0.25))
    assert found.index.name == "known_at" and found.index.is_unique and found.index.is_monotonic_increasing
    assert (found["label_end"] > found.index).all() and found["uniqueness"].between(0, 1).all()
    assert (found["ret"].isna() == (found["barrier"] == "ambiguous")).all()
    assert str(found["label_end"].dtype) == "datetime64[ns, UTC]" == str(found.index.dtype)
    for train, test in purged_kfold(found, 3, 5):
        weights = training_weights(found.iloc[train])
        assert len(test) and np.isclose(weights.mean(), 1) and np.isfinite(weights).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(ASKED)), end=st.sampled_from(SESSION_ENDS))
def test_label_tables_with_later_bars_changed_keep_finished_rows(data, name, end):
    bars = gappy(data.draw(st.integers(0, 2)), 0.25, days=3)
    cut = data.draw(st.integers(700, len(bars) - 1))
    spec = replace(SPEC, session_end=end, horizon=data.draw(st.integers(3, 30)))
    known = bars.index.as_unit("ns").asi8[cut - 1] + 60_000_000_000
    whole = ask(name, bars, spec)
    assert_same_bits(whole, ask(name, bars.iloc[:cut], spec), known)
    assert_same_bits(whole, ask(name, absurd(bars, cut, np.random.default_rng(cut)), spec), known)


@pytest.mark.parametrize("name", ASKED)
def test_label_tables_of_no_bars_are_empty(name):
    assert ask(name, gappy(1, 0.25).iloc[:0]).empty


def test_strongest_trend_of_equal_t_values_is_shortest():
    still = np.full(40, 100.0)
    chosen, t_value = strongest_trend(still, np.arange(20), np.arange(20) + 12, 4)
    assert (chosen == np.arange(20) + 4).all() and (t_value == 0).all()  # each horizon has t = 0
