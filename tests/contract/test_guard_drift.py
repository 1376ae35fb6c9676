"""The guard's reference and drifts on a synthetic market: few false alarms, drifts found, no test row read."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from benchmarks import guard
from benchmarks.guard import first_new, onsets
from benchmarks.guard_drifts import DRIFTS
from ml_factory.data.synthetic import SyntheticSpec, synthetic_market
from ml_factory.errors import BarsError
from tests.contract.doors import (
    BINS,
    ColumnReference,
    Guard,
    GuardReference,
    constant_rows,
    deserialize_state,
    fit_guard_reference,
    resolve_market_spec,
    serialize_state,
    to_bar_chunk,
)
from tests.contract.doors import PROBABILITIES as P

DAYS, TRAIN, TEST = 45, 33, 38  # sessions in all, of training, and before the test's
WARM = 3000  # bars before the test that settle the channels
STARTS = (400, 2200)
FEATURES = 6
PRICES = ["open", "high", "low", "close"]


@pytest.fixture(scope="module")
def market():
    """Bars, their market, and the times at which validation and test begin."""
    bars = synthetic_market(SyntheticSpec(days=DAYS, kind="null", seed=31, weather=0.1)).bars
    spec = resolve_market_spec("ES", bars)
    times = [bars.index[len(bars) * days // DAYS].isoformat() for days in (TRAIN, TEST)]
    return bars, spec, dict(zip(("validation", "test"), times, strict=True))


@pytest.fixture(scope="module")
def rows(market) -> tuple[pd.DataFrame, pd.DataFrame, pd.Series]:
    """Features, predictions and outcomes at every fifth bar: noise, and outcomes as probable as predicted."""
    index, generator = market[0].index[4::5] + pd.Timedelta(minutes=1), np.random.default_rng(5)
    p = generator.dirichlet([8, 8, 8], len(index))
    features = pd.DataFrame(generator.normal(size=(len(index), FEATURES)), index, [f"f{n}" for n in range(FEATURES)])
    labels = pd.Series(drawn(p, generator), index)
    return features.astype(np.float32), pd.DataFrame(p, index, P), labels


@pytest.fixture(scope="module")
def reference(market, rows) -> GuardReference:
    bars, spec, times = market
    return fit_guard_reference(bars, spec, *rows, times)


def drawn(p, generator):
    """Outcomes -1, 0, 1 with these probabilities."""
    return (p.cumsum(axis=1) < generator.random((len(p), 1))).sum(axis=1).clip(0, 2) - 1


def guard_of(market, reference) -> Guard:
    facts = {
        "feature_names": [f"f{n}" for n in range(FEATURES)], "warmup_bars": 640,
        "spec": {"data": {"labels": {"kind": "barrier", "horizon": 5}}}, "off_tick": reference.limits["off_tick"],
    }  # fmt: skip
    return Guard(SimpleNamespace(spec=SimpleNamespace(market=market[1]), reference=reference, description=facts))


def answers_of(guard: Guard, bars: pd.DataFrame, spec):
    """What the guard finds at every fifth of these bars: (moment, names)."""
    ends = bars.index + pd.Timedelta(minutes=1)
    guard.push(to_bar_chunk(bars, spec), np.empty(0, np.int64))
    found = guard.findings(ends[4::5].as_unit("ns").asi8, np.zeros(len(bars) // 5, bool))
    guard.forget()
    return [
        (moment, frozenset(f"{one.kind}:{one.part}" for one in some))
        for moment, some in zip(ends[4::5], found, strict=True)
    ]


def test_guard_on_held_out_bars_rarely_alarms_and_finds_declared_drifts(market, reference):
    bars, spec, times = market
    place = int((bars.index < times["test"]).sum())
    guard, test = guard_of(market, reference), bars.iloc[place:]
    answers_of(guard, bars.iloc[place - WARM : place], spec)
    before = deserialize_state(serialize_state(guard.get_state()))
    clean = answers_of(guard, test.iloc[:5000], spec)
    assert len(test) > 5000 and onsets(clean)[0] <= 5 and onsets(clean)[1] < 0.1
    names, found = [name for name in DRIFTS if name != "calibrator_lost"], {}
    for start in STARTS:
        guard = guard_of(market, reference)
        guard.load_state(before)
        answers_of(guard, test.iloc[:start], spec)
        state = guard.get_state()
        for name in names:
            change, history = DRIFTS[name], bars.iloc[: place + start]
            changed = change(test.iloc[start : start + 1000], history, 0.25, np.random.default_rng(start)).iloc[:500]
            guard = guard_of(market, reference)
            guard.load_state(state)
            usual = [one for one in clean if test.index[start] <= one[0] <= test.index[start + 500]]
            found[name, start] = first_new(answers_of(guard, changed, spec), usual)
    assert sum(moment is not None for moment in found.values()) >= 0.8 * len(found), found
    for name in ("volume_x5", "every_other_missing", "half_stuck", "open_close_swapped"):
        assert all(found[name, start] is not None for start in STARTS), (name, found)


def test_guard_finds_shifted_features_sharper_probabilities_and_constant_features_alone(market, reference, rows):
    values, p = rows[0].to_numpy()[-1500:], rows[1].to_numpy()[-1500:]
    known_at = rows[0].index[-1500:].as_unit("ns").asi8
    late = np.arange(len(values))[:, None] >= 500
    shifted = values + np.array([1, 1, 1, 0, 0, 0], np.float32) * late
    sharper = np.where(late, p**4 / (p**4).sum(axis=1, keepdims=True), p)
    constant = np.where(late & (np.arange(FEATURES) == 2), values[499], values)
    absent = np.where(late & (np.arange(FEATURES) == 2), np.float32(np.nan), values)
    for features, forecasts, check in (
        (values, p, ""), (shifted, p, "drift:features"), (values, sharper, "drift:p_long"), (constant, p, "constant:"),
        (absent, p, "range:"),
    ):  # fmt: skip
        guard = guard_of(market, reference)
        guard.push(to_bar_chunk(market[0].iloc[-1:], market[1]), known_at[:0])
        guard.add(known_at, features.astype(np.float32), known_at, forecasts)
        found = guard.findings(known_at, np.zeros(len(values), bool))
        names = [{f"{one.kind}:{one.part}" for one in some} for some in found]
        assert sum(bool(some) for some in names[:500]) < 30
        if check:
            assert check in set().union(*names[500:560]) and all(check in some for some in names[620:]), check
            assert max(guard.drift_of_columns().values()) > 1


def test_distances_of_a_window_equal_direct_formulas():
    generator = np.random.default_rng(2)
    train, late = generator.normal(size=(5000, 2)), generator.normal(0.5, 1, size=(300, 2))
    train[:500, 1] = np.nan
    bins = ColumnReference.fit(train, 300, 300)
    psi, ks = bins.distances(bins.codes(late), np.array([300]))
    edges = np.quantile(train[:, 0], np.arange(1, BINS) / BINS)
    shares = np.histogram(late[:, 0], [-np.inf, *edges, np.inf])[0] / 300
    direct = ((shares - 0.05) * np.log(np.maximum(shares, 0.5 / 300) / 0.05)).sum()
    np.testing.assert_allclose(psi[0, 0], direct, rtol=0.05)
    np.testing.assert_allclose(ks[0, 0], np.abs(np.cumsum(shares) - np.arange(1, BINS + 1) / BINS).max(), atol=1e-3)
    assert bins.shares[1, BINS] == 0.1 and ks[0, 1] > 0.1


def test_constant_rows_are_those_whose_last_values_are_one_or_absent():
    generator = np.random.default_rng(1)
    values = generator.integers(0, 2, (400, 3)).astype(float)
    values[generator.random((400, 3)) < 0.5] = np.nan
    for window in (1, 2, 4, 500):
        wanted = np.zeros(values.shape, bool)
        for row in range(window - 1, len(values)):
            for column in range(3):
                wanted[row, column] = len({repr(one) for one in values[row - window + 1 : row + 1, column]}) == 1
        assert (constant_rows(values, window) == wanted).all()


def test_fit_guard_reference_of_too_few_rows_raises(market, rows):
    bars, spec, times = market
    with pytest.raises(BarsError, match="Too few rows"):
        fit_guard_reference(bars.iloc[-6000:], spec, *rows, times)


def test_fit_guard_reference_reads_no_test_row(market, rows, reference):
    bars, spec, times = market
    late = bars.index >= times["test"]
    other = pd.concat([bars[~late], DRIFTS["open_close_swapped"](bars[late], bars, 0.25, None)])
    other.loc[late, "volume"] *= 50
    features, predictions, labels = (one.copy() for one in rows)
    features[features.index >= times["test"]] += 9
    predictions[predictions.index >= times["test"]] = 1 / 3
    labels[labels.index >= times["test"]] = 0
    changed = fit_guard_reference(other, spec, features, predictions, labels, times)
    assert serialize_state(changed.to_state()) == serialize_state(reference.to_state())


def other_validation(market, rows) -> tuple:
    """Bars and rows that are the same in training alone: later ones have other prices, volume, holes and features."""
    bars, _, times = market
    late = bars.index + pd.Timedelta(minutes=1) > times["validation"]
    other = bars[late].assign(open=bars["close"], close=bars["open"], volume=bars["volume"] * 50)
    place = np.arange(len(other))
    jumps = other[PRICES].mul([1, 1.02, 0.98, 1]).mul(np.where(place // 500 % 2, 1.9, 1.0), axis=0) + 0.1
    jumps[place % 500 < 200] = jumps["close"].iloc[0]
    bars = pd.concat([bars[~late], other.assign(**jumps)[(place % 500 <= 300) | (place % 500 >= 380)]])
    features = rows[0].mul(np.where(rows[0].index >= times["validation"], 7, 1), axis=0).astype(np.float32)
    return bars, (features, *rows[1:])


def test_fit_guard_reference_takes_all_but_thresholds_from_training_alone(market, rows, reference):
    _, spec, times = market
    bars, changed = other_validation(market, rows)
    got = fit_guard_reference(bars, spec, *changed, times)

    def of_training(one: GuardReference) -> bytes:
        thresholds = ("strange_features", "excess")
        limits = {name: value for name, value in one.limits.items() if name not in thresholds}
        bins = [[part.edges, part.shares] for part in (one.bars, one.features)]
        return serialize_state({
            "season": dict(one.season), "limits": limits, "bins": bins, "low": one.low, "high": one.high
        })  # fmt: skip

    assert of_training(got) == of_training(reference)
    assert 0.05 <= reference.limits["excess"] < 0.3 and reference.limits["strange_features"] >= 1
    assert (got.features.limit > reference.features.limit).all() and (got.bars.limit > reference.bars.limit).sum() > 12


def test_guard_checks_tick_where_training_was_on_it_whatever_came_later(market, rows, reference):
    bars, spec, times = market
    later = other_validation(market, rows)[0]
    off = bars.iloc[-1000:].assign(**{name: bars[name] + 0.1 for name in PRICES})
    assert reference.limits["off_tick"] == 0 and ((later[PRICES] % 0.25) > 0.01).any(axis=1).mean() > 0.1
    found = answers_of(guard_of(market, reference), off, spec)
    assert "tick:" in found[-1][1]
    early = bars.index < times["validation"]
    adjusted = pd.concat([bars[early].assign(**{name: bars[name] + 0.1 for name in PRICES}), bars[~early]])
    of_adjusted = fit_guard_reference(adjusted, spec, *rows, times)
    assert of_adjusted.limits["off_tick"] == 1
    assert not any("tick:" in found for _, found in answers_of(guard_of(market, of_adjusted), off, spec))


@pytest.mark.soak
# The rule of the thresholds was developed on NQ, ETHUSD and BTCUSD; these were measured once, at the end.
@pytest.mark.parametrize("symbol", ["ES", "XAUUSD", "SPY", "FILUSDT"])
def test_guard_on_held_out_real_bars_meets_limits_of_alarms_and_drifts(shared_data, symbol, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["guard", str(shared_data / "bars"), "--symbols", symbol])
    guard.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    (ours,) = (line for line in lines if line["side"] == "guard")
    assert ours["onsets_per_1000"] <= 1 and ours["found"] >= 7.5, ours  # 8 is missed on ES: docs/log.md
