"""Schemes of folds end to end: who trains on what, what a path is made of, and folds that have nothing to learn."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import argument_checks, pipeline
from ml_factory.data.io import import_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.calibration import Calibration
from ml_factory.evaluation.metrics import row_log_loss
from ml_factory.models.tabular_data import FoldBins
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.weights import WeightSpec, effective_rows
from ml_factory.workflows import fold_schemes, fold_scores, folds, open_run, unit_checkpoints
from ml_factory.workflows.fold_schemes import FoldPlan, SchemeSpec, fold_plan
from ml_factory.workflows.fold_scores import (
    evaluate_folds,
    evaluated_labels,
    fold_metrics,
    gain_over_blocks,
    verdict_of_folds,
)
from ml_factory.workflows.folds import FoldOutcome
from ml_factory.workflows.load import load_dataset
from ml_factory.workflows.prepared_dataset import Dataset, best_baseline, sample_weights_of
from ml_factory.workflows.unit_checkpoints import fit_progress, fold_phase

HORIZON = 10
SMALL = {"rounds": 10, "depth": 2, "threads": 1}
SCHEMES = tuple(argument_checks.SCHEMES)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> tuple[Workspace, Dataset]:
    workspace = Workspace(tmp_path_factory.mktemp("folds"))
    import_bars(synthetic_bars(days=16, kind="planted", seed=2).reset_index(), workspace, "MES")
    pipeline.prepare(workspace, "MES", (HORIZON,))
    return workspace, load_dataset(workspace, "MES", HORIZON)


def plan_of(data: Dataset, scheme: str, count: int = 4, lookback: int = 1, quick: bool = False, **more):
    return fold_plan(data, data.development(), SchemeSpec(scheme, count, **more), lookback, quick)


def made_up(plan: FoldPlan, seed: int = 0) -> FoldOutcome:
    """Forecasts that differ from fold to fold; a row in ten has none."""
    rng, forecasts = np.random.default_rng(seed), []
    for _, test in plan.folds:
        p = rng.dirichlet(np.ones(3), len(test))
        p[rng.random(len(test)) < 0.1] = np.nan
        forecasts.append(p)
    return FoldOutcome(plan, forecasts, [Calibration()] * len(forecasts), 0, ())


@pytest.mark.parametrize(("scheme", "count"), list(zip(SCHEMES, (4, 4, 4, 6), strict=True)))
def test_the_table_tells_rows_and_what_they_amount_to(prepared, scheme, count):
    data = prepared[1]
    plan = plan_of(data, scheme)
    table = plan.table()
    assert len(table) == count == len(plan.folds)
    for number, (train, _) in enumerate(plan.folds):
        row = table.loc[number]
        assert row["train"] + row["test"] + row["left_out"] == len(plan.rows)
        assert row["effective_train"] == effective_rows(data.labels.iloc[plan.rows[train]]) < row["train"] / 2
        assert 0 < row["effective_test"] < row["test"] / 2


@pytest.mark.parametrize("lookback", [1, 100])
def test_every_scheme_keeps_the_window_clear_of_what_it_is_judged_on(prepared, lookback):
    data = prepared[1]
    known = data.labels.index.as_unit("ns").asi8
    ends = pd.DatetimeIndex(data.labels["label_end"]).as_unit("ns").asi8
    embargo = max(64, lookback)
    for scheme in SCHEMES:
        plan = plan_of(data, scheme, lookback=lookback)
        known_at, label_end = known[plan.rows], ends[plan.rows]
        for train, test in plan.folds:
            for block in np.unique(plan.block[test]):
                judged = np.flatnonzero(plan.block == block)
                before, after = train[train < judged[0]], train[train > judged[-1]]
                assert (label_end[before] < known_at[judged[0]]).all()
                assert (known_at[after - embargo] > label_end[judged].max()).all()
                assert scheme.startswith(("purged", "comb")) or not len(after)


def test_a_rolling_window_is_as_long_as_asked(prepared):
    data = prepared[1]
    whole = plan_of(data, "walk_forward_expanding")
    plan = plan_of(data, "walk_forward_rolling", window=300)
    for (train, test), (all_before, same) in zip(plan.folds, whole.folds, strict=True):
        assert train.tolist() == all_before[-300:].tolist() and test.tolist() == same.tolist()


def test_quick_limits_what_each_fold_trains_on_and_nothing_else(prepared, monkeypatch):
    data = prepared[1]
    monkeypatch.setattr(fold_schemes, "limit_rows", lambda rows, quick: (rows[:50], {"training rows": "50 of more"}))
    for scheme in SCHEMES:
        whole, plan = plan_of(data, scheme), plan_of(data, scheme, quick=True)
        assert plan.quick_limits == {"rows of a fold": "50 of more"} and not whole.quick_limits
        for (train, test), (all_train, all_test) in zip(plan.folds, whole.folds, strict=True):
            assert train.tolist() == all_train[:50].tolist() and test.tolist() == all_test.tolist()


def test_a_path_is_the_whole_of_the_rows_each_forecast_by_its_own_fold(prepared):
    data = prepared[1]
    plan = plan_of(data, "combinatorial")
    outcome = made_up(plan)
    judged = evaluate_folds(data, outcome, "made_up")
    table = fold_scores.path_metrics(data, plan, judged).set_index(["path", "name"])
    assert plan.paths.shape == (3, 4) and len(table) == 3 * (2 + len(BASELINES))
    for path, taken in enumerate(plan.paths):
        losses, prior = [], []
        for block, fold in enumerate(taken):
            train, test = plan.folds[fold]
            clear = data.clear[plan.rows]
            share = np.array([np.mean(data.y[plan.rows[train[clear[train]]]] == side) for side in (-1, 0, 1)])
            for row, p in zip(test, outcome.forecasts[fold], strict=True):
                if plan.block[row] == block and np.isfinite(p).all() and clear[row]:
                    losses.append(row_log_loss(data.y[plan.rows[[row]]], p[None])[0])
                    prior.append(row_log_loss(data.y[plan.rows[[row]]], share[None])[0])
        row = table.loc[(path, "made_up")]
        assert row["rows"] == len(losses) and row["log_loss"] == pytest.approx(np.mean(losses), rel=1e-9)
        assert row["log_loss_gain"] == pytest.approx(np.mean(prior) - np.mean(losses), rel=1e-9)
        assert 0 < row["effective_rows"] < row["rows"] / 2


def test_a_block_counts_once_however_many_folds_judged_it(prepared):
    data = prepared[1]
    table = fold_metrics(data, evaluate_folds(data, made_up(plan_of(data, "combinatorial")), "made_up"))
    own = table[table["name"] == "made_up"]
    assert len(own) == 12 and own.groupby("block").size().tolist() == [3, 3, 3, 3]
    means = [own.loc[own["block"] == block, "log_loss_gain"].mean() for block in range(4)]
    wanted = (np.mean(means), np.std(means, ddof=1) / 2)
    assert gain_over_blocks(table, "made_up") == pytest.approx(wanted, rel=1e-12)


def test_the_best_baseline_of_a_fold_is_chosen_on_rows_it_held_out(prepared):
    """Not on the rows it judges: with their labels changed the choice and the baselines are the same."""
    data = prepared[1]
    plan = plan_of(data, "purged_kfold")
    judged = evaluate_folds(data, made_up(plan), "made_up")
    train, test = plan.folds[1]
    labels = data.labels.copy()
    labels.iloc[plan.rows[test], labels.columns.get_loc("label")] = np.int8(1)
    other = evaluate_folds(replace(data, labels=labels), made_up(plan), "made_up")
    assert other[1].best == judged[1].best
    np.testing.assert_array_equal(other[1].forecasts["clock"], judged[1].forecasts["clock"])
    readable = np.sort(train[plan.usable[train]])
    held_out = plan.rows[readable[len(readable) - round(0.15 * len(readable)) :]]
    fit = [row for row in plan.rows[readable] if data.labels["label_end"].iloc[row] < data.labels.index[held_out[0]]]
    assert judged[1].best == best_baseline(data, np.array(fit), held_out)
    table = fold_metrics(data, judged).set_index(["fold", "name"])
    losses = table.loc[1, "log_loss"]
    assert table.loc[(1, "made_up"), "gain_best"] == pytest.approx(losses[judged[1].best] - losses["made_up"])


def test_judged_folds_use_each_fold_s_own_calibration_and_none(prepared):
    data = prepared[1]
    outcome = made_up(plan_of(data, "purged_kfold"))
    own = [Calibration(0.5, (0.1, 0.2, -0.3)), Calibration(), Calibration(2.0), Calibration(4.0, (-0.5, 0.5, 0.0))]
    warm = replace(outcome, calibrations=own)
    for one, calibration in zip(evaluate_folds(data, warm, "made_up"), own, strict=True):
        raw = one.forecasts["made_up_uncalibrated"]
        powered = raw ** (1 / calibration.temperature) * np.exp(calibration.bias)
        np.testing.assert_allclose(one.forecasts["made_up"], powered / powered.sum(axis=1, keepdims=True), rtol=1e-9)
        assert list(one.forecasts) == ["made_up", "made_up_uncalibrated", *BASELINES]


def test_verdict_of_folds_names_absent_classes_and_weeks_and_else_judges(prepared):
    """16 days, less than the 8 weeks of a verdict; the same rows spread over 20 weeks have one."""
    data = prepared[1]
    judged = evaluate_folds(data, made_up(plan_of(data, "combinatorial")), "made_up")
    table, labels = fold_metrics(data, judged), evaluated_labels(data, judged)
    assert labels.index.is_unique and labels.index.is_monotonic_increasing
    assert data.clear[data.labels.index.get_indexer(labels.index)].all()
    short = verdict_of_folds(data, table, "made_up", labels)
    assert short.status == "not enough data" and short.reason.endswith("weeks of rows, wanted at least 8")
    spread = pd.Series(labels.to_numpy(), pd.date_range("2024-01-01", "2024-05-20", periods=len(labels), tz="UTC"))
    assert verdict_of_folds(data, table, "made_up", spread).status in ("beats", "does not beat")
    sided = verdict_of_folds(data, table, "made_up", spread[spread != 0])
    assert (sided.status, sided.reason) == ("not enough data", "no test row is neutral")
    both = verdict_of_folds(data, table, "made_up", labels[labels > 0]).reason
    assert both.startswith("no test row is short or neutral; ") and "weeks of rows" in both


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cross_validation_by_every_scheme(prepared, scheme):
    workspace, _ = prepared
    ask = {"scheme": scheme, "folds": 3, "model_settings": SMALL}
    result = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **ask)
    again = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **ask)
    assert again.resumed_from == 3 and again.run_id == result.run_id and scheme in result.summary()
    pd.testing.assert_frame_equal(again.folds, result.folds)
    assert {"log_loss_gain", "effective_rows", "block"} < set(result.folds.columns) and not result.untaught
    assert np.isfinite(result.folds["log_loss"]).all() and np.isfinite([result.gain_mean, result.gain_se]).all()
    if scheme == "combinatorial":
        pd.testing.assert_frame_equal(pd.read_parquet(result.paths_path), result.paths)
        assert result.paths["path"].nunique() == 2 and "2 paths: from" in result.summary()
    else:
        assert result.paths is None and result.paths_path is None
    own = result.folds[result.folds["name"] == "lightgbm"]
    found, means = result.verdict, own.groupby("block")["gain_best"].mean()
    assert found.gain_best == pytest.approx(means.mean()) and found.best_baseline in set(own["best_baseline"])
    assert found.rows == own.drop_duplicates("block")["rows"].sum()
    assert found.status == "not enough data" and "weeks of rows, wanted at least 8" in result.summary()
    assert result.plot().axes
    raw = gain_over_blocks(result.folds, "lightgbm_uncalibrated")[0]
    assert f"not calibrated {raw:+.4f}" in result.summary() and raw != result.gain_mean
    assert (result.fold_table["temperature"] != 1.0).all()


@pytest.mark.soak_except("lightgbm")
@pytest.mark.parametrize("model", ["lightgbm", "xgboost"])
def test_trials_and_seeds_of_a_fold_share_its_bins_and_say_the_same(prepared, model):
    """Two seeds and two depths on three folds: three builds, and every forecast to the bit as without sharing."""
    workspace, bins = prepared[0], FoldBins()
    for seed, depth in ((5, 2), (6, 2), (5, 3)):
        ask = {"folds": 3, "seed": seed, "model_settings": SMALL | {"depth": depth}}
        shared = pipeline.cross_validate(workspace, "MES", HORIZON, model, bins=bins, **ask)
        alone = pipeline.cross_validate(workspace, "MES", HORIZON, model, fresh=True, **ask)
        assert alone.run_id != shared.run_id and alone.resumed_from is None
        pd.testing.assert_frame_equal(alone.folds, shared.folds, check_exact=True)
    assert bins.builds == 3 and sorted(bins) == [0, 1, 2]
    for seed in (5, 6):
        pipeline.train(workspace, "MES", HORIZON, model, seed=seed, model_settings=SMALL, bins=bins, uncertified=True)
    assert bins.builds == 4


def test_folds_pass_their_slots_on(prepared, monkeypatch):
    """The outer record and one fold's fit hold slots at a time, and none when the folds are done."""
    workspace = prepared[0]
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    before = set(workspace.checkpoints.glob("slot-*.ckpt"))
    settings = {**SMALL, "rounds": 50, "block": 5}
    pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", folds=5, model_settings=settings, seed=77)
    made = set(workspace.checkpoints.glob("slot-*.ckpt")) - before
    assert len(made) <= 10  # two units, each the last three, the best and one being written
    notes = [json.loads(path.with_suffix(".json").read_text()) for path in made]
    assert {note["status"] for note in notes} <= {"returned"}


