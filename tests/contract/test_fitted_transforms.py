"""Principal components against scikit-learn; each row by itself."""

import numpy as np
import pytest
from sklearn.decomposition import PCA

from ml_factory.errors import SettingsError
from tests.contract.doors import PcaTransform, TransformFitSample


def sample(n: int = 6000, train: int = 4000) -> TransformFitSample:
    x = np.random.default_rng(1).standard_normal((n, 5)).astype(np.float32)
    x[:, 1] += 2 * x[:, 0]
    x[7, 2] = np.nan
    return TransformFitSample(x, tuple("abcde"), np.arange(train))


def test_pca_components_equal_scikit_learn():
    given = sample()
    x = given.x_NF[given.rows].astype(float)
    standard = np.nan_to_num((x - np.nanmean(x, axis=0)) / np.nanstd(x, axis=0))
    for share, count in ((0.9, 4), (1.0, 5), (0.2, 1)):
        wanted = PCA(share if share < 1 else None).fit(standard)
        fitted = PcaTransform.fit(given, share=share)
        assert fitted.loadings.shape == (5, count) == wanted.components_.T.shape
        np.testing.assert_allclose(np.abs(fitted.loadings), np.abs(wanted.components_.T), atol=1e-6)
        assert (fitted.loadings[np.abs(fitted.loadings).argmax(axis=0), np.arange(count)] > 0).all()
    made = fitted.transform(given.x_NF[:200])
    z = np.nan_to_num((given.x_NF[:200] - fitted.center) / fitted.scale)
    np.testing.assert_allclose(made, z @ fitted.loadings, atol=1e-5)


def test_fitted_transforms_invalid_input_raises_settings_error():
    given = sample()
    with pytest.raises(SettingsError, match="share"):
        PcaTransform.fit(given, share=1.5)
