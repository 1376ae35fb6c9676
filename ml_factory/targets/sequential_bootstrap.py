"""Sequential bootstrap: rows drawn so that the drawn ones overlap little (AFML 4.5).

After each draw a label's probability is its average uniqueness given the labels drawn so far. A draw changes only the
labels that live on the drawn one's bars, and those are adjacent, so a draw costs O(life + log n), not O(n * life).

Shares are whole numbers, 1/(1+c) in units of 2^-40: sums are exact in any order.
"""

import numpy as np
import pandas as pd
from numba import njit

from ml_factory.errors import SettingsError

ONE = 1 << 40
MOST_LABELS = 1 << 22  # the sum of their probabilities stays below 2^62
MOST_BARS = 1 << 22  # as does the sum of the shares of one label


def sequential_bootstrap_rows(rows: pd.DataFrame, draws: int | None = None, seed: int = 0) -> np.ndarray:
    """Draw int64[draws] positions into `rows`, some more than once; ambiguous rows are never drawn.

    rows : the training rows of one fold, in time order (barrier, entry_bar, exit_bar)
    draws : default: the number of clear rows
    seed : of numpy's default generator
    """
    clear = np.flatnonzero((rows["barrier"] != "ambiguous").to_numpy())
    first, last = rows["entry_bar"].to_numpy(np.int64)[clear] + 1, rows["exit_bar"].to_numpy(np.int64)[clear]
    return clear[sequential_bootstrap(first, last, draws, seed)]


def sequential_bootstrap(
    start_pos: np.ndarray, end_pos: np.ndarray, draws: int | None = None, seed: int = 0
) -> np.ndarray:
    """Draw int64[draws] positions of labels, in the order of drawing (AFML 4.5.2, snippet 4.5).

    Parameters
    ----------
    start_pos, end_pos : int64[n], first and last bar (both included) of each label, starts not decreasing
    draws : default n
    seed : of numpy's default generator, one uniform number a draw

    Raises
    ------
    SettingsError : labels out of order, that end before they start, or that are too many
    """
    start, end = np.asarray(start_pos, np.int64), np.asarray(end_pos, np.int64)
    draws = len(start) if draws is None else draws
    _check(start, end, draws)
    if not draws:
        return np.empty(0, np.int64)
    chance = np.random.default_rng(seed).random(draws)
    # Starts increase, and so does the running maximum of ends: labels alive on bars s..e are at near..far-1.
    near = np.searchsorted(np.maximum.accumulate(end), start, side="left")
    far = np.searchsorted(start, end, side="right")
    share = ONE // np.arange(1, draws + 2)  # of a bar, for one more label in addition to c drawn ones
    return _draw(start - start[0], end - start[0], near, far, chance, share)


@njit(cache=True, nogil=True)
def _draw(start, end, near, far, chance, share):
    """Draw int64[draws]; near, far : for each label, the range of labels that may live on its bars."""
    whole = share[0] * (end - start + 1)  # of each label: the sum of its shares of its bars
    leaves = 1
    while leaves < len(start):
        leaves *= 2
    # tree[leaves + i] is label i's probability, tree[p] = tree[2p] + tree[2p+1], tree[1] the total.
    tree = np.zeros(2 * leaves, np.int64)
    tree[leaves : leaves + len(start)] = share[0]
    _add_up(tree, leaves, 2 * leaves - 1)
    taken = np.zeros(end.max() + 1, np.int64)
    drawn = np.empty(len(chance), np.int64)
    for k in range(len(chance)):
        i = _find(tree, min(np.int64(chance[k] * tree[1]), tree[1] - 1)) - leaves
        drawn[k] = i
        lost = _take(taken, start[i], end[i], share)
        for j in range(near[i], far[i]):
            low, high = max(start[j], start[i]), min(end[j], end[i])
            if low <= high:
                whole[j] -= lost[high + 1 - start[i]] - lost[low - start[i]]
                tree[leaves + j] = whole[j] // (end[j] - start[j] + 1)
        _add_up(tree, leaves + near[i], leaves + far[i] - 1)
    return drawn


@njit(cache=True, nogil=True)
def _find(tree, left):
    """Return the leaf in which the sum from the first leaf on passes `left`."""
    p = 1
    while 2 * p < len(tree):
        p *= 2
        if left >= tree[p]:
            left -= tree[p]
            p += 1
    return p


@njit(cache=True, nogil=True)
def _take(taken, first, last, share):
    """Count one more label on bars first..last; return int64[life + 1], the loss of a label on the first b of them."""
    lost = np.zeros(last - first + 2, np.int64)
    for t in range(first, last + 1):
        lost[t - first + 1] = lost[t - first] + share[taken[t]] - share[taken[t] + 1]
        taken[t] += 1
    return lost


@njit(cache=True, nogil=True)
def _add_up(tree, a, b):
    """Update the sums above the leaves a..b."""
    while a > 1:
        a, b = a // 2, b // 2
        for p in range(a, b + 1):
            tree[p] = tree[2 * p] + tree[2 * p + 1]


def _check(start: np.ndarray, end: np.ndarray, draws: int) -> None:
    wrong = None
    if isinstance(draws, bool) or not isinstance(draws, int | np.integer) or draws < 0 or (draws and not len(start)):
        wrong = ("draws", repr(draws), f"a whole number, 0 or more, and labels to draw from ({len(start)} here)")
    elif (np.diff(start) < 0).any():
        wrong = ("start_pos", f"label {int(np.argmax(np.diff(start) < 0)) + 1} begins earlier", "labels in time order")
    elif (end < start).any():
        wrong = (
            "end_pos",
            f"label {int(np.argmax(end < start))} ends before it starts",
            "an end at or after the start",
        )
    elif len(start) > MOST_LABELS or (len(start) and (end - start).max() >= MOST_BARS):
        wrong = ("labels", f"{len(start):,}", f"at most {MOST_LABELS:,}, each of at most {MOST_BARS:,} bars")
    if wrong:
        where, got, wanted = wrong
        raise SettingsError(
            "Labels cannot be drawn like this", where=where, got=got, wanted=wanted,
            next_step="give the training rows of one fold, oldest first",
        )  # fmt: skip
