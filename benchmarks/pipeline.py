"""Bars to features, scaler and file: ours, pandas + scikit-learn, and the best packages joined, in turns in one run.

    python -m benchmarks.pipeline [--rows 3500000] [--repeats 3] [--data bars.parquet --symbol NQ]
                                    [--only compare alone whole peak growth]

One JSON line a measurement: wall and CPU seconds (the best of the repeats), the median wall, rows a second, and how
many times ours. Rows are one-minute bars and the base frame is one minute.

  compare       89 columns that every side makes (momentum and volatility on 1, 15 and 60 minutes), a robust scaler
                fitted on the first 70 % of the rows, a Parquet file, in memory where the system has files there; each
                phase, and their sum. Two threads for each side that can use them; same codec: float32, plain,
                uncompressed, no dictionary
  alone         ours only: the frames (they are part of `features`), labels, splits, our own file format
  whole         ours with every column there is, in our own format
  peak          most memory of each side in a process of its own: bars, columns, scaler and file
  growth        slope of log time on log rows, 0.5 to 14 million (49 columns); only when asked for

Before the clock runs all sides are compared column by column, once the longest recursion has forgotten its start:
within 1e-6 of the column's deviation and float32's rounding, and within `LOOSER` where a package's running sums lose
digits; `_comparable` says which rows are left out. Scalers within 1e-3 of a quartile distance. The bars come from a
made-up 24-hour market unless a file is named.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.market import COLUMNS, MADE_UP, file_bars, market_bars
from benchmarks.measure import Taken, digits, in_turns, peak_memory, rated, seconds, tell, timed, times
from benchmarks.twins import pandas_sklearn, talib_polars
from ml_factory.data.resample import asof_rows, frames_of
from ml_factory.data.sessions import MINUTE_NS, MarketSpec, market_for
from ml_factory.datasets.mapped import write_part
from ml_factory.datasets.scaling import IQR_OF_NORMAL, RobustScaler
from ml_factory.features.build import FeatureMatrix, FeatureSpec, build_features, column_names
from ml_factory.targets.labels import LabelSpec, triple_barrier
from ml_factory.targets.splits import SplitSpec, holdout

SIDES = ("ours", "joined", "pandas")
PARTS = ("compare", "alone", "whole", "peak", "growth")
FRAMES = (15, 60)
SPEC = FeatureSpec(base_minutes=1, frames=FRAMES, families=("momentum", "volatility"))
WHOLE = FeatureSpec(base_minutes=1)
THREADS = 2
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # no side is to wait for the disk
TRAIN = 0.7
FORGOTTEN = 640 * max(FRAMES)  # rows after which every recursion has forgotten how it was started
BLOCK = 65_536
PLAIN = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_batch_size": BLOCK}
FEW = 60_000  # rows that warm a side up
# Where running sums lose digits (a correlation above 0.9999 is asked as well): variances of prices, powers of returns.
LOOSER = {
    "pandas": {"slope_24": 1e-4, "slope_fit_24": 5e-4, "bollinger_place_20": 2e-3, "bollinger_width_20": 2e-5,
               "squeeze_20": 1e-4, "skew_48": 1e-4, "kurtosis_48": 1e-4},
    "joined": {"skew_48": 1e-4, "kurtosis_48": 0.1},
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One way to do it: bars -> what was made; that, first row, last training row -> scaler; and a file of it."""

    given: Callable[[pd.DataFrame], object]
    features: Callable[[object], object]
    fit: Callable[[object, int, int], object]
    write: Callable[[object, str], None]


def sides(market: MarketSpec, first: int) -> dict[str, Side]:
    """first : rows that ours leaves out at the start."""
    return {
        "ours": Side(
            lambda bars: bars,
            lambda bars: build_features(bars, market, SPEC, threads=THREADS),
            lambda made, _, stop: RobustScaler.fit(made.values[: stop - first]),
            lambda made, path: write_parquet(made.values, made.names, path),
        ),
        "joined": Side(
            talib_polars.table,
            partial(talib_polars.features, frames=FRAMES),
            talib_polars.fit,
            talib_polars.write,
        ),
        "pandas": Side(
            lambda bars: bars,
            partial(pandas_sklearn.features, frames=FRAMES),
            pandas_sklearn.fit,
            pandas_sklearn.write,
        ),
    }


