"""Entropy features: uncertainty of the next move, relative to that of pure chance.

Sources: Shannon (1948); Bandt and Pompe (2002) for the orders of successive closes; Lempel and Ziv (1976) for
complexity, by the scan of Kaspar and Schuster (1987); Grassberger (1989) and Kontoyiannis et al. (1998) for match
lengths; Lopez de Prado (2018), 18.2 to 18.5, for all of them on bars, signs and fixed bins of a deviation among the
codings. Symbols are counted in windows; the sums are of whole numbers, so that no order of adding changes a bit.
"""

import math
from collections.abc import Iterator

import numpy as np
from numba import njit

from ml_factory.features.engine import Block, Column
from ml_factory.features.windows import lag, window_sum

SIGMA_BINS, SIGMA_WIDTH = 8, 0.5
"""Bins of the returns, and their width in deviations of the previous 96 bars; the outer two are unbounded."""
_ONE = 2.0**40
_COUNTS = np.arange(97.0)
_TABLE = np.rint(_COUNTS * np.log(np.maximum(_COUNTS, 1.0)) * _ONE).astype(np.int64)
"""c log c of the counts 0 to 96, in units of 1 / _ONE."""


def entropy(b: Block) -> Iterator[Column]:
    """Yield the columns; see the module."""
    x = [lag(b.close, k) for k in range(4)]
    # The order of each three successive closes, newest first, as a number; equal counts as rising.
    three = 1 * (x[2] > x[1]) + 2 * (x[1] > x[0]) + 4 * (x[2] > x[0])
    yield "entropy_48", _window_entropy(three, 48, 6, lag(b.close, 49))
    if b.coarse:
        return

    four = three + 8 * (x[3] > x[2]) + 16 * (x[3] > x[1]) + 32 * (x[3] > x[0])
    yield "permutation_entropy_4_96", _window_entropy(four, 96, 24, lag(b.close, 98))
    yield "sigma_entropy_48", _window_entropy(sigma_bins(b.ret, b.return_std(96)), 48, SIGMA_BINS, lag(b.ret, 143))
    words = _last_moves(b.close)
    known = lag(b.ret, 98)
    of_four, of_three = (_window_entropy(words & (2**n - 1), 96, 2, known) for n in (4, 3))  # bits
    yield "word_entropy_4_96", of_four / 4.0
    yield "conditional_entropy_3_96", of_four - of_three  # what a fourth sign adds to three
    yield "lempel_ziv_48", math.log2(48.0) / 48.0 * lempel_ziv_phrases(words, 48) + 0.0 * lag(b.ret, 47)
    # Kontoyiannis et al. (1998), eq. 6, reversed: bits a sign.
    lengths = _match_lengths(words, 32) + 0.0 * lag(b.ret, 63)
    yield "match_entropy_48", window_sum(math.log2(32.0) / lengths, 48) / 48.0


def sigma_bins(ret: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return the bin, int64[M], of each return in SIGMA_WIDTH deviations, `spread` of the bar before; 0 if missing."""
    place = np.floor(ret / (SIGMA_WIDTH * lag(spread))) + SIGMA_BINS // 2
    return np.nan_to_num(np.clip(place, 0.0, SIGMA_BINS - 1.0)).astype(np.int64)


def _window_entropy(codes: np.ndarray, n: int, base: int, oldest: np.ndarray) -> np.ndarray:
    """Return the plug-in entropy of the last n codes (0 to 63) to this base; NaN where `oldest` is."""
    return (_TABLE[n] - _window_counts(codes, n, _TABLE)) / (_ONE * n * math.log(base)) + 0.0 * oldest


@njit(cache=True, nogil=True, error_model="numpy")
def _window_counts(codes, n, table):
    """Sum of `table` over the counts of the codes in the last n; before that, of those so far."""
    out, counts, total = np.empty(len(codes), np.int64), np.zeros(64, np.int64), 0
    for i in range(len(codes)):
        counts[codes[i]] += 1
        total += table[counts[codes[i]]] - table[counts[codes[i]] - 1]
        if i >= n:
            counts[codes[i - n]] -= 1
            total += table[counts[codes[i - n]]] - table[counts[codes[i - n]] + 1]
        out[i] = total
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _last_moves(close):
    """int64[M]: the last 64 moves as bits, the newest lowest; 1 where the close rose."""
    out, word = np.zeros(len(close), np.int64), np.int64(0)
    for i in range(1, len(close)):
        word = (word << 1) | np.int64(close[i] > close[i - 1])
        out[i] = word
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def lempel_ziv_phrases(words, n):
    """Lempel and Ziv's (1976) number of new phrases in the last n signs; a phrase ends where it was not seen before.

    All earlier positions of the current phrase are stored as bits of one number (a position: where it ends), so that
    one step reads one sign of all rows.
    """
    everywhere = np.int64((1 << (n + 1)) - 1)
    places, phrases = np.full(len(words), everywhere), np.zeros(len(words), np.int64)
    for bit in range(n - 1, -1, -1):
        older = -(np.int64(1) << (bit + 1))
        for i in range(len(words)):
            left = (places[i] >> 1) & (words[i] ^ (((words[i] >> bit) & 1) - 1)) & older
            phrases[i] += np.int64(left == 0)
            places[i] = everywhere if left == 0 else left
    for i in range(len(words)):
        phrases[i] += np.int64(places[i] != everywhere)  # the last phrase may be cut off
    return phrases


@njit(cache=True, nogil=True, error_model="numpy")
def _match_lengths(words, n):
    """1 + length of the longest run of signs up to the row, n at most, that also ends at one of the n rows before."""
    longest = np.zeros(len(words), np.int64)
    for step in range(1, n + 1):
        for i in range(len(words)):
            apart = (words[i] ^ (words[i] >> step)) | (np.int64(1) << n)
            longest[i] = max(longest[i], apart & -apart)  # 2 ** (length of the match)
    return np.log2(longest.astype(np.float64)) + 1.0
