"""Prepared data as trainings read it, the baselines of its rows, and folds of it under each scheme."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.models.registry import build_model
from ml_factory.storage.workspace import Workspace
from tests.contract import doors
from tests.small_data import SMALL_DATA

HORIZON = 10
SMALL = {"rounds": 10, "depth": 2, "threads": 1}
SCHEMES = tuple(doors.argument_checks.SCHEMES)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> tuple[Workspace, doors.PreparedDataset]:
    """A market with an edge, prepared for labels of ten bars; some tests add runs to it."""
    workspace = Workspace(tmp_path_factory.mktemp("sixteen"))
    doors.import_bars(synthetic_bars(days=16, kind="planted", seed=2).reset_index(), workspace, "MES")
    pipeline.prepare(workspace, "MES", (HORIZON,), settings=SMALL_DATA)
    return workspace, doors.load_dataset(workspace, "MES", HORIZON)


@pytest.fixture
def data(prepared) -> doors.PreparedDataset:
    return prepared[1]


def fitted(data: doors.PreparedDataset, root: Path, model: str = "lightgbm", **settings):
    workspace = Workspace(root)
    spec = doors.make_run_settings(
        data.symbol, HORIZON, model, task="train", seed=1, quick=False, data=data.fingerprint, settings=SMALL | settings
    )
    with doors.open_run(workspace, spec) as run:
        return workspace, doors.train_module.train_with_holdout(data, run)


def test_evaluate_artifact_counts_prior_on_rows_with_full_window(prepared, data, monkeypatch):
    workspace, _ = prepared
    read = np.flatnonzero(data.full_window_mask(32))  # as a network with 32 rows of look-back
    frame = data.labels.iloc[read][[]].assign(p_short=0.3, p_neutral=0.3, p_long=0.4, split=data.split_names()[read])
    monkeypatch.setattr(doors.predictions, "load_or_make_predictions", lambda *_: frame)
    artifact = SimpleNamespace(symbol="MES", kind="model", facts={"model": "lstm", "run_id": "any"})
    test = doors.evaluation.evaluate_artifacts(workspace, data, {"lstm": artifact}).test_metrics

    def prior_loss(training_rows):
        training_rows = training_rows[data.unambiguous_mask[training_rows]]
        assessed = np.intersect1d(read, data.splits["test"])
        share = {side: np.mean(data.y[training_rows] == side) for side in (-1, 0, 1)}
        return np.mean([-np.log(share[side]) for side in data.y[assessed[data.unambiguous_mask[assessed]]]])

    wanted = prior_loss(np.intersect1d(read, data.splits["train"]))
    assert test.loc["prior", "log_loss"] == pytest.approx(wanted, rel=1e-12)
    assert abs(wanted - prior_loss(data.splits["train"])) > 1e-4  # counted on all of them it is another number
    sided = of_one_class(data, data.splits["validation"])
    reason = doors.evaluation.evaluate_artifacts(workspace, sided, {"lstm": artifact}).verdicts["lstm"].reason
    assert "no validation row is short or neutral" in reason


def test_development_rows_end_before_first_test_row(data):
    rows, first = data.development_rows(), data.labels.index[data.splits["test"][0]]
    assert (data.labels["label_end"].iloc[rows] < first).all()
    left = np.setdiff1d(np.arange(len(data.labels)), rows)
    assert (data.labels["label_end"].iloc[left] >= first).all()


def test_training_windows_stay_inside_one_segment(data):
    lookback = 12
    spec = doors.make_run_settings(
        data.symbol, HORIZON, "lstm", task="train", seed=0, quick=False, data="0", settings={"lookback": lookback}
    )
    _, train, validation, _ = doors.train_module.build_untrained_model(data, spec)
    for rows in (train, validation):
        at = data.row[rows]
        assert (data.segment[at - lookback + 1] == data.segment[at]).all() and (np.diff(at) > 0).all()


def test_fit_inputs_are_the_rows_of_positive_weight_with_their_weights(data):
    """A fit, a fold and a plan take them from here."""
    model, train, held_out = build_model("linear", rounds=1), data.splits["train"], data.splits["validation"]
    rows, _, _, learnt, validation = doors.train_module.fit_inputs(
        data, model, train, held_out, lambda rows: data.scaler
    )
    weights, judged = (
        doors.training_weights(data.labels.iloc[train]),
        data.labels.iloc[held_out],
    )
    np.testing.assert_array_equal(rows, train[weights > 0])
    np.testing.assert_array_equal(learnt[0], data.scaler.transform(data.x_NF)[data.row[rows]])
    assert (learnt[1] == data.y[rows]).all() and (learnt[2] == weights[weights > 0]).all()
    of_held_out = doors.training_weights(judged)
    assert (validation[2] == of_held_out[of_held_out > 0]).all()


def test_load_or_predict_replaces_predictions_of_other_artifact(prepared, tmp_path):
    """A folder of results outlives its model: what another model said there is not taken for this one's."""
    _, data = prepared
    workspace, artifact = fitted(data, tmp_path)
    printed = doors.predictions.load_or_make_predictions(workspace, data, artifact)
    path = doors.predictions.predictions_path(workspace, artifact)
    written = path.read_bytes()
    strange = printed.copy()
    strange[["p_short", "p_neutral", "p_long"]] = [0.1, 0.1, 0.8]
    for spoil in (lambda: strange.to_parquet(path), lambda: path.write_bytes(written[:1000])):
        spoil()
        assert not doors.predictions.is_prediction_of_artifact(path, artifact)
        doors.predictions.load_or_make_predictions(workspace, data, artifact)
        assert path.read_bytes() == written and doors.predictions.is_prediction_of_artifact(path, artifact)
    assert not doors.predictions.is_prediction_of_artifact(path, replace(artifact, hash="0" * 64))
    path.unlink()
    path.mkdir()  # cannot be read as a file
    assert not doors.predictions.is_prediction_of_artifact(path, artifact)


