"""Sequential bootstrap: the book's worked example, and the naive form draw by draw."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_factory.errors import SettingsError
from ml_factory.targets import sequential_bootstrap as sequential_bootstrap_module
from ml_factory.targets.labels import average_uniqueness
from ml_factory.targets.sequential_bootstrap import ONE, sequential_bootstrap, sequential_bootstrap_rows

THREE = np.array([[0, 2], [2, 3], [4, 5]])  # AFML 4.5.3: returns 0-2, 2-3, 4-5


class Chances:
    """A generator whose uniform numbers are given."""

    def __init__(self, *chances: float):
        self.chances = np.array(chances)

    def random(self, n: int) -> np.ndarray:
        assert n == len(self.chances)
        return self.chances


def drawn_by(monkeypatch, *chances: float) -> list[int]:
    monkeypatch.setattr(sequential_bootstrap_module.np.random, "default_rng", lambda seed: Chances(*chances))
    return sequential_bootstrap(*THREE.T, draws=len(chances)).tolist()


@pytest.mark.parametrize(
    ("before", "edges"),
    [
        ((), (1 / 3, 2 / 3)),
        ((0.5,), (5 / 14, 8 / 14)),  # label 2 drawn: 5/14, 3/14, 6/14
        # labels 2 and 3 drawn: (1 + 1 + 1/2)/3 = 5/6, 1/2, 1/2 of 11/6
        ((0.5, 0.9), (5 / 11, 8 / 11)),
    ],
)
def test_sequential_bootstrap_draw_probabilities_equal_afml_example(monkeypatch, before, edges):
    """The chances of the next draw are where the drawn label changes as the uniform number grows."""
    for label, edge in enumerate(edges):
        *first, below = drawn_by(monkeypatch, *before, edge - 1e-9)
        *_, above = drawn_by(monkeypatch, *before, edge + 1e-9)
        assert (below, above) == (label, label + 1)
        assert first == [1, 2][: len(before)]


def naive(start: np.ndarray, end: np.ndarray, draws: int, seed: int) -> list[int]:
    """Snippet 4.5, every label anew after each draw: O(draws * labels * bars). Shares in units of 2^-40."""
    bars = np.arange(end.max() + 1)
    lives = (bars >= start[:, None]) & (bars <= end[:, None])
    taken, drawn = np.zeros(len(bars), np.int64), []
    for chance in np.random.default_rng(seed).random(draws):
        share = ONE // (1 + taken)
        uniqueness = (lives * share).sum(axis=1) // lives.sum(axis=1)
        total = int(uniqueness.sum())
        point = min(int(chance * total), total - 1)
        drawn.append(int(np.searchsorted(np.cumsum(uniqueness), point, side="right")))
        taken += lives[drawn[-1]]
    return drawn


def test_sequential_bootstrap_of_500_labels_equals_naive_form():
    rng = np.random.default_rng(3)
    start = np.sort(rng.integers(0, 600, 500))
    end = start + rng.integers(0, 40, 500)
    for seed in range(3):
        drawn = sequential_bootstrap(start, end, seed=seed)
        assert drawn.tolist() == naive(start, end, 500, seed)
    assert not np.array_equal(drawn, sequential_bootstrap(start, end, seed=0))


@settings(max_examples=100, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 25)), min_size=1, max_size=40),
    draws=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_sequential_bootstrap_of_random_labels_equals_naive_form(spans, draws, seed):
    """Also one label alone, labels inside labels, many on one bar, more draws than labels."""
    start, life = np.array(sorted(spans)).T
    drawn = sequential_bootstrap(start + 7, start + life + 7, draws, seed)
    assert drawn.tolist() == naive(start, start + life, draws, seed)


def test_sequential_bootstrap_draws_are_more_unique_than_random_draws():
    """As in the Monte Carlo of AFML 4.5.4: labels of random place and life, drawn both ways."""
    rng, better = np.random.default_rng(0), []
    for seed in range(200):
        start = np.sort(rng.integers(0, 20, 10))
        end = start + rng.integers(0, 6, 10)
        means = []
        for drawn in (sequential_bootstrap(start, end, seed=seed), rng.integers(0, 10, 10)):
            means.append(average_uniqueness(start[drawn], end[drawn], 40).mean())
        better.append(means[0] - means[1])
    assert np.mean(better) > 4 * np.std(better) / np.sqrt(len(better))


def test_bootstrap_rows_never_draws_ambiguous_rows():
    first, last = THREE.T
    rows = pd.DataFrame({"barrier": "upper", "entry_bar": first + 99, "exit_bar": last + 100})
    crowd = pd.concat([rows.iloc[:1].assign(barrier="ambiguous"), rows], ignore_index=True)
    drawn = sequential_bootstrap_rows(crowd, draws=50, seed=4)
    assert (drawn - 1).tolist() == sequential_bootstrap(first, last, 50, 4).tolist()
    assert set(drawn) == {1, 2, 3} and len(sequential_bootstrap_rows(crowd)) == 3
    assert len(sequential_bootstrap_rows(crowd.iloc[:1])) == 0


@pytest.mark.parametrize(
    ("start", "end", "draws", "printed"),
    [
        ([3, 2], [4, 4], 1, "label 1 begins earlier"),
        ([2, 3], [4, 2], 1, "label 1 ends before"),
        ([2], [4], -1, "draws"),
        ([2], [4], 2.0, "draws"),
        ([], [], 1, "labels to draw from"),
        ([0], [1 << 23], 1, "at most"),
    ],
)
def test_sequential_bootstrap_invalid_spans_raise_settings_error(start, end, draws, printed):
    with pytest.raises(SettingsError, match=printed):
        sequential_bootstrap(np.array(start), np.array(end), draws)
