"""Confidence intervals of the mean of a dependent series: the gain of one forecast over another, by row or by block.

Letters: N rows in time order, K outcomes, J cosines. Rows of weight 0 count for nothing. The choices are validated on
simulated series without gain: benchmarks/intervals.py, docs/decisions/0021-intervals.md.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ml_factory.data.sessions import DAY_NS
from ml_factory.lazy_module import LazyModule

fft, special = LazyModule("scipy.fft"), LazyModule("scipy.special")  # imported when an interval is computed
MEMORIES = 22  # least number of memories (autocorrelation lengths) for a verdict
WEEKS = 8  # least number of weeks for a verdict
FEWEST = 8  # least rows of weight for an interval
LOWEST = 8  # number of cosines for the memory


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean and its 95 % interval.

    mean, low, high, standard_error : in the units of the values; the last three NaN below 8 rows.
    rows : rows (or blocks) of weight.
    memory : autocorrelation length, in rows: so many rows inform as one independent row. NaN: not measured.
    enough : True where the rows span enough memories and weeks for a verdict.
    reason : what is lacking; "" if enough.
    """

    mean: float
    low: float
    high: float
    standard_error: float
    rows: int
    memory: float
    enough: bool
    reason: str


def gain_interval(values_N, w_N=None, *, horizon: int = 1, times_N=None, by_outcome_NK=None) -> ConfidenceInterval:
    """Return the 95 % interval of the weighted mean of a dependent series, and whether its rows are enough for a
    verdict.

    The widest of three: Newey and West's with truncation 1.3 sqrt(N); cosine blocks about as long as the memory; weeks
    as clusters, where their variance is significantly larger.

    Parameters
    ----------
    values_N : in time order.
    w_N : weights ≥ 0; None: all ones.
    horizon : rows over which one label reaches.
    times_N : datetime64 or DatetimeIndex, when each row is known. None: weeks cannot be counted, so the rows are never
        enough for a verdict.
    by_outcome_NK : value of each row under each of K outcomes. It shows a slow drift of the forecasts that the noise of
        the outcomes hides in the values; without it the memory of the values alone is measured, and may be too short.
    """
    values_N = np.asarray(values_N, dtype=np.float64)
    w_N = np.ones(len(values_N)) if w_N is None else np.asarray(w_N, dtype=np.float64)
    counted, nan = w_N > 0, np.nan
    values, w = values_N[counted], w_N[counted]
    n, mean = len(values), float(w @ values / w.sum()) if counted.any() else nan
    if n < FEWEST:
        return ConfidenceInterval(mean, nan, nan, nan, n, nan, False, f"{n} rows, wanted at least {FEWEST}")
    influence = w * (values - mean) / w.mean()  # of the linearised ratio Σwv / Σw
    squares = squared_cosine_weights(influence)
    memory = autocorrelation_length(influence)
    if by_outcome_NK is not None:
        memory = max(memory, autocorrelation_length(np.asarray(by_outcome_NK, dtype=np.float64)[counted]))
    error, factor, freedom = newey_west_standard_error(influence, horizon)
    candidates = [(error, factor), cosine_standard_error(squares, max(memory, 2 * horizon), n)]
    weeks = None if times_N is None else interval_week_numbers(times_N)[counted]
    if weeks is not None and weeks[0] != weeks[-1]:
        clustered, count = week_clustered_standard_error(influence, weeks)
        if clustered**2 > special.fdtri(count - 1, freedom, 0.9) * error**2:
            candidates.append((clustered, 1.96))
    error, factor = max(candidates, key=lambda pair: pair[0] * pair[1])
    reason = _lacking(n, memory, weeks)
    return ConfidenceInterval(mean, mean - factor * error, mean + factor * error, error, n, memory, not reason, reason)


def interval_week_numbers(times_N) -> np.ndarray:
    """Return the week of each moment, int64 (N,), from Saturday 00:00 UTC: a Sunday evening opening begins a week."""
    days = np.asarray(times_N, dtype="datetime64[ns]").astype(np.int64) // DAY_NS
    return (days - 2) // 7  # 1970-01-01 was a Thursday


def squared_cosine_weights(x_N: np.ndarray) -> np.ndarray:
    """Return squared weights of the cosines 1 to N - 1, (N - 1,), each an estimate of the squared standard error of the
    mean.

    The cosine transform of type II (Müller 2007; Lazarus, Lewis, Stock and Watson 2018, "EWC").
    """
    n = len(x_N)
    return (fft.dct(x_N, type=2, axis=0)[1:] / (np.sqrt(2) * n)) ** 2


def autocorrelation_length(x_NK: np.ndarray) -> float:
    """Return the autocorrelation length 1 + 2 Σ ρ in rows: N times the variance of the mean of x, over the variance of
    x.

    The former from the lowest cosines, so that dependence over up to an eighth of the rows counts; several columns are
    summed. 1 at least, and where x is constant.
    """
    x_NK = np.asarray(x_NK, dtype=np.float64).reshape(len(x_NK), -1)
    mean = x_NK.mean(axis=0)
    square = float(np.vdot(x_NK, x_NK)) / len(x_NK)
    variance = square - float(mean @ mean)
    if not variance > 1e-12 * square:
        return 1.0
    weights = _lowest_cosines(len(x_NK)) @ x_NK
    return max(1.0, float(np.vdot(weights, weights)) / len(weights) / len(x_NK) / variance)


@lru_cache(maxsize=8)
def _lowest_cosines(n: int) -> np.ndarray:
    """Return the cosines 1 to 8 over N rows, of mean square 1, (8, N)."""
    return np.sqrt(2) * np.cos(np.pi / n * np.outer(np.arange(1, LOWEST + 1), np.arange(n) + 0.5))


