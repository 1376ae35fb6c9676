"""Entropy features: uncertainty of the next move, relative to that of pure chance.

Sources: Shannon (1948); Bandt and Pompe (2002) for the orders of successive closes; Lempel and Ziv (1976) for
complexity, by the scan of Kaspar and Schuster (1987); Grassberger (1989) and Kontoyiannis et al. (1998) for match
lengths; Lopez de Prado (2018), 18.2 to 18.5, for all of them on bars, signs and fixed bins of a deviation among the
codings. Symbols are counted in windows; the sums are of whole numbers, so that no order of adding changes a bit.
"""

import math

import numpy as np
from numba import njit

from ml_factory.features.engine import FeatureFamily
from ml_factory.features.rolling import HISTORY, rolling_return_std

COARSE = ("entropy_48",)
BASE = (
    "permutation_entropy_4_96", "sigma_entropy_48", "word_entropy_4_96", "conditional_entropy_3_96", "lempel_ziv_48",
    "match_entropy_48",
)  # fmt: skip

SIGMA_BINS, SIGMA_WIDTH = 8, 0.5
"""Bins of the returns, and their width in deviations of the previous 96 bars; the outer two are unbounded."""
_ONE = 2.0**40


def _names(market, coarse):
    return COARSE if coarse else COARSE + BASE


@njit(cache=True, nogil=True, error_model="numpy")
def _kernel(b, state, out, coarse):
    table = _entropy_count_table(96)
    _window_entropy(_ordinal_patterns_of_three(b.close), 48, math.log(6.0), table, b.log_close[HISTORY - 49 :], out[0])
    if coarse:
        return
    words = _binary_encode_moves(b.close, HISTORY - 96)
    _window_entropy(ordinal_patterns_of_four(b.close), 96, math.log(24.0), table, b.log_close[HISTORY - 98 :], out[1])
    sigma, oldest = _sigma_encode_returns(b.ret, b.t0, HISTORY - 48), b.ret[HISTORY - 47 - 96 :]
    _window_entropy(sigma, 48, math.log(SIGMA_BINS), table, oldest, out[2])
    oldest = b.ret[HISTORY - 98 :]
    _window_entropy(_last_move_bits(words, 4), 96, 4.0 * math.log(2.0), table, oldest, out[3])
    _window_entropy(_last_move_bits(words, 3), 96, math.log(2.0), table, oldest, out[4])
    for i in range(out.shape[1]):
        out[4, i] = 4.0 * out[3, i] - out[4, i]
    lempel_ziv_complexity(words, 48, b.ret[HISTORY - 47 :], out[5])
    _match_length_entropy(words, 32, 48, b.ret[HISTORY - 47 - 63 :], out[6])


FAMILY = FeatureFamily(names=_names, kernel=_kernel)


@njit(cache=True, nogil=True, error_model="numpy")
def _entropy_count_table(n):
    """Return int64[n + 1]: c log c of the counts 0 to n, in units of 1 / _ONE."""
    table = np.zeros(n + 1, np.int64)
    for count in range(1, n + 1):
        table[count] = np.int64(round(count * math.log(count) * _ONE))
    return table


@njit(cache=True, nogil=True, error_model="numpy")
def _window_entropy(codes, n, most, table, oldest, out):
    """Compute the plug-in entropy of the last n codes (0 to 63) over `most` nats; NaN where `oldest` is."""
    counts = np.zeros(64, np.int64)
    total = 0
    for i in range(HISTORY - n, HISTORY):
        total += _put(counts, codes[i], 1, table)
    leaving, coming = codes[HISTORY - n :], codes[HISTORY:]
    for i in range(len(out)):
        total += _put(counts, coming[i], 1, table) + _put(counts, leaving[i], -1, table)
        out[i] = (table[n] - total) / (_ONE * n * most) + 0.0 * oldest[i]


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _put(counts, code, step, table):
    """Change the count of a code by `step`; return the change of the sum of c log c."""
    before = counts[code]
    counts[code] = before + step
    return table[before + step] - table[before]


