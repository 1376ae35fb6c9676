"""The synthetic markets look like one, and their truth is the truth."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import (
    SyntheticSpec,
    ensure_synthetic_demo_market,
    oracle_probabilities,
    synthetic_bars,
    synthetic_belief,
    synthetic_market,
)
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import assign_sessions, contract_spec, resample_bars, resolve_market_spec, validate_bars
from tests.data.bar_findings import kinds_of

HORIZON = 20  # bars of 5 minutes


def rows_and_outcomes(market, every: int):
    """5-minute rows at each of which barriers of one true deviation are set; the side touched first, bar by bar."""
    frame = resample_bars(market.bars, resolve_market_spec("MES", market.bars), 5)
    at = np.searchsorted(market.start_ns, frame.known_at - 60_000_000_000)
    barrier = market.sigma[np.minimum(at, len(market.sigma) - 1)] * np.sqrt(5 * HORIZON)
    price = {name: np.log(getattr(frame, name)) for name in ("high", "low", "close")}
    rows = [i for i in range(0, len(frame) - HORIZON, every) if frame.segment[i] == frame.segment[i + HORIZON]]
    outcome = np.zeros(len(rows), int)
    for k, i in enumerate(rows):
        for j in range(i + 1, i + HORIZON + 1):
            up = price["high"][j] >= price["close"][i] + barrier[i]
            down = price["low"][j] <= price["close"][i] - barrier[i]
            if up or down:
                outcome[k] = int(up) - int(down)
                break
    return frame, np.array(rows), barrier[rows], outcome


def log_loss(probability, outcome):
    return -np.log(np.maximum(probability[np.arange(len(outcome)), outcome + 1], 1e-3)).mean()


@pytest.fixture(scope="module")
def planted():
    market = synthetic_market(SyntheticSpec(days=200, kind="planted", seed=5))
    return market, *rows_and_outcomes(market, every=60)


def test_synthetic_bars_same_arguments_give_same_bits():
    first, again, other = (synthetic_bars(5, "planted", seed) for seed in (1, 1, 2))
    assert first.equals(again) and not first["close"].equals(other["close"])


@pytest.mark.parametrize("calendar", ["cme", "us_equity", "24h"])
@pytest.mark.parametrize("kind", ["planted", "null"])
def test_synthetic_bars_of_any_kind_and_calendar_pass_check_bars(kind, calendar):
    bars = synthetic_bars(12, kind, 3, calendar)
    checked, report = validate_bars(bars.reset_index(), market=resolve_market_spec("FOO", bars))
    assert kinds_of(report) == () and checked.equals(bars)
    assert ((bars / 0.25).drop(columns="volume") % 1 == 0).all(axis=None)
    sessions = assign_sessions(bars.index.as_unit("ns").asi8, calendar)
    assert sessions.inside.all() and len(np.unique(sessions.id)) == 12
    assert resolve_market_spec("FOO", bars).calendar == calendar


def test_synthetic_market_autocorrelation_is_zero_for_null_not_for_planted():
    def memory(kind):
        market = synthetic_market(SyntheticSpec(days=120, kind=kind, seed=8))
        hours = (market.returns / market.sigma)[: len(market.returns) // 60 * 60].reshape(-1, 60).sum(1)
        return np.corrcoef(hours[1:], hours[:-1])[0, 1], len(hours)

    null, count = memory("null")
    assert abs(null) < 3 / np.sqrt(count)
    assert memory("planted")[0] > 5 / np.sqrt(count)


def test_synthetic_belief_is_calibrated(planted):
    market = planted[0]
    found = synthetic_belief(market)
    belief = found.state
    assert np.allclose(belief.sum(1), 1)
    for state in (-1, 0, 1):
        given = belief[:, state + 1]
        for low, high in ((0.2, 0.4), (0.6, 0.8), (0.9, 1.0)):
            cell = (given >= low) & (given < high)
            if cell.sum() > 5000:
                assert abs((market.state[cell] == state).mean() - given[cell].mean()) < 0.06
    miss = np.log(market.sigma / found.usual) - found.weather
    assert (np.abs(miss) < 2 * found.weather_error).mean() == pytest.approx(0.95, abs=0.03)


def test_oracle_reads_bars_up_to_the_moment_alone():
    market = synthetic_market(SyntheticSpec(days=8, seed=2))
    frame, rows, barrier, _ = rows_and_outcomes(market, every=20)
    moments, cut = frame.known_at[rows], frame.known_at[rows[len(rows) // 2]]
    known = (moments <= cut).sum()
    later = market.bars.index.as_unit("ns").asi8 >= cut
    bars = market.bars.copy()
    bars.loc[later, ["open", "high", "low", "close"]] *= 1.5
    bars.loc[later, "volume"] += 500
    hidden = {"state": np.zeros_like(market.state), "sigma": 3 * market.sigma, "returns": -market.returns}
    first, other = (
        oracle_probabilities(one, moments, barrier, barrier, 5 * HORIZON, paths=50)
        for one in (market, replace(market, bars=bars, **hidden))
    )
    assert np.array_equal(first[:known], other[:known]) and not np.array_equal(first[known:], other[known:])


def test_oracle_probabilities_on_planted_market_have_lower_loss_than_prior(planted):
    market, frame, rows, barrier, outcome = planted
    share = np.bincount(outcome + 1, minlength=3) / len(outcome)
    prior = log_loss(np.tile(share, (len(outcome), 1)), outcome)
    losses = {}
    for knows in ("bars", "state"):
        truth = oracle_probabilities(
            market, frame.known_at[rows], barrier, barrier, 5 * HORIZON, knows=knows, paths=150
        )
        assert np.allclose(truth.sum(1), 1) and np.abs(truth.mean(0) - share).max() < 0.04
        losses[knows] = log_loss(truth, outcome)
        side = truth[:, 2] - truth[:, 0]
        assert abs((side * outcome).sum() / (side * side).sum() - 1) < 0.3  # the slope of outcome on what it said
    assert losses["state"] < losses["bars"] - 0.005 and losses["bars"] < prior - 0.03


def test_oracle_probabilities_on_null_market_have_no_side():
    market = synthetic_market(SyntheticSpec(days=30, kind="null", seed=5, shape=0.0, weather=0.0))
    frame, rows, barrier, outcome = rows_and_outcomes(market, every=20)
    truth = oracle_probabilities(market, frame.known_at[rows], barrier, barrier, 5 * HORIZON, knows="state")
    assert np.abs(truth[:, 2] - truth[:, 0]).mean() < 2.5 * np.sqrt(0.6 / 400)
    assert abs(outcome.mean()) < 3 / np.sqrt(len(outcome) / 2)
    assert market.sigma.std() < 1e-12


def test_ensure_demo_market_called_twice_keeps_first_file(tmp_path):
    workspace = Workspace(tmp_path)
    path = ensure_synthetic_demo_market(workspace, "MES", seed=3, days=3)
    before = path.read_bytes()
    assert ensure_synthetic_demo_market(workspace, "MES", seed=4, days=3).read_bytes() == before
    assert path == workspace.raw_bars("MES") and len(pd.read_parquet(path)) > 4000


def test_demo_null_is_the_market_without_edge(tmp_path):
    workspace = Workspace(tmp_path)
    for symbol, kind in {"DEMO": "planted", "DEMO-NULL": "null"}.items():
        made = pd.read_parquet(ensure_synthetic_demo_market(workspace, symbol, days=3))
        assert made["close"].to_numpy().tolist() == synthetic_bars(3, kind)["close"].tolist()
        assert contract_spec(symbol).multiplier == 5
    assert SyntheticSpec(days=3).state_drift == 0.1 and SyntheticSpec(days=3, kind="null").state_drift == 0


def test_synthetic_bars_us_equity_and_fx_skip_exchange_holidays():
    days = synthetic_bars(12, "null", calendar="us_equity", start="2024-11-20").index.tz_convert("America/New_York")
    dates = pd.Series(days.date).drop_duplicates().astype(str).tolist()
    assert "2024-11-28" not in dates and len(dates) == 12 and dates[0] == "2024-11-20" and dates[-1] == "2024-12-06"
    friday = days[days.strftime("%m-%d") == "11-29"]  # and go home at one
    assert friday[-1].strftime("%H:%M") == "12:59"
    assert "12-25" not in synthetic_bars(10, calendar="fx", start="2024-12-19").index.strftime("%m-%d-%H").tolist()
