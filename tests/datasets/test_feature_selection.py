"""Columns chosen by training rows: known winners, known clusters, and scikit-learn's own importances."""

import numpy as np
import pandas as pd
import pytest
from sklearn.ensemble import RandomForestClassifier

from ml_factory.datasets import feature_selection
from ml_factory.datasets.feature_selection import (
    select_by_clusters,
    select_by_mda,
    select_by_mdi,
    select_by_variance,
)
from ml_factory.datasets.fitted_transforms import TransformFitSample
from ml_factory.errors import SettingsError
from ml_factory.targets.weights import training_weights

N, TRAIN = 1500, 1200


def targets_of(label: np.ndarray, rows: np.ndarray) -> pd.DataFrame:
    known = pd.date_range("2024-01-01", periods=len(label), freq="5min", tz="UTC", name="known_at")
    table = {
        "label": label, "label_end": known + pd.Timedelta("15min"), "entry_bar": np.arange(len(label)),
        "exit_bar": np.arange(len(label)) + 3, "ret": 0.0,
        "barrier": pd.Categorical(np.where(label > 0, "upper", "lower"), categories=["upper", "lower", "ambiguous"]),
    }  # fmt: skip
    return pd.DataFrame(table, index=known).iloc[rows]


@pytest.fixture(scope="module")
def training() -> TransformFitSample:
    """Column 1 says the side, column 4 half of it; the rest is noise, 5 a copy of 1, 6 constant."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 7)).astype(np.float32)
    label = np.where(x[:, 1] + 0.5 * x[:, 4] + 0.2 * rng.standard_normal(N) > 0, 1, -1).astype(np.int8)
    x[:, 5], x[:, 6] = np.exp(x[:, 1]), 3.0
    x[5, 0] = np.nan
    rows = np.arange(TRAIN)
    return TransformFitSample(x, tuple("abcdefg"), rows, targets_of(label, rows))


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


def test_by_mdi_selects_informative_columns_with_forest_importances(training):
    found = select_by_mdi(training, share=0.4, trees=40)
    assert set(found.kept) <= {1, 4, 5} and len(found.kept) == 3
    x = np.nan_to_num(training.x_NF[:TRAIN])
    forest = RandomForestClassifier(
        40, criterion="entropy", max_features=1, max_depth=6, class_weight="balanced_subsample",
        random_state=feature_selection.derive_seed(0, "forest"),
    ).fit(x, training.targets["label"], training_weights(training.targets))  # fmt: skip
    table = pd.DataFrame([tree.feature_importances_ for tree in forest.estimators_]).replace(0, np.nan)
    wanted = table.mean().fillna(0)  # AFML, snippet 8.2
    np.testing.assert_allclose(found.scores, wanted / wanted.sum(), rtol=1e-9)


def test_by_mda_selects_informative_columns_and_drops_noise(training):
    found = select_by_mda(training, trees=30, depth=4)
    assert {1, 4} <= set(found.kept) and found.scores[1] > 5 * np.abs(found.scores[[0, 2, 3]]).max()
    assert found.scores[6] == 0 and 6 not in found.kept  # a constant shuffled is the same


def test_by_mda_scores_on_purged_folds_of_training_rows(training, monkeypatch):
    reported = []
    real = feature_selection.purged_kfold
    monkeypatch.setattr(feature_selection, "purged_kfold", lambda *words: reported.append(words) or real(*words))
    select_by_mda(training, folds=3, embargo=7, trees=2, depth=2)
    (labels, folds, embargo) = reported[0]
    assert (folds, embargo) == (3, 7) and labels.index.isin(training.targets.index).all()


def test_by_mdi_and_by_mda_without_two_label_classes_raise_settings_error(training):
    with pytest.raises(SettingsError, match="labels"):
        select_by_mdi(TransformFitSample(training.x_NF, training.names, training.rows))
    alike = TransformFitSample(training.x_NF, training.names, training.rows, training.targets.assign(label=np.int8(1)))
    with pytest.raises(SettingsError, match="two classes"):
        select_by_mda(alike)
