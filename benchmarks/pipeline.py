"""Bars to features, scaler and file: ours, pandas + scikit-learn, and the best packages joined, in turns in one run.

    python -m benchmarks.pipeline [--rows 3500000] [--repeats 3] [--data bars.parquet --symbol NQ]
                                    [--only compare alone whole peak growth]

One JSON line a measurement: wall and CPU seconds (the best of the repeats), the median wall, rows a second, and how
many times ours. Rows are one-minute bars and the base frame is one minute.

  compare       89 columns that every side makes (momentum and volatility on 1, 15 and 60 minutes) and a Parquet file of
                them, in memory where the system has files there; a robust scaler fitted on the first 70 % of the rows;
                and the sum of both. Ours writes a block while it makes the next ones, so columns and file are one phase
                with one wall; the CPU seconds of each kind of work stand beside it, and each package's two phases too.
                Two threads for each side that can use them; same codec: float32, plain, uncompressed, no dictionary
  alone         ours only: the frames (they are part of `features`), the matrix in memory and a scaler of it, labels,
                splits, our own file format
  whole         ours with every column there is, in our own format
  peak          most memory of each side in a process of its own: bars, columns, scaler and file; of ours with half of
                the rows as well
  growth        slope of log time on log rows, 0.5 to 14 million (49 columns and their file); only when asked for

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pyarrow.parquet as pq
from ml_factory.features.export import export_features

from benchmarks.market import COLUMNS, MADE_UP, file_bars, market_bars
from benchmarks.measure import Taken, digits, in_turns, peak_memory, rated, seconds, tell, timed, times
from benchmarks.twins import pandas_sklearn, talib_polars
from ml_factory.data.resample import asof_rows, frames_of
from ml_factory.data.sessions import MINUTE_NS, MarketSpec, market_for
from ml_factory.datasets.memmap import write_part
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
FEW = 60_000  # rows that warm a side up
# Where running sums lose digits (a correlation above 0.9999 is asked as well): variances of prices, powers of returns.
LOOSER = {
    "pandas": {"slope_24": 1e-4, "slope_fit_24": 5e-4, "bollinger_place_20": 2e-3, "bollinger_width_20": 2e-5,
               "squeeze_20": 1e-4, "skew_48": 1e-4, "kurtosis_48": 1e-4},
    "joined": {"skew_48": 1e-4, "kurtosis_48": 0.1},
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One way to do it: bars -> what was made; that, first row, last training row -> scaler; and a file of it.

    write : None where `features` has written the file already; what was made then has `cpu_s`, kind of work -> seconds.
    """

    given: Callable[[pd.DataFrame], object]
    features: Callable[[object, str], object]
    fit: Callable[[object, int, int], object]
    write: Callable[[object, str], None] | None = None


def sides(market: MarketSpec, first: int) -> dict[str, Side]:
    """first : rows that ours leaves out at the start."""
    return {
        "ours": Side(
            lambda bars: bars,
            lambda bars, path: export_features(bars, market, path, SPEC, threads=THREADS),
            lambda made, _, stop: RobustScaler.fit_blocks(made.blocks.before(stop - first)),
        ),
        "joined": Side(
            talib_polars.table,
            lambda bars, _: talib_polars.features(bars, FRAMES),
            talib_polars.fit,
            talib_polars.write,
        ),
        "pandas": Side(
            lambda bars: bars,
            lambda bars, _: pandas_sklearn.features(bars, FRAMES),
            pandas_sklearn.fit,
            pandas_sklearn.write,
        ),
    }


def run(side: Side, bars: object, first: int, folder: str) -> tuple[dict[str, Taken], dict[str, float]]:
    """Clocks of each phase of one run and of their sum; and CPU seconds of each kind of work inside a phase."""
    stop, path = first + int(TRAIN * (len(bars) - first)), Path(folder) / "columns.parquet"
    path.unlink(missing_ok=True)  # to free the pages of another side's file is not this one's work
    made, columns = timed(lambda: side.features(bars, str(path)))
    _, scaler = timed(lambda: side.fit(made, first, stop))
    written = timed(lambda: side.write(made, str(path)))[1] if side.write else Taken(0.0, 0.0)
    taken = {
        "features + write": Taken(*map(sum, zip(columns, written, strict=True))),
        "scaler": scaler,
        "sum": Taken(*map(sum, zip(columns, scaler, written, strict=True))),
    }
    inside = {"features": columns.cpu, "write": written.cpu} if side.write else made.cpu_s
    return taken, inside


def agree(bars: pd.DataFrame, market: MarketSpec, folder: str) -> FeatureMatrix:
    """Every column, scaler and file of every side against ours; a difference is an AssertionError."""
    ours = build_features(bars, market, SPEC, threads=THREADS)
    begin, stop = max(ours.first, FORGOTTEN), ours.first + int(TRAIN * len(ours))
    scaler = RobustScaler.fit(ours.values, np.arange(begin - ours.first, stop - ours.first))
    for name, side in sides(market, ours.first).items():
        path = str(Path(folder) / "columns.parquet")
        made = side.features(side.given(bars), path)
        if name == "ours":
            stored = RobustScaler.fit_blocks(made.blocks.before(stop - ours.first))
            matrix = RobustScaler.fit(ours.values, np.arange(stop - ours.first))
            assert stored.to_dict() == matrix.to_dict(), "another scaler from the file than from the matrix"
            table = pq.read_table(path)
            columns = {column: table[column].to_numpy() for column in table.column_names}
            same = (np.array_equal(columns[column], ours.values[:, f]) for f, column in enumerate(ours.names))
            assert all(same), "the file holds other numbers than the matrix"
        else:
            side.write(made, path)
            columns = made
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
        runs: dict[str, list[dict[str, Taken]]] = {name: [] for name in chosen}
        inside: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
        for _ in range(repeats):
            for name, side in chosen.items():
                taken, kinds = run(side, given[name], first, folder)
                runs[name].append(taken)
                inside[name].append(kinds)
    for phase in ("features + write", "scaler", "sum"):
        taken = {name: [run[phase] for run in rounds] for name, rounds in runs.items()}
        for name, clocks in taken.items():
            compared = rated(clocks, len(bars)) | times(clocks, taken["ours"])
            if phase == "features + write":
                least = {kind: digits(min(one[kind] for one in inside[name])) for kind in inside[name][0]}
                compared |= {"cpu_s_inside": least}
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
            "features, a matrix in memory": partial(build_features, bars, market, SPEC, threads=THREADS),
            "scaler, of that matrix": partial(RobustScaler.fit, made.values[: int(TRAIN * len(made))]),
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
    halves = {"ours": bars[: len(bars) // 2]}
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = str(Path(folder) / "bars.npy")
        for side, some in [*halves.items(), *((side, bars) for side in SIDES)]:
            np.save(
                path, np.column_stack([some.index.as_unit("ns").asi8.view(float), some[list(COLUMNS)].to_numpy()]).T
            )
            options = ["--bars", path, *(["--symbol", symbol] if symbol else [])]
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
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "columns.parquet"

        def export(rows: int) -> None:
            export_features(bars[:rows], MADE_UP, path, spec, threads=THREADS)
            path.unlink()

        export(FEW)
        calls = {str(n): partial(export, n) for n in counts}
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
