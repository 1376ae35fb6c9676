"""The boosters against their own libraries, and their blocks."""

import catboost
import lightgbm as lgb
import numpy as np
import pytest
import xgboost as xgb

from ml_factory.errors import CheckpointError, FactoryError, SettingsError
from ml_factory.models.registry import build_model
from tests.contract.doors import balanced_class_factors, derive_seed, early_stopping_round, softmax

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


def test_xgboost_blocks_without_sampling_equal_plain_xgboost(data):
    x, y, w = data
    model, _ = fit("xgboost", data, patience=0)
    params = {"objective": "multi:softprob", "num_class": 3, "eta": 0.1, "max_depth": 3, "tree_method": "hist"}
    params |= {"min_child_weight": 5, "lambda": 1, "base_score": 0.5, "nthread": 1}
    matrix = xgb.QuantileDMatrix(x[:450], y[:450] + 1, weight=w[:450])
    plain = xgb.train(params, matrix, model.best_round)
    np.testing.assert_allclose(model.predict_proba(x), plain.inplace_predict(x), atol=1e-6)


def test_lightgbm_blocks_without_sampling_equal_plain_lightgbm(data):
    x, y, w = data
    model, _ = fit("lightgbm", data, patience=0)
    params = {"objective": "multiclass", "num_class": 3, "learning_rate": 0.1, "max_depth": 3, "num_leaves": 8}
    params |= {"min_data_in_leaf": 20, "lambda_l2": 1, "verbosity": -1, "num_threads": 1, "deterministic": True}
    params |= {"force_row_wise": True}
    plain = lgb.train(params, lgb.Dataset(x[:450], y[:450] + 1, weight=w[:450]), model.best_round)
    np.testing.assert_allclose(model.predict_proba(x), plain.predict(x), atol=1e-9)


def test_catboost_block_with_sampling_equals_plain_catboost_bitwise(data):
    x, y, w = data
    model, _ = fit("catboost", data, row_sample=0.7, column_sample=0.7, seed=4, patience=0, block=20)
    params = {"loss_function": "MultiClass", "classes_count": 3, "learning_rate": 0.1, "depth": 3, "l2_leaf_reg": 1}
    params |= {"bootstrap_type": "Bernoulli", "subsample": 0.7, "rsm": 0.7, "thread_count": 1}
    params |= {"random_seed": derive_seed(4, "catboost", "block", 0), "allow_writing_files": False}
    plain = catboost.CatBoost({**params, "iterations": model.best_round})
    plain.fit(catboost.Pool(x[:450], y[:450] + 1, weight=w[:450]), silent=True)
    np.testing.assert_array_equal(model.predict_proba(x), softmax(plain.predict(x, prediction_type="RawFormulaVal")))


