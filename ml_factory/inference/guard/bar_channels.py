"""Channels of a bar: what drifts of a feed show in, freed of the time of day and of the usual level.

One number a bar and channel, NaN where it has none: each depends on the bars up to its own, whatever the pushes were.
"""

from collections.abc import Mapping

import numpy as np
from numba import njit

from ml_factory.data.resample import BarChunk
from ml_factory.data.sessions import DAY_NS, MINUTE_NS, MarketSpec, assign_sessions

CHANNELS = (
    "range", "range_change", "volume", "volume_change", "range_for_volume", "return", "gap", "close_place",
    "open_place", "momentum", "spacing", "outside",
)  # fmt: skip
MEANING = {
    "range": "the bars' range for the time of day", "range_change": "the bars' range against the last hours'",
    "volume": "volume for the time of day", "volume_change": "volume against the last hours'",
    "range_for_volume": "the bars' range for their volume", "return": "returns against the usual range",
    "gap": "the step from a close to the next open", "close_place": "the close's place in its bar",
    "open_place": "the open's place in its bar", "momentum": "the product of successive returns",
    "spacing": "the minutes between bars", "outside": "bars outside the trading hours",
}  # fmt: skip
LOG_CHANNELS = ("range", "range_change", "volume", "volume_change", "range_for_volume")
STRATA = 48  # half hours since the session's open
_SLOW, _FAST = 1 / 480, 1 / 60  # weight of the newest bar in the usual level
_STATE = 12


class BarChannels:
    """Channels of a feed, bar by bar.

    season : "range" and "volume", the usual log level by half hour of the session; "least_range", "least_volume", added
        before the logarithm; "slope" of log range on log volume
    """

    def __init__(self, market: MarketSpec, season: Mapping):
        self._market = market
        self._season = np.array([season["range"], season["volume"]], np.float64)
        self._facts = np.array([season["least_range"], season["least_volume"], season["slope"]], np.float64)
        self._state = np.zeros(_STATE)

    def push(self, chunk: BarChunk) -> np.ndarray:
        """Return the channels of the next bars, float64 (N, len(CHANNELS))."""
        out = np.empty((len(chunk.start), len(CHANNELS)))
        day, stratum, inside = session_strata(chunk.start, self._market.calendar)
        minutes = chunk.start // MINUTE_NS
        bar = self._market.bar_minutes
        _compute_channels(
            minutes, day, stratum, inside, *chunk.columns[:5], bar, self._season, self._facts, self._state, out
        )
        return out

    def get_state(self) -> dict:
        return {"state": self._state.copy()}

    def load_state(self, state: Mapping) -> None:
        self._state = np.array(state["state"], np.float64).reshape(_STATE)


def session_strata(start_ns: np.ndarray, calendar: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (session int64, half hour since its open int64, inside trading hours bool) of each bar start."""
    sessions = assign_sessions(start_ns, calendar)
    stratum = np.clip((start_ns - sessions.open_ns) // (DAY_NS // STRATA), 0, STRATA - 1)
    return sessions.id.astype(np.int64), stratum, sessions.inside


def fit_season(chunk: BarChunk, calendar: str) -> dict:
    """Return the `season` of training bars, as JSON values."""
    high, low = chunk.columns[1:3]
    _, stratum, _ = session_strata(chunk.start, calendar)
    spread = np.log(high / low)
    positive = spread[spread > 0]
    least = 0.25 * float(np.median(positive)) if len(positive) else 1e-6
    volume = chunk.columns[4]
    least_volume = 0.05 * float(np.median(volume[volume > 0])) if (volume > 0).any() else 1.0
    of_range = _medians(np.log(spread + least), stratum)
    of_volume, slope = np.zeros(STRATA), 0.0
    if len(volume):
        log_volume = np.log(volume + least_volume)
        of_volume = _medians(log_volume, stratum)
        x, y = log_volume - of_volume[stratum], np.log(spread + least) - of_range[stratum]
        slope = float((x * y).sum() / max(float((x * x).sum()), 1e-12))
    return {
        "range": of_range.tolist(), "volume": of_volume.tolist(), "least_range": least,
        "least_volume": least_volume, "slope": slope,
    }  # fmt: skip


def _medians(values: np.ndarray, stratum: np.ndarray) -> np.ndarray:
    """Return the median by stratum; the overall one where a stratum has fewer than 30 values."""
    out = np.full(STRATA, float(np.median(values)))
    for number in range(STRATA):
        own = values[stratum == number]
        if len(own) >= 30:
            out[number] = float(np.median(own))
    return out


@njit(cache=True, nogil=True)
def _compute_channels(minutes, day, stratum, inside, opened, high, low, close, volume, bar, season, facts, state, out):
    """Fill `out`; `state` is (bars, close, return, minute, day, range slow, range fast, volume slow, ratio slow)."""
    bars, before, last_return, last_minute, last_day = state[0], state[1], state[2], state[3], state[4]
    slow, fast, slow_volume, slow_ratio = state[5], state[6], state[7], state[8]
    for i in range(len(minutes)):
        spread = np.log(high[i] / low[i])
        level = np.log(spread + facts[0]) - season[0, stratum[i]]
        weight_slow, weight_fast = max(_SLOW, 1.0 / (bars + 1.0)), max(_FAST, 1.0 / (bars + 1.0))
        known = bars > 0
        usual = np.exp(season[0, stratum[i]] + (fast if known else level))
        out[i, 0] = level
        out[i, 1] = level - slow if known else np.nan
        out[i, 2] = out[i, 3] = out[i, 4] = np.nan
        if len(volume):
            amount = np.log(volume[i] + facts[1]) - season[1, stratum[i]]
            ratio = level - facts[2] * amount
            out[i, 2] = amount
            out[i, 3] = amount - slow_volume if known else np.nan
            out[i, 4] = ratio - slow_ratio if known else np.nan
            slow_volume += weight_slow * (amount - slow_volume)
            slow_ratio += weight_slow * (ratio - slow_ratio)
        same = known and last_day == day[i]
        adjacent = same and minutes[i] - last_minute == bar
        move = np.log(close[i] / before) / usual if adjacent else np.nan
        out[i, 5] = move
        out[i, 6] = np.log(opened[i] / before) / usual if adjacent else np.nan
        out[i, 7] = (close[i] - low[i]) / (high[i] - low[i]) if high[i] > low[i] else np.nan
        out[i, 8] = (opened[i] - low[i]) / (high[i] - low[i]) if high[i] > low[i] else np.nan
        out[i, 9] = move * last_return if adjacent else np.nan
        out[i, 10] = (minutes[i] - last_minute) / bar if same else np.nan
        out[i, 11] = 0.0 if inside[i] else 1.0
        slow += weight_slow * (level - slow)
        fast += weight_fast * (level - fast)
        bars, before, last_return, last_minute, last_day = bars + 1.0, close[i], move, minutes[i], day[i]
    state[0], state[1], state[2], state[3], state[4] = bars, before, last_return, last_minute, last_day
    state[5], state[6], state[7], state[8] = slow, fast, slow_volume, slow_ratio
