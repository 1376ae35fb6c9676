"""Conformal test martingale over blocks of bars: capital that grows while blocks are stranger than those of training.

Bars follow each other too closely for a test of exchangeability. A block of 30 bars therefore gives one score: for
every channel the mean rank and the mean distance of the ranks from the middle, each as the difference from its forecast
by the block before (AR(1), fitted on training blocks), squared in units of training and summed. Its conformal p-value
is the share of training blocks, and of itself, with a score at least as large, rounded up to a grid. The capital bets
on small p-values with the mixture of the power martingales, the integral of k p^(k-1) over k from 0 to 1 (Vovk,
Gammerman and Shafer, "Algorithmic Learning in a Random World", chapter 7), and restarts at 1, as in the conformal CUSUM
of Vovk, Petej, Nouretdinov, Ahlberg, Carlsson and Gammerman (2021), "Retrain or not retrain", PMLR 152.
"""

from collections.abc import Mapping

import numpy as np

from ml_factory.inference.guard.histograms import BINS, MovingCounts, ReferenceBins

BLOCK = 30  # bars
LARGEST_SCORE = 25.0  # of one channel
TAILS = 0.5 ** np.linspace(0, 12, 49)  # the grid of p-values, falling
_GROWTH = np.append(0.5, (1 - TAILS[1:] + TAILS[1:] * np.log(TAILS[1:])) / (TAILS[1:] * np.log(TAILS[1:]) ** 2))


class BlockScores:
    """Strangeness of successive blocks.

    follow, scale : float64 [2 C], the AR(1) coefficient and the deviation of its error, of training blocks
    """

    def __init__(self, bins: ReferenceBins, follow: np.ndarray, scale: np.ndarray):
        self._ranks = bins.middle_ranks()
        self._follow, self._scale = follow, scale
        self._counts = MovingCounts(len(self._ranks), BLOCK, BLOCK)
        self._before = np.full(2 * len(self._ranks), np.nan)

    def push(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows, scores): the places in `codes` that end a block, and the blocks' scores, float64 (E,)."""
        rows, counts = self._counts.push(codes)
        if not len(rows):
            return rows, np.empty(0)
        means = block_means(counts, self._ranks)
        before = np.concatenate([self._before[None], means[:-1]])
        self._before = means[-1].copy()
        errors = ((means - self._follow * before) / self._scale) ** 2
        scores = np.zeros(len(rows))
        for column in errors.T:  # in this order whatever the number of blocks
            scores += np.where(np.isnan(column), 0.0, np.minimum(column, LARGEST_SCORE))
        return rows, scores

    def get_state(self) -> dict:
        return {"counts": self._counts.get_state(), "before": self._before.copy()}

    def load_state(self, state: Mapping) -> None:
        self._counts.load_state(state["counts"])
        self._before = np.array(state["before"], np.float64).reshape(self._before.shape)


class BlockMartingale:
    """Log capital after each block.

    levels : float64 [len(TAILS)], rising: of `fit_levels`. A score above a level is as rare as its share of TAILS; a
        score equal to it may tie with many training blocks
    """

    def __init__(self, levels: np.ndarray):
        self._levels, self._capital = levels, 1.0

    def push(self, scores: np.ndarray) -> np.ndarray:
        """Return the log capital after each of the next blocks, float64 (E,)."""
        factors = _GROWTH[np.maximum(np.searchsorted(self._levels, scores, side="left") - 1, 0)]
        out = np.empty(len(scores))
        for place, factor in enumerate(factors.tolist()):
            self._capital = min(max(self._capital * factor, 1.0), 1e100)
            out[place] = self._capital
        return np.log(out)

    def get_state(self) -> dict:
        return {"capital": self._capital}

    def load_state(self, state: Mapping) -> None:
        self._capital = float(state["capital"])


def block_means(counts: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the mean rank, and the mean distance of ranks from the middle, of each channel: float64 (E, 2 C)."""
    mean, spread = np.zeros(counts.shape[:2]), np.zeros(counts.shape[:2])
    for place in range(BINS + 1):
        mean += counts[:, :, place] * ranks[:, place]
        spread += counts[:, :, place] * np.abs(ranks[:, place])
    return np.concatenate([mean, spread], axis=1) / BLOCK


def fit_block_scores(bins: ReferenceBins, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `follow` and `scale` of training bars; `codes` uint8 (N, C)."""
    _, counts = MovingCounts(codes.shape[1], BLOCK, BLOCK).push(codes)
    means = block_means(counts, bins.middle_ranks())
    means = means - means.mean(axis=0)
    before, after = means[:-1], means[1:]
    power = (before**2).sum(axis=0)
    follow = np.where(power > 0, (before * after).sum(axis=0) / np.where(power > 0, power, 1.0), 0.0)
    scale = np.sqrt(((after - follow * before) ** 2).mean(axis=0))
    return follow, np.where(scale > 1e-6, scale, np.inf)


def fit_levels(scores: np.ndarray) -> np.ndarray:
    """Return the scores that each share of TAILS of the training blocks reaches, rising."""
    ordered = np.sort(scores)
    place = np.ceil(len(ordered) * (1 - TAILS)).astype(int)
    levels = np.where(place < len(ordered), ordered[np.minimum(place, len(ordered) - 1)], np.inf)
    return np.maximum.accumulate(np.append(-np.inf, levels[1:]))
