"""Wavelet features: energy by time scale, from Haar details of a causal window.

Source: Percival and Walden, Wavelet Methods for Time Series Analysis (2000), section 5.8: the undecimated (maximal
overlap) Haar transform, whose detail of a row looks back only. Differences of log prices are taken, so the level of
the price does not enter.
"""

import math
from collections.abc import Iterator

from ml_factory.features.engine import Block, Column
from ml_factory.features.windows import lag, ratio, window_sum

SCALES = (2, 4, 8, 16)
WINDOW = 96


def wavelet(b: Block) -> Iterator[Column]:
    """Yield share and detail of each scale; none where `coarse`: the scales cover those frames."""
    squares = b.ret * b.ret
    for scale in () if b.coarse else SCALES:
        # Half the difference of the means of the newest scale / 2 returns and of those before: of independent returns
        # with variance v it has variance v / scale.
        half = scale // 2
        newest = window_sum(b.ret, half)
        detail = 0.5 * (newest - lag(newest, half)) / half
        covered = window_sum(squares, WINDOW + scale - 1)  # the returns that WINDOW details depend on
        yield f"haar_share_{scale}", ratio(window_sum(detail * detail, WINDOW), covered)
        yield f"haar_detail_{scale}", detail * math.sqrt(scale) / b.return_std(WINDOW)
