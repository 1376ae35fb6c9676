"""A run that goes on elsewhere says so; a headline is not chosen on the rows it is read from."""

import pytest

from ml_factory import pipeline, runs
from ml_factory.storage.json_values import parse_json
from ml_factory.workflows import evaluation, folds

SMALL = {"rounds": 10, "depth": 3}


def test_cross_validate_resumed_with_other_threads_is_marked_inexact(prepared, monkeypatch):
    asked = []

    def killed_in_the_second_fold(*given, **options):
        asked.append(given)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return fit(*given, **options)

    fit = folds.fit_on_rows
    with monkeypatch.context() as patch:
        patch.setattr(runs, "cores", lambda: 64)
        patch.setattr(folds, "fit_on_rows", killed_in_the_second_fold)
        with pytest.raises(KeyboardInterrupt):
            pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, model_settings=SMALL)
    result = pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, model_settings=SMALL)
    assert result.resumed_from == 1 and "unfinished at fold 1 of 2" in result.found
    assert not result.exact and any(
        "threads: began with" in reason and "64" in reason for reason in result.inexact_because
    )
    assert "continued, not bit-exact" in result.summary()
    straight = pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, seed=1, model_settings=SMALL)
    assert straight.exact and "bit-exact" not in straight.summary()


def test_evaluate_headline_shows_model_chosen_on_validation_rows(prepared, monkeypatch):
    for name in ("xgboost", "lightgbm"):
        pipeline.train(prepared, "DEMO", 5, name, mirror="off", model_settings=SMALL)
    means = evaluation.prepared_dataset_metrics
    calls = []

    def disturbed(data, rows, forecasts, best):
        table = means(data, rows, forecasts, best)
        calls.append(set(rows.tolist()) <= set(data.splits["validation"].tolist()))
        if calls[-1]:  # on validation rows lightgbm is made the winner, on test rows xgboost
            table.loc["lightgbm", "log_loss"] = 0.0
        else:
            table.loc["xgboost", ["log_loss", "log_loss_gain"]] = [0.0, 9.0]
        return table

    monkeypatch.setattr(evaluation, "prepared_dataset_metrics", disturbed)
    found = pipeline.evaluate(prepared, "DEMO", 5)
    facts = parse_json(found.report_path.with_suffix(".json").read_text())
    assert "lightgbm was chosen on validation rows" in found.report_path.read_text()
    assert all(f"\n{name} " in found.summary() for name in ("xgboost", "lightgbm", "prior"))  # a table
    assert facts["chosen"] == facts["backtest"]["model"] == "lightgbm" and sorted(calls) == [False, True]
