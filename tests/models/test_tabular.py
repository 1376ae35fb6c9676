"""The boosters against their own libraries, and their blocks."""

import catboost
import lightgbm as lgb
import numpy as np
import pytest
import xgboost as xgb

from ml_factory.errors import CheckpointError, FactoryError, SettingsError
from ml_factory.models import tabular_catboost
from ml_factory.models.registry import build_model
from ml_factory.models.tabular import BoosterSpec
from ml_factory.models.tabular_data import Rows
from ml_factory.seeding import derive_seed

BOOSTERS = ("xgboost", "lightgbm", "catboost")
PLAIN = {"rounds": 20, "learning_rate": 0.1, "depth": 3, "threads": 1, "row_sample": 1.0, "column_sample": 1.0}


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 8)).astype(np.float32)
    y = np.digitize(x[:, 0] + x[:, 1] * x[:, 2] + rng.normal(size=600), [-0.7, 0.7]) - 1
    return x, y, rng.uniform(0.2, 2, 600)


def fit(name, data, **settings):
    x, y, w = data
    model = build_model(name, **{**PLAIN, **settings})
    result = model.fit(x[:450], y[:450], w[:450], validation=(x[450:], y[450:], w[450:]))
    return model, result


def test_without_sampling_blocks_are_plain_xgboost(data):
    x, y, w = data
    model, _ = fit("xgboost", data, patience=0)
    params = {"objective": "multi:softprob", "num_class": 3, "eta": 0.1, "max_depth": 3, "tree_method": "hist"}
    params |= {"min_child_weight": 5, "lambda": 1, "base_score": 0.5, "nthread": 1}
    matrix = xgb.QuantileDMatrix(x[:450], y[:450] + 1, weight=w[:450])
    plain = xgb.train(params, matrix, model.best_round)
    np.testing.assert_allclose(model.predict_proba(x), plain.inplace_predict(x), atol=1e-6)


def test_without_sampling_blocks_are_plain_lightgbm(data):
    x, y, w = data
    model, _ = fit("lightgbm", data, patience=0)
    params = {"objective": "multiclass", "num_class": 3, "learning_rate": 0.1, "max_depth": 3, "num_leaves": 8}
    params |= {"min_data_in_leaf": 20, "lambda_l2": 1, "verbosity": -1, "num_threads": 1, "deterministic": True}
    params |= {"force_row_wise": True}
    plain = lgb.train(params, lgb.Dataset(x[:450], y[:450] + 1, weight=w[:450]), model.best_round)
    np.testing.assert_allclose(model.predict_proba(x), plain.predict(x), atol=1e-9)


def test_with_sampling_blocks_are_plain_catboost_all_at_once(data, tmp_path):
    """CatBoost's snapshot carries its generator, so that blocks of 10 are bit for bit one run of 20."""
    x, y, w = data
    model, _ = fit("catboost", data, row_sample=0.7, column_sample=0.7, seed=4, patience=0)
    params = {"loss_function": "MultiClass", "classes_count": 3, "learning_rate": 0.1, "depth": 3, "l2_leaf_reg": 1}
    params |= {"bootstrap_type": "Bernoulli", "subsample": 0.7, "rsm": 0.7, "random_seed": 4, "thread_count": 1}
    plain = catboost.CatBoost({**params, "iterations": model.best_round, "train_dir": str(tmp_path)})
    plain.fit(catboost.Pool(x[:450], y[:450] + 1, weight=w[:450]), silent=True)
    np.testing.assert_array_equal(
        model.predict_proba(x), (p := plain.predict(x, prediction_type="Probability")) / p.sum(axis=1, keepdims=True)
    )


@pytest.mark.parametrize("name", BOOSTERS)
def test_the_best_round_is_the_one_of_least_validation_loss(name, data):
    x, y, w = data
    settings = {"rounds": 60, "learning_rate": 0.5, "row_sample": 0.8, "column_sample": 0.8}
    model, result = fit(name, data, patience=7, block=5, **settings)
    assert result.stopped_early and result.best_round == model.best_round < 60
    assert result.best_epoch == -(-result.best_round // 5)

    def loss(p):
        return -np.average(np.log(p[np.arange(450, 600), y[450:] + 1]), weights=w[450:])

    _, full = fit(name, data, patience=0, block=5, **settings)
    assert full.best_round >= result.best_round and not full.stopped_early
    reached = loss(model.predict_proba(x))
    assert reached <= min(row["val_loss"] for row in result.history) + 1e-6
    shorter, _ = fit(name, data, **{**settings, "rounds": model.best_round - 1, "block": 5, "patience": 0})
    assert reached < loss(shorter.predict_proba(x)) + 1e-6


@pytest.mark.parametrize("name", ["xgboost", "lightgbm"])
def test_every_block_has_its_own_seed(name, data):
    sampled = {"row_sample": 0.6, "column_sample": 0.6, "patience": 0}
    p = [fit(name, data, block=block, **sampled)[0].predict_proba(data[0]) for block in (10, 5)]
    assert np.abs(p[0] - p[1]).max() > 1e-4
    assert derive_seed(0, name, "block", 0) != derive_seed(0, name, "block", 1)


@pytest.mark.parametrize("name", BOOSTERS)
def test_nan_is_missing_and_infinity_refused(name, data):
    x, y, w = data
    holes = x.copy()
    holes[::3, 0] = np.nan
    model, _ = fit(name, (holes, y, w))
    assert np.isfinite(model.predict_proba(holes)).all()
    holes[5, 2] = -np.inf
    with pytest.raises(FactoryError, match="row 5, column 2"):
        model.predict_proba(holes)


def test_catboost_leaves_no_files_behind(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    fit("catboost", data)
    assert [path.name for path in tmp_path.rglob("*")] == ["t"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"rounds": 0}, "rounds"), ({"depth": 2.5}, "depth"), ({"row_sample": 0.0}, "row_sample"), ({"l2": -1.0}, "l2")],
)
def test_settings_check_themselves(settings, field):
    with pytest.raises(SettingsError, match=rf"\[{field}\]"):
        BoosterSpec(**settings)


def test_catboost_goes_on_from_the_snapshot_in_the_checkpoint(data, monkeypatch):
    """Started from nothing it would end the same, only later: so count the rounds it really trains."""
    x, y, w = data
    model, trained = build_model("catboost", **PLAIN), []
    until = tabular_catboost._Until.after_iteration
    monkeypatch.setattr(
        tabular_catboost._Until,
        "after_iteration",
        lambda self, info: trained.append(info.iteration) or until(self, info),
    )

    def grower(rows):
        return model._open(model.settings, rows, None, model._bin(model.settings, rows, None))

    first = grower(Rows(x, y + 1, w))
    first.grow(0, 12, seed=0)
    part = first.part()
    first.close()
    trained.clear()
    second = grower(Rows(x, y + 1, w))
    second.restore(part, 12)
    second.grow(12, 15, seed=0)
    assert trained == [13, 14, 15]
    second.close()
    third = grower(Rows(x[::-1].copy(), y + 1, w))
    third.restore(part, 12)
    with pytest.raises(CheckpointError, match="cannot go on from the snapshot"):
        third.grow(12, 15, seed=0)
    third.close()


def test_catboost_takes_more_rounds_than_it_chooses_its_settings_by(data):
    """A training told 200 rounds has other settings than one told 190, and would refuse its snapshot."""
    _, result = fit("catboost", data, rounds=210, patience=0, learning_rate=0.01)
    assert len(result.history) == 21