def test_dataset_last_move_is_nan_at_segment_start(data):
    opening = data.segment[data.row] != data.segment[data.row - 1]
    assert opening.any() and np.isnan(data.last_move[opening & (data.row > 0)]).all()
    inside = np.flatnonzero(~opening & (data.row > 0))
    row = data.row[inside]
    np.testing.assert_allclose(data.last_move[inside], np.log(data.close[row] / data.close[row - 1]), atol=1e-12)


def reading(columns: list[str], *steps: str | dict) -> doors.PreparedDataset:
    """A data set of these columns and steps, without rows."""
    nothing, settings = np.empty(0), {"features": asdict(doors.FeatureSpec()), "preprocess": list(steps)}
    features = pd.DataFrame(columns=columns)
    return doors.PreparedDataset(
        "DEMO", 5, "", features, nothing, nothing, pd.DataFrame(), {}, None, {"data": settings}
    )


@pytest.mark.parametrize(
    ("steps", "given", "wanted"),
    [
        (["robust"], {}, {"offset_column": 1, "offset_bars": 5}),
        ([{"step": "standard"}], {"offset": "clock"}, {"offset_column": 1, "offset_bars": 5}),
        (["robust"], {"offset": "none", "rounds": 3}, {"rounds": 3}),
        (["robust"], {"offset_column": 0}, {"offset_column": 0}),
        (["quantile"], {}, {}),  # equal steps of the clock are no longer equal
        (["pca", "robust"], {}, {}),
    ],
)
def test_resolve_data_settings_clock_offset_needs_evenly_scaled_column(steps, given, wanted):
    assert doors.resolve_dataset_settings(reading(["rsi_14", "session_progress"], *steps), given) == wanted


def test_resolve_data_settings_unavailable_offset_raises():
    with pytest.raises(SettingsError, match=r"\[offset\]"):
        doors.resolve_dataset_settings(reading(["session_progress"], "robust"), {"offset": "hour"})
    for columns, steps in ((["rsi_14"], ["robust"]), (["session_progress"], ["quantile"])):
        with pytest.raises(SettingsError, match=r"\[offset\].*leave offset out"):
            doors.resolve_dataset_settings(reading(columns, *steps), {"offset": "clock"})


