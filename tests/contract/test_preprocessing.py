"""Steps in order: each fitted on training rows of what the ones before it make, and on nothing else."""

import numpy as np
import pytest
from sklearn.decomposition import PCA

from ml_factory.errors import FactoryError, SettingsError
from tests.contract.doors import (
    PcaTransform,
    check_preprocessing_steps,
    fit_preprocessing_steps,
    preprocessing_from_dict,
)

N = 1600
# A fold in the middle judges; its neighbours on both sides teach.
TRAIN = np.r_[100:700, 1000:1500]
CHAIN = ("standard", {"step": "pca", "share": 0.99}, "robust")


def given() -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 6)).astype(np.float32)
    x[:, 5] = x[:, 0] * 2
    return x


def test_fit_steps_transform_equals_steps_applied_in_order():
    given_NF = given()
    fitted = fit_preprocessing_steps(CHAIN, given_NF, TRAIN)
    assert [step.kind for step in fitted.steps] == [step if isinstance(step, str) else step["step"] for step in CHAIN]
    x = given_NF
    for step in fitted.steps:
        x = step.transform(x)
    made = fitted.transform(given_NF)
    np.testing.assert_array_equal(made, x)
    assert made.shape == (N, 5) and np.isfinite(made).all()  # f repeats a
    assert made.dtype == np.float32 and made.flags.c_contiguous


def test_check_steps_invalid_steps_raise_settings_error():
    assert check_preprocessing_steps(["pca", {"step": "robust", "clip": 4}]) == ("pca", {"step": "robust", "clip": 4})
    for steps, message in (
        (("rubust",), "did you mean 'robust'"),
        (({"step": "robust", "clib": 4},), "did you mean 'clip'"),
        (({"clip": 4},), "no such step"),
        (("robust", "pca"), "last step must scale"),
        ((), "last step must scale"),
    ):
        with pytest.raises(SettingsError, match=message):
            check_preprocessing_steps(steps)


ROBUST = {"kind": "robust", "center": [0.0, 0.0], "scale": [1.0, 1.0], "clip": 8.0}
QUANTILE = {"kind": "quantile", "knots": [[0.0, 1.0, 2.0]]}


@pytest.mark.parametrize(
    "stored",
    [{}, None, {"kind": "magic"}, {"kind": "pca"}, {"kind": "preprocessor", "steps": [1]}, ROBUST | {"scale": ["a"]},
     ROBUST | {"clip": None}, QUANTILE | {"knots": "a"}],
)  # fmt: skip
def test_from_dict_damaged_steps_raise_error(stored):
    assert preprocessing_from_dict(ROBUST).to_dict() == ROBUST and preprocessing_from_dict(QUANTILE).kind == "quantile"
    with pytest.raises(FactoryError, match="cannot be read"):
        preprocessing_from_dict(stored)


def test_pca_components_equal_scikit_learn():
    x_NF, rows = np.random.default_rng(1).standard_normal((6000, 5)).astype(np.float32), np.arange(4000)
    x_NF[:, 1] += 2 * x_NF[:, 0]
    x_NF[7, 2] = np.nan
    x = x_NF[rows].astype(float)
    standard = np.nan_to_num((x - np.nanmean(x, axis=0)) / np.nanstd(x, axis=0))
    for share, count in ((0.9, 4), (1.0, 5), (0.2, 1)):
        wanted = PCA(share if share < 1 else None).fit(standard)
        fitted = PcaTransform.fit(x_NF, rows, share=share)
        assert fitted.loadings.shape == (5, count) == wanted.components_.T.shape
        np.testing.assert_allclose(np.abs(fitted.loadings), np.abs(wanted.components_.T), atol=1e-6)
        assert (fitted.loadings[np.abs(fitted.loadings).argmax(axis=0), np.arange(count)] > 0).all()
    made = fitted.transform(x_NF[:200])
    z = np.nan_to_num((x_NF[:200] - fitted.center) / fitted.scale)
    np.testing.assert_allclose(made, z @ fitted.loadings, atol=1e-5)


def test_pca_share_above_1_raises_settings_error():
    with pytest.raises(SettingsError, match="share"):
        PcaTransform.fit(given(), TRAIN, share=1.5)
