"""Columns chosen by training rows: constant ones, and known clusters."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.datasets.feature_selection import select_by_clusters, select_by_variance
from ml_factory.datasets.fitted_transforms import TransformFitSample
from ml_factory.errors import SettingsError

N, TRAIN = 1500, 1200


@pytest.fixture(scope="module")
def training() -> TransformFitSample:
    """Noise; column 5 repeats column 1, and 6 is constant."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 7)).astype(np.float32)
    x[:, 5], x[:, 6] = np.exp(x[:, 1]), 3.0
    x[5, 0] = np.nan
    return TransformFitSample(x, tuple("abcdefg"), np.arange(TRAIN))


def test_by_variance_drops_constant_column(training):
    kept = select_by_variance(training)
    assert kept.kept.tolist() == [0, 1, 2, 3, 4, 5] and kept.names_out(training.names) == tuple("abcdef")
    wanted = np.nanvar(training.x_NF[:TRAIN].astype(float), axis=0)
    np.testing.assert_allclose(kept.scores, wanted, rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(kept.transform(training.x_NF), training.x_NF[:, :6])
    with pytest.raises(SettingsError, match="No column is left"):
        select_by_variance(training, least=100)


def test_by_clusters_keeps_one_column_of_each_correlated_cluster(training):
    """The exponential of a column has its ranks, and a linear correlation of 0.76 only."""
    assert select_by_clusters(training).kept.tolist() == [0, 1, 2, 3, 4, 6]
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 900))
    x = np.column_stack([a, a + 0.3 * rng.standard_normal(900), -a, b, b + 0.02 * rng.standard_normal(900), a + b])
    given = TransformFitSample(x.astype(np.float32), tuple("uvwxyz"), np.arange(900))
    found = select_by_clusters(given, most=0.9)
    assert found.kept.tolist() == [0, 3, 5]
    assert found.scores[0] == found.scores[1] == found.scores[2] and found.scores[3] == found.scores[4]
    rho = pd.DataFrame(x).corr("spearman").abs().to_numpy()
    for cluster in np.unique(found.scores):
        inside = np.flatnonzero(found.scores == cluster)
        assert rho[np.ix_(inside, inside)].min() >= 0.9
