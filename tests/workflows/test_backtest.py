"""`backtest` of a finished model: stored predictions, simple strategies on the same rows, the verb."""

import json

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.rolls import RollSpec
from ml_factory.data.synthetic import ensure_synthetic_demo_market, synthetic_bars
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.evaluation.backtest import CostSpec, TradingRule
from ml_factory.settings import DataSpec
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.backtest import luck_sentence
from tests.small_data import FEW_COLUMNS

STRATEGIES = ["linear", "always_long", "flat", "last_move", "clock", "random"]


def test_backtest_of_trained_model_equals_verb_and_label_exits(prepared, call):
    with pytest.raises(NotPreparedError):
        pipeline.backtest(prepared, "DEMO", 5, "linear")
    pipeline.train(prepared, "DEMO", 5, "linear", quick=True, uncertified=True)
    found = pipeline.backtest(prepared, "DEMO", 5, "linear")
    table = found.strategies.set_index("strategy")
    assert list(table.index) == STRATEGIES and "linear" in str(found)
    assert table.loc["flat", "net"] == 0 and table.loc["flat", "trades"] == 0 < table.loc["linear", "trades"]
    assert table.loc["random", "trades"] == pytest.approx(table.loc["linear", "trades"], rel=0.2)  # the same turnover
    assert table.loc["random", "exposure"] == pytest.approx(table.loc["linear", "exposure"], rel=0.2)
    known = pipeline.load_predictions(prepared, "DEMO", 5, "linear")
    test = known[known["split"] == "test"]
    assert found.curves["drawdown"].min() == -table.loc["linear", "drawdown"] < 0  # of the figure and of the table
    assert (found.frame["entry_time"] >= test.index[0]).all()
    assert found.luck["trials"] == 1 and "1 trial on this symbol" in found.luck_sentence
    assert found.luck["deflated_sharpe"] == pytest.approx(found.luck["probabilistic_sharpe"], nan_ok=True)
    assert np.isnan(found.luck["deflated_sharpe"]) and "wanted at least 8" in found.lacking  # a week: no probability
    assert "not enough sessions" in luck_sentence(found.own.abs() + 1, found.luck, found.lacking)
    code, out, err = call("backtest", "--workspace", prepared.root, "--horizon", 5, "--model", "linear", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["strategies"][0]["net"] == pytest.approx(table.loc["linear", "net"]) and facts["run_id"]
    # Exits of a rule that never reverses are those of the labels: same bar, same barrier side.
    free = TradingRule(reverse=False)
    trades = pipeline.backtest(prepared, "DEMO", 5, "linear", costs=CostSpec(0, 0), rule=free).frame
    labels = pipeline.load_labels(prepared, "DEMO", 5)
    barrier = labels["barrier"].reindex(trades["entry_time"])
    clear = barrier.isin(["upper", "lower"]).to_numpy() & trades["exit"].isin(["upper", "lower"]).to_numpy()
    same = barrier.astype(str).to_numpy()[clear] == trades["exit"].astype(str).to_numpy()[clear]
    assert clear.sum() > 20 and same.mean() > 0.95  # bars that hold both are resolved by minute bars in labels alone


def test_backtest_writes_trades_and_facts_chooses_edge_on_validation_rows_and_counts_rules_by_hand(prepared, call):
    pipeline.train(prepared, "DEMO", 5, "linear", quick=True, uncertified=True)
    found = pipeline.backtest(prepared, "DEMO", 5, "linear")
    folder = prepared.results / "DEMO" / found.run_id
    assert (found.path, found.trades_path) == (folder / "backtest.json", folder / "backtest.csv")
    trades, facts = pd.read_csv(found.trades_path), parse_json(found.path.read_text())
    assert len(trades) == found.own["trades"] and trades["net"].sum() == pytest.approx(found.own["net"])
    known = pipeline.load_predictions(prepared, "DEMO", 5, "linear").query("split == 'test'")
    assert (facts["first"], facts["last"]) == (known.index[0].isoformat(), known.index[-1].isoformat())
    assert (
        facts["costs"]["spread_ticks"] == 1
        and facts["rule"]["reverse"]
        and facts["contract"]["multiplier"] > 0
        and facts["quick"] is True
    )
    assert facts["run_id"] == found.run_id and facts["luck_sentence"] == found.luck_sentence and not facts["by_hand"]
    # Of the least edges, the one that earned most on validation rows, in 30 trades or more.
    table = found.least_edges.set_index("least_edge")
    enough = table[table["trades"] >= 30]
    chosen = table.index[table["chosen"]].tolist()
    assert chosen == [enough["net"].idxmax()] == [found.rule["least_edge"]] == [facts["rule"]["least_edge"]]
    by_hand = pipeline.backtest(prepared, "DEMO", 5, "linear", split="validation", rule=TradingRule(least_edge=0.05))
    assert by_hand.own["net"] == pytest.approx(table.loc[0.05, "net"]) and by_hand.luck["trials"] == 1
    # A rule chosen by hand on test rows is a trial, once.
    verb = ("backtest", "--workspace", prepared.root, "--horizon", 5, "--model", "linear", "--json")
    for trials, words, rule in (
        (2, ("--least-edge", 0.05), {"least_edge": 0.05}), (2, ("--least-edge", 0.05), {"flat_at_session_end": True}),
        (3, ("--overnight",), {"flat_at_session_end": False}), (4, ("--daily-loss-limit", 9), {"daily_loss_limit": 9}),
    ):  # fmt: skip
        code, out, err = call(*verb, *words)
        assert code == 0, err
        facts = json.loads(out)
        assert facts["luck"]["trials"] == trials and facts["by_hand"] and rule.items() <= facts["rule"].items()
    assert pipeline.leaderboard(prepared).trials == {"DEMO": 4}
    drawn = {line.get_label(): line.get_ydata() for line in found.plot().axes[0].lines}
    assert {"linear", "always long", "clock", "shifted in time"} <= set(drawn)
    assert drawn["linear"][-1] == pytest.approx(found.own["net"])


def test_backtest_trades_in_sessions_of_prepared_calendar_and_ends_before_missing_bars(tmp_path):
    """A 24-hour feed prepared as US shares: no position after 16:00 New York, nor over a session's missing end."""
    place = Workspace(tmp_path)
    ensure_synthetic_demo_market(place, "MES", days=30)
    bars = pd.read_parquet(place.raw_bars("MES"))
    clock = pd.DatetimeIndex(bars["timestamp"]).tz_convert("America/New_York")
    bars[~((clock.day % 2 == 1) & (clock.hour == 15) & (clock.minute > 20))].to_parquet(place.raw_bars("MES"))
    pipeline.prepare(place, "MES", (5,), settings=DataSpec(features=FEW_COLUMNS, calendar="us_equity"))
    more = {"model_settings": {"offset": "none"}}  # with so few rows it would forecast the clock's shares alone
    pipeline.train(place, "MES", 5, "linear", quick=True, uncertified=True, **more)
    found = pipeline.backtest(place, "MES", 5, "linear", rule=TradingRule(horizon=15, barriers=False))
    assert found.contract["calendar"] == "us_equity"
    into, out = (found.frame[name].dt.tz_convert("America/New_York") for name in ("entry_time", "exit_time"))
    assert (into.dt.date == out.dt.date).all() and (out.dt.strftime("%H:%M") <= "16:00").all()
    holes = found.frame["exit"] == "hole"
    assert holes.any() and (out[holes].dt.strftime("%H:%M") == "15:25").all()
    assert f"{holes.sum()} of {len(holes)} trades ended at the last bar before missing ones" in str(found)


def test_backtest_over_rolls_trades_at_traded_prices_and_leaves_before_each(tmp_path):
    """Contracts 10 % apart; the second roll lies among the test rows, in mid-session."""
    place, rolls = Workspace(tmp_path), (("MESM4", "2024-01-26T15:00Z"), ("MESU4", "2024-02-07T15:02Z"))
    near = synthetic_bars(days=12, kind="planted", seed=0)
    names, prices = ("MESH4", "MESM4", "MESU4"), ["open", "high", "low", "close"]
    parts = [near.assign(contract=name, **{one: near[one] * 1.1**k for one in prices}) for k, name in enumerate(names)]
    table = pd.concat(parts).sort_index(kind="stable")
    spec = DataSpec(features=FEW_COLUMNS, calendar="cme", tick=0.01)
    pipeline.prepare(
        place, "MES", (5,), data=table.reset_index(), roll=RollSpec(first="MESH4", forced=rolls), settings=spec
    )
    pipeline.train(place, "MES", 5, "linear", quick=True, uncertified=True)
    found = pipeline.backtest(place, "MES", 5, "linear", rule=TradingRule(horizon=100, barriers=False, reverse=False))
    trades, at = found.frame, pd.Timestamp(rolls[1][1])
    held = np.where(trades["entry_time"] < at, 1.1, 1.21)
    assert (held == 1.1).any() and (held == 1.21).any()
    np.testing.assert_allclose(trades["entry_price"], near["open"].reindex(trades["entry_time"]) * held)
    left = trades[trades["exit"] == "roll"]
    assert len(left) == 1 and at <= left["exit_time"].iloc[0] <= at + pd.Timedelta("5min")
    assert left["exit_price"].iloc[0] == pytest.approx(near["close"].loc[at - pd.Timedelta("1min")] * 1.1)
    assert "1 before a roll" in str(found)


def test_backtest_of_training_rows_is_refused(prepared):
    with pytest.raises(SettingsError, match="out of sample"):
        pipeline.backtest(prepared, "DEMO", 5, "linear", split="train")
