"""A run that goes on elsewhere says so; a headline is not chosen on the rows it is read from."""

import pytest

from ml_factory import experiment, pipeline
from ml_factory.data.sources import import_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.runs.workspace import Workspace
from ml_factory.units import nested, pages

SMALL = {"rounds": 10, "depth": 3}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("elsewhere"))
    import_bars(synthetic_bars(days=14, seed=6).reset_index(), made, "MES")
    pipeline.prepare(made, "MES", (10,))
    return made


def test_folds_continued_with_other_threads_are_marked(workspace, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "cores", lambda: 64)
        patch.setattr(nested, "out_of_fold_predictions", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline.cross_validate(workspace, "MES", 10, "xgboost", folds=2, model_settings=SMALL)
    result = pipeline.cross_validate(workspace, "MES", 10, "xgboost", folds=2, model_settings=SMALL)
    assert not result.exact and any("threads" in reason for reason in result.inexact_because)
    assert "continued, not bit-exact" in result.summary()
    straight = pipeline.cross_validate(workspace, "MES", 10, "xgboost", folds=2, seed=1, model_settings=SMALL)
    assert straight.exact and "bit-exact" not in straight.summary()


def test_the_headline_is_the_model_that_validation_rows_chose(workspace, monkeypatch):
    for name in ("xgboost", "lightgbm"):
        pipeline.train(workspace, "MES", 10, name, mirror="off", model_settings=SMALL)
    asked = []
    told = pages.tiles
    monkeypatch.setattr(
        pages, "tiles", lambda data, metrics, chosen: asked.append(chosen) or told(data, metrics, chosen)
    )
    means = pipeline.with_baselines
    calls = []

    def disturbed(data, teachers, rows, forecasts):
        table = means(data, teachers, rows, forecasts)
        calls.append(set(rows.tolist()) <= set(data.splits["validation"].tolist()))
        if calls[-1]:  # on validation rows lightgbm is made the winner, on test rows xgboost
            table.loc["lightgbm", "log_loss"] = 0.0
        else:
            table.loc["xgboost", ["log_loss", "log_loss_gain"]] = [0.0, 9.0]
        return table

    monkeypatch.setattr(pipeline, "with_baselines", disturbed)
    pipeline.evaluate(workspace, "MES", 10)
    assert asked == ["lightgbm"] and sorted(calls) == [False, True]
