"""The robust scaler against scikit-learn, and deaf to rows it was not fitted on."""

import json

import numpy as np
import pytest
from sklearn.preprocessing import RobustScaler as Reference

from ml_factory.datasets.scaling import IQR_OF_NORMAL, RobustScaler
from ml_factory.errors import FactoryError, SettingsError


def columns(n: int = 5000) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.standard_normal(n), 1e4 + 50 * rng.standard_t(3, n), rng.exponential(1e-6, n)])
    return x.astype(np.float32)


def test_equal_to_scikit_learn():
    x = columns()
    scaler, reference = RobustScaler.fit(x, clip=1e9), Reference().fit(x.astype(np.float64))
    np.testing.assert_allclose(scaler.center, reference.center_, rtol=1e-12)
    np.testing.assert_allclose(scaler.scale * IQR_OF_NORMAL, reference.scale_, rtol=1e-12)
    wanted = reference.transform(x.astype(np.float64)) * IQR_OF_NORMAL
    np.testing.assert_allclose(scaler.transform(x), wanted, rtol=1e-6, atol=1e-9)


def test_a_bell_gets_deviation_one_and_outliers_are_clipped():
    x = np.random.default_rng(1).normal(3, 7, (100_000, 1)).astype(np.float32)
    out = RobustScaler.fit(x).transform(x)
    assert out.dtype == np.float32 and abs(out.std() - 1) < 0.02 and abs(out.mean()) < 0.02
    wild = np.array([[1e30], [-1e30], [np.inf], [-np.inf], [np.nan], [3.0]], np.float32)
    np.testing.assert_allclose(RobustScaler.fit(x).transform(wild).ravel(), [8, -8, 8, -8, 0, 0], atol=0.02)


def test_what_is_missing_or_infinite_is_not_fitted_on():
    x = columns()
    spoiled = np.concatenate([x, np.full((700, 3), np.nan), np.full((700, 3), np.inf)]).astype(np.float32)
    one, two = RobustScaler.fit(x), RobustScaler.fit(spoiled)
    assert (one.center == two.center).all() and (one.scale == two.scale).all()


def test_flat_sparse_and_empty_columns():
    x = np.zeros((100, 3), np.float32)
    x[:, 0], x[:5, 1], x[:, 2] = 0.1, 4.0, np.nan
    scaler = RobustScaler.fit(x)
    assert scaler.scale[0] == 1 and scaler.scale[1] == pytest.approx(x[:, 1].std()) and scaler.scale[2] == 1
    assert np.isfinite(scaler.transform(x)).all() and (scaler.transform(x)[:, [0, 2]] == 0).all()


def test_other_rows_change_nothing():
    """Fitted on training rows: any change outside them leaves every bit; a row is scaled the same in any company."""
    x = np.tile(columns(), (30, 1))  # longer than a block
    train = np.arange(2000)
    disturbed = x.copy()
    disturbed[2000:] *= -1.7
    one, two = RobustScaler.fit(x[train]), RobustScaler.fit(disturbed[train])
    assert one.to_dict() == two.to_dict()
    whole = one.transform(x)
    pieces = [one.transform(x[i : i + 777]) for i in range(0, len(x), 777)]
    assert (whole == np.concatenate(pieces)).all()
    out = np.empty_like(x)
    assert one.transform(x, out=out) is out and (out == whole).all()


def test_json_keeps_every_bit():
    scaler = RobustScaler.fit(columns())
    again = RobustScaler.from_dict(json.loads(json.dumps(scaler.to_dict())))
    assert (again.center == scaler.center).all() and (again.scale == scaler.scale).all() and again.clip == scaler.clip


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "other"},
        {"center": [1.0]},
        {"scale": [0.0, 1.0, 1.0]},
        {"scale": ["a"]},
        {"clip": None},
        {"clip": -1.0},
    ],
)
def test_a_damaged_scaler_is_refused(damage):
    with pytest.raises(FactoryError, match="cannot be read"):
        RobustScaler.from_dict({**RobustScaler.fit(columns()).to_dict(), **damage})


def test_misuse_says_what_was_got():
    with pytest.raises(SettingsError, match="needs rows"):
        RobustScaler.fit(np.empty((0, 3), np.float32))
    with pytest.raises(SettingsError, match=r"\(5, 2\)"):
        RobustScaler.fit(columns()).transform(np.zeros((5, 2), np.float32))
    with pytest.raises(SettingsError, match="clip"):
        RobustScaler.fit(columns(), clip=0)
