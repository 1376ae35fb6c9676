"""The scalers against scikit-learn and NumPy, and deaf to rows they were not fitted on."""

import numpy as np
import pytest
from sklearn.preprocessing import QuantileTransformer
from sklearn.preprocessing import RobustScaler as Reference
from sklearn.preprocessing import StandardScaler as Standard

from ml_factory.errors import SettingsError
from tests.contract.doors import IQR_OF_NORMAL, SCALERS, QuantileScaler, RobustScaler, StandardScaler, column_quantiles


def columns(n: int = 5000) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.standard_normal(n), 1e4 + 50 * rng.standard_t(3, n), rng.exponential(1e-6, n)])
    return x.astype(np.float32)


def test_robust_scaler_equals_scikit_learn():
    x = columns()
    scaler, reference = RobustScaler.fit(x, clip=1e9), Reference().fit(x.astype(np.float64))
    np.testing.assert_allclose(scaler.center, reference.center_, rtol=1e-12)
    np.testing.assert_allclose(scaler.scale * IQR_OF_NORMAL, reference.scale_, rtol=1e-12)
    wanted = reference.transform(x.astype(np.float64)) * IQR_OF_NORMAL
    np.testing.assert_allclose(scaler.transform(x), wanted, rtol=1e-6, atol=1e-9)


def test_robust_scaler_clips_and_is_deaf_to_missing_constant_and_wild_values():
    x = np.random.default_rng(1).normal(3, 7, (100_000, 1)).astype(np.float32)
    scaler = RobustScaler.fit(x)
    assert abs(scaler.transform(x).std() - 1) < 0.02 and abs(scaler.transform(x).mean()) < 0.02
    wild = np.array([[1e30], [-1e30], [np.inf], [-np.inf], [np.nan], [3.0]], np.float32)
    np.testing.assert_allclose(scaler.transform(wild).ravel(), [8, -8, 8, -8, 0, 0], atol=0.02)
    spoiled = np.concatenate([x, np.full((700, 1), np.nan), np.full((700, 1), np.inf)]).astype(np.float32)
    assert RobustScaler.fit(spoiled).to_dict() == scaler.to_dict()
    x = np.zeros((100, 3), np.float32)
    x[:, 0], x[:5, 1], x[:, 2] = 0.1, 4.0, np.nan
    scaler = RobustScaler.fit(x)
    assert scaler.scale.tolist() == pytest.approx([1, x[:, 1].std(), 1])
    assert np.isfinite(scaler.transform(x)).all() and (scaler.transform(x)[:, [0, 2]] == 0).all()


@pytest.mark.parametrize("kind", SCALERS)
def test_scaler_of_rows_longer_than_a_block_equals_pieces(kind):
    x = np.random.default_rng(4).standard_normal((70_000, 3)).astype(np.float32)
    scaler = SCALERS[kind].fit(x)
    parts = [scaler.transform(part) for part in np.array_split(x, 9)]
    np.testing.assert_array_equal(scaler.transform(x), np.concatenate(parts))


def test_standard_scaler_equals_scikit_learn():
    x = np.tile(columns(), (30, 1))
    scaler, reference = StandardScaler.fit(x, clip=1e9), Standard().fit(x.astype(np.float64))
    np.testing.assert_allclose(scaler.center, reference.mean_, rtol=1e-9)
    np.testing.assert_allclose(scaler.scale, reference.scale_, rtol=1e-9)
    spoiled = np.concatenate([x, np.full((9, 3), np.nan), np.full((9, 3), -np.inf)]).astype(np.float32)
    np.testing.assert_allclose(StandardScaler.fit(spoiled).scale, scaler.scale, rtol=1e-12)


def test_quantile_scaler_equals_scikit_learn():
    x = columns()[:, :2].copy()  # what is below 1e-7 scikit-learn takes for the least of all
    x[:, 1] = np.round(x[:, 1] / 40)  # many ties
    reference = QuantileTransformer(n_quantiles=257, output_distribution="normal", subsample=None).fit(x.astype(float))
    wanted = reference.transform(x.astype(float))
    np.testing.assert_allclose(QuantileScaler.fit(x).transform(x), wanted, rtol=1e-5, atol=1e-3)
    wild = np.array([[np.nan, np.nan], [np.inf, -np.inf]], np.float32)
    np.testing.assert_allclose(QuantileScaler.fit(x).transform(wild), [[0, 0], [5.2, -5.2]], atol=1e-3)


def awkward(n: int) -> np.ndarray:
    """Ties, constants, holes, infinities, a trend, a rare spike, two values, denormals: one column each."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n, 14)).astype(np.float32)
    x[:, 1], x[:, 2], x[: n // 2 + 7, 3] = np.round(x[:, 1] * 3), -0.0, 1.5
    x[:3, 0], x[3:5, 0] = -np.inf, np.inf  # too few to move a rank out of its bracket
    x[:, 4], x[::7, 5], x[::9, 6], x[::3, 7] = np.nan, np.inf, -np.inf, np.nan
    x[:, 8], x[:, 9], x[: n - 5, 9] = np.arange(n), 7e37, 0
    x[:, 10], x[:, 11] = rng.integers(0, 2, n), x[:, 11] * np.float32(1e-41)
    x[: n - 1, 12] = np.nan
    x[:, 13] = np.where(np.arange(n) % 4 == 0, 0.0, x[:, 13])  # the quartile sits at the edge of a great tie
    return x


@pytest.mark.parametrize("shares", [(0.25, 0.5, 0.75), (0.0, 0.001, 0.3, 1.0)])
def test_quantiles_of_difficult_columns_equal_numpy_bitwise(shares):
    x = awkward(20_003)
    rows = np.sort(np.random.default_rng(1).choice(len(x), 9_000, replace=False))
    for found, part in ((column_quantiles(x, shares), x), (column_quantiles(x, shares, rows), x[rows])):
        for f in range(x.shape[1]):
            values = part[np.isfinite(part[:, f]), f].astype(float)
            wanted = np.quantile(values, shares) if len(values) else np.full(len(shares), np.nan)
            np.testing.assert_array_equal(found[f], wanted, err_msg=f"column {f}")
        assert not np.signbit(found[2]).any()  # of -0.0: two ways to a scaler write the same text


def test_quantiles_of_read_only_values_of_one_column_leave_them_in_order():
    x = np.random.default_rng(2).standard_normal((101, 1)).astype(np.float32)
    x.flags.writeable, before = False, x.copy()
    assert column_quantiles(x, (0.5,)).item() == np.median(x) == column_quantiles(x, (0.5,), np.arange(101)).item()
    assert np.array_equal(x, before)


def test_scaler_invalid_input_raises_settings_error():
    with pytest.raises(SettingsError, match=r"\(5, 2\)"):
        RobustScaler.fit(columns()).transform(np.zeros((5, 2), np.float32))
    with pytest.raises(SettingsError, match="clip"):
        RobustScaler.fit(columns(), clip=0)
