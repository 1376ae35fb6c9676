"""Buckets of fixed lengths: few shapes, every row once an epoch, and an order that a resumed run finds again."""

from collections import Counter

import numpy as np
import pytest

from ml_factory.recipes.language.length_buckets import BucketedRows, BucketSampler, bucket_lengths
from ml_factory.training.device import Device


@pytest.mark.parametrize("shares", [1, 2])
def test_bucket_sampler_takes_every_row_once_an_epoch_in_batches_of_one_bucket(shares):
    counts = (20, 9, 33)
    sampler = BucketSampler(sum(counts), 6, 7, shares, counts=counts)
    ends, seen = np.cumsum(counts), Counter()
    for step in range(sampler.steps_until_epoch(5)):
        rows = sampler.positions(step)
        assert len(rows) == 6 and len(set(np.searchsorted(ends, rows, side="right"))) == 1
        seen.update(rows.tolist())
    assert set(seen) == set(range(62)) and set(seen.values()) <= {4, 5}
    again = BucketSampler(sum(counts), 6, 7, shares, counts=counts)
    for step in (37, 3, 21):  # resumed anywhere
        assert np.array_equal(again.positions(step), sampler.positions(step))
    other = BucketSampler(sum(counts), 6, 8, shares, counts=counts)
    assert any(not np.array_equal(other.positions(step), sampler.positions(step)) for step in range(9))


def test_bucket_lengths_are_few_and_hold_enough_rows():
    lengths = np.random.default_rng(0).integers(3, 60, 500)  # even, so quarters
    assert bucket_lengths(lengths, 4, 64, 32) == (24, 40, 48, 64)
    assert bucket_lengths(lengths, 4, 20, 32)[-1] == 20
    assert bucket_lengths(lengths, 4, 64, 400) == (64,)
    assert bucket_lengths(np.array([5]), 4, 64, 32) == (8,)


def test_bucketed_rows_have_one_of_a_few_shapes_and_keep_text_and_label_together():
    drawn = np.random.default_rng(1)
    tokens = [drawn.integers(2, 50, drawn.integers(1, 30)).astype(np.int32) for _ in range(60)]
    labels = np.arange(60, dtype=np.int32)[:, None]
    rows = BucketedRows(Device("cpu", 1), tokens, labels, (8, 16, 24), 0)
    shapes, found = set(), {}
    sampler = rows.sampler(len(rows), 4, 0)
    for step in range(sampler.steps_until_epoch(1)):
        text, label, _ = rows(sampler.positions(step))
        shapes.add(tuple(text.shape))
        found |= {int(one): text[place] for place, one in enumerate(label[:, 0])}
    assert shapes <= {(4, 8), (4, 16), (4, 24)} and len(found) > 40
    for number, text in found.items():
        own = tokens[number][:24]
        assert text[: len(own)].tolist() == own.tolist() and not text[len(own) :].any()
    assert sorted(np.concatenate([places for _, places in rows.buckets()]).tolist()) == list(range(60))
