"""A run that goes on elsewhere says so; a headline is not chosen on the rows it is read from."""

import pytest

from ml_factory import pipeline, runs
from ml_factory.data.io import import_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import evaluation, folds
from tests.small_data import SMALL_DATA

SMALL = {"rounds": 10, "depth": 3}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("elsewhere"))
    import_bars(synthetic_bars(days=14, seed=6).reset_index(), made, "MES")
    pipeline.prepare(made, "MES", (10,), settings=SMALL_DATA)
    return made


def test_cross_validate_resumed_with_other_threads_is_marked_inexact(workspace, monkeypatch):
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
            pipeline.cross_validate(workspace, "MES", 10, "xgboost", folds=2, model_settings=SMALL)
    result = pipeline.cross_validate(workspace, "MES", 10, "xgboost", folds=2, model_settings=SMALL)
    assert result.resumed_from == 1 and "unfinished at fold 1 of 2" in result.found
    assert not result.exact and any(
        "threads: began with" in reason and "64" in reason for reason in result.inexact_because
    )
    assert "continued, not bit-exact" in result.summary()
    straight = pipeline.cross_validate(workspace, "MES", 10, "xgboost", folds=2, seed=1, model_settings=SMALL)
    assert straight.exact and "bit-exact" not in straight.summary()


def test_evaluate_headline_shows_model_chosen_on_validation_rows(workspace, monkeypatch):
    for name in ("xgboost", "lightgbm"):
        pipeline.train(workspace, "MES", 10, name, mirror="off", model_settings=SMALL)
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
    found = pipeline.evaluate(workspace, "MES", 10)
    facts = parse_json(found.report_path.with_suffix(".json").read_text())
    assert facts["chosen"] == facts["backtest"]["model"] == "lightgbm" and sorted(calls) == [False, True]
