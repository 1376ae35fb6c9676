"""Level shifts that no trade made: another unit, another adjustment, a futures roll.

A trade moves the price through the bars around it. A change of contract, a split or another unit moves it between two
calm bars, and the new level persists. Overnight a roll cannot be distinguished from the night's own move unless the
file names its contracts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ml_factory.data.bar_report import BarFinding, pluralize_count
from ml_factory.data.price_anomalies import outlier_robust_move_size, price_move_persists

CALM_TIMES = 5.0  # a jump this many times the largest of the bars around it; clean markets 1.9, real rolls 15
JUMP_TIMES = 20.0  # and this many times the usual move; real rolls 37
RATIO_JUMP = np.log(1.2)  # from here on it is a split or another adjustment, not a roll
NIGHT_TIMES = 8.0  # at a session's edge: this many usual ones, the ratio of a split, and calm bars around it
NIGHT_CALM = 4.0  # times the range of bars at a usual edge: a company that lost a third opens more volatile
RATIO_ERROR = 0.03
UNIT_TIMES = 10.0  # usual moves around a power of ten: nothing else moved the price
_TEN = np.log(10.0)
# n for 1, and the fractions that companies use: with all ratios of small numbers every fall of 20 to 50 % would match
_RATIOS = np.log([6 / 5, 5 / 4, 4 / 3, 3 / 2, 2, 5 / 2, *range(3, 11), 15, 20, 25, 30, 50])
_NEAR = range(-3, 3)  # the bars around a jump: three before it, three from it on


@dataclass(frozen=True)
class LevelShifts:
    """Level shifts found in N bars.

    unit : int64[N], the power of ten by which each bar is off
    adjustment : int64, first rows of a level that is adjusted in another way
    roll : int64, first rows of another contract
    """

    unit: np.ndarray
    adjustment: np.ndarray
    roll: np.ndarray


def find_level_shifts(log: dict[str, np.ndarray], adjacent: np.ndarray, edge: np.ndarray) -> LevelShifts:
    """Find the level shifts of bars.

    Parameters
    ----------
    log : column -> float64[N], log prices
    adjacent : bool[N], the bar follows its predecessor within the session, without a long gap
    edge : bool[N], True at the first bar of a session
    """
    gap = np.zeros(len(adjacent))
    gap[1:] = log["open"][1:] - log["close"][:-1]
    close, swing = log["close"], level_shift_local_range(log)
    usual = outlier_robust_move_size(np.diff(close, prepend=close[:1]), adjacent, edge)
    unit = _units(gap, swing, UNIT_TIMES * usual)
    if unit.any():
        close = close - unit * _TEN
        gap -= np.diff(unit, prepend=unit[:1]) * _TEN
        usual = outlier_robust_move_size(np.diff(close, prepend=close[:1]), adjacent, edge)
    jump = np.flatnonzero(adjacent & (level_shift_scores(gap, swing, usual) > 1))
    jump = jump[price_move_persists(close, jump, gap[jump])]
    large = np.abs(gap[jump]) >= RATIO_JUMP
    thin = ~large & ~_traded(log, jump)
    jump, large = jump[~thin], large[~thin]
    night = _night(gap, edge & ~adjacent, close, swing)
    return LevelShifts(unit, np.union1d(jump[large], night), jump[~large])


def level_shift_scores(gap: np.ndarray, swing: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Compute the gap before each bar relative to the larger of both limits, float64[N]; 1 is on the limit."""
    return np.abs(gap) / np.maximum(CALM_TIMES * swing, JUMP_TIMES * usual)


def level_shift_findings(levels: LevelShifts, log: dict[str, np.ndarray]) -> Iterator[BarFinding]:
    """Yield one finding for each kind of level shift; `log` maps a column to float64[N], log prices."""
    rows = np.flatnonzero(levels.unit)
    if len(rows):
        factors = ", ".join(f"{10.0**k:g}" for k in np.unique(levels.unit[rows]).tolist())
        message = f"{pluralize_count(len(rows), 'bar')} in another unit: {factors} times the prices around them"
        yield BarFinding("unit", "reported", rows, message, "divide them at the source")
    for kind, rows in (("adjustment", levels.adjustment), ("roll", levels.roll)):
        if not len(rows):
            continue
        ratio = np.exp(log["open"][rows] - log["close"][rows - 1])
        shown = ", ".join(f"{value:.4g}" for value in ratio[:3]) + (", ..." if len(rows) > 3 else "")
        message = f"the price level jumps between two calm bars in {pluralize_count(len(rows), 'place')} (by {shown}): "
        cause = "a split, or prices adjusted in another way from there on" if kind == "adjustment" else "a roll"
        yield BarFinding(kind, "reported", rows, message + f"it looks like {cause}")


def level_shift_local_range(log: dict[str, np.ndarray]) -> np.ndarray:
    """Compute the largest range of the bars around each gap, float64[N]."""
    span = log["high"] - log["low"]
    padded = np.concatenate([np.zeros(3), span, np.zeros(3)])
    return np.max([padded[3 + k : 3 + k + len(span)] for k in _NEAR], axis=0)


def _units(gap: np.ndarray, swing: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Return int64[N]: the power of ten between a jump by it and the jump back."""
    power = np.rint(gap / _TEN)
    seen = (power != 0) & (np.abs(power) <= 3) & (np.abs(gap - power * _TEN) < error) & (swing < 0.1 * _TEN)
    unit = np.zeros(len(gap), np.int64)
    rows = np.flatnonzero(seen)
    k = 0
    while k + 1 < len(rows):
        first, after = rows[k], rows[k + 1]
        if power[first] == -power[after]:
            unit[first:after] = int(power[first])
            k += 1
        k += 1
    return unit


def _traded(log: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return bool: whether most of the twenty bars around a row have a range; without trades the quote jumps."""
    flat = np.concatenate([[0], np.cumsum(log["high"] == log["low"])])
    first, after = np.maximum(rows - 10, 0), np.minimum(rows + 10, len(flat) - 1)
    return flat[after] - flat[first] < 0.5 * (after - first)


def _night(gap: np.ndarray, edge: np.ndarray, close: np.ndarray, swing: np.ndarray) -> np.ndarray:
    """Return the session edges where the price changes by a split's ratio, more than overnight moves explain."""
    rows = np.flatnonzero(edge)[1:]
    size = np.abs(gap[rows])
    if not len(rows):
        return rows
    usual = np.minimum(size, 20 * np.median(size)).mean()
    calm = swing[rows] <= NIGHT_CALM * np.median(swing[rows])
    rows = rows[(size > NIGHT_TIMES * usual) & (size >= RATIO_JUMP) & calm]
    off = np.abs(np.abs(gap[rows])[:, None] - _RATIOS).min(axis=1) if len(rows) else np.empty(0)
    rows = rows[off < RATIO_ERROR]
    return rows[price_move_persists(close, rows, gap[rows])]
