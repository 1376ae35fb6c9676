"""Steps in order: each fitted on training rows of what the ones before it make, and on nothing else."""

import numpy as np
import pytest

from ml_factory.errors import FactoryError, SettingsError
from tests.contract.doors import (
    TransformFitSample,
    check_preprocessing_steps,
    fit_preprocessing_steps,
    preprocessing_from_dict,
    step_feature_names_out,
)

N = 1600
# A fold in the middle judges; its neighbours on both sides teach.
TRAIN = np.r_[100:700, 1000:1500]
CHAIN = ("standard", {"step": "pca", "share": 0.99}, "robust")


def given(rows: np.ndarray = TRAIN) -> TransformFitSample:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 6)).astype(np.float32)
    x[:, 5] = x[:, 0] * 2
    return TransformFitSample(x, tuple("abcdef"), rows)


def test_fit_steps_transform_equals_steps_applied_in_order():
    sample = given()
    fitted = fit_preprocessing_steps(CHAIN, sample)
    assert [step.kind for step in fitted.steps] == [step if isinstance(step, str) else step["step"] for step in CHAIN]
    x, names = sample.x_NF, sample.names
    for step in fitted.steps:
        x, names = step.transform(x), step_feature_names_out(step, names)
    made = fitted.transform(sample.x_NF)
    np.testing.assert_array_equal(made, x)
    assert made.shape == (N, len(names)) and fitted.names_out(sample.names) == names and np.isfinite(made).all()
    assert made.dtype == np.float32 and made.flags.c_contiguous
    assert len(names) < len(sample.names)  # f repeats a


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