@pytest.mark.parametrize("name", BOOSTERS)
def test_booster_best_round_has_least_validation_loss(name, data):
    """Patience counts over blocks, and the block that the best round is in is cut there."""
    x, y, w = data
    settings = {"learning_rate": 0.5, "row_sample": 0.8, "column_sample": 0.8, "block": 5}
    model, result = fit(name, data, rounds=60, patience=7, **settings)
    assert result.stopped_early and model.best_round < 60 and model.best_round % 5
    assert result.best_epoch == -(-model.best_round // 5)
    reached = -np.average(np.log(model.predict_proba(x)[np.arange(450, 600), y[450:] + 1]), weights=w[450:])
    assert reached <= min(row["val_loss"] for row in result.history[:-1]) + 1e-6  # patience ends within the last block
    ended, _ = fit(name, data, rounds=model.best_round, patience=0, **settings)
    np.testing.assert_allclose(model.predict_proba(x), ended.predict_proba(x), atol=1e-6)


@pytest.mark.parametrize("name", BOOSTERS)
def test_booster_nan_is_missing_value_and_infinity_raises_error(name, data):
    x, y, w = data
    holes = np.where(np.arange(600)[:, None] % 3 == 0, np.float32("nan"), x)
    model, _ = fit(name, (holes, y, w), rounds=5)
    assert np.isfinite(model.predict_proba(holes)).all()
    holes[5, 2] = -np.inf
    with pytest.raises(FactoryError, match="row 5, column 2"):
        model.predict_proba(holes)


@pytest.mark.filterwarnings("ignore")  # XGBoost's, where there is no GPU: it takes the CPU
def test_xgboost_on_gpu_is_marked_inexact(data):
    found = [fit("xgboost", data, rounds=2, **device)[1].nondeterminism for device in ({"device": "cuda"}, {})]
    assert found[0] and not found[1]


def test_catboost_fit_leaves_no_files(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    fit("catboost", data)
    assert [path.name for path in tmp_path.rglob("*")] == ["t"]


def _scores_of_blocks(name: str, blocks: list[bytes], x: np.ndarray) -> np.ndarray:
    """Class scores by the library alone: the sum over its models."""
    if name == "xgboost":
        margins = [xgb.Booster(model_file=bytearray(data)).inplace_predict(x, predict_type="margin") for data in blocks]
        return np.sum(margins, axis=0)
    if name == "lightgbm":
        return sum(lgb.Booster(model_str=data.decode()).predict(x, raw_score=True) for data in blocks)
    models = [catboost.CatBoost().load_model(blob=data) for data in blocks]
    return sum(model.predict(x, prediction_type="RawFormulaVal") for model in models)


@pytest.mark.parametrize("name", BOOSTERS)
def test_booster_state_holds_blocks_in_own_format_of_library(name, data):
    """Whatever reads the library's format reads the model, also where its last block was cut."""
    x, y, w = data
    model = build_model(name, **{**PLAIN, "rounds": 24, "row_sample": 0.7, "column_sample": 0.7})
    model.fit(x, y, w)
    blocks = model.get_state()["fitted"]
    assert len(blocks) == 3
    np.testing.assert_allclose(softmax(_scores_of_blocks(name, blocks, x)), model.predict_proba(x), atol=1e-6)


@pytest.mark.parametrize("fitted", [[b"another format"], {"nodes": np.zeros(3)}], ids=["bytes", "earlier version"])
@pytest.mark.parametrize("name", BOOSTERS)
def test_booster_state_that_its_library_cannot_read_is_refused(name, fitted, data):
    state = fit(name, data)[0].get_state() | {"fitted": fitted}
    with pytest.raises(CheckpointError, match=rf"{name} cannot read this model.*wanted a model of {name} \d"):
        build_model(name).load_state(state)


def test_patience_end_equals_hand_computed_rounds():
    assert early_stopping_round([3, 2, 2.5, 2.6, 1], 2) == 4  # the better fifth round came too late
    assert early_stopping_round([3, 2, 2.5, 1.9, 2.0], 2) is None
    assert early_stopping_round([3, 2, 2, 2], 2) == 4  # no better is no better
    assert early_stopping_round([3, 4, 5, 6], 0) is None and early_stopping_round([], 3) is None


def test_balanced_class_factors_equal_hand_computed_ones():
    target, weight = np.array([0, 0, 0, 1, 1, 2]), np.array([1.0, 1, 2, 1, 1, 6])
    # Total weight 12, so 4 a class: classes weigh 4, 2 and 6.
    np.testing.assert_allclose(balanced_class_factors(target, weight), [1, 2, 4 / 6])
    np.testing.assert_allclose(balanced_class_factors(target[:5], weight[:5]), [0.75, 1.5, 1])  # absent: 1


@pytest.mark.parametrize("name", [*BOOSTERS, "linear"])
def test_class_weight_balanced_equals_sample_weights(name, data):
    """Factors are of the training rows alone, and validation rows get the same."""
    x, y, w = data
    w = np.where(y == 0, w / 5, w)
    weighted = w * balanced_class_factors(y[:450] + 1, w[:450])[y + 1]
    p = []
    for how, weight in (("none", weighted), ("balanced", w), ("none", w)):
        model = build_model(name, rounds=20, threads=1, class_weight=how)
        model.fit(x[:450], y[:450], weight[:450], validation=(x[450:], y[450:], weight[450:]))
        p.append(model.predict_proba(x))
    np.testing.assert_array_equal(p[0], p[1])
    assert p[1][:, 1].mean() > p[2][:, 1].mean() + 0.05
    with pytest.raises(SettingsError, match=r"\[class_weight\]"):
        build_model(name, class_weight="even")


@pytest.mark.parametrize("name", ["xgboost", "lightgbm"])
def test_booster_without_useful_split_trains_all_rounds(name, data):
    x, y, w = data
    model = build_model(name, rounds=30, patience=0, min_leaf=1000.0, threads=1)
    result = model.fit(x, y, w, validation=(x, y, w))
    assert len(result.history) == 3
    p = model.predict_proba(x)
    np.testing.assert_allclose(p, np.broadcast_to(p[0], p.shape))
