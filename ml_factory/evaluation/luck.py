"""Statistics of luck: how probable a Sharpe ratio is without skill, and after how many trials it was chosen.

Ratios are those of one period (a session, say), never annualised, and periods are the returns behind them.
"""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pandas as pd

from ml_factory.errors import SettingsError
from ml_factory.evaluation.intervals import MEMORIES, describe_lacking_weeks

NORMAL = NormalDist()


def describe_lacking_sessions(equity: pd.DataFrame, trades: pd.DataFrame) -> str:
    """Describe what a backtest's sessions lack for a probability of its Sharpe ratio; "" for nothing.

    A verdict's weeks, and as many sessions with a trade as a verdict needs memories: with fewer, one of four strategies
    without skill is called 95 % probable. equity and trades as of `Backtest`.
    """
    entered = equity["session"].iloc[equity.index.searchsorted(trades["entry_time"], side="right")].nunique()
    few = f"{entered} sessions with a trade, wanted at least {MEMORIES}" if entered < MEMORIES else ""
    return "; ".join(filter(None, [describe_lacking_weeks(equity.index), few]))


def sharpe_moments(returns: np.ndarray) -> tuple[float, float, float, int]:
    """Return (Sharpe ratio, skewness, kurtosis, count) of returns; 3 is the kurtosis of normal ones.

    NaN ratio for constant returns.
    """
    returns = np.asarray(returns, np.float64)
    deviation = float(returns.std(ddof=1)) if len(returns) > 1 else 0.0
    if not deviation > 0:
        return np.nan, 0.0, 3.0, len(returns)
    z = (returns - returns.mean()) / returns.std()
    return float(returns.mean()) / deviation, float((z**3).mean()), float((z**4).mean()), len(returns)


def probabilistic_sharpe(
    sharpe: float, periods: int, skewness: float = 0.0, kurtosis: float = 3.0, benchmark: float = 0.0
) -> float:
    """Return the probability that the true Sharpe ratio is above `benchmark`; NaN below 2 periods.

    Bailey and López de Prado (2012), "The Sharpe Ratio Efficient Frontier", equation 12. Returns are independent there.
    """
    variance = 1 - skewness * sharpe + (kurtosis - 1) / 4 * sharpe**2
    if periods < 2 or not variance > 0:
        return np.nan
    return NORMAL.cdf((sharpe - benchmark) * math.sqrt((periods - 1) / variance))


def min_track_record(sharpe: float, skewness: float = 0.0, kurtosis: float = 3.0, benchmark: float = 0.0) -> float:
    """Return the periods after which this ratio is above `benchmark` with 95 %; infinite where it is not above.

    Bailey and López de Prado (2012), equation 14.
    """
    if not sharpe > benchmark:
        return math.inf
    variance = 1 - skewness * sharpe + (kurtosis - 1) / 4 * sharpe**2
    return float(1 + variance * (NORMAL.inv_cdf(0.95) / (sharpe - benchmark)) ** 2)


def expected_best_sharpe(trials: float, deviation: float) -> float:
    """Return the expected largest ratio of independent trials without skill.

    Bailey and López de Prado (2014), "The Deflated Sharpe Ratio", equation 1.

    trials : number of independent trials; 1: 0
    deviation : standard deviation of the trials' ratios
    """
    if not trials >= 1 or not deviation >= 0:
        raise SettingsError(
            "No such trials", where="trials, deviation", got=f"{trials}, {deviation}", wanted=">= 1, >= 0"
        )
    if trials == 1:
        return 0.0
    first, second = NORMAL.inv_cdf(1 - 1 / trials), NORMAL.inv_cdf(1 - 1 / (trials * math.e))
    return float(deviation * ((1 - np.euler_gamma) * first + np.euler_gamma * second))


def deflated_sharpe(
    sharpe: float, periods: int, trials: float, deviation: float | None = None, skewness: float = 0.0,
    kurtosis: float = 3.0,
) -> float:  # fmt: skip
    """Return the probability that the true ratio is above zero, when it is the best of `trials`.

    Bailey and López de Prado (2014), equation 2: `probabilistic_sharpe` over the best that luck alone is expected to
    bring.

    deviation : of the ratios of the trials; None: that of ratios without skill over as many periods, 1 / sqrt(periods)
    """
    if periods < 2:
        return np.nan
    spread = 1 / math.sqrt(periods) if deviation is None else deviation
    return probabilistic_sharpe(sharpe, periods, skewness, kurtosis, expected_best_sharpe(trials, spread))


def pbo(returns_TN: np.ndarray, blocks: int = 16) -> float:
    """Return the probability of backtest overfitting: how often one half's best strategy is below the other's median.

    Bailey, Borwein, López de Prado and Zhu (2017), "The Probability of Backtest Overfitting": combinatorially symmetric
    cross-validation. The rows are cut into blocks; each half of the blocks chooses the strategy with the largest Sharpe
    ratio, whose rank among all is taken on the other half; ties count half.

    Parameters
    ----------
    returns_TN : net returns of N strategies (2 or more) in T periods
    blocks : even; the first T // blocks * blocks rows are used; 16 make 12,870 halves
    """
    returns_TN = np.asarray(returns_TN, np.float64)
    count = len(returns_TN) // max(blocks, 1)
    if blocks < 2 or blocks % 2 or returns_TN.ndim != 2 or returns_TN.shape[1] < 2 or count < 2:
        raise SettingsError(
            "These returns cannot be cut so", where="pbo", got=f"{returns_TN.shape} in {blocks} blocks",
            wanted="2 strategies or more, an even number of blocks of 2 periods or more",
        )  # fmt: skip
    cut = returns_TN[: count * blocks].reshape(blocks, count, -1)
    sums, squares = cut.sum(axis=1), (cut**2).sum(axis=1)
    below, halves = 0.0, 0
    for chosen in itertools.combinations(range(blocks), blocks // 2):
        inside = np.zeros(blocks, bool)
        inside[list(chosen)] = True
        size = count * blocks // 2
        fitted, other = (_ratios(sums[part].sum(axis=0), squares[part].sum(axis=0), size) for part in (inside, ~inside))
        best = int(np.argmax(fitted))
        rank = np.count_nonzero(other < other[best]) + (np.count_nonzero(other == other[best]) + 1) / 2
        share = rank / (other.size + 1)
        below += 1.0 if share < 0.5 else 0.5 if share == 0.5 else 0.0
        halves += 1
    return below / halves


def _ratios(total: np.ndarray, square: np.ndarray, count: int) -> np.ndarray:
    """Return mean over deviation from sums and sums of squares; 0 for constant returns."""
    mean = total / count
    deviation = np.sqrt(np.maximum(square / count - mean**2, 0.0))
    return np.divide(
        mean, deviation, out=np.zeros_like(mean), where=deviation > 1e-12 * np.sqrt(square / count + 1e-300)
    )