# ---- the baselines a model is held against ---------------------------------------------------------------------------

LIFE = 6  # bars a neutral label lives; the others live one
N = 900


@pytest.fixture
def stretches():
    """Neutral stretches, whose labels live long and overlap and so weigh little; every ninth row is ambiguous."""
    label = np.tile(np.repeat([0, -1, 1], [40, 20, 30]), N // 90).astype(np.int8)
    entry = np.arange(N, dtype=np.int64)
    barrier = np.where(label > 0, "upper", np.where(label < 0, "lower", "vertical")).astype("U9")
    barrier[::9] = "ambiguous"
    label[::9] = 0
    exit_bar = entry + np.where(label == 0, LIFE, 1)
    labels = pd.DataFrame({"label": label, "barrier": barrier, "entry_bar": entry, "exit_bar": exit_bar})
    labels.index = pd.date_range("2024-01-01 00:05", periods=N, freq="5min", tz="UTC")
    return SimpleNamespace(
        labels=labels, y=label, row=entry, unambiguous_mask=barrier != "ambiguous", horizon=LIFE,
        last_move=np.sin(entry), clock=doors.session_time(labels.index.as_unit("ns").asi8, "24h"),
        volatility=np.cos(entry), classes=doors.label_classes(doors.LABEL_KINDS[0]),
    )  # fmt: skip


def metrics_with_baselines(data, train, rows, forecasts):
    return doors.prepared_dataset_metrics(
        data, rows, forecasts | doors.prepared_dataset_baselines(data, train, rows), "prior"
    )


def test_prior_baseline_counts_each_clear_training_row_once(stretches):
    train, test = np.arange(600), np.arange(600, N)
    table = metrics_with_baselines(stretches, train, test, {})
    clear, assessed = train[stretches.unambiguous_mask[train]], test[stretches.unambiguous_mask[test]]
    share = np.array([np.mean(stretches.y[clear] == side) for side in (-1, 0, 1)])
    by_hand = -np.log(share[stretches.y[assessed] + 1]).mean()
    assert table.loc["prior", "log_loss"] == pytest.approx(by_hand, rel=1e-12)


def test_weighted_prior_loss_uses_training_weights(stretches):
    train, validation = np.arange(600), np.arange(600, N)
    taught, assessed = (
        doors.training_weights(stretches.labels.iloc[train]),
        doors.training_weights(stretches.labels.iloc[validation]),
    )
    share = np.array([taught[stretches.y[train] == side].sum() for side in (-1, 0, 1)]) / taught.sum()
    by_hand = assessed @ -np.log(share[stretches.y[validation] + 1]) / assessed.sum()
    assert doors.dataset_weighted_prior_loss(stretches, train, validation) == pytest.approx(by_hand, rel=1e-12)
    assert abs(metrics_with_baselines(stretches, train, validation, {}).loc["prior", "log_loss"] - by_hand) > 0.01


def test_clock_baseline_counts_clear_training_rows_by_bars_left(stretches):
    """With ambiguous rows counted as neutral, or bars of ten minutes, the shares would be others."""
    train = np.arange(0, 600, 2)  # every other bar
    clear = train[stretches.unambiguous_mask[train]]
    one_bar_left = clear[np.rint(stretches.clock.minutes_left[clear] / 5) == 1]
    share = np.array([np.mean(stretches.y[clear] == side) for side in (-1, 0, 1)])
    counts = np.array([np.sum(stretches.y[one_bar_left] == side) for side in (-1, 0, 1)])
    lives = {"horizon": LIFE, "bar_minutes": 5.0, "volatility": stretches.volatility[clear]}
    pseudo_count = doors.SessionClock.fit(stretches.clock.take(clear), stretches.y[clear], **lives).pseudo_count
    wanted = (counts + pseudo_count * share) / (counts.sum() + pseudo_count)
    assert counts.sum() and doors.prepared_dataset_baselines(stretches, train, one_bar_left)["clock"] == pytest.approx(
        np.tile(wanted, (counts.sum(), 1)), rel=1e-12
    )


# ---- folds -----------------------------------------------------------------------------------------------------------


def plan_of(data: doors.PreparedDataset, scheme: str, count: int = 4, lookback: int = 1, limit: int = 0, **more):
    return doors.plan_folds(data, data.development_rows(), doors.FoldSchemeSpec(scheme, count, **more), lookback, limit)


def made_up(plan: doors.FoldPlan, seed: int = 0) -> doors.FoldForecasts:
    """Forecasts that differ from fold to fold; a row in ten has none."""
    rng, forecasts = np.random.default_rng(seed), []
    for _, test in plan.folds:
        p = rng.dirichlet(np.ones(3), len(test))
        p[rng.random(len(test)) < 0.1] = np.nan
        forecasts.append(p)
    return doors.FoldForecasts(plan, forecasts, [doors.Calibration()] * len(forecasts))


def test_fold_plan_limit_is_of_training_rows_only_and_embargo_at_least_the_input_window(prepared):
    data = prepared[1]
    for scheme in SCHEMES:
        whole = plan_of(data, scheme)
        plan = plan_of(data, scheme, limit=50 * len(whole.folds))
        for lookback, embargo in ((1, 64), (100, 100)):
            purged = plan_of(data, scheme, lookback=lookback)
            assert purged.embargo == embargo
            for train, test in purged.folds:
                split = doors.Split("", {"train": train, "test": test}, embargo)
                assert not list(doors.find_unpurged_rows(purged.labels, split, "fold"))
        assert plan.quick_limits["rows of a fold"].startswith("50 of ") and not whole.quick_limits
        for (train, test), (all_train, all_test) in zip(plan.folds, whole.folds, strict=True):
            assert len(train) == 50 and np.isin(train, all_train).all() and test.tolist() == all_test.tolist()


def test_fold_scheme_of_a_window_trains_on_so_many_rows_and_is_recorded(prepared):
    rolled = plan_of(prepared[1], "walk_forward_rolling", 3, window=400).table()
    assert rolled["train"].between(300, 400).all()
    assert (plan_of(prepared[1], "walk_forward_rolling", 3).table()["train"] > 400).all()
    assert doors.FoldSchemeSpec("walk_forward_rolling", window=400).to_dict()["window"] == 400
    assert doors.FoldSchemeSpec("combinatorial", test_blocks=3).to_dict()["test_blocks"] == 3


def test_path_metrics_match_hand_computed_losses_per_path(prepared):
    data = prepared[1]
    plan = plan_of(data, "combinatorial")
    outcome = made_up(plan)
    assessed = doors.score_folds(data, outcome, "made_up")
    table = doors.path_score_table(data, plan, assessed).set_index(["path", "name"])
    assert plan.paths.shape == (3, 4) and len(table) == 3 * (2 + len(doors.BASELINES))
    for path, taken in enumerate(plan.paths):
        losses, prior = [], []
        for block, fold in enumerate(taken):
            train, test = plan.folds[fold]
            clear = data.unambiguous_mask[plan.rows]
            share = np.array([np.mean(data.y[plan.rows[train[clear[train]]]] == side) for side in (-1, 0, 1)])
            for row, p in zip(test, outcome.forecasts[fold], strict=True):
                if plan.block[row] == block and np.isfinite(p).all() and clear[row]:
                    losses.append(doors.row_log_loss(data.y[plan.rows[[row]]], p[None])[0])
                    prior.append(doors.row_log_loss(data.y[plan.rows[[row]]], share[None])[0])
        row = table.loc[(path, "made_up")]
        assert row["rows"] == len(losses) and row["log_loss"] == pytest.approx(np.mean(losses), rel=1e-9)
        assert row["log_loss_gain"] == pytest.approx(np.mean(prior) - np.mean(losses), rel=1e-9)
        assert 0 < row["effective_rows"] < row["rows"] / 2


def test_evaluate_folds_chooses_best_baseline_on_held_out_training_rows(prepared):
    """Not on the rows it judges: with their labels changed the choice and the baselines are the same."""
    data = prepared[1]
    plan = plan_of(data, "purged_kfold")
    assessed = doors.score_folds(data, made_up(plan), "made_up")
    train, test = plan.folds[1]
    labels = data.labels.copy()
    labels.iloc[plan.rows[test], labels.columns.get_loc("label")] = np.int8(1)
    other = doors.score_folds(replace(data, labels=labels), made_up(plan), "made_up")
    assert other[1].best == assessed[1].best
    np.testing.assert_array_equal(other[1].forecasts["clock"], assessed[1].forecasts["clock"])
    readable = np.sort(train[plan.usable[train]])
    held_out = plan.rows[readable[len(readable) - round(0.15 * len(readable)) :]]
    fit = [row for row in plan.rows[readable] if data.labels["label_end"].iloc[row] < data.labels.index[held_out[0]]]
    assert assessed[1].best == doors.best_baseline(
        data, held_out, doors.prepared_dataset_baselines(data, np.array(fit), held_out)
    )
    table = doors.fold_score_table(data, assessed).set_index(["fold", "name"])
    losses = table.loc[1, "log_loss"]
    assert table.loc[(1, "made_up"), "gain_best"] == pytest.approx(losses[assessed[1].best] - losses["made_up"])


def test_verdict_of_folds_names_absent_classes_and_too_few_weeks(prepared):
    """16 days, less than the 8 weeks of a verdict; the same rows spread over 20 weeks have one."""
    data = prepared[1]
    assessed = doors.score_folds(data, made_up(plan_of(data, "combinatorial")), "made_up")
    table, labels = doors.fold_score_table(data, assessed), doors.labels_of_scored_folds(data, assessed)
    assert labels.index.is_unique and labels.index.is_monotonic_increasing
    assert data.unambiguous_mask[data.labels.index.get_indexer(labels.index)].all()
    short = doors.verdict_of_fold_scores(data, table, "made_up", labels)
    assert short.status == "not enough data" and short.reason.endswith("weeks of rows, wanted at least 8")
    spread = pd.Series(labels.to_numpy(), pd.date_range("2024-01-01", "2024-05-20", periods=len(labels), tz="UTC"))
    assert doors.verdict_of_fold_scores(data, table, "made_up", spread).status in ("beats", "does not beat")
    sided = doors.verdict_of_fold_scores(data, table, "made_up", spread[spread != 0])
    assert (sided.status, sided.reason) == ("not enough data", "no test row is neutral")
    both = doors.verdict_of_fold_scores(data, table, "made_up", labels[labels > 0]).reason
    assert both.startswith("no test row is short or neutral; ") and "weeks of rows" in both


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cross_validate_each_scheme_gives_finite_metrics_and_reuses_folds(prepared, scheme):
    workspace, _ = prepared
    rolling = scheme == "walk_forward_rolling"
    ask = {"scheme": doors.FoldSchemeSpec(scheme, 3, window=400 if rolling else None), "model_settings": SMALL}
    result = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **ask)
    again = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **ask)
    assert again.reused and again.resumed_from is None and "3 folds found done" in again.summary()
    assert not result.reused and again.run_id == result.run_id and scheme in result.summary()
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
    raw = doors.fold_score_mean_gain(result.folds, "lightgbm_uncalibrated")[0]
    assert f"not calibrated {raw:+.4f}" in result.summary() and raw != result.gain_mean
    assert (result.fold_table["temperature"] != 1.0).all()
    table, rows = result.fold_table, len(prepared[1].development_rows())
    assert table["train"].between(300, 400).all() == rolling and result.scheme == scheme
    assert (table[["train", "test", "left_out"]].sum(axis=1) == rows).all() and (table["left_out"] > 0).all()
    assert (table["effective_train"] < table["train"] / 2).all() and (table["effective_test"] > 0).all()


