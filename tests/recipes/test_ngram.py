"""The n-gram baseline against a count by hand."""

import math
from collections import Counter

import numpy as np
import pytest

from ml_factory.recipes.sdce_run import ngram_losses


def slow_losses(train, held_out, vocabulary: int, order: int) -> list[float]:
    """Witten-Bell with dictionaries; 0 stands for what is before a row."""
    losses = []
    levels = [(Counter(), {}) for _ in range(order)]
    for row in train:
        padded = [0] * order + [int(token) + 1 for token in row]
        for at in range(order, len(padded)):
            for back, (counts, after) in enumerate(levels):
                context = tuple(padded[at - back : at])
                counts[context, padded[at]] += 1
                after.setdefault(context, Counter())[padded[at]] += 1
    for last in range(1, order + 1):
        total, number = 0.0, 0
        for row in held_out:
            padded = [0] * order + [int(token) + 1 for token in row]
            for at in range(order + 1, len(padded)):
                chance = 1 / vocabulary
                for back, (counts, after) in enumerate(levels[:last]):
                    context = tuple(padded[at - back : at])
                    if context in after:
                        kinds, seen = len(after[context]), sum(after[context].values())
                        chance = (counts[context, padded[at]] + kinds * chance) / (seen + kinds)
                total, number = total - math.log(chance), number + 1
        losses.append(total / number)
    return losses


def test_ngram_model_equals_count_by_hand():
    drawn = np.random.default_rng(0)
    train, held_out = drawn.integers(0, 6, (12, 15)), drawn.integers(0, 8, (5, 15))
    found = ngram_losses(train, held_out, 9, 4)
    assert found == pytest.approx(slow_losses(train, held_out, 9, 4), rel=1e-12)


def test_ngram_model_learns_a_cycle():
    rows = np.tile(np.arange(5), (20, 8))
    losses = ngram_losses(rows, rows, 5, 2)
    assert losses[0] == pytest.approx(math.log(5), abs=0.01) and losses[1] < 0.05
