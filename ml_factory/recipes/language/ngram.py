"""An n-gram model of tokens, the cheapest baseline: interpolated with Witten-Bell weights.

P(w | h) = (count(h w) + kinds(h) P(w | h')) / (count(h) + kinds(h)), where kinds(h) is the number of different tokens
seen after h, h' is h without its oldest token, and before any context each token has 1 / V. N rows, T tokens of a row.
"""

import numpy as np

_MIX = np.uint64(0x9E3779B97F4A7C15)


class NgramModel:
    """Counts of n-grams up to `order` in rows (N, T); contexts do not cross rows."""

    def __init__(self, rows_NT: np.ndarray, vocabulary: int, order: int = 4):
        self.vocabulary, self.order = vocabulary, order
        self._levels = []
        for back in range(order):
            context, whole = _keys(rows_NT, back)
            grams, gram_counts = np.unique(whole, return_counts=True)
            contexts, counts = np.unique(context, return_counts=True)
            # The context of each different gram, once, gives the number of kinds.
            first = np.unique(whole, return_index=True)[1]
            kinds = np.bincount(np.searchsorted(contexts, context[first]), minlength=len(contexts))
            self._levels.append((grams, gram_counts, contexts, counts, kinds))

    def mean_losses(self, rows_NT: np.ndarray) -> list[float]:
        """Return the mean negative log-probability of tokens 1 .. T - 1 of each row in nats, as networks are scored,
        by 1-grams, 2-grams, ... up to the order.
        """
        losses: list[float] = []
        chance = np.full(rows_NT.shape[0] * rows_NT.shape[1], 1.0 / self.vocabulary)
        for back, (grams, gram_counts, contexts, counts, kinds) in enumerate(self._levels):
            context, whole = _keys(rows_NT, back)
            seen, before = _look_up(grams, gram_counts, whole), _look_up(contexts, counts, context)
            different = _look_up(contexts, kinds, context)
            total = np.maximum(before + different, 1)
            chance = np.where(before > 0, (seen + different * chance) / total, chance)
            losses.append(float(-np.log(chance.reshape(rows_NT.shape)[:, 1:]).mean()))
        return losses


def _keys(rows_NT: np.ndarray, back: int) -> tuple[np.ndarray, np.ndarray]:
    """Return hashes uint64 of the `back` tokens before each token, and of these with the token, flat."""
    tokens = rows_NT.astype(np.uint64) + np.uint64(1)
    key = np.full(tokens.shape, np.uint64(back + 1))
    for distance in range(back, 0, -1):
        moved = np.zeros_like(tokens)  # 0 stands before the row
        moved[:, distance:] = tokens[:, :-distance]
        key = _mixed(key, moved)
    return key.ravel(), _mixed(key, tokens).ravel()


def _mixed(key: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Return a hash of both (splitmix64's finalizer)."""
    key = (key + token) * _MIX
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each key, 0 where it is not there."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
