"""Triple barrier + MAE/MFE + average uniqueness: rows a second, ours compared with NumPy, interleaved in one run.

    python -m benchmarks.barriers [--rows 3500000] [--horizons 20 60 240 2000] [--repeats 3] [--growth]

One JSON line a measurement. Every form starts from open, high, low, close and segment, ends with barrier, exit bar,
return, MAE, MFE and uniqueness, and uses one thread:
  ours     barrier_prices, scan, mean_share (compiled, striding over blocks of bars)
  loop     NumPy over all rows at once, bar after bar of the horizon: the form everybody writes, here in blocks of rows
           that stay in the cache, looking only at rows still open once they are few
  doubling NumPy again, but leaping: extremes of 1, 2, 4... bars for all rows, then a bisection of each life. No user
           known to us writes it; it shows the limit of NumPy
  table    the whole of `triple_barrier_labels`: ours plus label_end and the table
Before the clock runs, all forms must agree to the bit on barriers and exits and to 1e-12 on the rest.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
from scipy.signal import lfilter

from benchmarks.measure import digits, in_turns, print_json, rated, times
from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.targets.barrier_kernels import LOWER, SESSION, UPPER, VERTICAL, average_uniqueness_kernel
from ml_factory.targets.label_table import find_labelable_rows, simulate_label_exits
from ml_factory.targets.labels import LabelSpec, triple_barrier_labels, triple_barrier_prices

MINUTE = 60_000_000_000
MARKET = MarketSpec("MES", "cme", 0.25, False)
SESSION_BARS = 1380
BLOCK = 4096  # rows: their columns stay in the second-level cache
FEW = 0.3  # of a block still open: from here on gathering them is cheaper than passing over all


def walk(rows: int, seed: int = 0) -> ResampledBars:
    """One-minute bars of a driftless walk on the tick, in sessions of 1,380 bars."""
    rng = np.random.default_rng(seed)
    path = np.cumsum(rng.standard_normal(rows * 4, dtype=np.float32) * np.float32(1e-4), dtype=np.float64)
    price = np.round(5000 * np.exp(path - np.linspace(0, path[-1], len(path))) / 0.25).reshape(rows, 4) * 0.25
    open_ = np.append(price[0, 0], price[:-1, -1])
    start = np.arange(rows, dtype=np.int64) * MINUTE
    segment = (np.arange(rows) // SESSION_BARS).astype(np.int32)
    high, low = np.maximum(price.max(axis=1), open_), np.minimum(price.min(axis=1), open_)
    return ResampledBars(1, start, start + MINUTE, open_, high, low, price[:, 3].copy(), None, segment, segment)


def ours(frame: ResampledBars, spec: LabelSpec) -> tuple[np.ndarray, ...]:
    up, down = triple_barrier_prices(frame, spec, MARKET)
    entry, last = find_labelable_rows(frame, "session", ~np.isnan(up))
    end = np.minimum(entry + spec.horizon, last)
    rows = simulate_label_exits(frame, None, entry, last, end, up, down, MARKET, spec.horizon)
    shares = average_uniqueness_kernel(entry + 1, rows.exit_bar, len(frame))
    return entry, rows.barrier, rows.exit_bar, rows.ret, rows.mae, rows.mfe, shares


def table(frame: ResampledBars, spec: LabelSpec) -> object:
    return triple_barrier_labels(frame, None, spec, MARKET, session_close=frame.known_at)


def last_bars(segment: np.ndarray) -> np.ndarray:
    ends = np.append(np.flatnonzero(np.diff(segment)), len(segment) - 1)
    return np.repeat(ends, np.diff(ends, prepend=-1))


def numpy_prices(frame: ResampledBars, spec: LabelSpec) -> tuple[np.ndarray, np.ndarray]:
    """Barrier prices by a recursive filter over the squared returns inside segments."""
    inside = np.flatnonzero(np.diff(frame.segment) == 0) + 1
    squares = np.log(frame.close[inside] / frame.close[inside - 1])
    squares *= squares
    decay = 1 - 2 / (spec.sigma_span + 1)
    seen = np.arange(1, len(squares) + 1)
    mean = lfilter([1.0], [1.0, -decay], squares) * (1 - decay) / (1 - decay**seen)
    sigma = np.full(len(frame), np.nan)
    sigma[inside[spec.sigma_span - 1 :]] = np.sqrt(mean[spec.sigma_span - 1 :])
    holes = np.flatnonzero(np.isnan(sigma))
    holes = holes[holes > inside[spec.sigma_span - 1]]
    sigma[holes] = sigma[holes - 1]
    least = np.log1p(max(1.0, spec.cost_ticks) * MARKET.tick / frame.close)
    scale = math.sqrt(spec.horizon) * sigma
    up = frame.close * np.exp(np.maximum(spec.k_up * scale, least))
    down = frame.close * np.exp(-np.maximum(spec.k_down * scale, least))
    return np.ceil(up / MARKET.tick - 1e-6) * MARKET.tick, np.floor(down / MARKET.tick + 1e-6) * MARKET.tick


def numpy_uniqueness(entry: np.ndarray, exit_bar: np.ndarray, n: int) -> np.ndarray:
    """Average uniqueness by one cumulative sum over the file."""
    alive = np.cumsum(np.bincount(entry + 1, minlength=n + 1) - np.bincount(exit_bar + 1, minlength=n + 1))[:n]
    share = np.append(0.0, np.cumsum(1.0 / np.maximum(alive, 1)))
    return (share[exit_bar + 1] - share[entry + 1]) / (exit_bar - entry)


def numpy_form(find: Callable) -> Callable:
    """A form whose exits come from `find(frame, up, down, last, horizon)`: exit_bar[N], best[N], worst[N] before it."""

    def form(frame: ResampledBars, spec: LabelSpec) -> tuple[np.ndarray, ...]:
        up, down = numpy_prices(frame, spec)
        last = last_bars(frame.segment)
        entry = np.flatnonzero(~np.isnan(up) & (np.arange(len(frame)) < last))
        exits, best, worst = find(frame, up, down, last, spec.horizon)
        j, up, down, close = exits[entry], up[entry], down[entry], frame.close[entry]
        return entry, *leave(frame, spec, entry, j, up, down, close, last[entry], best[entry], worst[entry])

    return form


def leave(frame, spec, entry, j, up, down, close, last, best, worst) -> tuple[np.ndarray, ...]:
    """Return the outcomes at the exit bars: barrier, exit bar, return, MAE, MFE, uniqueness."""
    slack = MARKET.tick * 1e-6
    open_, high, low = frame.open[j], frame.high[j], frame.low[j]
    opens_up, opens_down = open_ >= up - slack, open_ <= down + slack
    above, below = high >= up - slack, low <= down + slack
    inside = ~(above | below)
    gap = opens_up | opens_down
    barrier = np.where(inside, np.where(entry + spec.horizon <= last, VERTICAL, SESSION), 4)
    barrier = np.where(opens_up | (above & ~below & ~gap), UPPER, barrier)
    barrier = np.where(opens_down | (below & ~above & ~gap), LOWER, barrier).astype(np.int8)
    price = np.where(barrier == UPPER, up, np.where(barrier == LOWER, down, np.nan))
    price = np.where(gap, open_, np.where(inside, frame.close[j], price))
    top = np.where(gap, open_, np.where(inside | (barrier == LOWER), high, up))
    bottom = np.where(gap, open_, np.where(inside | (barrier == UPPER), low, down))
    mae, mfe = np.log(np.minimum(worst, bottom) / close), np.log(np.maximum(best, top) / close)
    return barrier, j, np.log(price / close), mae, mfe, numpy_uniqueness(entry, j, len(frame))


def by_loop(frame: ResampledBars, up, down, last, horizon: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every row of a block one bar further at a time; rows that are done leave when few are left."""
    n, slack = len(frame), MARKET.tick * 1e-6
    high, low = (np.append(values, np.full(horizon, np.nan)) for values in (frame.high, frame.low))
    exits, best, worst = np.empty(n, np.int64), np.empty(n), np.empty(n)
    ends = np.unique(last)
    for a in range(0, n, BLOCK):
        b = min(a + BLOCK, n)
        rows, above, below = np.arange(a, b), up[a:b] - slack, down[a:b] + slack
        top, bottom, closing = frame.close[a:b].copy(), frame.close[a:b].copy(), np.minimum(last[a:b], rows + horizon)
        open_rows, whole, near = b - a, True, ends[(ends >= a) & (ends <= b + horizon)]
        for h in range(1, horizon + 1):
            if whole:
                hi, lo = high[a + h : b + h], low[a + h : b + h]
                done = np.flatnonzero((hi >= above) | (lo <= below))
                over = near - h - a
                over = over[(over >= 0) & (over < b - a)] if h < horizon else np.flatnonzero(above < np.inf)
                over = over[above[over] < np.inf]
                done = np.union1d(done, over) if len(over) else done
            else:
                bars = rows + h
                hi, lo = high[bars], low[bars]
                done = np.flatnonzero((hi >= above) | (lo <= below) | ((bars == closing) & (above < np.inf)))
            if len(done):
                exits[rows[done]], best[rows[done]], worst[rows[done]] = rows[done] + h, top[done], bottom[done]
                above[done], below[done] = np.inf, -np.inf
                open_rows -= len(done)
            if not open_rows:
                break
            np.maximum(top, hi, out=top)
            np.minimum(bottom, lo, out=bottom)
            if open_rows < FEW * len(rows):
                keep = np.flatnonzero(above < np.inf)
                rows, above, below, closing = rows[keep], above[keep], below[keep], closing[keep]
                top, bottom, whole = top[keep], bottom[keep], False
    return exits, best, worst