def newey_west_standard_error(influence: np.ndarray, horizon: int) -> tuple[float, float, float]:
    """Return (standard error, factor of a 95 % interval, degrees of freedom) of the mean, from autocovariances.

    Newey and West (1987), Bartlett kernel, with the truncation 1.3 sqrt(N) that Lazarus, Lewis, Stock and Watson (2018)
    recommend, at least twice the horizon; the factor is Kiefer and Vogelsang's (2005, table 1, 97.5 %).
    """
    n = len(influence)
    lags = min(max(2 * int(horizon), int(np.ceil(1.3 * np.sqrt(n)))), n - 1)
    width = 1 << int(n + lags).bit_length()  # long enough that the circular correlation does not wrap
    spectrum = np.fft.rfft(influence, width)
    covariance = np.fft.irfft(spectrum.real**2 + spectrum.imag**2, width)[: lags + 1] / n
    kernel = 1 - np.arange(1, lags + 1) / (lags + 1)
    variance = max(covariance[0] + 2 * kernel @ covariance[1:], 0.0)
    b = lags / n
    return float(np.sqrt(variance / n)), 1.96 + 2.9694 * b + 0.4160 * b**2 - 0.5324 * b**3, 1.5 / b


def cosine_standard_error(squares: np.ndarray, memory: float, n: int) -> tuple[float, float]:
    """Return (standard error, factor) from J cosines: the closed form of blocks of N / J rows, with a t quantile of J.

    J = N / memory - 14, from 8 to 128: variation faster than the memory holds less information about the mean.
    """
    count = min(int(np.clip(n / memory - 14, 8, 128)), len(squares))
    return float(np.sqrt(squares[:count].mean())), float(special.stdtrit(count, 0.975))


def week_clustered_standard_error(influence: np.ndarray, weeks: np.ndarray) -> tuple[float, int]:
    """Return (standard error of the mean, weeks) where rows of one week may depend in any way (Liang and Zeger
    1986).
    """
    sums = np.add.reduceat(influence, _starts(weeks))
    return float(np.sqrt(sums @ sums * len(sums) / (len(sums) - 1)) / len(influence)), len(sums)


def count_interval_weeks(weeks: np.ndarray) -> float:
    """Return the number of weeks that the rows fill: a week with fewer rows than usual (the median) counts by its
    share.
    """
    rows = np.diff(np.append(_starts(weeks), len(weeks)))
    return float(np.minimum(rows / np.median(rows), 1).sum())


def _starts(weeks: np.ndarray) -> np.ndarray:
    return np.append(0, np.flatnonzero(np.diff(weeks)) + 1)


def _lacking(n: int, memory: float, weeks: np.ndarray | None) -> str:
    """Describe what the rows lack for a verdict; "" for nothing."""
    if weeks is None:
        return "the times of the rows are not given, so their weeks cannot be counted"
    missing = [_weeks_lacking(weeks)] if _weeks_lacking(weeks) else []
    if n < MEMORIES * memory:
        missing.append(
            f"{n:,} rows are {n / memory:.1f} memories (autocorrelation lengths) of {memory:,.0f} rows, "
            f"wanted at least {MEMORIES}"
        )
    return "; ".join(missing)


def describe_lacking_weeks(times_N) -> str:
    """Describe the weeks that these rows span where they are too few for a verdict; "" for enough.

    times_N : datetime64 or DatetimeIndex, when each row is known, in time order.
    """
    return (
        _weeks_lacking(interval_week_numbers(times_N)) if len(times_N) else f"0 weeks of rows, wanted at least {WEEKS}"
    )


def _weeks_lacking(weeks: np.ndarray) -> str:
    spanned = count_interval_weeks(weeks)
    return f"{spanned:.1f} weeks of rows, wanted at least {WEEKS}" if round(spanned, 1) < WEEKS else ""


def fold_gain_interval(block_means) -> ConfidenceInterval:
    """Return the 95 % interval of the mean over K test blocks of folds: Nadeau and Bengio's (2003) corrected t.

    Blocks are dependent: drift lasts longer than a block, and their models share training rows. No unbiased estimate of
    it exists (Bengio and Grandvalet 2004). The variance of a mean of blocks that correlate by 1 / K, the share of the
    rows that a block has, is S² (1 / K + 1 / (K - 1)); the quantile is t with K - 1 degrees of freedom.

    Parameters
    ----------
    block_means : (K,) the mean gain of each block.
    """
    means = np.asarray(block_means, dtype=np.float64)
    count, mean, nan = len(means), float(np.mean(means)) if len(means) else np.nan, np.nan
    if count < 2:
        return ConfidenceInterval(mean, nan, nan, nan, count, nan, False, f"{count} blocks, wanted at least 2")
    error = float(means.std(ddof=1) * np.sqrt(1 / count + 1 / (count - 1)))
    half = float(special.stdtrit(count - 1, 0.975)) * error
    return ConfidenceInterval(mean, mean - half, mean + half, error, count, nan, True, "")


def gain_interval_by_class(gain_N3: np.ndarray, y, w=None, *, horizon: int = 1, times_N=None) -> ConfidenceInterval:
    """Return the interval of the mean gain under the outcomes.

    gain_N3 : gain of each row under each class.
    y : labels.
    w, horizon, times_N : as of `gain_interval`.
    """
    happened = gain_N3[np.arange(len(gain_N3)), np.asarray(y).astype(np.int64) + 1]
    return gain_interval(happened, w, horizon=horizon, times_N=times_N, by_outcome_NK=gain_N3)
