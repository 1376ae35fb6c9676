"""Hash of bars."""

import hashlib

import numpy as np
import pandas as pd


def hash_bars(bars: pd.DataFrame) -> str:
    """Return the SHA-256 (hex) of the bars: times, columns and every value's bits, whatever file they are read from."""
    digest = hashlib.sha256(",".join(bars.columns).encode())
    # numbers: prices, volume, the code of a contract
    for column in (bars.index.as_unit("ns").asi8, *(bars[name].to_numpy() for name in bars.columns)):
        digest.update(np.ascontiguousarray(column))
    return digest.hexdigest()
