"""Steps in order: each fitted on training rows of what the ones before it make, and on nothing else."""

import json

import numpy as np
import pytest

from ml_factory.datasets.fitted_transforms import Sample
from ml_factory.datasets.preprocessing import (
    STEPS,
    Preprocessor,
    check_steps,
    fit_steps,
    from_dict,
    names_out,
    transform,
)
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.errors import FactoryError, SettingsError
from tests.datasets.test_feature_selection import targets_of

N = 1600
# A fold in the middle judges; its neighbours on both sides teach.
TRAIN = np.r_[100:700, 1000:1500]
SETTINGS = {
    "mdi": {"trees": 5},
    "mda": {"trees": 5},
    "fractional_difference": {"window": 32},
    "quantile": {"knots": 17},
}
CHAIN = (
    {"step": "fractional_difference", "window": 32}, "two_state_hmm", "variance", "clusters",
    {"step": "mda", "trees": 5}, {"step": "pca", "share": 0.99}, "robust",
)  # fmt: skip


def given(rows: np.ndarray = TRAIN) -> Sample:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 6)).astype(np.float32)
    x[:, 5] = x[:, 0] * 2
    label = np.where(x[:, 1] + 0.3 * rng.standard_normal(N) > 0, 1, -1).astype(np.int8)
    moves = rng.standard_normal(N) * np.where((np.arange(N) // 200) % 2, 3e-3, 1e-3)
    return Sample(x, tuple("abcdef"), rows, 100 * np.exp(np.cumsum(moves)), targets_of(label, rows))


def disturbed(sample: Sample) -> Sample:
    """Every row that does not teach is another one: features, prices."""
    rng = np.random.default_rng(9)
    others = np.setdiff1d(np.arange(N), sample.rows)
    x, close = sample.x_NF.copy(), sample.close.copy()
    x[others] = rng.normal(40, 90, (len(others), x.shape[1]))
    close[others] *= np.exp(rng.normal(1, 1, len(others)))
    return Sample(x, sample.names, sample.rows, close, sample.targets)


@pytest.mark.parametrize("step", [*STEPS, "all of them"])
def test_what_is_fitted_knows_its_training_rows_only(step):
    steps = CHAIN if step == "all of them" else ({"step": step, **SETTINGS.get(step, {})},)
    sample = given()
    clean, other = fit_steps(steps, sample), fit_steps(steps, disturbed(sample))
    assert clean.to_dict() == other.to_dict()
    # And it does know them: other training rows, other numbers.
    moved = fit_steps(steps, given(TRAIN + 90))
    assert moved.to_dict() != clean.to_dict() or step in ("clusters", "variance", "fractional_difference")


def test_steps_follow_each_other():
    sample = given()
    fitted = fit_steps(CHAIN, sample)
    assert [step.kind for step in fitted.steps] == [step if isinstance(step, str) else step["step"] for step in CHAIN]
    x, names = sample.x_NF, sample.names
    for step in fitted.steps:
        x, names = transform(step, x, sample.close), names_out(step, names)
    made = fitted.transform(sample.x_NF, sample.close)
    np.testing.assert_array_equal(made, x)
    assert made.shape == (N, len(names)) and fitted.names_out(sample.names) == names and np.isfinite(made).all()
    assert made.dtype == np.float32 and made.flags.c_contiguous
    selected = fitted.steps[3].names_out(fitted.steps[2].names_out((*"abcdef", "log_price_differenced", "wild_state")))
    assert "a" in selected and "f" not in selected  # f repeats a


def test_a_prefix_has_the_bits_of_the_whole():
    sample = given()
    fitted = fit_steps(CHAIN, sample)
    whole = fitted.transform(sample.x_NF, sample.close)
    for stop in (1, 40, 777):
        np.testing.assert_array_equal(fitted.transform(sample.x_NF[:stop], sample.close[:stop]), whole[:stop])


def test_one_step_is_itself_and_json_keeps_every_bit():
    sample = given()
    lone = fit_steps(("robust",), sample)
    assert isinstance(lone, RobustScaler) and lone.to_dict() == RobustScaler.fit(sample.x_NF[TRAIN]).to_dict()
    fitted = fit_steps(CHAIN, sample)
    again = from_dict(json.loads(json.dumps(fitted.to_dict(), allow_nan=False)))
    assert isinstance(again, Preprocessor) and again.to_dict() == fitted.to_dict()
    assert (again.transform(sample.x_NF, sample.close) == fitted.transform(sample.x_NF, sample.close)).all()


def test_steps_are_checked_before_any_work():
    assert check_steps(["pca", {"step": "robust", "clip": 4}]) == ("pca", {"step": "robust", "clip": 4})
    for steps, message in (
        (("rubust",), "did you mean 'robust'"),
        (({"step": "robust", "clib": 4},), "did you mean 'clip'"),
        (({"clip": 4},), "no such step"),
        (("robust", "pca"), "last step must scale"),
        ((), "last step must scale"),
    ):
        with pytest.raises(SettingsError, match=message):
            check_steps(steps)


@pytest.mark.parametrize(
    "stored", [{}, None, {"kind": "magic"}, {"kind": "pca"}, {"kind": "preprocessor", "steps": [1]}]
)
def test_damaged_steps_are_refused(stored):
    with pytest.raises(FactoryError, match="cannot be read"):
        from_dict(stored)
