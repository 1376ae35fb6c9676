"""Finished models: what their report says, how they compare, and what is left of their forecasts after costs."""

import html
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market, synthetic_bars
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.evaluation.backtest import CostSpec, TradingRule
from ml_factory.storage.workspace import Workspace
from tests.contract import doors
from tests.small_data import FEW_COLUMNS

STRATEGIES = ["linear", "always_long", "flat", "last_move", "clock", "random"]
FEW = {"model_settings": {"rounds": 7}}  # in place of QUICK's limit, and a QUICK run all the same


def train(place: Workspace, model: str = "linear", **more):
    return pipeline.train(place, "DEMO", 5, model, **more)


@pytest.fixture(scope="module")
def trained(prepared_template, tmp_path_factory) -> Workspace:
    """A workspace with a full run and a later QUICK run of one model, and a QUICK run of another; only read."""
    place = tmp_path_factory.mktemp("finished") / "workspace"
    shutil.copytree(prepared_template, place)
    with pytest.raises(NotPreparedError, match="No model is finished"):
        pipeline.leaderboard(place)
    train(place)
    for model in ("linear", "lightgbm"):
        assert train(place, model, quick=True, **FEW).limited == {}
    return Workspace(place)


@pytest.fixture
def place(trained, tmp_path) -> Workspace:
    """A copy of it, to be written into."""
    return Workspace(shutil.copytree(trained.root, tmp_path / "workspace"))


def test_result_holds_facts_and_prints_them_as_json():
    table = pd.DataFrame({"loss": [0.5, np.nan]}, index=pd.Index(["a", "b"], name="name"))
    more = {"path": Path("x/y"), "table": table, "verdict": SimpleNamespace(to_dict=lambda: {"a": 1}), "n": (1, 2)}
    found = doors.Result(["one", "two"], also={"frame": table}, **more)
    assert str(found) == found.summary() == "one\ntwo" and found.plot() is None and found.frame is table
    rows = [{"name": "a", "loss": 0.5}, {"name": "b", "loss": None}]
    assert found.to_dict() == {"path": "x/y", "table": rows, "verdict": {"a": 1}, "n": [1, 2]}
    with pytest.raises(AttributeError, match="no losses; it has frame, path, table"):
        print(found.losses)


# ---- the report ------------------------------------------------------------------------------------------------------


def test_findings_of_run_are_in_result_summary_page_and_json(trained):
    result, compared = train(trained), pipeline.evaluate(trained, "DEMO", 5, ["linear"])
    assert "few_rows" in {one.code for one in result.findings}, "a week of bars"
    assert compared.findings == result.findings
    page = html.unescape(result.report_path.read_text())
    shown = page.replace("−", "-").replace("<code>", "`").replace("</code>", "`")
    facts = doors.parse_json(result.report_path.with_suffix(".json").read_text())
    assert f"<h1>{result.verdict.answer}</h1>".replace("-0", "−0") in page and facts["answer"] == result.verdict.answer
    verdict, own = facts["verdicts"]["linear"], facts["backtest"]["strategies"][0]
    assert verdict["sentence"] == result.verdict.sentence and facts["backtest"]["run_id"] == result.run_id
    for words in (
        facts["next_step"], "5 bars of 5 minutes", *(f"`{name}`: " for name in doors.BASELINES),
        "Not checked: one month", "After costs", f"<dt>after costs</dt><dd>{own['net']:+,.0f}<small>",
        "Validation rows, by least edge",
        f"{verdict['gain_best']:+.4f} ({verdict['gain_best_low']:+.4f}", f"{result.verdict.numbers[1:]}.",
        "Evaluated on all ", "Information coefficient of linear",
        "synthetic market with a planted edge",
        *(f"{one:.4f}" for name in ("predicted", "observed") for one in result.calibration[name]),
        *(f"{row['log_loss']:.4f}" for row in facts["metrics"]),
    ):  # fmt: skip
        assert words in shown, words
    assert not any(words in shown for words in ("20 bars of", "None of the checks", "was chosen on", "QUICK limited"))
    assert [one for one in facts["findings"] if one["code"] != "dies_of_costs"] == [
        one.to_dict() for one in result.findings
    ]
    for number, one in enumerate(facts["findings"], 1):
        assert f"{number}. {one['severity'].capitalize()}: {one['sentence']} {one['advice']}".strip() in shown
    for number, one in enumerate(result.findings, 1):
        assert f"finding {number}, {one.severity}: {one.sentence}" in result.summary()
    losses = {row["name"]: row["log_loss"] for row in facts["metrics"]}
    assert losses == pytest.approx(result.metrics.query("split == 'test'").set_index("name")["log_loss"].to_dict())


