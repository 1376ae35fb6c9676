"""What a feature is worth: permuted against a hand-made model, gain and SHAP values against the libraries' promise."""

import numpy as np
import pytest

from ml_factory.models.registry import build_model
from tests.contract.doors import TabularModel, feature_importance_table

TABULAR = ("xgboost", "lightgbm", "catboost", "linear")


class ByFirst(TabularModel):
    """Says 0.8 for the sign of the first feature, 0.1 for the others; reads nothing else."""

    def __init__(self):
        self.n_features = 3

    def importances(self):
        return np.array([0.5, 0.2, 0.3])

    def predict_proba(self, x):
        p = np.full((len(x), 3), 0.1)
        p[np.arange(len(x)), np.where(x[:, 0] > 0, 2, 0)] = 0.8
        return p


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 5)).astype(np.float32)
    return x, np.digitize(2 * x[:, 1] + x[:, 3] + 0.5 * rng.normal(size=600), [-0.8, 0.8]) - 1, rng.uniform(0.2, 2, 600)


def test_permuted_column_equals_hand_computed_loss_rise():
    x = np.random.default_rng(1).normal(size=(4_000, 3)).astype(np.float32)
    y, before = np.where(x[:, 0] > 0, 1, -1), x.copy()
    table = feature_importance_table(ByFirst(), list("abc"), x, y, rows=4_000, repeats=5)
    assert list(table.index) == ["a", "c", "b"]
    # Half of the permuted rows get the other sign: their loss goes from -log 0.8 to -log 0.1.
    np.testing.assert_allclose(table["permuted"], [0.5 * np.log(8), 0, 0], atol=0.03)
    assert 0 < table["spread"].iloc[0] < 0.05 and (table["spread"].iloc[1:] == 0).all()
    np.testing.assert_array_equal(x, before)
    half = np.where(np.arange(4_000) < 2_000, 1, 0)
    weighed = feature_importance_table(ByFirst(), list("abc"), x, y, half, rows=4_000, repeats=5)
    assert weighed["permuted"].iloc[0] != table["permuted"].iloc[0]


@pytest.mark.parametrize("name", TABULAR)
def test_importance_table_lists_informative_features_first(name, data):
    x, y, w = data
    settings = {"rounds": 30, "threads": 1, **({} if name == "linear" else {"depth": 3, "learning_rate": 0.2})}
    model = build_model(name, **settings)
    model.fit(x[:450], y[:450], w[:450])
    gain = model.importances()
    assert gain.shape == (5,) and gain.sum() == pytest.approx(1) and list(np.argsort(-gain)[:2]) == [1, 3]
    table = feature_importance_table(model, list("abcde"), x[450:], y[450:], w[450:], top=3, rows=100)
    assert list(table.index[:2]) == ["b", "d"] and len(table) == 3
    assert table["permuted"].iloc[0] > table["permuted"].iloc[1] > abs(table["permuted"].iloc[2])
    np.testing.assert_array_equal(table["gain"], np.sort(gain)[::-1][:3])
    again = build_model(name).load_state(model.get_state())
    np.testing.assert_array_equal(again.importances(), gain)
