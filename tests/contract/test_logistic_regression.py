"""The linear baseline against scikit-learn."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression as SklearnLogisticRegression

from tests.contract.doors import LogisticRegression


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 6)).astype(np.float32) * np.array([1, 10, 0.1, 1, 1, 1], np.float32) + 3
    y = np.digitize(x[:, 0] - x[:, 1] / 10 + rng.normal(size=500), [-0.7, 0.7]) - 1
    return x, y, rng.uniform(0.2, 2, 500)


@pytest.mark.parametrize("l2", [1.0, 30.0])
def test_linear_fit_equals_scikit_learn_optimum(data, l2):
    x, y, w = data
    w = w / w.mean()
    model = LogisticRegression(rounds=300, patience=0, l2=l2, threads=1, clip=1e9)
    model.fit(x, y, w)
    scaled = (x - x.mean(axis=0, dtype=float)) / x.std(axis=0, dtype=float)
    theirs = SklearnLogisticRegression(C=1 / l2, tol=1e-10, max_iter=10_000).fit(scaled, y, sample_weight=w)
    np.testing.assert_allclose(model.predict_proba(x), theirs.predict_proba(scaled), atol=2e-4)


def test_linear_fit_with_nothing_to_learn_predicts_the_shares_of_the_classes():
    x, y = np.zeros((30, 2), np.float32), np.tile([-1, 0, 1], 10)
    model = LogisticRegression(rounds=5, threads=1)
    assert model.fit(x, y, validation=(x, y, None)).history[-1]["val_loss"] == pytest.approx(np.log(3))
    np.testing.assert_allclose(model.predict_proba(x), 1 / 3)


def test_linear_nan_becomes_mean_and_outliers_are_clipped(data):
    x, y, w = data
    holes = x.copy()
    holes[::5, 0] = np.nan
    holes[:, 5] = np.nan
    model = LogisticRegression(rounds=50, threads=1, clip=3.0)
    model.fit(holes, y, w)
    mean, deviation = (model.get_state()["fitted"][name] for name in ("mean", "deviation"))
    np.testing.assert_allclose(mean[0], np.nanmean(holes[:, 0], dtype=float))
    np.testing.assert_allclose(deviation[0], np.nanstd(holes[:, 0], dtype=float))
    assert mean[5] == 0 and deviation[5] == 1
    at_mean, far, farther = np.repeat(x[:1], 3, axis=0)
    at_mean[0], far[0], farther[0] = mean[0], 1e4, 1e6
    missing = at_mean.copy()
    missing[0] = np.nan
    p = model.predict_proba(np.stack([at_mean, missing, far, farther]))
    np.testing.assert_allclose(p[0], p[1], atol=1e-6)
    np.testing.assert_array_equal(p[2], p[3])


def test_linear_scale_ignores_rows_with_zero_weight(data):
    x, y, w = data
    w = np.where(np.arange(500) < 100, 0, w)
    disturbed = x.copy()
    disturbed[:100] += 1e3
    p = []
    for rows in (x, disturbed):
        model = LogisticRegression(rounds=20, threads=1)
        model.fit(rows, y, w)
        p.append(model.predict_proba(x))
    np.testing.assert_array_equal(p[0], p[1])
