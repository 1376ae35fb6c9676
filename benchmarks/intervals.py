"""Does the interval of a gain hold where forecasts and the class mix drift slowly, and is it any use there?

    python -m benchmarks.intervals                        # 4,000 series a cell
    python -m benchmarks.intervals --series 200 --forecasts 0 200 --rows 15000

Two forecasts that know nothing of the outcomes and are equally in distribution: the expected gain of one over the
other is exactly zero. Both drift with one half-life, the class shares with another, and labels reach over 20 rows.
One JSON line a cell: `enough`, the share of series with a verdict; `memory`, the median; `false` and `power`, percent
of the verdicts whose `gain_low` is above zero as they are, and with a gain of three true standard errors added; the
same of every series for intervals from independent rows (iid), Newey and West's error (hac) and weeks as clusters.
"""

import argparse
import time
from collections.abc import Iterator

import numpy as np
import pandas as pd
from scipy.signal import lfilter
from scipy.special import ndtr, stdtrit

from benchmarks.measure import digits, print_json
from ml_factory.evaluation.intervals import (
    gain_interval,
    interval_week_numbers,
    newey_west_standard_error,
    week_clustered_standard_error,
)

HORIZON = 20
HALF_LIVES = [0, 200, 1000, 3000]  # rows
AT_ONCE = 40  # series in memory
BARS_A_DAY = {"23 h": 276, "6.5 h": 78}  # of 5 minutes
OPENING = {"23 h": "2023-01-01 23:00", "6.5 h": "2023-01-02 14:30"}  # a Sunday evening, a Monday
# Deviations of the logit of neutral and of long against short: of a forecast, and of the true class shares.
FORECAST, REGIME, MIDDLE = (0.4, 0.2), (0.5, 0.2), -0.3