def test_findings_read_gains_of_each_part_over_prior_of_training_rows(trained, monkeypatch):
    seen = {}
    monkeypatch.setattr(doors.evaluation, "overfit_finding", lambda train, valid: seen.update(train=train, valid=valid))
    monkeypatch.setattr(doors.evaluation, "concentration_finding", lambda unit, gains: seen.update({unit: gains}))
    result = train(trained)
    data, stored = doors.load_dataset(trained, "DEMO", 5), pipeline.load_predictions(trained, "DEMO", 5, "linear")
    rows = {part: data.labels.index.get_indexer(stored.index[stored["split"] == part]) for part in ("train", "test")}
    p = stored.loc[stored["split"] == "train", doors.PROBABILITIES].to_numpy()
    clear = data.unambiguous_mask[rows["train"]]
    y = data.y[rows["train"]][clear]
    shares = np.array([(y == label).mean() for label in (-1, 0, 1)])
    by_hand = -np.log(shares[y + 1]).mean() - doors.row_log_loss(y, p[clear]).mean()
    assert seen["train"] == pytest.approx(by_hand) and seen["train"] != pytest.approx(seen["valid"])
    test, gains = data.unambiguous_mask[rows["test"]], seen["month"]
    assert list(gains.index) == sorted(set(data.labels.index[rows["test"]].strftime("%Y-%m")))
    assert gains.sum() / test.sum() == pytest.approx(result.verdict.gain_best)


def test_evaluate_headline_shows_model_chosen_on_validation_rows(trained, monkeypatch):
    means, calls = doors.evaluation.prepared_dataset_metrics, []

    def disturbed(data, rows, forecasts, best):
        table = means(data, rows, forecasts, best)
        calls.append(set(rows.tolist()) <= set(data.splits["validation"].tolist()))
        if calls[-1]:  # on validation rows lightgbm is made the winner, on test rows linear
            table.loc["lightgbm", "log_loss"] = 0.0
        else:
            table.loc["linear", ["log_loss", "log_loss_gain"]] = [0.0, 9.0]
        return table

    monkeypatch.setattr(doors.evaluation, "prepared_dataset_metrics", disturbed)
    found = pipeline.evaluate(trained, "DEMO", 5)
    facts = doors.parse_json(found.report_path.with_suffix(".json").read_text())
    assert "lightgbm was chosen on validation rows" in found.report_path.read_text()
    assert all(f"\n{name} " in found.summary() for name in ("linear", "lightgbm", "prior"))  # a table
    assert facts["chosen"] == facts["backtest"]["model"] == "lightgbm" and sorted(calls) == [False, True]


# ---- the leaderboard -------------------------------------------------------------------------------------------------


def test_leaderboard_rows_are_those_of_evaluate_and_of_full_runs_first(trained, call, tmp_path):
    compared, found = pipeline.evaluate(trained, "DEMO", 5), pipeline.leaderboard(trained)
    table, losses = found.frame.set_index("model"), compared.metrics.set_index("name")["log_loss"]
    assert sorted(table.index) == ["lightgbm", "linear"] and table["log_loss"].is_monotonic_increasing
    for name, row in table.iterrows():
        verdict = compared.verdicts[name]
        assert row["log_loss"] == losses[name] and row["baseline_log_loss"] == losses[verdict.best_baseline]
        assert (row["gain_best"], row["gain_low"], row["status"], row["edge"]) == (
            verdict.gain_best, verdict.gain_best_low, verdict.status, verdict.edge,
        )  # fmt: skip
        assert row["chosen"] == (name == compared.chosen) and row["fit_seconds"] > 0
    assert table["quick"].to_dict() == {"linear": False, "lightgbm": True} and found.trials == {"DEMO": 3}
    assert [line.split()[3] for line in found.summary().splitlines()[1:3]].count("QUICK") == 1
    full = train(trained).run_id
    assert table.loc["linear", "run_id"] == full == pipeline.predict(trained, "DEMO", 5, "linear").run_id
    assert "full run of 2" in compared.choices["linear"]
    own = pipeline.backtest(trained, "DEMO", 5, "linear", run=full).own
    assert table.loc["linear", "net"] == own["net"] and f"{own['net']:,.0f}" in found.summary()
    words = ("leaderboard", "--workspace", trained.root, "--horizon", 5, "--json", "--out", tmp_path / "board.csv")
    code, out, err = call(*words)
    assert code == 0, err
    assert [one["model"] for one in json.loads(out)["models"]] == list(table.index) and json.loads(out)["skipped"] == []
    assert call("leaderboard", "--workspace", trained.root, "--out", tmp_path)[:2] == (1, "")  # a folder
    assert pd.read_csv(tmp_path / "board.csv")["log_loss"].tolist() == pytest.approx(table["log_loss"].tolist())


