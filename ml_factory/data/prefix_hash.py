"""Incremental hashes of bar prefixes.

Chained over blocks of 65,536 bars: the hash at a block's edge continues into the next block, so that any number of
prefixes of the same bars costs one pass over them, and appended bars leave the earlier hashes unchanged.
"""

import hashlib

import numpy as np
import pandas as pd

BLOCK_ROWS = 65_536


class PrefixHasher:
    """SHA-256 (hex) of the first bars: times, columns and every value's bits; file format and metadata do not matter.

    bars : checked bars, which must not change while the hasher is used
    """

    def __init__(self, bars: pd.DataFrame):
        self.bars = bars
        # numbers: prices, volume, the code of a contract
        self._columns = [bars.index.as_unit("ns").asi8, *(bars[name].to_numpy() for name in bars.columns)]
        self._at_edge = [hashlib.sha256(",".join(bars.columns).encode()).digest()]
        self._found: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.bars)

    def hash_prefix(self, end: int) -> str:
        """Return the hash of the first `end` bars."""
        if end not in self._found:
            self._found[end] = self._compute(end)
        return self._found[end]

    @property
    def total_hash(self) -> str:
        """Hash of all bars."""
        return self.hash_prefix(len(self))

    def block_hashes(self, rows: int) -> list[str]:
        """Return the hash at each `hash_block_edges` of the first `rows` bars."""
        return [self.hash_prefix(edge) for edge in hash_block_edges(rows)]

    def _compute(self, end: int) -> str:
        whole = end // BLOCK_ROWS
        while len(self._at_edge) <= whole:
            edge = (len(self._at_edge) - 1) * BLOCK_ROWS
            self._at_edge.append(self._continue_hash(self._at_edge[-1], edge, edge + BLOCK_ROWS))
        edge = whole * BLOCK_ROWS
        return (self._continue_hash(self._at_edge[whole], edge, end) if end > edge else self._at_edge[whole]).hex()

    def _continue_hash(self, before: bytes, low: int, high: int) -> bytes:
        digest = hashlib.sha256(before)
        for column in self._columns:
            digest.update(np.ascontiguousarray(column[low:high]))
        return digest.digest()


def hash_block_edges(rows: int) -> list[int]:
    """Return the number of bars before the end of each whole block."""
    return list(range(BLOCK_ROWS, rows + 1, BLOCK_ROWS))


def hash_bars(bars: pd.DataFrame) -> str:
    """Return the SHA-256 (hex) of checked bars: times, columns and every value's bits, not the file format."""
    return PrefixHasher(bars).total_hash