@njit(cache=True, nogil=True, error_model="numpy")
def _ordinal_patterns_of_three(x):
    """Return a number for the order of each three successive values; equal counts as rising."""
    out = np.zeros(len(x), np.int64)
    x0, x1, x2, rows = x[:-2], x[1:-1], x[2:], out[2:]
    for i in range(len(rows)):
        rows[i] = np.int64(x0[i] > x1[i]) + 2 * np.int64(x1[i] > x2[i]) + 4 * np.int64(x0[i] > x2[i])
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def ordinal_patterns_of_four(x):
    """Return a number for the order of each four successive values; equal counts as rising."""
    out = np.zeros(len(x), np.int64)
    three = _ordinal_patterns_of_three(x)
    oldest, newest, before, now, rows = x[:-3], x[3:], three[2:-1], three[3:], out[3:]
    for i in range(len(rows)):
        # Not given by the newest three: the rank of the oldest among them.
        first = 8 * (before[i] & 1) + 16 * (before[i] >> 2)
        rows[i] = now[i] + first + 32 * np.int64(oldest[i] > newest[i])
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _sigma_encode_returns(ret, t0, first):
    """Return the bin of each return from row `first` on, in SIGMA_WIDTH deviations of the previous 96."""
    out = np.zeros(len(ret), np.int64)
    spread = rolling_return_std(ret, 96, t0, first - 1)[first - 1 :]
    ret, rows = ret[first:], out[first:]
    for i in range(len(rows)):
        place = ret[i] / (SIGMA_WIDTH * spread[i]) + SIGMA_BINS // 2
        rows[i] = np.int64(min(max(place, 0.0), SIGMA_BINS - 1.0)) if place == place else 0
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _binary_encode_moves(close, first):
    """Return int64[M], from row `first` on: the last 64 moves as bits, the newest lowest; 1 where the close rose."""
    out = np.zeros(len(close), np.int64)
    before, now, rows = close[first - 64 : -1], close[first - 63 :], out[first - 63 :]
    word = 0
    for i in range(len(rows)):
        word = (word << 1) | np.int64(now[i] > before[i])
        rows[i] = word
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _last_move_bits(words, n):
    """Return the last n moves of each row as a number."""
    return words & ((1 << n) - 1)


@njit(cache=True, nogil=True, error_model="numpy")
def lempel_ziv_complexity(words, n, oldest, out):
    """Compute Lempel and Ziv's (1976) number of new phrases in n signs, over n / log2(n), the value of a fair coin.

    A phrase ends where it was not seen before. All earlier positions of the current phrase are stored as bits of one
    number (a position: where it ends), so that one step reads one sign of many rows.
    """
    everywhere = np.int64((1 << (n + 1)) - 1)
    scale = math.log(n) / math.log(2.0) / n
    places, phrases = np.empty(256, np.int64), np.empty(256, np.int64)
    for start in range(0, len(out), 256):
        count = min(256, len(out) - start)
        word = words[HISTORY + start : HISTORY + start + count]
        places[:], phrases[:] = everywhere, 0
        for bit in range(n - 1, -1, -1):
            older = -(np.int64(1) << (bit + 1))
            for i in range(count):
                same = word[i] ^ (((word[i] >> bit) & 1) - 1)
                left = (places[i] >> 1) & same & older
                new = left == 0
                phrases[i] += np.int64(new)
                places[i] = everywhere if new else left
        for i in range(count):
            found = phrases[i] + np.int64(places[i] != everywhere)  # the last phrase may be cut off
            out[start + i] = scale * found + 0.0 * oldest[start + i]


@njit(cache=True, nogil=True, error_model="numpy")
def _match_length_entropy(words, n, mean_of, oldest, out):
    """Compute the mean over `mean_of` rows of log2(n) / L, bits a sign (Kontoyiannis et al. 1998, eq. 6, reversed).

    L : 1 + length of the longest run of signs up to the row, n at most, that also ends at one of the previous n rows
    """
    first = HISTORY - mean_of
    words = words[first:]
    longest = np.zeros(len(words), np.int64)
    for step in range(1, n + 1):
        for i in range(len(words)):
            apart = (words[i] ^ (words[i] >> step)) | (np.int64(1) << n)
            longest[i] = max(longest[i], apart & -apart)  # 2 ** (length of the match)
    lengths = (longest.astype(np.float64).view(np.int64) >> 52) - 1022
    total = 0
    weight = np.empty(n + 2, np.int64)
    weight[0] = 0
    for length in range(1, n + 2):
        weight[length] = np.int64(round(math.log(n) / math.log(2.0) / length * _ONE))
    for i in range(mean_of):
        total += weight[lengths[i]]
    for i in range(len(out)):
        total += weight[lengths[mean_of + i]] - weight[lengths[i]]
        out[i] = total / (_ONE * mean_of) + 0.0 * oldest[i]
