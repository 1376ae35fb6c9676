"""Five frames out of one-minute bars, joined to the base rows as of `known_at`: ours, polars, numpy and pandas.

    python -m benchmarks.resample [--rows 3500000] [--repeats 7]

Prints one JSON line a side: wall and CPU seconds (the best of interleaved repeats), rows a second, and how many times
our wall and CPU time it took. Every side gets two threads and starts from float64 columns in memory; the result is 25
float64 columns of as many rows. Ours and numpy write them into a matrix that is there already, as the pipeline does;
polars and pandas cannot, so `ours_fresh` makes a new one each time too. All are compared with ours first, bit for bit.
Needs polars in addition to the project.
"""

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

os.environ.setdefault("POLARS_MAX_THREADS", "2")

import numpy as np
import pandas as pd
import polars as pl

from benchmarks.market import COLUMNS, MADE_UP, market_bars
from benchmarks.measure import in_turns, print_json, rated, times
from ml_factory.data.resample import asof_rows, resample_bars
from ml_factory.data.sessions import MINUTE_NS

FRAMES = (5, 15, 30, 60, 240)
THREADS = 2


def ours(bars: pd.DataFrame, matrix: np.ndarray | None = None) -> np.ndarray:
    made = {minutes: resample_bars(bars, MADE_UP, minutes) for minutes in (1, *FRAMES)}
    known_at = made[1].known_at
    matrix = np.empty((len(FRAMES) * len(COLUMNS), len(known_at))) if matrix is None else matrix

    def join(place: int) -> None:
        frame, at = made[FRAMES[place]], place * len(COLUMNS)
        columns = np.stack([getattr(frame, name) for name in COLUMNS])
        rows = asof_rows(known_at, frame.known_at)
        matrix[at : at + len(COLUMNS)] = np.where(rows >= 0, columns[:, rows], np.nan)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(join, range(len(FRAMES))))
    return matrix


def with_polars(bars: pl.DataFrame) -> list[np.ndarray]:
    whole = bars.lazy().with_columns(known=pl.col("timestamp") + pl.duration(minutes=1))
    for minutes in FRAMES:
        column = {name: pl.col(name) for name in COLUMNS}
        grouped = bars.lazy().group_by_dynamic("timestamp", every=f"{minutes}m").agg(
            column["open"].first(), column["high"].max(), column["low"].min(), column["close"].last(),
            column["volume"].sum(),
        )  # fmt: skip
        known = (pl.col("timestamp") + pl.duration(minutes=minutes)).alias("known").set_sorted()
        coarse = grouped.select(known, *(pl.col(name).alias(f"{name}@{minutes}") for name in COLUMNS))
        whole = whole.join_asof(coarse, on="known", strategy="backward")
    table = whole.select(f"{name}@{minutes}" for minutes in FRAMES for name in COLUMNS).collect()
    return table.get_columns()


def with_numpy(bars: pd.DataFrame, matrix: np.ndarray) -> np.ndarray:
    start = bars.index.asi8
    source = {name: bars[name].to_numpy() for name in COLUMNS}

    def join(place: int) -> None:
        width = FRAMES[place] * MINUTE_NS
        bucket = start // width
        first = np.flatnonzero(np.diff(bucket, prepend=-1))
        last = np.append(first[1:], len(start)) - 1
        known_at = (bucket[first] + 1) * width
        coarse = [
            source["open"][first],
            np.maximum.reduceat(source["high"], first),
            np.minimum.reduceat(source["low"], first),
            source["close"][last],
            np.add.reduceat(source["volume"], first),
        ]
        rows = np.searchsorted(known_at, start + MINUTE_NS, side="right")
        for k, column in enumerate(coarse):
            # "clip" lets take write into `out` without a buffer between
            np.take(np.append(np.nan, column), rows, out=matrix[place * len(COLUMNS) + k], mode="clip")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(join, range(len(FRAMES))))
    return matrix


def with_pandas(bars: pd.DataFrame) -> list[np.ndarray]:
    known = pd.DataFrame({"known": bars.index + pd.Timedelta(minutes=1)})
    rules = dict(zip(COLUMNS, ("first", "max", "min", "last", "sum"), strict=True))
    out = []
    for minutes in FRAMES:
        coarse = bars.resample(f"{minutes}min", origin="epoch").agg(rules).dropna()
        coarse = coarse.set_axis(coarse.index + pd.Timedelta(minutes=minutes)).rename_axis("known").reset_index()
        joined = pd.merge_asof(known, coarse, on="known")
        out += [joined[name].to_numpy() for name in COLUMNS]
    return out


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=3_500_000)
    options.add_argument("--repeats", type=int, default=7)
    chosen = options.parse_args()
    bars = market_bars(chosen.rows)
    table = pl.DataFrame({"timestamp": bars.index.asi8} | {name: bars[name].to_numpy() for name in COLUMNS})
    table = table.with_columns(pl.col("timestamp").cast(pl.Datetime("ns")).set_sorted())
    matrix = np.zeros((len(FRAMES) * len(COLUMNS), chosen.rows))
    sides = {
        "ours": (partial(ours, matrix=matrix), bars),
        "ours_fresh": (ours, bars),
        "polars": (with_polars, table),
        "numpy": (partial(with_numpy, matrix=matrix), bars),
        "pandas": (with_pandas, bars),
    }
    wanted = ours(bars)
    for name, (side, data) in sides.items():  # also the warm-up
        matrix[:] = 0
        for got, want in zip(side(data), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(got, float), want, err_msg=name)
    del wanted, got, want
    runs = in_turns({name: partial(side, data) for name, (side, data) in sides.items()}, chosen.repeats)
    for name, clocks in runs.items():
        facts = {"rows": chosen.rows, "frames": FRAMES, "threads": THREADS}
        compared = rated(clocks, chosen.rows) | times(clocks, runs["ours"])
        print_json(bench="resample_join", side=name, **facts, **compared)


if __name__ == "__main__":
    main()