def write_parquet(values: np.ndarray, names: list[str], path: str) -> None:
    """Rows of float32 as a Parquet file, a block at a time; the next block is turned on its side meanwhile."""

    def turned(begin: int) -> pa.Table:
        block = np.empty((values.shape[1], min(BLOCK, len(values) - begin)), np.float32)
        for row in range(0, block.shape[1], 64):  # squares that stay in the first cache
            block[:, row : row + 64] = values[begin + row : begin + min(row + 64, block.shape[1])].T
        return pa.Table.from_arrays([pa.array(column) for column in block], schema=schema)

    schema = pa.schema([pa.field(name, pa.float32(), nullable=False) for name in names])
    with pq.ParquetWriter(path, schema, **PLAIN, data_page_size=4 * BLOCK) as writer, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(turned, 0)
        for begin in range(0, len(values), BLOCK):
            block, waiting = (
                waiting.result(),
                pool.submit(turned, begin + BLOCK) if begin + BLOCK < len(values) else None,
            )
            writer.write_table(block, row_group_size=BLOCK)


def run(side: Side, bars: object, first: int, folder: str) -> dict[str, Taken]:
    """Seconds of each phase of one run, and their sum."""
    stop = first + int(TRAIN * (len(bars) - first))
    taken: dict[str, Taken] = {}
    made, taken["features"] = timed(lambda: side.features(bars))
    _, taken["scaler"] = timed(lambda: side.fit(made, first, stop))
    _, taken["write"] = timed(lambda: side.write(made, str(Path(folder) / "columns.parquet")))
    taken["sum"] = Taken(*map(sum, zip(*taken.values(), strict=True)))
    return taken


def agree(bars: pd.DataFrame, market: MarketSpec, folder: str) -> FeatureMatrix:
    """Every column, scaler and file of every side against ours; a difference is an AssertionError."""
    ours = build_features(bars, market, SPEC, threads=THREADS)
    begin, stop = max(ours.first, FORGOTTEN), ours.first + int(TRAIN * len(ours))
    scaler = RobustScaler.fit(ours.values, np.arange(begin - ours.first, stop - ours.first))
    for name, side in sides(market, ours.first).items():
        made = side.features(side.given(bars))
        side.write(made, path := str(Path(folder) / "columns.parquet"))
        columns = made if name != "ours" else dict(zip(ours.names, ours.values.T, strict=True))
        assert sorted(columns) == sorted(ours.names), f"{name}: other columns"
        stored = pq.ParquetFile(path).metadata.row_group(0).column(0)
        assert (stored.compression, stored.has_dictionary_page) == ("UNCOMPRESSED", False), f"{name}: another codec"
        worst = max(_compare(name, ours, columns), key=lambda found: found["of_allowed"])
        if name != "ours":
            center, scale = side.fit(made, begin, stop)
            order = [list(columns).index(column) for column in ours.names]
            miss = np.abs(center[order] - scaler.center) / scaler.scale
            miss = np.maximum(miss, np.abs(scale[order] / scaler.scale / IQR_OF_NORMAL - 1))
            # Columns whose half is one value have a scale of their own in each library.
            miss = np.where(scale[order] > 0, miss, 0.0)
            assert miss.max() < 1e-3, f"{name}: another scaler for {ours.names[int(miss.argmax())]}, {miss.max()}"
        left_out = {frame or "1m": int((~kept).sum()) for frame, kept in _comparable(ours).items()}
        tell(bench="pipeline equality", side=name, rows=len(ours), left_out=left_out, columns=len(columns), worst=worst)
        del made, columns
    return ours


def _compare(side: str, ours: FeatureMatrix, columns: dict[str, np.ndarray]) -> Iterator[dict]:
    skip = max(FORGOTTEN - ours.first, 0)
    masks = {frame: mask[skip:] for frame, mask in _comparable(ours).items()}
    for place, name in enumerate(ours.names):
        column, _, frame = name.partition("@")
        kept = masks[frame]
        want = ours.values[skip:, place].astype(np.float64)
        got = columns[name][len(columns[name]) - len(want) :].astype(np.float64)
        want, got = want[kept], got[kept]
        assert np.isfinite(got).all(), f"{side}: {name} is not finite"
        allowed = LOOSER.get(side, {}).get(column, 1e-6)
        # float32 rounds to 6e-8 of the value, on each side.
        miss = max(float(np.max(np.abs(got - want) - 1.2e-7 * np.abs(want))) / want.std(), 0.0)
        assert miss <= allowed, f"{side}: {name} differs by {miss:.2e} deviations, allowed {allowed:.0e}"
        assert allowed == 1e-6 or np.corrcoef(want, got)[0, 1] > 0.9999, f"{side}: {name} is another column"
        yield {"column": name, "deviations": digits(miss, 2), "of_allowed": digits(miss / allowed, 2)}