def test_leaderboard_lists_models_of_other_data_and_horizons_without_a_model(place):
    pipeline.prepare(
        place, "DEMO", (5, 10), settings=doors.DataSpec(features=FEW_COLUMNS, labels=doors.LabelSpec(k_up=0.9))
    )
    with pytest.raises(NotPreparedError):
        pipeline.prepare(place, "TYPO", 5)
    before = pipeline.leaderboard(place)
    assert before.frame["status"].tolist() == ["other data"] * 2 and "0 of 2 models beat" in before.summary()
    train(place, "lightgbm", quick=True)
    pipeline.cross_validate(place, "DEMO", 5, "linear", folds=2, quick=True)  # one more trial
    found = pipeline.leaderboard(place)
    table = found.frame.set_index("model")
    assert found.trials == {"DEMO": 5} and list(table.index) == ["lightgbm", "linear"]
    assert table.loc["linear", "status"] == "other data" and pd.isna(table.loc["linear", "log_loss"])
    assert table.loc["lightgbm", "status"] != "other data"
    assert found.skipped == ["DEMO, horizon 10"] and "no finished model: DEMO, horizon 10" in str(found)


# ---- the backtest ----------------------------------------------------------------------------------------------------


def test_backtest_of_trained_model_equals_verb_and_label_exits(trained, call):
    found = pipeline.backtest(trained, "DEMO", 5, "linear")
    table = found.strategies.set_index("strategy")
    assert list(table.index) == STRATEGIES and "linear" in str(found)
    assert table.loc["flat", "net"] == 0 and table.loc["flat", "trades"] == 0 < table.loc["linear", "trades"]
    assert table.loc["random", "trades"] == pytest.approx(table.loc["linear", "trades"], rel=0.2)  # the same turnover
    assert table.loc["random", "exposure"] == pytest.approx(table.loc["linear", "exposure"], rel=0.2)
    known = pipeline.load_predictions(trained, "DEMO", 5, "linear").query("split == 'test'")
    assert found.curves["drawdown"].min() == -table.loc["linear", "drawdown"] < 0  # of the figure and of the table
    assert (found.frame["entry_time"] >= known.index[0]).all()
    assert found.luck["trials"] == 3 and "3 trials on this symbol" in found.luck_sentence
    assert np.isnan(found.luck["deflated_sharpe"]) and "wanted at least 8" in found.lacking  # a week: no probability
    code, out, err = call("backtest", "--workspace", trained.root, "--horizon", 5, "--model", "linear", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["strategies"][0]["net"] == pytest.approx(table.loc["linear", "net"]) and facts["run_id"]
    drawn = {line.get_label(): line.get_ydata() for line in found.plot().axes[0].lines}
    assert {"linear", "always long", "clock", "shifted in time"} <= set(drawn)
    assert drawn["linear"][-1] == pytest.approx(found.own["net"])
    with pytest.raises(SettingsError, match="out of sample"):
        pipeline.backtest(trained, "DEMO", 5, "linear", split="train")


@pytest.mark.parametrize(
    ("net", "chance", "needed", "lacking", "says"),
    [
        (-1.0, 0.97, 90.0, "", "No edge after costs: nothing is left (2 trials on this symbol)."),
        (9.0, np.nan, 90.0, "5, wanted 8", "No verdict: not enough sessions: 5, wanted 8 (2 trials on this symbol)."),
        (
            9.0,
            0.97,
            90.0,
            "",
            "A Sharpe ratio above 0 is 97.0% probable after 2 trials on this symbol, on 200 sessions.",
        ),
        (9.0, 0.6, 900.0, "", "60% probable after 2 trials on this symbol, on 200 sessions; at this ratio, 900"),
    ],
)
def test_luck_sentence_says_what_the_trials_leave_of_a_profit(net, chance, needed, lacking, says):
    luck = {"trials": 2, "deflated_sharpe": chance, "sessions_needed": needed}
    assert says in doors.luck_sentence({"net": net, "sessions": 200.0}, luck, lacking)


def test_backtest_rule_that_never_reverses_exits_as_labels_do(place):
    free = TradingRule(reverse=False)
    trades = pipeline.backtest(place, "DEMO", 5, "linear", costs=CostSpec(0, 0), rule=free).frame
    barrier = pipeline.load_labels(place, "DEMO", 5)["barrier"].reindex(trades["entry_time"])
    clear = barrier.isin(["upper", "lower"]).to_numpy() & trades["exit"].isin(["upper", "lower"]).to_numpy()
    same = barrier.astype(str).to_numpy()[clear] == trades["exit"].astype(str).to_numpy()[clear]
    assert clear.sum() > 20 and same.mean() > 0.95  # bars that hold both are resolved by minute bars in labels alone


def test_backtest_writes_trades_and_facts_chooses_edge_on_validation_rows_and_counts_rules_by_hand(
    place, call, monkeypatch
):
    found = pipeline.backtest(place, "DEMO", 5, "linear")
    folder = place.results / "DEMO" / found.run_id
    assert (found.path, found.trades_path) == (folder / "backtest.json", folder / "backtest.csv")
    trades, facts = pd.read_csv(found.trades_path), doors.parse_json(found.path.read_text())
    assert len(trades) == found.own["trades"] and trades["net"].sum() == pytest.approx(found.own["net"])
    known = pipeline.load_predictions(place, "DEMO", 5, "linear").query("split == 'test'")
    assert (facts["first"], facts["last"]) == (known.index[0].isoformat(), known.index[-1].isoformat())
    assert facts["costs"]["spread_ticks"] == 1 and facts["contract"]["multiplier"] > 0
    assert facts["rule"]["reverse"] and facts["quick"] is False
    assert facts["run_id"] == found.run_id and facts["luck_sentence"] == found.luck_sentence and not facts["by_hand"]
    # Of the least edges, the one that earned most on validation rows, in 30 trades or more.
    table = found.least_edges.set_index("least_edge")
    chosen = table.index[table["chosen"]].tolist()
    assert chosen == [table[table["trades"] >= 30]["net"].idxmax()] == [found.rule["least_edge"]]
    by_hand = pipeline.backtest(place, "DEMO", 5, "linear", split="validation", rule=TradingRule(least_edge=0.05))
    assert by_hand.own["net"] == pytest.approx(table.loc[0.05, "net"]) and by_hand.luck["trials"] == 3
    # A rule chosen by hand on test rows is a trial, once; what it leaves open is chosen on validation rows.
    monkeypatch.setattr("ml_factory.workflows.backtest.FEWEST_TRADES", 5)
    verb = ("backtest", "--workspace", place.root, "--horizon", 5, "--model", "linear", "--json")
    for trials, words, rule in (
        (4, ("--least-edge", 0.05), {"least_edge": 0.05}), (4, ("--least-edge", 0.05), {"flat_at_session_end": True}),
        (5, ("--overnight", "--spread", 6), {"flat_at_session_end": False}),
        (6, ("--daily-loss-limit", 9), {"daily_loss_limit": 9}),
    ):  # fmt: skip
        code, out, err = call(*verb, *words)
        assert code == 0, err
        facts = json.loads(out)
        assert facts["luck"]["trials"] == trials and facts["by_hand"] and rule.items() <= facts["rule"].items()
        tried = [one["least_edge"] for one in facts["least_edges"] if one["chosen"]]
        assert "--overnight" not in words or tried == [facts["rule"]["least_edge"]] != [0]
    assert pipeline.leaderboard(place).trials == {"DEMO": 6}


def test_backtest_trades_in_sessions_of_prepared_calendar_and_ends_before_missing_bars(tmp_path):
    """A 24-hour feed prepared as US shares: no position after 16:00 New York, nor over a session's missing end."""
    place = Workspace(tmp_path)
    ensure_synthetic_demo_market(place, "MES", days=30)
    bars = pd.read_parquet(place.raw_bars("MES"))
    clock = pd.DatetimeIndex(bars["timestamp"]).tz_convert("America/New_York")
    bars[~((clock.day % 2 == 1) & (clock.hour == 15) & (clock.minute > 20))].to_parquet(place.raw_bars("MES"))
    pipeline.prepare(place, "MES", (5,), settings=doors.DataSpec(features=FEW_COLUMNS, calendar="us_equity"))
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
    spec = doors.DataSpec(features=FEW_COLUMNS, calendar="cme", tick=0.01)
    pipeline.prepare(
        place, "MES", (5,), data=table.reset_index(), roll=doors.RollSpec(first="MESH4", forced=rolls), settings=spec
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
