"""`leaderboard` of a workspace: a row per finished model, with the numbers of `evaluate`."""

import json

import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.errors import NotPreparedError
from ml_factory.settings import DataSpec
from ml_factory.targets.labels import LabelSpec
from tests.small_data import FEW_COLUMNS, SMALL_DATA


def test_leaderboard_rows_equal_evaluate_on_same_test_rows(prepared, call, tmp_path):
    with pytest.raises(NotPreparedError, match="No model is finished"):
        pipeline.leaderboard(prepared)
    pipeline.prepare(prepared, "DEMO", (5, 10), settings=SMALL_DATA)
    for model in ("linear", "lightgbm"):
        pipeline.train(prepared, "DEMO", 5, model, quick=True, uncertified=True)
    compared = pipeline.evaluate(prepared, "DEMO", 5)
    found = pipeline.leaderboard(prepared)
    table = found.frame.set_index("model")
    assert found.skipped == ["DEMO, horizon 10"] and "no finished model: DEMO, horizon 10" in str(found)
    losses = compared.metrics.set_index("name")["log_loss"]
    assert sorted(table.index) == ["lightgbm", "linear"] and table["log_loss"].is_monotonic_increasing
    for name, row in table.iterrows():
        verdict = compared.verdicts[name]
        assert row["log_loss"] == losses[name] and row["baseline_log_loss"] == losses[verdict.best_baseline]
        assert (row["gain_best"], row["gain_low"], row["status"], row["edge"]) == (
            verdict.gain_best, verdict.gain_best_low, verdict.status, verdict.edge,
        )  # fmt: skip
        assert row["chosen"] == (name == compared.chosen) and row["quick"]
        assert row["fit_seconds"] > 0
    code, out, err = call(
        "leaderboard", "--workspace", prepared.root, "--horizon", 5, "--json", "--out", tmp_path / "board.csv"
    )
    assert code == 0, err
    assert [one["model"] for one in json.loads(out)["models"]] == list(table.index) and json.loads(out)["skipped"] == []
    assert call("leaderboard", "--workspace", prepared.root, "--out", tmp_path)[:2] == (1, "")  # a folder
    assert pd.read_csv(tmp_path / "board.csv")["log_loss"].tolist() == pytest.approx(table["log_loss"].tolist())


def test_leaderboard_keeps_full_run_counts_trials_and_lists_models_of_other_data(prepared):
    def board():
        found = pipeline.leaderboard(prepared)
        return found, found.frame.set_index("model")

    full = pipeline.train(prepared, "DEMO", 5, "linear", uncertified=True)
    own = {"rounds": 7}  # in place of QUICK's limit, and a QUICK run all the same
    quick = pipeline.train(prepared, "DEMO", 5, "linear", quick=True, model_settings=own, uncertified=True)
    pipeline.train(prepared, "DEMO", 5, "lightgbm", quick=True, model_settings=own, uncertified=True)
    assert quick.limited == {}
    found, table = board()
    assert table.loc["linear", "run_id"] == full.run_id != quick.run_id and not table.loc["linear", "quick"]
    assert table.loc["lightgbm", "quick"] and found.trials == {"DEMO": 3}
    assert pipeline.predict(prepared, "DEMO", 5, "linear").run_id == full.run_id, "nor in what is predicted and traded"
    assert [line.split()[3] for line in found.summary().splitlines()[1:3]].count("QUICK") == 1
    assert "full run of 2" in pipeline.evaluate(prepared, "DEMO", 5).choices["linear"]
    traded = pipeline.backtest(prepared, "DEMO", 5, "linear", run_id=full.run_id)
    own = traded.strategies.set_index("strategy").loc["linear"]
    assert table.loc["linear", "net"] == own["net"] and f"{own['net']:,.0f}" in found.summary()
    # A cross-validation is one more trial; models of data that is no longer the prepared one keep a line.
    pipeline.cross_validate(prepared, "DEMO", 5, "linear", folds=2, quick=True, uncertified=True)
    pipeline.prepare(prepared, "DEMO", (5,), settings=DataSpec(features=FEW_COLUMNS, labels=LabelSpec(k_up=0.9)))
    pipeline.train(prepared, "DEMO", 5, "lightgbm", quick=True, uncertified=True)
    found, table = board()
    assert found.trials == {"DEMO": 5} and list(table.index) == ["lightgbm", "linear"]
    assert table.loc["linear", "status"] == "other data" and pd.isna(table.loc["linear", "log_loss"])
    assert table.loc["lightgbm", "status"] != "other data"