def _comparable(ours: FeatureMatrix) -> dict[str, np.ndarray]:
    """Frame ("" is the base) -> bool[N]: rows on which the packages mean the same as we do.

    Not where the market has stood still for 7 bars or closed at one price for 12: the packages' running sums leave
    rounding where ours leave 0, and a share of it is anything. Nor at the last row of a session that closes early,
    inside a bucket: ours knows the calendar and has the bucket complete, the packages have it a row later.
    """
    base, first = ours.base, ours.first
    span, size = base.high - base.low, np.abs(np.diff(base.close, prepend=np.nan))
    moved = np.ones(len(base), bool)
    for x, n in ((span + size, 7), (size, 12)):
        moved &= pd.Series(x).rolling(n).max().to_numpy() > 0
    ends = np.append(np.diff(base.session) != 0, True)
    masks = {"": moved[first:]}
    for minutes in FRAMES:
        masks[f"{minutes}m"] = ~(ends & (base.known_at % (minutes * MINUTE_NS) != 0))[first:]
    return masks


def compare(bars: pd.DataFrame, market: MarketSpec, repeats: int, facts: dict) -> None:
    """All sides in turns, after all of them agreed."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        first = agree(bars, market, folder).first
        chosen = sides(market, first)
        given = {name: side.given(bars) for name, side in chosen.items()}
        runs = {name: [] for name in chosen}
        for _ in range(repeats):
            for name, side in chosen.items():
                runs[name].append(run(side, given[name], first, folder))
    for phase in ("features", "scaler", "write", "sum"):
        taken = {name: [run[phase] for run in rounds] for name, rounds in runs.items()}
        for name, clocks in taken.items():
            compared = rated(clocks, len(bars)) | times(clocks, taken["ours"])
            tell(bench="pipeline", phase=phase, side=name, **facts, **compared)


def alone(bars: pd.DataFrame, market: MarketSpec, repeats: int, facts: dict) -> None:
    """What only ours does, or does otherwise."""
    made = build_features(bars, market, SPEC, threads=THREADS)
    labels = triple_barrier(made.base, None, LabelSpec(), market)

    def frames() -> None:
        found = frames_of(bars, market, (1, *FRAMES), threads=THREADS)
        for minutes in FRAMES:
            asof_rows(found[1].known_at, found[minutes].known_at)

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        calls = {
            "frames (in features)": frames,
            "labels": partial(triple_barrier, made.base, None, LabelSpec(), market),
            "splits": partial(holdout, labels, SplitSpec()),
            "write, own format": partial(write_part, Path(folder) / "columns.npy", made.values),
        }
        for phase, clocks in in_turns(calls, repeats).items():
            tell(bench="pipeline", phase=phase, side="ours", **facts, **rated(clocks, len(bars)))


def whole(bars: pd.DataFrame, market: MarketSpec, repeats: int, facts: dict) -> None:
    """Every column there is, in our own format."""
    build_features(bars[: min(len(bars), FEW)], market, WHOLE)  # compiled
    facts = facts | {"columns": len(column_names(market, WHOLE))}
    taken: dict[str, list[Taken]] = {"features": [], "scaler": [], "write, own format": []}
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for _ in range(repeats):
            made, clock = timed(partial(build_features, bars, market, WHOLE, threads=THREADS))
            taken["features"].append(clock)
            rows = np.arange(int(TRAIN * len(made)))
            taken["scaler"].append(timed(partial(RobustScaler.fit, made.values, rows))[1])
            taken["write, own format"].append(timed(partial(write_part, Path(folder) / "all.npy", made.values))[1])
            del made
    for phase, clocks in taken.items():
        tell(bench="pipeline, every column", phase=phase, side="ours", **facts, **rated(clocks, len(bars)))


def peak(bars: pd.DataFrame, market: MarketSpec, imported: int, side: str, facts: dict) -> None:
    """Memory of one run of one side, above the imports and above what was there when it began; in a fresh process."""
    chosen, process = sides(market, 0)[side], psutil.Process()
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        run(chosen, chosen.given(bars[: min(len(bars), FEW)]), 5000, folder)  # compiled
        given = chosen.given(bars)
        ready = process.memory_info().rss
        with peak_memory() as found:
            run(chosen, given, 5000, folder)
    matrix = len(bars) * facts["columns"] * 4
    sizes = {"matrix": matrix, "above_imports": found["bytes"] - imported, "above_ready": found["bytes"] - ready}
    told = {f"{name}_gb": digits(size / 1e9) for name, size in sizes.items()}
    ratios = {f"{name}_times_matrix": digits(size / matrix, 3) for name, size in sizes.items() if name != "matrix"}
    tell(bench="pipeline peak", side=side, **facts, **told, **ratios)


def peaks(bars: pd.DataFrame, market: MarketSpec, symbol: str | None) -> None:
    """`peak` of every side, on bars that a file hands over: making them here would leave its own traces."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = str(Path(folder) / "bars.npy")
        np.save(path, np.column_stack([bars.index.as_unit("ns").asi8.view(float), bars[list(COLUMNS)].to_numpy()]).T)
        options = ["--bars", path, *(["--symbol", symbol] if symbol else [])]
        for side in SIDES:
            subprocess.run([sys.executable, "-m", "benchmarks.pipeline", *options, "--peak", side], check=True)


