"""Changes of the price level that no trade made: another unit, another adjustment, a roll.

A trade moves the price through the bars around it; a change of contract, split or unit moves it between two bars
that are as calm as their neighbours, and it stays. Overnight a roll cannot be told from the night's own move unless
the file names its contracts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ml_factory.data.market_scale import stays, usual_move
from ml_factory.data.report import Finding, count_of

CALM_TIMES = 5.0  # a jump this many times the largest of the bars around it; clean markets 1.9, real rolls 15
JUMP_TIMES = 20.0  # and this many times the usual move; real rolls 37
RATIO_JUMP = np.log(1.2)  # from here on it is a split or another adjustment, not a roll
NIGHT_TIMES = 8.0  # over a session's edge: this many times the usual one, the ratio of a split, and calm bars beside
NIGHT_CALM = 4.0  # times the bars beside the usual edge: a company that lost a third opens wilder
RATIO_ERROR = 0.03
UNIT_TIMES = 10.0  # usual moves around a power of ten: nothing else moved the price
_TEN = np.log(10.0)
# n for 1, and the fractions companies use: a ratio near any two small numbers would be every fall of 20 to 50 %
_RATIOS = np.log([6 / 5, 5 / 4, 4 / 3, 3 / 2, 2, 5 / 2, *range(3, 11), 15, 20, 25, 30, 50])
_NEAR = range(-3, 3)  # the bars beside a jump: three before it, three from it on


@dataclass(frozen=True)
class Levels:
    """unit : int64[N], the power of ten by which each bar is off.  adjustment, roll : int64, first rows of a level."""

    unit: np.ndarray
    adjustment: np.ndarray
    roll: np.ndarray


def find_levels(log: dict[str, np.ndarray], beside: np.ndarray, edge: np.ndarray) -> Levels:
    """Where the level changes.

    log : log prices, float64[N].  beside : bool[N], the bar follows its predecessor within the session, without a
    long silence.  edge : bool[N], the first bar of a session.
    """
    gap = np.zeros(len(beside))
    gap[1:] = log["open"][1:] - log["close"][:-1]
    close, swing = log["close"], swings(log)
    usual = usual_move(np.diff(close, prepend=close[:1]), beside, edge)
    unit = _units(gap, swing, UNIT_TIMES * usual)
    if unit.any():
        close = close - unit * _TEN
        gap -= np.diff(unit, prepend=unit[:1]) * _TEN
        usual = usual_move(np.diff(close, prepend=close[:1]), beside, edge)
    jump = np.flatnonzero(beside & (jump_scores(gap, swing, usual) > 1))
    jump = jump[stays(close, jump, gap[jump])]
    large = np.abs(gap[jump]) >= RATIO_JUMP
    thin = ~large & ~_traded(log, jump)
    jump, large = jump[~thin], large[~thin]
    night = _night(gap, edge & ~beside, close, swing)
    return Levels(unit, np.union1d(jump[large], night), jump[~large])


def jump_scores(gap: np.ndarray, swing: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """float64[N]: how far the gap before each bar is over both its limits; 1 is on the limit."""
    return np.abs(gap) / np.maximum(CALM_TIMES * swing, JUMP_TIMES * usual)


def level_findings(levels: Levels, log: dict[str, np.ndarray]) -> Iterator[Finding]:
    """What `levels` says of the bars, in words.  log : column -> float64[N], logarithms of its prices."""
    rows = np.flatnonzero(levels.unit)
    if len(rows):
        factors = ", ".join(f"{10.0**k:g}" for k in np.unique(levels.unit[rows]).tolist())
        message = f"{count_of(len(rows), 'bar')} in another unit: {factors} times the prices around them"
        yield Finding("unit", "reported", rows, message, "divide them at the source")
    for kind, rows in (("adjustment", levels.adjustment), ("roll", levels.roll)):
        if not len(rows):
            continue
        ratio = np.exp(log["open"][rows] - log["close"][rows - 1])
        shown = ", ".join(f"{value:.4g}" for value in ratio[:3]) + (", ..." if len(rows) > 3 else "")
        message = f"the price level jumps between two calm bars in {count_of(len(rows), 'place')} (by {shown}): "
        cause = "a split, or prices adjusted in another way from there on" if kind == "adjustment" else "a roll"
        yield Finding(kind, "reported", rows, message + f"it looks like {cause}")


def swings(log: dict[str, np.ndarray]) -> np.ndarray:
    """float64[N]: the largest range of the bars beside each gap."""
    span = log["high"] - log["low"]
    padded = np.concatenate([np.zeros(3), span, np.zeros(3)])
    return np.max([padded[3 + k : 3 + k + len(span)] for k in _NEAR], axis=0)


def _units(gap: np.ndarray, swing: np.ndarray, error: np.ndarray) -> np.ndarray:
    """int64[N]: powers of ten between a jump by one and the jump back."""
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
    """bool: most of the twenty bars around have a range; where nothing trades the price jumps by itself."""
    flat = np.concatenate([[0], np.cumsum(log["high"] == log["low"])])
    first, after = np.maximum(rows - 10, 0), np.minimum(rows + 10, len(flat) - 1)
    return flat[after] - flat[first] < 0.5 * (after - first)


def _night(gap: np.ndarray, edge: np.ndarray, close: np.ndarray, swing: np.ndarray) -> np.ndarray:
    """Rows of session edges where the price changes by a split's ratio that no night explains, between calm bars."""
    rows = np.flatnonzero(edge)[1:]
    size = np.abs(gap[rows])
    if not len(rows):
        return rows
    usual = np.minimum(size, 20 * np.median(size)).mean()
    calm = swing[rows] <= NIGHT_CALM * np.median(swing[rows])
    rows = rows[(size > NIGHT_TIMES * usual) & (size >= RATIO_JUMP) & calm]
    off = np.abs(np.abs(gap[rows])[:, None] - _RATIOS).min(axis=1) if len(rows) else np.empty(0)
    rows = rows[off < RATIO_ERROR]
    return rows[stays(close, rows, gap[rows])]