@pytest.mark.parametrize("fold", [0, 1])
def test_folds_killed_inside_one_say_how_far_that_one_was(prepared, monkeypatch, fold):
    workspace, now = prepared[0], []
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    asked = {"folds": 2, "model_settings": {**SMALL, "rounds": 20, "block": 5, "patience": 0}, "seed": 90 + fold}

    def saved(state):
        if now[-1] == fold and state["rounds"] == 15:
            raise KeyboardInterrupt
        return fit_progress(state)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            unit_checkpoints, "fold_phase", lambda model, number: now.append(number) or fold_phase(model, number)
        )
        patch.setattr(unit_checkpoints, "fit_progress", saved)
        pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **asked)
    result = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **asked)
    assert result.reached == ("round 10 in the first fold", "fold 1 of 2, round 10 in the next")[fold]
    assert f"unfinished at {result.reached} ({result.run_id}). Resumes from there." in result.found
    assert result.origin()["value"]["resumed from"] == result.reached
    assert result.resumed_from == (None, 1)[fold] and ("round 10 in the first fold" in result.summary()) == (fold == 0)


def test_weights_by_return_read_the_bars_the_label_lived_on(prepared):
    data = prepared[1]
    rows = np.array([40, 900, 1500])
    spec = WeightSpec(uniqueness=False, returns=True)
    close = data.features.index.to_series().map(dict(zip(data.features.index, data.close, strict=True)))
    moved = []
    for row in rows:
        here = data.features.index.get_loc(data.labels.index[row])
        life = data.labels["exit_bar"].iloc[row] - data.labels["entry_bar"].iloc[row]
        moved.append(abs(np.log(close.iloc[here + life] / close.iloc[here])))
    assert (data.labels["barrier"].iloc[rows] != "ambiguous").all()
    np.testing.assert_allclose(sample_weights_of(data, rows, spec), np.array(moved) * 3 / sum(moved), rtol=1e-9)