def test_cross_validate_killed_inside_fold_reports_progress_on_resume(prepared, monkeypatch):
    workspace, saves, save = prepared[0], [], doors.FitCheckpoints.save
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    asked = {"folds": 2, "model_settings": {**SMALL, "rounds": 20, "block": 5, "patience": 0}, "seed": 91}

    def killed(checkpoints, state, *given, **options):
        saves.append(state["rounds"])
        if saves.count(15) == 2:
            raise KeyboardInterrupt
        return save(checkpoints, state, *given, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(doors.FitCheckpoints, "save", killed)
        pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **asked)
    result = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **asked)
    assert not list(workspace.checkpoints.glob(f"{result.run_id}/*.ckpt"))
    assert result.reached == "fold 1 of 2, round 10 in the next" and result.resumed_from == 1
    assert f"unfinished at {result.reached} ({result.run_id}). Resumes from there." in result.found
    assert result.origin["value"]["resumed from"] == result.reached


def test_torn_fold_and_fold_of_other_rows_are_fitted_again(prepared):
    workspace, asked = prepared[0], {"folds": 3, "model_settings": SMALL, "seed": 61}
    first = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **asked)
    one, two, _ = sorted(first.path.parent.glob("fold-*.state"))
    state = doors.read_state_file(two)
    doors.write_state_file(two, state | {"p": np.asarray(state["p"])[1:]})
    one.write_bytes(one.read_bytes()[:-9])
    again = pipeline.cross_validate(workspace, "MES", HORIZON, "lightgbm", **asked)
    assert (again.resumed_from, again.reused) == (1, False) and again.run_id == first.run_id
    pd.testing.assert_frame_equal(again.folds, first.folds, check_exact=True)


