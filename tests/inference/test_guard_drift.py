"""Detectors of the guard on a synthetic market: few false alarms, drifts found, any pushes, a checked reference."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from benchmarks.guard import first_new, onsets
from benchmarks.guard_drifts import DRIFTS
from ml_factory.data.resample import BarChunk, to_bar_chunk
from ml_factory.data.sessions import resolve_market_spec
from ml_factory.data.synthetic import SyntheticSpec, synthetic_market
from ml_factory.errors import SettingsError
from ml_factory.evaluation.metrics import PROBABILITIES as P
from ml_factory.inference.guard.block_martingale import BlockMartingale, fit_levels
from ml_factory.inference.guard.drift import RowDrift
from ml_factory.inference.guard.fit_reference import FinishedRows, fit_guard_reference
from ml_factory.inference.guard.guarded_stream import BarGuard
from ml_factory.inference.guard.histograms import BINS, MovingCounts, ReferenceBins
from ml_factory.inference.guard.outcomes import OutcomeCheck
from ml_factory.inference.guard.reference import GuardReference
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.storage.serialization import deserialize_state, serialize_state

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
def rows(market) -> FinishedRows:
    """Features, predictions and outcomes at every fifth bar: noise, and outcomes as probable as predicted."""
    index, generator = market[0].index[4::5] + pd.Timedelta(minutes=1), np.random.default_rng(5)
    p = generator.dirichlet([8, 8, 8], len(index))
    features = pd.DataFrame(generator.normal(size=(len(index), FEATURES)), index, [f"f{n}" for n in range(FEATURES)])
    labels = pd.Series(drawn(p, generator), index)
    return FinishedRows(features.astype(np.float32), pd.DataFrame(p, index, P), labels, 5)


@pytest.fixture(scope="module")
def reference(market, rows) -> GuardReference:
    bars, spec, times = market
    return fit_guard_reference(bars, spec, rows, times)


def drawn(p, generator):
    """Outcomes -1, 0, 1 with these probabilities."""
    return (p.cumsum(axis=1) < generator.random((len(p), 1))).sum(axis=1).clip(0, 2) - 1


def bar_guard(market, reference, off_tick=0.0) -> BarGuard:
    bundle = SimpleNamespace(
        spec=SimpleNamespace(market=market[1]), guard_reference=reference, description={"off_tick": off_tick},
        off_tick_share=reference.limits.get("off_tick", off_tick),
    )  # fmt: skip
    return BarGuard(bundle, GuardSettings())


def test_bar_drift_on_held_out_bars_rarely_alarms_and_finds_declared_drifts(market, reference):
    bars, spec, times = market
    place = int((bars.index < times["test"]).sum())
    guard, test = bar_guard(market, reference), bars.iloc[place:]
    guard.push(to_bar_chunk(bars.iloc[place - WARM : place], spec))
    before = deserialize_state(serialize_state(guard.get_state()))
    clean = [(event.bar - WARM, event.check) for event in guard.push(to_bar_chunk(test, spec))]
    assert len(test) > 5000 and onsets(clean, 5000)[0] <= 5 and onsets(clean, 5000)[1] < 0.1
    names, found = [name for name in DRIFTS if name != "calibrator_lost"], {}
    for start in STARTS:
        guard = bar_guard(market, reference)
        guard.load_state(before)
        guard.push(to_bar_chunk(test.iloc[:start], spec))
        state = guard.get_state()
        for name in names:
            history = bars.iloc[: place + start]
            change = DRIFTS[name].change
            changed = change(test.iloc[start : start + 1000], history, 0.25, np.random.default_rng(start)).iloc[:500]
            guard = bar_guard(market, reference)
            guard.load_state(state)
            events = [(event.bar - WARM - start, event.check) for event in guard.push(to_bar_chunk(changed, spec))]
            found[name, start] = first_new(events, clean, start)
    assert sum(bar is not None for bar in found.values()) >= 0.8 * len(found), found
    for name in ("volume_x5", "every_other_missing", "half_stuck", "open_close_swapped"):
        assert all(found[name, start] is not None for start in STARTS), (name, found)


def test_bar_guard_of_any_chunks_gives_events_and_state_of_one_push(market, reference):
    bars, spec, _ = market
    chunk, whole = to_bar_chunk(bars.iloc[-4100:], spec), bar_guard(market, reference)
    swapped = BarChunk(chunk.start, (chunk.columns[3], *chunk.columns[1:3], chunk.columns[0], *chunk.columns[4:]), None)
    wanted = whole.push(swapped)
    assert {event.check for event in wanted} >= {"drift:gap"}
    guard, events, edges = (
        bar_guard(market, reference),
        [],
        [0, *range(1, 70), 317, 320, 2900, *range(2901, 3000), 4100],
    )
    for first, stop in pairwise(edges):
        events += guard.push(swapped.part(first, stop))
        if first % 7 == 0:
            state = deserialize_state(serialize_state(guard.get_state()))
            guard = bar_guard(market, reference)
            guard.load_state(state)
    assert sorted(events) == sorted(wanted)
    assert serialize_state(guard.get_state()) == serialize_state(whole.get_state())


def test_row_drift_finds_shifted_features_and_sharper_probabilities_alone(reference, rows):
    values, p = rows.features.to_numpy()[-1500:], rows.predictions.to_numpy()[-1500:]
    bars = np.arange(len(values))
    shifted = values.copy()
    shifted[500:] += np.array([1, 1, 1, 0, 0, 0], np.float32)
    sharper = np.where(bars[:, None] < 500, p, p**4 / (p**4).sum(axis=1, keepdims=True))
    for features, forecasts, check in ((values, p, ""), (shifted, p, "features"), (values, sharper, "probabilities")):
        drift = RowDrift(list(rows.features), reference, 1.0)
        events = [*drift.push_features(features, bars), *drift.push_probabilities(forecasts, bars)]
        if not check:
            assert len(events) <= 2
            continue
        assert {event.check for event in events if event.bar > 560} == {f"drift:{check}"}
        assert min(event.bar for event in events if event.check == f"drift:{check}" and event.bar >= 500) < 560
        assert max(drift.ratios().values()) > 1


def test_outcome_check_alarms_where_probabilities_are_wrong_and_not_where_right(reference):
    generator, false, found = np.random.default_rng(8), 0, 0
    for _ in range(12):
        p = generator.dirichlet([8, 8, 8], 600)
        for right in (True, False):
            check, moments = OutcomeCheck(5), np.arange(600)
            shown = p if right else p**4 / (p**4).sum(axis=1, keepdims=True)
            check.remember(moments, shown)
            labels = drawn(p, generator).tolist()
            capital = max(check.add(moment, label) for moment, label in zip(moments.tolist(), labels, strict=True))
            false += right and capital > reference.outcomes
            found += not right and capital > reference.outcomes
    assert false <= 1 and found >= 11


def test_outcome_check_forgets_answered_and_old_predictions_and_refuses_unknown_labels():
    check = OutcomeCheck(2)
    check.remember(np.arange(10_005), np.full((10_005, 3), 1 / 3))
    assert check.add(3, 0) is None and check.add(10_004, 1) is not None and check.add(10_004, 1) is None
    with pytest.raises(SettingsError, match="no such outcome"):
        check.add(10_003, 2)
    other = OutcomeCheck(2)
    other.load_state(deserialize_state(serialize_state(check.get_state())))
    assert other.add(10_003, -1) == check.add(10_003, -1)
    assert serialize_state(other.get_state()) == serialize_state(check.get_state())


def test_reference_bins_distances_equal_direct_formulas():
    generator = np.random.default_rng(2)
    train, late = generator.normal(size=(5000, 2)), generator.normal(0.5, 1, size=(300, 2))
    train[:500, 1] = np.nan
    bins = ReferenceBins.fit(train)
    _, counts = MovingCounts(2, 300, 300).push(bins.codes(late))
    psi, ks = bins.distances(counts, 300)
    edges = np.quantile(train[:, 0], np.arange(1, BINS) / BINS)
    shares = np.histogram(late[:, 0], [-np.inf, *edges, np.inf])[0] / 300
    np.testing.assert_allclose(
        psi[0, 0], ((shares - 0.05) * np.log(np.maximum(shares, 0.5 / 300) / 0.05)).sum(), rtol=0.05
    )
    np.testing.assert_allclose(ks[0, 0], np.abs(np.cumsum(shares) - np.arange(1, BINS + 1) / BINS).max(), atol=1e-3)
    assert bins.shares[1, BINS] == 0.1 and ks[0, 1] > 0.1


def test_guard_reference_round_trips(reference):
    assert GuardReference.from_bytes(reference.to_bytes()).to_bytes() == reference.to_bytes()


def test_guard_reference_of_older_bundle_without_share_off_tick_opens(reference):
    state = deserialize_state(reference.to_bytes())
    assert state["limits"].pop("off_tick") == 0
    again = GuardReference.from_bytes(serialize_state(state))
    assert set(again.limits) == {"gap_minutes", "unit_jump", "stuck_bars"}


def test_fit_guard_reference_reads_no_test_row(market, rows, reference):
    bars, spec, times = market
    late = bars.index >= times["test"]
    other = pd.concat([bars[~late], DRIFTS["open_close_swapped"].change(bars[late], bars, 0.25, None)])
    other.loc[late, "volume"] *= 50
    features = rows.features.copy()
    features[features.index >= times["test"]] += 9
    predictions = rows.predictions.copy()
    predictions[predictions.index >= times["test"]] = 1 / 3
    changed = FinishedRows(features, predictions, rows.labels.where(rows.labels.index < times["test"], 0), 5)
    assert fit_guard_reference(other, spec, changed, times).to_bytes() == reference.to_bytes()


def other_validation(market, rows) -> tuple[pd.DataFrame, FinishedRows]:
    """Bars and rows that are the same in training alone: later ones have other prices, volume, holes and features."""
    bars, _, times = market
    late = bars.index + pd.Timedelta(minutes=1) > times["validation"]
    other = bars[late].assign(open=bars["close"], close=bars["open"], volume=bars["volume"] * 50)
    wider = {"high": other["high"] * 1.02, "low": other["low"] / 1.02}
    place = np.arange(len(other))
    prices = other.assign(**wider)[PRICES].mul(np.where(place // 500 % 2, 1.9, 1.0), axis=0) + 0.1
    stuck = place % 500 < 200
    prices[stuck] = prices["close"].iloc[0]
    holes = (place % 500 > 300) & (place % 500 < 380)
    bars = pd.concat([bars[~late], other.assign(**prices)[~holes]])
    features, predictions = rows.features.copy(), rows.predictions.copy()
    features[features.index >= times["validation"]] *= 7
    return bars, FinishedRows(features, predictions, rows.labels, rows.horizon)


def test_fit_guard_reference_takes_all_but_thresholds_from_training_alone(market, rows, reference):
    _, spec, times = market
    bars, changed = other_validation(market, rows)
    got = fit_guard_reference(bars, spec, changed, times)

    def of_training(one: GuardReference) -> bytes:
        return serialize_state({
            "season": {name: np.asarray(value) for name, value in one.season.items()}, "limits": dict(one.limits),
            "bars": [one.bars.bins.edges, one.bars.bins.shares], "follow": one.follow, "scale": one.scale,
            "rows": [one.rows.bins.edges[:FEATURES], one.rows.bins.shares[:FEATURES]],
            "levels": one.levels, "low": one.low, "high": one.high,
        })  # fmt: skip

    assert of_training(got) == of_training(reference)
    assert got.capital > reference.capital and (got.rows.psi[:FEATURES] > reference.rows.psi[:FEATURES]).all()
    assert (got.bars.psi > reference.bars.psi).sum() > 6


def test_bar_guard_checks_tick_where_training_was_on_it_whatever_came_later(market, rows, reference):
    bars, spec, times = market
    later = other_validation(market, rows)[0]
    off = bars.iloc[-1000:].assign(**{name: bars[name] + 0.1 for name in PRICES})
    assert reference.limits["off_tick"] == 0 and ((later[PRICES] % 0.25) > 0.01).any(axis=1).mean() > 0.1
    events = bar_guard(market, reference, off_tick=0.5).push(to_bar_chunk(off, spec))
    assert "tick" in {event.check for event in events}
    early = bars.index < times["validation"]
    adjusted = pd.concat([bars[early].assign(**{name: bars[name] + 0.1 for name in PRICES}), bars[~early]])
    of_adjusted = fit_guard_reference(adjusted, spec, rows, times)
    assert of_adjusted.limits["off_tick"] == 1
    events = bar_guard(market, of_adjusted).push(to_bar_chunk(off, spec))
    assert "tick" not in {event.check for event in events}


def test_block_martingale_of_scores_that_tie_with_training_loses_capital():
    for ties in (np.ones(2000), np.tile([0.5, 1.0], 1000)):
        capital = BlockMartingale(fit_levels(ties)).push(np.tile(ties, 2))
        assert capital.max() < 1, capital.max()
    assert BlockMartingale(fit_levels(np.ones(2000))).push(np.full(5, 2.0))[-1] > 10


def test_block_martingale_p_values_are_at_least_share_of_training_blocks_and_itself():
    generator = np.random.default_rng(4)
    train = generator.integers(0, 60, 3000).astype(float)
    levels = fit_levels(train)
    for score in np.unique(np.append(train, train + 0.5)):
        martingale = BlockMartingale(levels)
        martingale._capital = 1e50  # far from the restart
        growth = float(np.exp(martingale.push(np.array([score]))[0])) / 1e50
        p = ((train >= score).sum() + 1) / (len(train) + 1)
        assert growth <= (0.5 if p >= 1 else (1 - p + p * np.log(p)) / (p * np.log(p) ** 2)) * (1 + 1e-9)
