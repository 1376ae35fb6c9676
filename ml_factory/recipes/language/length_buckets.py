"""Rows of tokens in buckets of fixed lengths: every batch has one of a few shapes, so a compiler builds few programs.

N rows, B rows of a batch, T tokens of a text, L tokens of a label.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ml_factory.seeding import derive_seed, seeded_generator
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import Device
from ml_factory.training.sampler import BatchSampler

STEP = 8  # lengths are multiples of it


def bucket_lengths(lengths_N: np.ndarray, buckets: int, longest: int, least_rows: int) -> tuple[int, ...]:
    """Return the lengths of the buckets, ascending: quantiles of these, rounded up; the last holds the longest row.

    longest : tokens that a row has at most. least_rows : rows of a bucket at least, where there are so many.
    """
    lengths_N = np.minimum(np.sort(lengths_N), longest)
    ends = [lengths_N[min(len(lengths_N) * (one + 1) // buckets, len(lengths_N)) - 1] for one in range(buckets)]
    chosen = sorted({min(-(-int(end) // STEP) * STEP, longest) for end in ends})
    kept, below = [], 0
    for end in chosen[:-1]:  # a bucket with few rows joins the next longer one
        count = int(np.count_nonzero(lengths_N <= end))
        if count - below >= least_rows and len(lengths_N) - count >= least_rows:
            kept.append(end)
            below = count
    return (*kept, chosen[-1])


class BucketSampler:
    """Rows of each step, all of one bucket: a function of (seed, step), as `BatchSampler` is.

    Rows are numbered bucket by bucket. Each bucket is a stream of permutations; an epoch takes the batches that each
    bucket has filled, in an order drawn from (seed, epoch).

    counts : rows of each bucket.
    """

    def __init__(self, rows: int, batch: int, seed: int, shares: int = 1, *, counts: Sequence[int]):
        self.rows, self.seed, self.counts = rows, seed, tuple(counts)
        self.batch = min(batch, *counts) // shares * shares
        self._parts = [BatchSampler(count, self.batch, derive_seed(seed, "bucket", at), shares)
                       for at, count in enumerate(counts)] if self.batch else []  # fmt: skip
        self._starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def steps_until_epoch(self, epoch: int) -> int:
        """Return the number of steps when that many epochs are over."""
        return sum(part.steps_until_epoch(epoch) for part in self._parts)

    def positions(self, step: int) -> np.ndarray:
        """Return the rows of this step's batch, int64, of one bucket."""
        epoch = step * self.batch // self.rows  # at most two off, since a bucket's last batch may be an epoch later
        while self.steps_until_epoch(epoch) > step:
            epoch -= 1
        while self.steps_until_epoch(epoch + 1) <= step:
            epoch += 1
        buckets, numbers = self._order(epoch)
        place = step - self.steps_until_epoch(epoch)
        bucket = int(buckets[place])
        return self._parts[bucket].positions(int(numbers[place])) + self._starts[bucket]

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each step of the epoch, its bucket and the number of the step within that bucket's stream."""
        if self._epoch is None or self._epoch[0] != epoch:
            spans = [(part.steps_until_epoch(epoch), part.steps_until_epoch(epoch + 1)) for part in self._parts]
            buckets = np.repeat(np.arange(len(spans)), [high - low for low, high in spans])
            buckets = seeded_generator(self.seed, "buckets", epoch).permutation(buckets)
            numbers = np.empty(len(buckets), np.int64)
            for bucket, (low, high) in enumerate(spans):
                numbers[buckets == bucket] = np.arange(low, high)
            self._epoch = epoch, buckets, numbers
        return self._epoch[1:]


class BucketedRows:
    """Rows in buckets, as the training loop and the evaluation read them.

    lengths : of the buckets, ascending; longer rows are cut.
    sampler : order of the rows in training.
    order_N : place of each row, bucket by bucket, in the given order.
    """

    def __init__(
        self, device: Device, tokens: Sequence[np.ndarray], labels_NL: np.ndarray, lengths: Sequence[int], pad: int
    ):
        sizes_N = np.array([min(len(row), lengths[-1]) for row in tokens])
        bucket_N = np.searchsorted(lengths, sizes_N)
        self.order_N = np.argsort(bucket_N, kind="stable")
        self.loaders: list[BatchLoader] = []
        self.lengths: list[int] = []
        for bucket, length in enumerate(lengths):
            rows = np.flatnonzero(bucket_N == bucket)
            if not len(rows):
                continue
            tokens_NT = np.full((len(rows), length), pad, np.int32)
            for place, row in enumerate(rows):
                tokens_NT[place, : sizes_N[row]] = tokens[row][: sizes_N[row]]
            self.loaders.append(BatchLoader(device, [tokens_NT, labels_NL[rows], np.ones(len(rows), np.float32)]))
            self.lengths.append(length)
        counts = [len(loader) for loader in self.loaders]
        self._ends = np.cumsum(counts)
        self.sampler = partial(BucketSampler, counts=counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __call__(self, positions: np.ndarray):
        loader, inside = self._within(positions)
        return loader(inside)

    def prefetch(self, positions: np.ndarray) -> None:
        """Announce the next positions to their bucket."""
        loader, inside = self._within(positions)
        if loader.prefetch is not None:
            loader.prefetch(inside)

    def _within(self, positions: np.ndarray) -> tuple[BatchLoader, np.ndarray]:
        bucket = int(np.searchsorted(self._ends, positions[0], side="right"))
        return self.loaders[bucket], positions - (int(self._ends[bucket - 1]) if bucket else 0)

    def buckets(self) -> Iterator[tuple[BatchLoader, np.ndarray]]:
        """Yield each bucket's loader and the places of its rows in the given order."""
        start = 0
        for loader in self.loaders:
            yield loader, self.order_N[start : start + len(loader)]
            start += len(loader)
