"""`backtest` of a finished model: stored predictions, simple strategies on the same rows, the verb."""

import json

import pytest

from ml_factory import pipeline
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.evaluation.backtest import CostSpec, TradingRule

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
    assert (found.frame["entry_time"] >= test.index[0]).all()
    assert found.luck["trials"] == 1 and "1 finished run of this symbol" in found.luck_sentence
    assert found.luck["deflated_sharpe"] == pytest.approx(found.luck["probabilistic_sharpe"], nan_ok=True)
    assert found.luck_sentence.startswith("No edge found") == (not found.luck["deflated_sharpe"] > 0.95)
    code, out, err = call("backtest", "--workspace", prepared.root, "--horizon", 5, "--model", "linear", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["strategies"][0]["net"] == pytest.approx(table.loc["linear", "net"]) and facts["run_id"]
    # Exits of an unlimited rule are those of the labels: same bar, same barrier side.
    free = TradingRule(max_contracts=1_000, reverse=False)
    trades = pipeline.backtest(prepared, "DEMO", 5, "linear", costs=CostSpec(0, 0), rule=free).frame
    labels = pipeline.load_labels(prepared, "DEMO", 5)
    barrier = labels["barrier"].reindex(trades["entry_time"])
    clear = barrier.isin(["upper", "lower"]).to_numpy() & trades["exit"].isin(["upper", "lower"]).to_numpy()
    same = barrier.astype(str).to_numpy()[clear] == trades["exit"].astype(str).to_numpy()[clear]
    assert clear.sum() > 20 and same.mean() > 0.95  # bars that hold both are resolved by minute bars in labels alone


def test_backtest_of_training_rows_is_refused(prepared):
    with pytest.raises(SettingsError, match="out of sample"):
        pipeline.backtest(prepared, "DEMO", 5, "linear", split="train")
