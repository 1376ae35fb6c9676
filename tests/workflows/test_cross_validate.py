"""Nested folds: each searches for barriers on its own training rows, and is purged by the labels they make."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.resample import resample_bars
from ml_factory.data.sessions import MarketSpec
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import SettingsError
from ml_factory.targets import barrier_search
from ml_factory.targets.barrier_search import search_barriers_on_training_rows
from ml_factory.targets.barrier_search_spec import BarrierSearchSpec, SearchedLabelSpec
from ml_factory.targets.labels import triple_barrier_labels
from ml_factory.workflows import cross_validate
from ml_factory.workflows.barriers import barrier_trials

SPEC = BarrierSearchSpec(trials=5, neutral=(0.02, 0.7), lean=0.5)
SMALL = {"rounds": 5, "depth": 2, "threads": 1}


def folds(place, search: BarrierSearchSpec | None = SPEC, **options) -> pipeline.CrossValidateResult:
    return pipeline.cross_validate(place, "DEMO", 5, "xgboost", folds=3, model_settings=SMALL, search=search, **options)


WIDE = replace(SPEC, k=(1.9, 2.5), neutral=(0.3, 1.0))  # labels that end later than those the folds were cut with


@pytest.mark.parametrize("asked", [SPEC, WIDE], ids=["near", "wide"])
@pytest.mark.parametrize("scheme", ["purged_kfold", "walk_forward_expanding"])
def test_cross_validate_nested_uses_barriers_searched_on_fold_training_rows(prepared, monkeypatch, scheme, asked):
    seen, whole = [], cross_validate.fit_and_forecast_folds
    monkeypatch.setattr(
        cross_validate, "fit_and_forecast_folds", lambda *given: seen.append(given[1:3]) or whole(*given)
    )
    plans, cut = [], cross_validate.cross_validate_nested
    monkeypatch.setattr(
        pipeline, "cross_validate_nested", lambda *given, **named: plans.append(given[2]) or cut(*given, **named)
    )
    result = folds(prepared, asked, scheme=scheme)
    plan, store = plans[0], DatasetStore.current(prepared.processed("DEMO"))
    market = MarketSpec.from_dict(store.facts["market"])
    bars = pd.read_parquet(prepared.raw_bars("DEMO")).set_index("timestamp")
    base, minute_bars = resample_bars(bars, market, 5), resample_bars(bars, market, 1)
    spec, purged = replace(asked, labels=replace(asked.labels, horizon=5)), 0
    first_test = pipeline.load_labels(prepared, "DEMO", 5).index[pipeline.load_splits(prepared, "DEMO", 5)["test"][0]]
    assert len(seen) == len(plan.folds) == len(result.fold_table)
    for number, ((train, test), (own, part)) in enumerate(zip(plan.folds, seen, strict=True)):
        training_rows, evaluates = plan.labels.index[train], plan.labels.index[test]
        found = search_barriers_on_training_rows(base, minute_bars, market, training_rows, spec, evaluated=evaluates)
        stored = SearchedLabelSpec.from_json((result.path.parent / f"barriers-{number}.json").read_text())
        assert stored == found and found.seen_rows.count == len(train)
        made = triple_barrier_labels(base, minute_bars, found.labels, market)
        made = made[made.index.isin(plan.labels.index) & (made["label_end"] < first_test)]
        pd.testing.assert_frame_equal(own.labels, made)
        # the rule of the splits, counted row by row
        ((kept, evaluated_rows),) = part.folds
        known, end = made.index, list(made["label_end"])
        assert list(known[evaluated_rows]) == [moment for moment in evaluates if moment in known]
        start, last, after = known[evaluated_rows[0]], max(end[row] for row in evaluated_rows), []
        for row, moment in enumerate(known):
            behind = row - 64 >= 0 and known[row - 64] > last
            if moment in training_rows and (end[row] < start or behind):
                after.append(row)
        assert kept.tolist() == after
        purged += len(train) - len(after)
        row = result.fold_table.loc[number]
        assert (row["fold"], row["k_up"], row["sigma_span"]) == (number, found.labels.k_up, found.labels.sigma_span)
    scores = result.folds[result.folds["name"] == "xgboost"]
    assert scores["fold"].tolist() == list(range(len(seen)))
    assert result.gain_mean == pytest.approx(scores["log_loss_gain"].mean())
    if asked is SPEC:
        assert len(set(result.fold_table["k_up"])) > 1  # their questions differ
    else:
        assert purged > 0


def test_cross_validate_with_barriers_searched_on_tested_rows_raises(prepared):
    """Labels of a search that saw the training rows: only a search in every fold may judge them."""
    pipeline.search_barriers(prepared, "DEMO", 5, SPEC)
    pipeline.prepare(prepared, "DEMO", (5,), searched="h5-v1")
    with pytest.raises(SettingsError, match=r"searched on rows that the folds test.*saw [\d,]+ rows.*--search"):
        folds(prepared, None)
    assert not list(prepared.results.rglob("folds.parquet"))  # and nothing was fitted
    assert len(folds(prepared, SPEC).fold_table) == 3
    pipeline.prepare(prepared, "DEMO", (5,))
    assert len(folds(prepared, None).fold_table) == 3


def test_cross_validate_nested_resumes_after_kill_and_loads_finished_run(prepared, monkeypatch):
    assessed, whole = [], barrier_search._View.evaluate
    monkeypatch.setattr(barrier_search._View, "evaluate", lambda *given: assessed.append(1) or whole(*given))
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    forecast, done = cross_validate.fit_and_forecast_folds, []

    def killed(*given):
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(1)
        return forecast(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cross_validate, "fit_and_forecast_folds", killed)
        folds(prepared)
    assert len(assessed) == 2 * SPEC.trials
    resumed = folds(prepared)
    assert resumed.resumed_from == 1 and len(assessed) == 3 * SPEC.trials
    rebuilt = folds(prepared, fresh=True)
    assert rebuilt.resumed_from is None and rebuilt.run_id != resumed.run_id and len(assessed) == 6 * SPEC.trials
    pd.testing.assert_frame_equal(rebuilt.folds, resumed.folds)
    pd.testing.assert_frame_equal(rebuilt.fold_table, resumed.fold_table)
    again = folds(prepared)
    assert again.run_id == rebuilt.run_id and again.resumed_from == 3 and len(assessed) == 6 * SPEC.trials


def killed_in_the_search(place, monkeypatch, trials: int, fold: int = 0) -> None:
    """A nest that dies in the search of this fold, after so many trials."""
    assessed, whole = [], barrier_search._View.evaluate

    def judge(*given):
        if len(assessed) == fold * SPEC.trials + trials:
            raise KeyboardInterrupt
        assessed.append(1)
        return whole(*given)

    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(barrier_search._View, "evaluate", judge)
        folds(place)


def test_cross_validate_nested_resumed_on_other_machine_is_marked_inexact(prepared, monkeypatch):
    with monkeypatch.context() as patch:
        machine = barrier_trials.machine_and_library_versions
        patch.setattr(
            barrier_trials, "machine_and_library_versions", lambda *given: machine(*given) | {"python": "3.1"}
        )
        killed_in_the_search(prepared, monkeypatch, trials=3, fold=1)
    result = folds(prepared)
    assert not result.exact and any("python: began with 3.1" in reason for reason in result.inexact_because)
    assert result.reached == "fold 1 of 3, trial 3 of 5 in the next"
    assert f"unfinished at {result.reached} ({result.run_id})" in result.found
    assert result.origin()["value"]["resumed from"] == result.reached


def test_cross_validate_plain_has_no_search_and_combinatorial_search_raises(prepared):
    plain, searched = folds(prepared, None), folds(prepared)
    assert plain.run_id != searched.run_id and "k_up" not in plain.fold_table
    settings = json.loads((plain.path.parent / "run.json").read_text())["settings"]
    assert "search" not in settings and not list(plain.path.parent.glob("barriers-*"))
    assert np.isfinite(plain.gain_mean)
    with pytest.raises(SettingsError, match="path"):
        folds(prepared, scheme="combinatorial")
    with pytest.raises(SettingsError, match="None of 2 trials"):
        folds(prepared, replace(SPEC, trials=2, neutral=(0.98, 0.99)))
