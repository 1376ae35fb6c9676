"""Training weights: the worked examples of the book, and deaf to every row that does not train."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import synthetic_bars
from tests.contract import doors


def lives(*spans: tuple[int, int], barrier: str = "vertical") -> pd.DataFrame:
    """Rows that live on bars first..last."""
    entry, last = np.array(spans).T
    return pd.DataFrame({"barrier": [barrier] * len(spans), "entry_bar": entry - 1, "exit_bar": last})


def test_training_weights_equal_afml_uniqueness_example():
    """AFML 4.5.3: labels on returns 0-2, 2-3, 4-5 have average uniqueness 5/6, 3/4, 1."""
    weights = doors.training_weights(lives((0, 2), (2, 3), (4, 5)))
    shares = np.array([5 / 6, 3 / 4, 1])
    np.testing.assert_allclose(weights, shares / shares.mean(), rtol=1e-15)


def test_average_uniqueness_equals_naive_indicator_matrix():
    rng = np.random.default_rng(0)
    start = np.sort(rng.integers(0, 300, 400))
    end = start + rng.integers(0, 30, 400)
    grid = np.zeros((400, 330))
    for label, (first, last) in enumerate(zip(start, end, strict=True)):
        grid[label, first : last + 1] = 1
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(grid > 0, grid / grid.sum(axis=0), np.nan)
    np.testing.assert_allclose(doors.average_uniqueness(start, end, 330), np.nanmean(shares, axis=1), rtol=1e-13)


def test_training_weights_ambiguous_rows_have_zero_weight_and_no_overlap():
    rows = lives((0, 2), (2, 3), (4, 5))
    crowd = pd.concat([rows, lives((0, 5), (1, 4), barrier="ambiguous")], ignore_index=True)
    weights = doors.training_weights(crowd)
    assert (weights[3:] == 0).all()
    np.testing.assert_allclose(
        weights[:3] / weights[0], doors.training_weights(rows) / doors.training_weights(rows)[0], rtol=1e-15
    )
    assert np.isclose(weights.mean(), 1)
    assert (doors.training_weights(crowd.iloc[3:]) == 0).all() and len(doors.training_weights(crowd.iloc[:0])) == 0


def test_training_weights_have_mean_1_and_use_training_rows_only():
    bars = synthetic_bars(days=6, kind="null", seed=0)
    market = doors.MarketSpec("MES", "cme", 0.25, True)
    base = doors.resample_bars(bars, market, 5)
    labels = doors.triple_barrier_labels(base, doors.resample_bars(bars, market, 1), doors.LabelSpec(), market)
    train = labels.iloc[:600]
    weights = doors.training_weights(train)
    assert len(weights) == 600 and np.isclose(weights.mean(), 1) and (weights >= 0).all()
    alone = doors.training_weights(train.drop(columns="uniqueness"))
    assert (alone == weights).all()  # nothing stored with the labels, which knew their neighbours, comes in
    thin = doors.training_weights(train.iloc[::25])
    assert thin.std() < weights.std()  # rows that no longer overlap count alike


def test_training_weights_categorical_barriers_equal_text_barriers():
    rows = lives((0, 2), (2, 3))
    assert (doors.training_weights(rows) == doors.training_weights(rows.astype({"barrier": "category"}))).all()


def test_effective_rows_equals_kish_formula_with_pairwise_overlap():
    rng = np.random.default_rng(1)
    entry = np.sort(rng.integers(0, 80, 60))
    rows = pd.DataFrame({"barrier": "lower", "entry_bar": entry, "exit_bar": entry + rng.integers(1, 15, 60)})
    rows.loc[::7, "barrier"] = "ambiguous"
    weights = rng.random(60)
    for w in (None, weights):
        total, pairs = 0.0, 0.0
        clear = rows[rows["barrier"] != "ambiguous"]
        for i, one in clear.iterrows():
            total += 1 if w is None else w[i]
            for j, other in clear.iterrows():
                bars = min(one["exit_bar"], other["exit_bar"]) - max(one["entry_bar"], other["entry_bar"])
                life = (one["exit_bar"] - one["entry_bar"]) * (other["exit_bar"] - other["entry_bar"])
                pairs += (1 if w is None else w[i] * w[j]) * max(bars, 0) / np.sqrt(life)
        assert doors.effective_sample_size(rows, w) == pytest.approx(total**2 / pairs, rel=1e-12)


def test_effective_rows_of_simple_cases_equal_hand_computed_values():
    apart, references = lives((0, 1), (2, 5), (6, 6), (9, 9)), lives((0, 3), (0, 3), (4, 5), (4, 5))
    weights = np.array([1.0, 2.0, 3.0, 0.0])
    assert doors.effective_sample_size(apart) == pytest.approx(4)
    assert doors.effective_sample_size(apart, weights) == pytest.approx(
        weights.sum() ** 2 / (weights**2).sum()
    )  # Kish (1965)
    assert doors.effective_sample_size(references) == pytest.approx(2)
    staggered = lives(*((i, i + 19) for i in range(2000)))
    shares = doors.average_uniqueness(np.arange(2000), np.arange(2000) + 19, 2019)
    assert doors.effective_sample_size(staggered) == pytest.approx(shares.sum(), rel=0.01)
    assert (
        doors.effective_sample_size(apart.iloc[:0])
        == 0
        == doors.effective_sample_size(lives((0, 1), barrier="ambiguous"))
    )