def by_doubling(frame: ResampledBars, up, down, last, horizon: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Extremes of 2**k bars from each bar on; a row leaps 2**k bars, from the largest k down, while it stays inside."""
    n, slack = len(frame), MARKET.tick * 1e-6
    tops, bottoms = [frame.high], [frame.low]
    for k in range(int(math.log2(horizon))):
        width = 1 << k
        tops.append(np.append(np.maximum(tops[-1][:-width], tops[-1][width:]), np.full(width, np.inf)))
        bottoms.append(np.append(np.minimum(bottoms[-1][:-width], bottoms[-1][width:]), np.full(width, -np.inf)))
    at, end = np.arange(1, n + 1), np.minimum(last, np.arange(n) + horizon)
    best, worst, above, below = frame.close.copy(), frame.close.copy(), up - slack, down + slack
    for a in range(0, n, BLOCK):
        part = slice(a, a + BLOCK)
        j, stop, hi, lo = at[part], end[part], best[part], worst[part]
        for k in range(len(tops) - 1, -1, -1):
            for _ in range(2 if k == len(tops) - 1 else 1):
                here = np.minimum(j, n - 1)
                top, bottom = tops[k][here], bottoms[k][here]
                leap = np.flatnonzero((top < above[part]) & (bottom > below[part]) & (j + (1 << k) <= stop + 1))
                hi[leap], lo[leap] = np.maximum(hi[leap], top[leap]), np.minimum(lo[leap], bottom[leap])
                j[leap] += 1 << k
    return np.minimum(at, end), best, worst


FORMS = {"ours": ours, "loop": numpy_form(by_loop), "doubling": numpy_form(by_doubling), "table": table}


def agree(rows: int, horizon: int) -> None:
    """All forms, on the first bars of a walk; a difference is an AssertionError."""
    frame, spec = walk(rows, seed=1), LabelSpec(horizon=horizon)
    reference = ours(frame, spec)
    for name in ("loop", "doubling"):
        for one, two in zip(reference, FORMS[name](frame, spec), strict=True):
            if one.dtype.kind in "iu":
                np.testing.assert_array_equal(one, two, err_msg=name)
            else:
                np.testing.assert_allclose(one, two, rtol=0, atol=1e-10, err_msg=name)
    whole = table(frame, spec)
    kept = np.isin(reference[0], whole["entry_bar"])
    np.testing.assert_array_equal(whole["exit_bar"], reference[2][kept])


def measure(frame: ResampledBars, horizon: int, repeats: int, forms: list[str]) -> None:
    """The best of `repeats` rounds, each form once a round."""
    spec = LabelSpec(horizon=horizon)
    runs = in_turns({name: partial(FORMS[name], frame, spec) for name in forms}, repeats)
    for name, clocks in runs.items():
        line = {"rows": len(frame), "horizon": horizon} | rated(clocks, len(frame))
        if name != "ours" and "ours" in runs:
            line |= times(clocks, runs["ours"])
        print_json(bench="barriers", form=name, **line)


def growth(repeats: int) -> None:
    """Slope of log time on log rows of the whole table, 0.5 to 14 million rows at H = 240.

    Each call is the first of its own process: in a repeated one, small arrays would find their pages already mapped.
    """
    counts, cpu = (500_000, 1_750_000, 3_500_000, 7_000_000, 14_000_000), []
    options = ["--horizons", "240", "--repeats", "1", "--forms", "table"]
    for rows in counts:
        once = [sys.executable, "-m", "benchmarks.barriers", "--rows", str(rows), *options]
        runs = [subprocess.run(once, capture_output=True, text=True, check=True).stdout for _ in range(repeats)]
        cpu.append(min(json.loads(run)["cpu_s"] for run in runs))
    slope = float(np.polyfit(np.log(counts), np.log(cpu), 1)[0])
    print_json(bench="barriers growth", horizon=240, rows=counts, cpu_s=cpu, slope=digits(slope, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_500_000)
    parser.add_argument("--horizons", type=int, nargs="+", default=[20, 60, 240, 2000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--growth", action="store_true", help="also 0.5 to 14 million rows")
    options = parser.parse_args()
    for horizon in options.horizons:
        agree(min(options.rows, 30_000), horizon)
    frame = walk(options.rows)
    for horizon in options.horizons:
        measure(frame, horizon, options.repeats, options.forms)
    if options.growth:
        growth(options.repeats)


if __name__ == "__main__":
    main()