def test_finished_folds_are_on_the_drive_before_the_cross_validation_ends(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path / "drive"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workspace, data = Workspace(tmp_path / "drive"), prepared[1]
    seen, plan, spec = [], plan_of(data, "purged_kfold", 2, lookback=20), doors.make_run_settings(
        "MES", HORIZON, "linear", task="folds", seed=0, quick=False, data="0", settings=None
    )  # fmt: skip
    with doors.open_run(workspace, spec) as run:
        found = doors.fit_folds(run, data, plan, doors.FoldModel(0, "linear", {"rounds": 5}), seen.append)
        assert workspace.wait(60)
        assert len(list((tmp_path / "drive").glob("results/MES/*/fold-linear-*-of-2.state"))) == 2
    assert not plan.usable.all()  # rows without a whole window are neither learnt from nor forecast
    for (_, test), p, learnt in zip(plan.folds, found.forecasts, seen, strict=True):
        np.testing.assert_array_equal(np.isfinite(p).all(axis=1), plan.usable[test])
        assert np.isin(learnt["train"], plan.rows[plan.usable]).all()


def test_inner_validation_of_thirteen_rows_matches_docstring():
    known_at = pd.date_range("2025-01-06 00:05", periods=13, freq="5min", tz="UTC").as_unit("ns")
    labels = pd.DataFrame({"label_end": known_at + pd.Timedelta(minutes=10)}, index=known_at)
    fit, validation = doors.inner_validation_split(labels, np.arange(13))
    assert fit.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8] and validation.tolist() == [11, 12]
    with pytest.raises(FactoryError, match="too few training rows"):
        doors.inner_validation_split(labels, np.arange(2))


def of_one_class(data: doors.PreparedDataset, rows: np.ndarray) -> doors.PreparedDataset:
    """The same data, but these rows of the labels were all long."""
    labels = data.labels.copy()
    labels.iloc[rows, labels.columns.get_loc("label")] = np.int8(1)
    labels.iloc[rows, labels.columns.get_loc("barrier")] = "upper"
    return replace(data, labels=labels)


def test_cross_validate_names_fold_of_one_class_and_fits_other_folds(prepared, tmp_path, monkeypatch):
    data = prepared[1]
    first = plan_of(data, "walk_forward_expanding", 3).folds[0][0]
    one_class = of_one_class(data, data.development_rows()[first])
    monkeypatch.setattr(doors.train_module, "load_certified_dataset", lambda *_: one_class)
    ask = {"scheme": "walk_forward_expanding", "folds": 3, "model_settings": SMALL}
    result = pipeline.cross_validate(Workspace(tmp_path), "MES", HORIZON, "lightgbm", uncertified=True, **ask)
    assert result.untaught == [0] and sorted(result.folds["fold"].unique()) == [1, 2]
    assert "one class: fold 0" in result.summary() and len(result.fold_table) == 3
    assert result.to_dict()["untaught"] == [0]
