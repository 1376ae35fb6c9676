"""Scores of predicted classes: accuracy, macro F1, and the interval of a share."""

from collections import Counter
from collections.abc import Hashable, Sequence

_QUANTILE = 1.959963984540054  # of the normal distribution, 97.5 %


def accuracy(truth: Sequence[Hashable], predicted: Sequence[Hashable]) -> float:
    """Return the share of equal pairs."""
    return sum(one == other for one, other in zip(truth, predicted, strict=True)) / len(truth)


def macro_f1(truth: Sequence[Hashable], predicted: Sequence[Hashable]) -> float:
    """Return the mean over classes of 2 TP / (2 TP + FP + FN); a class of either side counts, as in scikit-learn."""
    hits = Counter(one for one, other in zip(truth, predicted, strict=True) if one == other)
    sizes, given = Counter(truth), Counter(predicted)
    # TP + FN and TP + FP are the numbers of rows of the class on either side.
    scores = [2 * hits[one] / (sizes[one] + given[one]) for one in {*sizes, *given}]
    return sum(sorted(scores)) / len(scores)


def wilson_interval(right: int, rows: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927), for rows that are independent."""
    share, factor = right / rows, _QUANTILE**2 / rows
    middle = (share + factor / 2) / (1 + factor)
    half = (factor * (share * (1 - share) + factor / 4)) ** 0.5 / (1 + factor)
    return max(middle - half, 0.0), min(middle + half, 1.0)