def handed_over(path: str, symbol: str | None) -> tuple[pd.DataFrame, MarketSpec]:
    stored = np.load(path)
    index = pd.DatetimeIndex(stored[0].view("datetime64[ns]"), tz="UTC", name="timestamp")
    bars = pd.DataFrame(stored[1:].T, index, list(COLUMNS), copy=False)
    return bars, market_for(symbol, bars) if symbol else MADE_UP


def growth(repeats: int, most: int) -> None:
    """Slope of log time on log rows."""
    spec = FeatureSpec(base_minutes=1, frames=FRAMES, families=("momentum",))
    counts = [count for count in (500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 14_000_000) if count <= most]
    counts = counts if len(counts) > 1 else [most // 2, most]
    bars = market_bars(counts[-1])
    build_features(bars[:FEW], MADE_UP, spec)
    calls = {str(n): partial(build_features, bars[:n], MADE_UP, spec, threads=THREADS) for n in counts}
    found = {n: seconds(clocks) for n, clocks in in_turns(calls, repeats).items()}
    slopes = {
        f"slope_{clock}": digits(float(np.polyfit(np.log(counts), np.log([f[clock] for f in found.values()]), 1)[0]), 3)
        for clock in ("wall_s", "cpu_s")
    }
    columns = len(column_names(MADE_UP, spec))
    tell(bench="pipeline growth", columns=columns, **slopes, seconds={n: f["wall_s"] for n, f in found.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_500_000, help="of a made-up market")
    parser.add_argument("--data", help="a Parquet file of one-minute bars instead")
    parser.add_argument("--symbol", help="whose bars these are")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS[:-1], help="growth is made when asked for")
    parser.add_argument("--peak", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--bars", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    imported = psutil.Process().memory_info().rss
    if asked.bars:
        bars, market = handed_over(asked.bars, asked.symbol)
    else:
        bars, market = file_bars(asked.data, asked.symbol) if asked.data else (market_bars(asked.rows), MADE_UP)
    facts = {"market": market.symbol, "rows": len(bars), "columns": len(column_names(market, SPEC)), "threads": THREADS}
    if asked.peak:
        peak(bars, market, imported, asked.peak, facts)
        return
    parts = {
        "compare": partial(compare, bars, market, asked.repeats, facts),
        "alone": partial(alone, bars, market, asked.repeats, facts),
        "whole": partial(whole, bars, market, asked.repeats, facts),
        "peak": partial(peaks, bars, market, asked.symbol),
        "growth": partial(growth, asked.repeats, 4 * asked.rows),
    }
    for part in asked.only:
        parts[part]()


if __name__ == "__main__":
    main()