@pytest.mark.soak_except("spec1")
@pytest.mark.parametrize("spec", [WeightSpec(decay=-0.5), WeightSpec(returns=True), WeightSpec(False, bootstrap=1)])
def test_weights_are_a_setting_of_the_run_and_of_each_fold(prepared, monkeypatch, spec):
    workspace, _ = prepared
    seen = []
    monkeypatch.setattr(folds, "sample_weights_of", lambda *said: seen.append(sample_weights_of(*said)) or seen[-1])
    ask = {"folds": 3, "model_settings": SMALL}
    plain = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **ask)
    seen.clear()
    other = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", weights=spec, **ask)
    assert other.run_id != plain.run_id and len(seen) == 3
    losses = [one.folds.loc[one.folds["name"] == "lightgbm", "log_loss"].to_numpy() for one in (plain, other)]
    assert (losses[0] != losses[1]).all()
    if spec.decay < 0:
        assert all((w[: len(w) // 4] == 0).all() and (w[-len(w) // 4 :] > 0).any() for w in seen)
    trained = [
        pipeline.train(workspace, "MES", HORIZON, "lightgbm", model_settings=SMALL, mirror="off", **more)
        for more in ({}, {"weights": spec})
    ]
    assert trained[0].predictions_hash != trained[1].predictions_hash


def of_one_class(data: Dataset, rows: np.ndarray) -> Dataset:
    """The same data, but these rows of the labels were all long."""
    labels = data.labels.copy()
    labels.iloc[rows, labels.columns.get_loc("label")] = np.int8(1)
    labels.iloc[rows, labels.columns.get_loc("barrier")] = "upper"
    return replace(data, labels=labels)


def test_a_fold_of_one_class_is_named_and_the_others_go_on(prepared, tmp_path, monkeypatch):
    data = prepared[1]
    first = plan_of(data, "walk_forward_expanding", 3).folds[0][0]
    monkeypatch.setattr(open_run, "load_dataset", lambda *_: of_one_class(data, data.development()[first]))
    ask = {"scheme": "walk_forward_expanding", "folds": 3, "model_settings": SMALL}
    result = pipeline.cross_validate(Workspace(tmp_path), "MES", HORIZON, "lightgbm", uncertified=True, **ask)
    assert result.untaught == [0] and sorted(result.folds["fold"].unique()) == [1, 2]
    assert "one class: fold 0" in result.summary() and len(result.fold_table) == 3
    assert result.to_dict()["untaught"] == [0]


def test_when_no_fold_can_learn_it_says_so(prepared, tmp_path, monkeypatch):
    data = prepared[1]
    monkeypatch.setattr(open_run, "load_dataset", lambda *_: of_one_class(data, np.arange(len(data.labels))))
    with pytest.raises(FactoryError, match="No fold has training rows of two classes"):
        ask = {"folds": 3, "model_settings": SMALL, "uncertified": True}
        pipeline.cross_validate(Workspace(tmp_path), "MES", HORIZON, "lightgbm", **ask)


def test_what_is_asked_of_the_run_is_no_setting_of_the_model(prepared):
    workspace, _ = prepared
    for name in ("scheme", "test_blocks", "window", "weights"):
        with pytest.raises(SettingsError, match=name):
            pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", model_settings={name: 2})
    with pytest.raises(SettingsError, match="combinatorial"):
        pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", scheme="combinatoral")