def times_of(market: str, rows: int) -> np.ndarray:
    """datetime64[ns] (rows,): the bars of a market that trades five days a week."""
    bar = np.arange(rows)
    day, bar = np.divmod(bar, BARS_A_DAY[market])
    minutes = (day // 5 * 7 + day % 5) * 1440 + 5 * (bar + 1)
    return np.datetime64(OPENING[market], "ns") + minutes.astype("timedelta64[m]")


def wander(rng: np.random.Generator, half_life: int, shape: tuple[int, ...]) -> np.ndarray:
    """Stationary AR(1) of variance 1 along the last axis; half-life 0: independent rows."""
    x = rng.standard_normal(shape, dtype=np.float32)
    if half_life:
        phi = 0.5 ** (1 / half_life)
        x[..., 1:] *= np.sqrt(1 - phi**2)
        x = lfilter([1.0], [1.0, -phi], x, axis=-1).astype(np.float32)
    return x


def log_shares(rng: np.random.Generator, half_life: int, size: tuple[float, float], count: int, rows: int):
    """(3, count, rows): logs of wandering class shares."""
    neutral, side = wander(rng, half_life, (2, count, rows))
    logits = np.stack([-size[1] * side / 2, MIDDLE + size[0] * neutral, size[1] * side / 2])
    return logits - np.log(np.exp(logits).sum(axis=0))


def null_gains(rng: np.random.Generator, forecast: int, regime: int, count: int, rows: int):
    """(count, rows) gains of one ignorant forecast over another, and (count, rows, 3) what each class would have given.

    forecast, regime : half-lives in rows.  A row shares the noise of its outcome with the 19 before it.
    """
    ours, theirs = (log_shares(rng, forecast, FORECAST, count, rows) for _ in range(2))
    shares = np.exp(log_shares(rng, regime, REGIME, count, rows))
    noise = rng.standard_normal((2, count, rows + HORIZON), dtype=np.float32).cumsum(axis=-1, dtype=np.float64)
    touch, way = ndtr(((noise[..., HORIZON:] - noise[..., :-HORIZON]) / np.sqrt(HORIZON)).astype(np.float32))
    outcome = np.where(touch < shares[1], 1, np.where(way * (shares[0] + shares[2]) < shares[0], 0, 2))
    gains = np.moveaxis(ours - theirs, 0, -1)
    return np.take_along_axis(gains, outcome[..., None], axis=-1)[..., 0], np.ascontiguousarray(gains)


def alternatives(values: np.ndarray) -> dict[str, float]:
    """Half-widths of intervals from independent rows, and from Newey and West's error alone."""
    error, factor, _ = newey_west_standard_error(values - values.mean(), HORIZON)
    return {"iid": 1.96 * float(values.std()) / np.sqrt(len(values)), "hac": factor * error}


def evaluated(values: np.ndarray, gains_N3: np.ndarray, times: np.ndarray, weeks: np.ndarray) -> dict[str, float]:
    """Return the product's result for one series, and the half-width from weeks as clusters alone."""
    found = gain_interval(values, horizon=HORIZON, times_N=times, by_outcome_NK=gains_N3)
    clustered, count = (
        week_clustered_standard_error(values - values.mean(), weeks) if weeks[0] != weeks[-1] else (np.inf, 2)
    )
    facts = {"mean": found.mean, "half": found.mean - found.low, "memory": found.memory, "enough": found.enough}
    return facts | {"weeks": float(stdtrit(count - 1, 0.975)) * clustered}


def cells(chosen: argparse.Namespace, forecast: int, regime: int) -> Iterator[tuple[tuple[str, int], pd.DataFrame]]:
    """((market, rows), a row a series) of one pair of half-lives; shorter series are the beginnings of longer ones."""
    rng = np.random.default_rng([chosen.seed, forecast, regime])
    times = {market: times_of(market, max(chosen.rows)) for market in chosen.markets}
    weeks = {market: interval_week_numbers(stamps) for market, stamps in times.items()}
    lines = {(market, n): [] for market in chosen.markets for n in chosen.rows}
    for begun in range(0, chosen.series, AT_ONCE):
        count = min(AT_ONCE, chosen.series - begun)
        for values, gains in zip(*null_gains(rng, forecast, regime, count, max(chosen.rows)), strict=True):
            others = {n: alternatives(values[:n]) for n in chosen.rows}
            for (market, n), found in lines.items():
                found.append(evaluated(values[:n], gains[:n], times[market][:n], weeks[market][:n]) | others[n])
    for cell, found in lines.items():
        yield cell, pd.DataFrame(found)


def rates(found: pd.DataFrame) -> dict[str, float]:
    """Percent of verdicts that are false without any gain, and that find a gain of three true standard errors."""
    gain = 3 * found["mean"].std()
    facts = {"enough": digits(found["enough"].mean(), 3), "memory": digits(found["memory"].median(), 3)}
    verdicts = found[found["enough"]]
    for name, rows in {"": verdicts, "iid_": found, "hac_": found, "weeks_": found}.items():
        half = rows[name.rstrip("_") or "half"]
        if len(rows):
            facts[f"{name}false"] = digits(100 * (rows["mean"] > half).mean(), 3)
            facts[f"{name}power"] = digits(100 * (rows["mean"] + gain > half).mean(), 3)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=4000)
    parser.add_argument("--forecasts", nargs="*", type=int, default=HALF_LIVES, help="half-lives of the forecasts")
    parser.add_argument("--regimes", nargs="*", type=int, default=HALF_LIVES, help="half-lives of the class mix")
    parser.add_argument("--rows", nargs="*", type=int, default=[1500, 3000, 6000, 15000])
    parser.add_argument("--markets", nargs="*", choices=list(BARS_A_DAY), default=list(BARS_A_DAY))
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    started = time.process_time()
    for forecast in chosen.forecasts:
        for regime in chosen.regimes:
            for (market, n), found in cells(chosen, forecast, regime):
                about = {"market": market, "rows": n, "forecast": forecast, "regime": regime}
                print_json(bench="intervals", series=chosen.series, **about, **rates(found))
    print_json(bench="intervals", cpu_s=digits(time.process_time() - started, 3))


if __name__ == "__main__":
    main()
