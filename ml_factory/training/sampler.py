"""The rows of each step, a function of (seed, step), and which of them each process computes."""

import numpy as np

from ml_factory.seeding import seeded_generator


class BatchSampler:
    """A stream of permutations of the rows, one per epoch, each drawn from (seed, epoch) alone.

    Batches are always full; rows left at an epoch's end open the next one.

    batch : rows of a step, cut to a multiple of `shares` (processes times chips) where there are fewer rows.
    """

    def __init__(self, rows: int, batch: int, seed: int, shares: int = 1):
        self.rows, self.seed, self.shares = rows, seed, shares
        self.batch = min(batch, rows) // shares * shares
        self._kept: dict[int, np.ndarray] = {}

    def steps_until_epoch(self, epoch: int) -> int:
        """Return the number of steps when that many epochs are over."""
        return epoch * self.rows // self.batch

    def positions(self, step: int) -> np.ndarray:
        """Return the rows of this step's batch, int64."""
        start, stop = step * self.batch, (step + 1) * self.batch
        first, last = start // self.rows, (stop - 1) // self.rows
        self._kept = {epoch: self._kept[epoch] for epoch in self._kept if epoch >= first}
        parts = []  # cut before concatenating: an epoch may have millions of rows
        for epoch in range(first, last + 1):
            opening = epoch * self.rows
            if epoch not in self._kept:
                self._kept[epoch] = seeded_generator(self.seed, "order", epoch).permutation(self.rows)
            parts.append(self._kept[epoch][max(start - opening, 0) : stop - opening])
        return np.concatenate(parts)


class StreamSampler(BatchSampler):
    """Consecutive positions in the stream of all epochs: epoch * rows + row, for data with an order of its own.

    Share i of `shares` gets every `shares`-th position of a batch, from the i-th on.
    """

    def positions(self, step: int) -> np.ndarray:
        stream = np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.int64)
        return stream.reshape(-1, self.shares).T.ravel()


def micro_batch_size(rows: int, most: int, multiple: int) -> int:
    """Return the largest divisor of `rows` that is at most `most` and a multiple of `multiple`: all parts have one
    shape.

    rows : a process's rows of a step, a multiple of `multiple` (the chips that share a part).
    """
    fitting = (size for size in range(max(most, multiple), 0, -1) if rows % size == 0 and size % multiple == 0)
    return next(fitting, multiple)
