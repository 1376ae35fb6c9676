"""Entropies against their definitions written out row by row, a parse worked by hand, and series that are known."""

import math
from itertools import pairwise

import numpy as np
import pytest

from tests.contract.doors import FAMILIES, compute_family_columns, lempel_ziv_phrases, sigma_bins, window_std
from tests.contract.features.plain import window

entropy = FAMILIES["entropy"]


def shannon(symbols):
    """Nats."""
    counts = np.unique(symbols, axis=0, return_counts=True)[1]
    return -sum(c / len(symbols) * math.log(c / len(symbols)) for c in counts)


def permutation_entropy(order, n):
    def reference(frame, i):
        ranks = [np.argsort(window(frame.close, k, order), kind="stable") for k in range(i - n + 1, i + 1)]
        return shannon(ranks) / math.log(math.factorial(order))

    return reference


def sigma_entropy(frame, i):
    moves, bins = np.diff(np.log(window(frame.close, i, 146))), []
    for k in range(97, 145):
        place = moves[k] / max(np.std(moves[k - 96 : k]), 1e-6) / 0.5
        bins.append(np.clip(math.floor(place), -4, 3))
    return shannon(bins) / math.log(8)


def signs(frame, i, n):
    """The last n moves as "1" up, "0" not."""
    return "".join("01"[int(b > a)] for a, b in pairwise(window(frame.close, i, n + 1)))


def words(text, n):
    return [text[k : k + n] for k in range(len(text) - n + 1)]


def word_entropy(frame, i):
    return shannon(words(signs(frame, i, 99), 4)) / (4 * math.log(2))


def conditional_entropy(frame, i):
    """What a fourth sign adds to three, in bits."""
    return (shannon(words(signs(frame, i, 99), 4)) - shannon(words(signs(frame, i, 98), 3))) / math.log(2)


def phrases(text):
    """Lempel and Ziv (1976): each phrase is the shortest that does not stand before its own last sign."""
    found, start = 0, 0
    while start < len(text):
        end = start + 1
        while end <= len(text) and text[start:end] in text[: end - 1]:
            end += 1
        found, start = found + 1, end
    return found


def match_entropy(frame, i):
    total = 0.0
    for k in range(i - 47, i + 1):
        text, longest = signs(frame, k, 64), 0
        for d in range(1, 33):
            while longest < 32 and text[63 - longest :] == text[63 - longest - d : 64 - d]:
                longest += 1
        total += 5.0 / (1 + longest)
    return total / 48


TWINS = {
    "entropy_48": permutation_entropy(3, 48),
    "permutation_entropy_4_96": permutation_entropy(4, 96),
    "sigma_entropy_48": sigma_entropy,
    "word_entropy_4_96": word_entropy,
    "conditional_entropy_3_96": conditional_entropy,
    "lempel_ziv_48": lambda f, i: phrases(signs(f, i, 48)) * math.log2(48) / 48,
    "match_entropy_48": match_entropy,
}


def test_entropy_columns_equal_reference(either_frame, markets, check_columns):
    check_columns(entropy, either_frame("ES", 60), markets["ES"], TWINS)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0001101001000101", 6),  # 0 001 10 100 1000 101, the example of Kaspar and Schuster (1987)
        ("0000000000000000", 2),  # 0 000...
        ("0101010101010101", 3),  # 0 1 0101...
    ],
)
def test_lempel_ziv_phrase_count_equals_hand_computed_value(text, want):
    assert lempel_ziv_phrases(np.array([int(text, 2)]), 16)[0] == phrases(text) == want


def test_entropy_columns_are_high_for_random_and_low_for_periodic_prices(make_frame, markets):
    coin = 1000.0 + np.cumsum(np.random.default_rng(1).normal(size=5000))
    beat = 1000.0 + np.tile([0.0, 2.0, 1.0, 3.0], 200)
    of_coin, of_beat = (compute_family_columns(entropy, make_frame(x), markets["ES"], False) for x in (coin, beat))
    for name in ("entropy_48", "permutation_entropy_4_96", "word_entropy_4_96", "conditional_entropy_3_96"):
        assert 0.88 < of_coin[name][200:].mean() < 1.0, name
    assert of_coin["lempel_ziv_48"][200:].mean() == pytest.approx(1.2, abs=0.1)  # short texts lie above 1
    assert np.abs(of_beat["conditional_entropy_3_96"][200:]).max() < 0.02  # the window's edges weigh one word
    assert of_beat["lempel_ziv_48"][200:].max() <= 4 * math.log2(48) / 48
    assert of_beat["match_entropy_48"][200:].max() == pytest.approx(5.0 / 33)


def test_entropy_columns_of_constant_price_are_minimal(rough, markets):
    found = compute_family_columns(entropy, rough, markets["ES"], False)
    still = {name: float(column[799]) for name, column in found.items()}
    assert still.pop("lempel_ziv_48") == pytest.approx(2 * math.log2(48) / 48)
    assert still.pop("match_entropy_48") == pytest.approx(5.0 / 33)
    assert set(still.values()) == {0.0}


def test_sigma_encode_returns_puts_no_move_in_middle_bin_and_large_ones_at_ends():
    rng = np.random.default_rng(0)
    ret = rng.choice([-0.001, 0.001], 200)
    ret[150:155] = 0.0, 0.0011, -0.0011, 1.0, -1.0
    bins = sigma_bins(ret, window_std(ret, 96))[150:155]
    assert bins.tolist() == [4, 6, 1, 7, 0]
