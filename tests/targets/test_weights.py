"""Training weights: the worked example of the book, and deaf to every row that does not train."""

import numpy as np
import pandas as pd

from ml_factory.data.resample import base_frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.targets.labels import LabelSpec, triple_barrier
from ml_factory.targets.weights import average_uniqueness, training_weights


def lives(*spans: tuple[int, int], barrier: str = "vertical") -> pd.DataFrame:
    """Rows that live on bars first..last."""
    entry, last = np.array(spans).T
    return pd.DataFrame({"barrier": [barrier] * len(spans), "entry_bar": entry - 1, "exit_bar": last})


def test_the_example_of_the_book():
    """AFML 4.5.3: labels on returns 0-2, 2-3, 4-5 have average uniqueness 5/6, 3/4, 1."""
    weights = training_weights(lives((0, 2), (2, 3), (4, 5)))
    shares = np.array([5 / 6, 3 / 4, 1])
    np.testing.assert_allclose(weights, shares / shares.mean(), rtol=1e-15)


def test_equal_to_the_naive_form():
    rng = np.random.default_rng(0)
    start = np.sort(rng.integers(0, 300, 400))
    end = start + rng.integers(0, 30, 400)
    grid = np.zeros((400, 330))
    for label, (first, last) in enumerate(zip(start, end, strict=True)):
        grid[label, first : last + 1] = 1
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(grid > 0, grid / grid.sum(axis=0), np.nan)
    np.testing.assert_allclose(average_uniqueness(start, end, 330), np.nanmean(shares, axis=1), rtol=1e-13)


def test_ambiguous_rows_weigh_nothing_and_crowd_nobody():
    rows = lives((0, 2), (2, 3), (4, 5))
    crowd = pd.concat([rows, lives((0, 5), (1, 4), barrier="ambiguous")], ignore_index=True)
    weights = training_weights(crowd)
    assert (weights[3:] == 0).all()
    np.testing.assert_allclose(weights[:3] / weights[0], training_weights(rows) / training_weights(rows)[0], rtol=1e-15)
    assert np.isclose(weights.mean(), 1)
    assert (training_weights(crowd.iloc[3:]) == 0).all() and len(training_weights(crowd.iloc[:0])) == 0


def test_weights_of_real_shape_have_mean_one_and_see_training_rows_only():
    bars = synthetic_bars(days=6, kind="null", seed=0)
    market = MarketSpec("MES", "cme", 0.25, True)
    base = base_frame(bars, market, 5)
    labels = triple_barrier(base, base_frame(bars, market, 1), LabelSpec(), market)
    train = labels.iloc[:600]
    weights = training_weights(train)
    assert len(weights) == 600 and np.isclose(weights.mean(), 1) and (weights >= 0).all()
    alone = training_weights(train.drop(columns="uniqueness"))
    assert (alone == weights).all()  # nothing stored with the labels, which knew their neighbours, comes in
    thin = training_weights(train.iloc[::25])
    assert thin.std() < weights.std()  # rows that no longer overlap count alike


def test_categorical_and_text_barriers_weigh_the_same():
    rows = lives((0, 2), (2, 3))
    assert (training_weights(rows) == training_weights(rows.astype({"barrier": "category"}))).all()
