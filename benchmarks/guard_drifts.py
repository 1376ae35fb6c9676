"""Ten declared drifts of a feed: what `benchmarks.guard` injects, fixed before any threshold was chosen.

A drift changes the bars from its first bar on: (bars, their history, tick, generator) -> the changed bars.
"""

import numpy as np
import pandas as pd

PRICES = ["open", "high", "low", "close"]


def prices_x10(bars, history, tick, generator):
    """Prices in another unit."""
    return bars.assign(**{name: bars[name] * 10 for name in PRICES})


def clock_1h(bars, history, tick, generator):
    """Time stamps an hour late, as of another zone."""
    return bars.set_axis(bars.index + pd.Timedelta(hours=1))


def volatility_x2(bars, history, tick, generator):
    """Log prices twice as far from where they were."""
    start = history["close"].iloc[-1]
    return _rounded(bars, {name: start * (bars[name] / start) ** 2 for name in PRICES}, tick)


def volume_x5(bars, history, tick, generator):
    """Five times the volume; without volume nothing changes, which counts as not found."""
    return bars.assign(volume=bars["volume"] * 5) if "volume" in bars else bars


def open_close_swapped(bars, history, tick, generator):
    """The columns open and close are exchanged."""
    return bars.assign(open=bars["close"], close=bars["open"])


def half_stuck(bars, history, tick, generator):
    """Half of the minutes, at random, repeat the close of the minute before."""
    stuck = generator.random(len(bars)) < 0.5
    stuck[0] = False
    latest = np.maximum.accumulate(np.where(stuck, 0, np.arange(len(bars))))
    close = bars["close"].to_numpy()[latest]
    return bars.assign(**{name: np.where(stuck, close, bars[name]) for name in PRICES})


def every_other_missing(bars, history, tick, generator):
    """Every other minute is absent."""
    return bars.iloc[::2]


def trend(bars, history, tick, generator):
    """A drift of 0.3 standard deviations of a minute's return."""
    size = 0.3 * np.log(history["close"].iloc[-1000:]).diff().std()
    count = np.arange(len(bars))
    within = {"open": 0.0, "high": 0.5, "low": 0.5, "close": 1.0}  # opens stay at the close before
    return _rounded(bars, {name: bars[name] * np.exp(size * (count + within[name])) for name in PRICES}, tick)


def quote_noise(bars, history, tick, generator):
    """Noise on open and close, uniform within half a usual range or two ticks, whichever is more."""
    usual = (history["high"] - history["low"]).iloc[-1000:].median()
    size = max(0.5 * usual, 2 * tick)
    open_, close = (bars[name] + generator.uniform(-size, size, len(bars)) for name in ("open", "close"))
    return _rounded(bars, {
        "open": open_, "high": bars["high"], "low": bars["low"], "close": close
    }, tick)  # fmt: skip


def _rounded(bars, prices, tick):
    """The bars with these prices, on the tick, high and low outside open and close."""
    prices = {name: np.maximum(np.round(values / tick), 1) * tick for name, values in prices.items()}
    body = np.stack([prices["open"], prices["close"]])
    prices["high"] = np.maximum(prices["high"], body.max(axis=0))
    prices["low"] = np.minimum(prices["low"], body.min(axis=0))
    return bars.assign(**prices)


DRIFTS = {
    "prices_x10": prices_x10,
    "clock_1h": clock_1h,
    "volatility_x2": volatility_x2,
    "volume_x5": volume_x5,
    "open_close_swapped": open_close_swapped,
    "half_stuck": half_stuck,
    "every_other_missing": every_other_missing,
    "trend": trend,
    "quote_noise": quote_noise,
    "calibrator_lost": None,  # probabilities to the fourth power, normalized
}
