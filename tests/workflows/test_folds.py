"""Schemes of folds end to end: who trains on what, what a path is made of, and folds that have nothing to learn."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ml_factory import argument_checks, pipeline
from ml_factory.errors import FactoryError
from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.calibration import Calibration, floored_log_probabilities
from ml_factory.evaluation.metrics import row_log_loss
from ml_factory.runs import FitCheckpoints, open_run
from ml_factory.settings import make_run_settings
from ml_factory.storage.files import files
from ml_factory.storage.serialization import read_state_file, write_state_file
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import folds
from ml_factory.workflows import train as train_module
from ml_factory.workflows.cross_validate import (
    fold_score_mean_gain,
    fold_score_table,
    labels_of_scored_folds,
    path_score_table,
    score_folds,
    verdict_of_fold_scores,
)
from ml_factory.workflows.evaluation import best_baseline, prepared_dataset_baselines
from ml_factory.workflows.folds import (
    FoldForecasts,
    FoldModel,
    FoldPlan,
    FoldSchemeSpec,
    fit_folds,
    inner_validation_split,
    plan_folds,
)
from ml_factory.workflows.prepared_dataset import PreparedDataset, dataset_rows_with_weight

HORIZON = 10
SMALL = {"rounds": 10, "depth": 2, "threads": 1}
SCHEMES = tuple(argument_checks.SCHEMES)


@pytest.fixture
def prepared(sixteen_days) -> tuple[Workspace, PreparedDataset]:
    return sixteen_days


def plan_of(data: PreparedDataset, scheme: str, count: int = 4, lookback: int = 1, limit: int = 0, **more):
    return plan_folds(data, data.development_rows(), FoldSchemeSpec(scheme, count, **more), lookback, limit)


def made_up(plan: FoldPlan, seed: int = 0) -> FoldForecasts:
    """Forecasts that differ from fold to fold; a row in ten has none."""
    rng, forecasts = np.random.default_rng(seed), []
    for _, test in plan.folds:
        p = rng.dirichlet(np.ones(3), len(test))
        p[rng.random(len(test)) < 0.1] = np.nan
        forecasts.append(p)
    return FoldForecasts(plan, forecasts, [Calibration()] * len(forecasts))


@pytest.mark.parametrize("lookback", [1, 100])
def test_fold_plan_purges_labels_and_embargoes_windows_around_test_blocks(prepared, lookback):
    data = prepared[1]
    known = data.labels.index.as_unit("ns").asi8
    ends = pd.DatetimeIndex(data.labels["label_end"]).as_unit("ns").asi8
    embargo = max(64, lookback)
    for scheme in SCHEMES:
        plan = plan_of(data, scheme, lookback=lookback)
        known_at, label_end = known[plan.rows], ends[plan.rows]
        for train, test in plan.folds:
            for block in np.unique(plan.block[test]):
                assessed = np.flatnonzero(plan.block == block)
                before, after = train[train < assessed[0]], train[train > assessed[-1]]
                assert (label_end[before] < known_at[assessed[0]]).all()
                assert (known_at[after - embargo] > label_end[assessed].max()).all()
                assert scheme.startswith(("purged", "comb")) or not len(after)


def test_fold_plan_limit_is_shared_by_folds_and_of_training_rows_only(prepared):
    data = prepared[1]
    for scheme in SCHEMES:
        whole = plan_of(data, scheme)
        plan = plan_of(data, scheme, limit=50 * len(whole.folds))
        assert plan.quick_limits["rows of a fold"].startswith("50 of ") and not whole.quick_limits
        for (train, test), (all_train, all_test) in zip(plan.folds, whole.folds, strict=True):
            assert len(train) == 50 and np.isin(train, all_train).all() and test.tolist() == all_test.tolist()


def test_cross_validate_with_a_rolling_window_trains_on_so_many_rows(prepared):
    workspace, data = prepared
    scheme = FoldSchemeSpec("walk_forward_rolling", 3, window=400)
    rolled = pipeline.cross_validate(
        workspace, data.symbol, HORIZON, "lightgbm", scheme=scheme, model_settings=SMALL, mirror="off"
    )
    assert rolled.fold_table["train"].between(300, 400).all() and rolled.scheme == "walk_forward_rolling"
    assert (plan_of(data, "walk_forward_rolling", 3).table()["train"] > 400).all()
    record = files.read_json(workspace.results / data.symbol / rolled.run_id / "run.json")
    assert record["settings"]["window"] == 400


def test_path_metrics_match_hand_computed_losses_per_path(prepared):
    data = prepared[1]
    plan = plan_of(data, "combinatorial")
    outcome = made_up(plan)
    assessed = score_folds(data, outcome, "made_up")
    table = path_score_table(data, plan, assessed).set_index(["path", "name"])
    assert plan.paths.shape == (3, 4) and len(table) == 3 * (2 + len(BASELINES))
    for path, taken in enumerate(plan.paths):
        losses, prior = [], []
        for block, fold in enumerate(taken):
            train, test = plan.folds[fold]
            clear = data.unambiguous_mask[plan.rows]
            share = np.array([np.mean(data.y[plan.rows[train[clear[train]]]] == side) for side in (-1, 0, 1)])
            for row, p in zip(test, outcome.forecasts[fold], strict=True):
                if plan.block[row] == block and np.isfinite(p).all() and clear[row]:
                    losses.append(row_log_loss(data.y[plan.rows[[row]]], p[None])[0])
                    prior.append(row_log_loss(data.y[plan.rows[[row]]], share[None])[0])
        row = table.loc[(path, "made_up")]
        assert row["rows"] == len(losses) and row["log_loss"] == pytest.approx(np.mean(losses), rel=1e-9)
        assert row["log_loss_gain"] == pytest.approx(np.mean(prior) - np.mean(losses), rel=1e-9)
        assert 0 < row["effective_rows"] < row["rows"] / 2


def test_evaluate_folds_chooses_best_baseline_on_held_out_training_rows(prepared):
    """Not on the rows it judges: with their labels changed the choice and the baselines are the same."""
    data = prepared[1]
    plan = plan_of(data, "purged_kfold")
    assessed = score_folds(data, made_up(plan), "made_up")
    train, test = plan.folds[1]
    labels = data.labels.copy()
    labels.iloc[plan.rows[test], labels.columns.get_loc("label")] = np.int8(1)
    other = score_folds(replace(data, labels=labels), made_up(plan), "made_up")
    assert other[1].best == assessed[1].best
    np.testing.assert_array_equal(other[1].forecasts["clock"], assessed[1].forecasts["clock"])
    readable = np.sort(train[plan.usable[train]])
    held_out = plan.rows[readable[len(readable) - round(0.15 * len(readable)) :]]
    fit = [row for row in plan.rows[readable] if data.labels["label_end"].iloc[row] < data.labels.index[held_out[0]]]
    assert assessed[1].best == best_baseline(data, held_out, prepared_dataset_baselines(data, np.array(fit), held_out))
    table = fold_score_table(data, assessed).set_index(["fold", "name"])
    losses = table.loc[1, "log_loss"]
    assert table.loc[(1, "made_up"), "gain_best"] == pytest.approx(losses[assessed[1].best] - losses["made_up"])


def test_verdict_of_folds_names_absent_classes_and_too_few_weeks(prepared):
    """16 days, less than the 8 weeks of a verdict; the same rows spread over 20 weeks have one."""
    data = prepared[1]
    assessed = score_folds(data, made_up(plan_of(data, "combinatorial")), "made_up")
    table, labels = fold_score_table(data, assessed), labels_of_scored_folds(data, assessed)
    assert labels.index.is_unique and labels.index.is_monotonic_increasing
    assert data.unambiguous_mask[data.labels.index.get_indexer(labels.index)].all()
    short = verdict_of_fold_scores(data, table, "made_up", labels)
    assert short.status == "not enough data" and short.reason.endswith("weeks of rows, wanted at least 8")
    spread = pd.Series(labels.to_numpy(), pd.date_range("2024-01-01", "2024-05-20", periods=len(labels), tz="UTC"))
    assert verdict_of_fold_scores(data, table, "made_up", spread).status in ("beats", "does not beat")
    sided = verdict_of_fold_scores(data, table, "made_up", spread[spread != 0])
    assert (sided.status, sided.reason) == ("not enough data", "no test row is neutral")
    both = verdict_of_fold_scores(data, table, "made_up", labels[labels > 0]).reason
    assert both.startswith("no test row is short or neutral; ") and "weeks of rows" in both


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cross_validate_each_scheme_gives_finite_metrics_and_reuses_folds(prepared, scheme):
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
    raw = fold_score_mean_gain(result.folds, "lightgbm_uncalibrated")[0]
    assert f"not calibrated {raw:+.4f}" in result.summary() and raw != result.gain_mean
    assert (result.fold_table["temperature"] != 1.0).all()
    table, rows = result.fold_table, len(prepared[1].development_rows())
    assert (table[["train", "test", "left_out"]].sum(axis=1) == rows).all() and (table["left_out"] > 0).all()
    assert (table["effective_train"] < table["train"] / 2).all() and (table["effective_test"] > 0).all()


@pytest.mark.parametrize("fold", [0, 1])
def test_cross_validate_killed_inside_fold_reports_progress_on_resume(prepared, monkeypatch, fold):
    workspace, saves, save = prepared[0], [], FitCheckpoints.save
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    asked = {"folds": 2, "model_settings": {**SMALL, "rounds": 20, "block": 5, "patience": 0}, "seed": 90 + fold}

    def killed(checkpoints, state, *given, **options):
        saves.append(state["rounds"])
        if saves.count(15) == fold + 1:
            raise KeyboardInterrupt
        return save(checkpoints, state, *given, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FitCheckpoints, "save", killed)
        pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **asked)
    result = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **asked)
    assert not list(workspace.checkpoints.glob(f"{result.run_id}/*.ckpt"))
    assert result.reached == ("round 10 in the first fold", "fold 1 of 2, round 10 in the next")[fold]
    assert f"unfinished at {result.reached} ({result.run_id}). Resumes from there." in result.found
    assert result.origin["value"]["resumed from"] == result.reached
    assert result.resumed_from == (None, 1)[fold] and ("round 10 in the first fold" in result.summary()) == (fold == 0)


def test_torn_fold_and_fold_of_other_rows_are_fitted_again(prepared):
    workspace, asked = prepared[0], {"folds": 3, "model_settings": SMALL, "seed": 61}
    first = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **asked)
    one, two, _ = sorted(first.path.parent.glob("fold-*.state"))
    state = read_state_file(two)
    write_state_file(two, state | {"p": np.asarray(state["p"])[1:]})
    one.write_bytes(one.read_bytes()[:-9])
    again = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **asked)
    assert again.resumed_from == 1 and again.run_id == first.run_id
    pd.testing.assert_frame_equal(again.folds, first.folds, check_exact=True)


def test_finished_folds_are_on_the_drive_before_the_cross_validation_ends(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path / "drive"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workspace, data = Workspace(tmp_path / "drive"), prepared[1]
    plan, spec = plan_of(data, "purged_kfold", 2), make_run_settings(
        "MES", HORIZON, "linear", task="folds", seed=0, quick=False, data="0", settings=None
    )  # fmt: skip
    with open_run(workspace, spec) as run:
        fit_folds(run, data, plan, FoldModel(0, "linear", {"rounds": 5}))
        assert workspace.wait(60)
        assert len(list((tmp_path / "drive").glob("results/MES/*/fold-linear-*-of-2.state"))) == 2


class Witness:
    """A model that remembers the rows it was given: its input is the features of a row."""

    lookback = 1

    def fit(self, x, y, sample_weight, *, validation, **options):
        self.fitted, self.y, self.weights, self.held_out = x, y, sample_weight, validation[0]
        return SimpleNamespace(nondeterminism=())

    def predict_proba(self, x):
        self.predicted = x
        return np.tile([0.2, 0.3, 0.5], (len(x), 1))


def test_each_fold_is_fitted_stopped_and_calibrated_on_its_own_training_rows(prepared, tmp_path, monkeypatch):
    data, models, scaled_on, seen = prepared[1], [], [], []

    class Watched(FoldModel):
        def build(self, data, fold):
            models.append(Witness())
            return models[-1]

    def numbered(data, rows):
        scaled_on.append(rows)
        return SimpleNamespace(transform=lambda x_NF: np.arange(len(x_NF), dtype=float)[:, None])

    monkeypatch.setattr(folds, "fit_dataset_preprocessing", numbered)
    plan = plan_of(data, "purged_kfold", 3, lookback=20)
    spec = make_run_settings("MES", HORIZON, "linear", task="folds", seed=0, quick=False, data="0", settings=None)
    with open_run(Workspace(tmp_path), spec) as run:
        forecasts = fit_folds(run, data, plan, Watched(0, "linear", {}), seen.append)
    for number, (model, (train_rows, test)) in enumerate(zip(models, plan.folds, strict=True)):
        fit, held_out = (plan.rows[part] for part in plan.fit_and_held_out(number))
        weighed, weights = dataset_rows_with_weight(data, fit)
        np.testing.assert_array_equal(model.fitted[:, 0], data.row[weighed])
        np.testing.assert_array_equal(scaled_on[number], weighed)
        np.testing.assert_array_equal(model.weights, weights)
        np.testing.assert_array_equal(seen[number]["inputs_train"], model.fitted)
        np.testing.assert_array_equal(seen[number]["inputs_test"], model.predicted)
        np.testing.assert_array_equal(seen[number]["train"], weighed)
        assert set(model.held_out[:, 0]) <= set(data.row[held_out]) and not np.isin(fit, held_out).any()
        assert not np.isin(np.r_[fit, held_out], plan.rows[test]).any()
        assert np.isin(np.r_[fit, held_out], plan.rows[train_rows]).all()
        usable = plan.usable[test]
        np.testing.assert_array_equal(model.predicted[:, 0], data.row[plan.rows[test[usable]]])
        assert not usable.all() and (np.isfinite(forecasts.forecasts[number]).all(axis=1) == usable).all()
        y = data.y[dataset_rows_with_weight(data, held_out)[0]]
        log_p = floored_log_probabilities(np.tile([0.2, 0.3, 0.5], (len(y), 1)))
        assert forecasts.calibrations[number] == Calibration.fit(log_p, y, horizon=HORIZON) != Calibration()


def test_inner_validation_of_twelve_rows_matches_docstring():
    known_at = pd.date_range("2025-01-06 00:05", periods=12, freq="5min", tz="UTC").as_unit("ns")
    labels = pd.DataFrame({"label_end": known_at + pd.Timedelta(minutes=10)}, index=known_at)
    fit, validation = inner_validation_split(labels, np.arange(12), 0.25)
    assert fit.tolist() == [0, 1, 2, 3, 4, 5, 6] and validation.tolist() == [9, 10, 11]
    with pytest.raises(FactoryError, match="too few training rows"):
        inner_validation_split(labels, np.arange(2), 0.15)


def of_one_class(data: PreparedDataset, rows: np.ndarray) -> PreparedDataset:
    """The same data, but these rows of the labels were all long."""
    labels = data.labels.copy()
    labels.iloc[rows, labels.columns.get_loc("label")] = np.int8(1)
    labels.iloc[rows, labels.columns.get_loc("barrier")] = "upper"
    return replace(data, labels=labels)


def test_cross_validate_names_fold_of_one_class_and_fits_other_folds(prepared, tmp_path, monkeypatch):
    data = prepared[1]
    first = plan_of(data, "walk_forward_expanding", 3).folds[0][0]
    one_class = of_one_class(data, data.development_rows()[first])
    monkeypatch.setattr(train_module, "load_certified_dataset", lambda *_: one_class)
    ask = {"scheme": "walk_forward_expanding", "folds": 3, "model_settings": SMALL}
    result = pipeline.cross_validate(Workspace(tmp_path), "MES", HORIZON, "lightgbm", uncertified=True, **ask)
    assert result.untaught == [0] and sorted(result.folds["fold"].unique()) == [1, 2]
    assert "one class: fold 0" in result.summary() and len(result.fold_table) == 3
    assert result.to_dict()["untaught"] == [0]
