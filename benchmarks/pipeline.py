"""`pipeline.prepare` compared with TA-Lib + polars, in turns in one run.

    python -m benchmarks.pipeline [--rows 3500000] [--repeats 3] [--data bars.parquet --symbol NQ]
                                    [--only compare every peak growth]

One JSON line a measurement: wall and CPU seconds (the best of the repeats), the median wall, rows a second, and how
many times the seconds of `prepare`. Each side starts from the same Parquet file of one-minute bars. Base bars of one
minute, and 89 columns that both sides make: momentum and volatility on 1, 15 and 60 minutes.

  compare   `prepare`: what a user runs, from the file to features, labels, splits, scaler and certificate, with the
            seconds of each phase. `prepare, shared steps`: the sum of its phases that both sides have (reading,
            checking, columns, file). The peer: reading, columns, a robust scaler fitted on the first 70 % of
            the rows, and an uncompressed Parquet file. Files lie in memory where the system has files there
  every     `prepare` with every column that the library has
  peak      most memory of each side in a process of its own, above its imports; `prepare` with half of the rows as well
  growth    slope of log time on log rows of `prepare`, 0.5 to 14 million (49 columns); only when asked for

Before the clock runs both sides are compared column by column, once the longest recursion has forgotten its start:
within 1e-6 of the column's deviation and float32's rounding, and within `LOOSER` where TA-Lib's running sums lose
digits; `_comparable` lists the rows that are left out. Scalers agree within 1e-3 of a quartile distance. The bars come
from a synthetic 24-hour market unless a file is named.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import psutil

from benchmarks import talib_polars
from benchmarks.measure import best, digits, in_turns, peak_memory, print_json, rated, seconds, timed, times
from ml_factory import Workspace, pipeline
from ml_factory.data.resample import resample_bars
from ml_factory.data.sessions import MINUTE_NS, MarketSpec, resolve_market_spec
from ml_factory.datasets.scaling import IQR_OF_NORMAL, RobustScaler
from ml_factory.features.build import FeatureRows, FeatureSpec, build_features, feature_column_names
from ml_factory.settings import DataSpec

SIDES = ("prepare", "polars")
COLUMNS = ("open", "high", "low", "close", "volume")
MADE_UP = MarketSpec("BTC", "24h", None, True)
PARTS = ("compare", "every", "peak", "growth")
FRAMES = (15, 60)
SPEC = FeatureSpec(base_minutes=1, frames=FRAMES, families=("momentum", "volatility"))
EVERY = FeatureSpec(base_minutes=1)
NARROW = FeatureSpec(base_minutes=1, frames=FRAMES, families=("momentum",))
SHARED = ("importing", "reading", "checking", "frames", "features", "writing", "scaler")  # phases that each side has
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # no side is to wait for the disk
HORIZON = 20
TRAIN = 0.7
FORGOTTEN = 640 * max(FRAMES)  # rows after which every recursion has forgotten how it was started
FEW = 60_000  # rows that warm a side up
# Where running sums of powers of returns lose digits (a correlation above 0.9999 is asked as well).
LOOSER = {"skew_48": 1e-4, "kurtosis_48": 0.1}


def market_bars(rows: int, seed: int = 0) -> pd.DataFrame:
    """A 24-hour market with one minute in twenty missing, and some hours."""
    rng = np.random.default_rng(seed)
    minute = np.cumsum(1 + (rng.random(rows) < 0.05) + 300 * (rng.random(rows) < 1e-5))
    close = np.round(20_000 * np.exp(np.cumsum(rng.normal(0, 2e-4, rows))), 2)
    opens = np.concatenate([close[:1], close[:-1]])
    spread = np.round(rng.exponential(2, (2, rows)), 2)
    prices = opens, np.maximum(opens, close) + spread[0], np.minimum(opens, close) - spread[1], close
    start = np.datetime64("2015-01-01", "ns").astype(np.int64) + minute * MINUTE_NS
    table = dict(zip(COLUMNS, (*prices, rng.integers(1, 500, rows).astype(float)), strict=True))
    return pd.DataFrame(table, index=pd.DatetimeIndex(start.astype("datetime64[ns]"), tz="UTC", name="timestamp"))


def file_bars(path: str, symbol: str) -> tuple[pd.DataFrame, MarketSpec]:
    """A file of checked one-minute bars with a column `timestamp`; only those inside the market's sessions."""
    bars = pd.read_parquet(path).set_index("timestamp").astype(float)
    market = resolve_market_spec(symbol, bars)
    inside = resample_bars(bars, market, 1).start
    return bars[np.isin(bars.index.as_unit("ns").asi8, inside)], market


def prepare(file: Path, folder: Path, market: MarketSpec, spec: FeatureSpec = SPEC) -> object:
    """Run `pipeline.prepare` in a new workspace, as a user does; the workspace stays in `folder`."""
    shutil.rmtree(folder / "workspace", ignore_errors=True)
    settings = DataSpec(features=spec, calendar=market.calendar, tick=market.tick or 0.01)
    made = pipeline.prepare(Workspace(folder / "workspace"), market.symbol, (HORIZON,), data=file, settings=settings)
    assert "FAILED" not in made.proof, made.proof
    return made


def with_packages(file: Path, folder: Path, first: int) -> dict[str, np.ndarray]:
    """Read, make the columns, fit the scaler on the first 70 % of the rows and write, with TA-Lib and polars."""
    bars = pd.read_parquet(file).set_index("timestamp")
    made = talib_polars.features(talib_polars.table(bars), FRAMES)
    talib_polars.fit(made, first, first + int(TRAIN * (len(bars) - first)))
    talib_polars.write(made, str(folder / "columns.parquet"))
    return made


def agree(file: Path, folder: Path, market: MarketSpec) -> FeatureRows:
    """Compare every column of the peer with the stored ones of `prepare`; a difference is an AssertionError."""
    bars = pd.read_parquet(file).set_index("timestamp")
    prepare(file, folder, market)
    stored = pipeline.load_features(Workspace(folder / "workspace"), market.symbol)
    ours = build_features(bars, market, SPEC)  # for its frame: which rows the packages mean the same on
    assert list(stored.columns) == list(ours.names), "other columns are stored"
    assert np.array_equal(stored.to_numpy(), ours.values), "other numbers are stored"
    begin, stop = max(ours.first, FORGOTTEN), ours.first + int(TRAIN * len(ours))
    scaler = RobustScaler.fit(ours.values, np.arange(begin - ours.first, stop - ours.first))
    columns = with_packages(file, folder, begin)
    assert sorted(columns) == sorted(ours.names), "other columns"
    worst = max(_compare(ours, columns), key=lambda found: found["of_allowed"])
    center, scale = talib_polars.fit(columns, begin, stop)
    order = [list(columns).index(column) for column in ours.names]
    miss = np.abs(center[order] - scaler.center) / scaler.scale
    miss = np.maximum(miss, np.abs(scale[order] / scaler.scale / IQR_OF_NORMAL - 1))
    # Columns whose half is one value have a scale of their own in each library.
    miss = np.where(scale[order] > 0, miss, 0.0)
    assert miss.max() < 1e-3, f"another scaler for {ours.names[int(miss.argmax())]}, {miss.max()}"
    left_out = {frame or "1m": int((~kept).sum()) for frame, kept in _comparable(ours).items()}
    print_json(bench="pipeline equality", rows=len(ours), left_out=left_out, columns=len(columns), worst=worst)
    return ours


def _compare(ours: FeatureRows, columns: dict[str, np.ndarray]) -> Iterator[dict]:
    skip = max(FORGOTTEN - ours.first, 0)
    masks = {frame: mask[skip:] for frame, mask in _comparable(ours).items()}
    for place, name in enumerate(ours.names):
        column, _, frame = name.partition("@")
        kept = masks[frame]
        want = ours.values[skip:, place].astype(np.float64)
        got = columns[name][len(columns[name]) - len(want) :].astype(np.float64)
        want, got = want[kept], got[kept]
        assert np.isfinite(got).all(), f"{name} is not finite"
        allowed = LOOSER.get(column, 1e-6)
        # float32 rounds to 6e-8 of the value, on each side.
        miss = max(float(np.max(np.abs(got - want) - 1.2e-7 * np.abs(want))) / want.std(), 0.0)
        assert miss <= allowed, f"{name} differs by {miss:.2e} deviations, allowed {allowed:.0e}"
        assert allowed == 1e-6 or np.corrcoef(want, got)[0, 1] > 0.9999, f"{name} is another column"
        yield {"column": name, "deviations": digits(miss, 2), "of_allowed": digits(miss / allowed, 2)}


def _comparable(ours: FeatureRows) -> dict[str, np.ndarray]:
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


def compare(file: Path, folder: Path, market: MarketSpec, repeats: int, facts: dict) -> None:
    """Time both sides in turns, after they agreed."""
    first = agree(file, folder, market).first
    phases: list[pd.Series] = []

    def ours() -> None:
        phases.append(prepare(file, folder, market).phases["seconds"].groupby(level=0, sort=False).sum())

    clocks = in_turns({"prepare": ours, "polars": partial(with_packages, file, folder, first)}, repeats)
    least = pd.concat(phases, axis=1).min(axis=1)
    print_json(
        bench="pipeline phases", side="prepare", **facts, seconds={name: digits(x, 3) for name, x in least.items()}
    )
    shared = [sum(one[name] for name in one.index if name.split()[0] in SHARED) for one in phases]
    for side, taken in clocks.items():
        print_json(
            bench="pipeline", side=side, **facts, **rated(taken, facts["rows"]), **times(taken, clocks["prepare"])
        )
    walls = {side: digits(best(taken).wall / min(shared), 3) for side, taken in clocks.items()}
    print_json(bench="pipeline, shared steps", **facts, wall_s=digits(min(shared)), times_shared_wall=walls)


def every(file: Path, folder: Path, market: MarketSpec, repeats: int, facts: dict) -> None:
    """Time `prepare` with every column that the library has."""
    facts = facts | {"columns": len(feature_column_names(market, EVERY))}
    taken = [timed(partial(prepare, file, folder, market, EVERY))[1] for _ in range(repeats)]
    print_json(bench="pipeline, every column", side="prepare", **facts, **rated(taken, facts["rows"]))


def peak(side: str, file: Path, folder: Path, market: MarketSpec, imported: int, facts: dict) -> None:
    """Report the memory of one run of one side above its imports; in a process of its own."""
    with peak_memory() as found:
        prepare(file, folder, market) if side == "prepare" else with_packages(file, folder, 5000)
    matrix, used = facts["rows"] * facts["columns"] * 4, found["bytes"] - imported
    sizes = {"matrix_gb": digits(matrix / 1e9), "peak_gb": digits(used / 1e9), "times_matrix": digits(used / matrix, 3)}
    print_json(bench="pipeline peak", side=side, **facts, **sizes)


def peaks(file: Path, folder: Path, symbol: str | None) -> None:
    """Run `peak` for every side, and for `prepare` with half of the bars."""
    half = folder / "half.parquet"
    bars = pd.read_parquet(file)
    bars.iloc[: len(bars) // 2].to_parquet(half)
    for side, path in (("prepare", half), *((side, file) for side in SIDES)):
        options = ["--data", str(path), *(["--symbol", symbol] if symbol else []), "--peak", side]
        subprocess.run([sys.executable, "-m", "benchmarks.pipeline", *options], check=True)


def growth(folder: Path, repeats: int, most: int) -> None:
    """Fit the slope of log time on log rows."""
    counts = [count for count in (500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 14_000_000) if count <= most]
    counts = counts if len(counts) > 1 else [most // 2, most]
    bars = market_bars(counts[-1])
    for n in counts:
        bars.iloc[:n].reset_index().to_parquet(folder / f"{n}.parquet")
    del bars
    calls = {str(n): partial(prepare, folder / f"{n}.parquet", folder, MADE_UP, NARROW) for n in counts}
    found = {n: seconds(clocks) for n, clocks in in_turns(calls, repeats).items()}
    slopes = {
        f"slope_{clock}": digits(float(np.polyfit(np.log(counts), np.log([f[clock] for f in found.values()]), 1)[0]), 3)
        for clock in ("wall_s", "cpu_s")
    }
    columns = len(feature_column_names(MADE_UP, NARROW))
    print_json(bench="pipeline growth", columns=columns, **slopes, seconds={n: f["wall_s"] for n, f in found.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_500_000, help="of a synthetic market")
    parser.add_argument("--data", help="a Parquet file of one-minute bars instead")
    parser.add_argument("--symbol", help="symbol of that file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS[:-1], help="growth runs when asked for")
    parser.add_argument("--peak", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    imported = psutil.Process().memory_info().rss
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        if options.data and not options.symbol:
            file, market, rows = Path(options.data), MADE_UP, len(pd.read_parquet(options.data, columns=["close"]))
        else:
            bars, market = (
                file_bars(options.data, options.symbol) if options.data else (market_bars(options.rows), MADE_UP)
            )
            file, rows = folder / "bars.parquet", len(bars)
            bars[list(COLUMNS)].reset_index().to_parquet(file)
            del bars
        facts = {"market": market.symbol, "rows": rows, "columns": len(feature_column_names(market, SPEC))}
        if options.peak:
            peak(options.peak, file, folder, market, imported, facts)
            return
        parts = {
            "compare": partial(compare, file, folder, market, options.repeats, facts),
            "every": partial(every, file, folder, market, options.repeats, facts),
            "peak": partial(peaks, file, folder, options.symbol),
            "growth": partial(growth, folder, options.repeats, 4 * options.rows),
        }
        few = folder / "few.parquet"
        pd.read_parquet(file).iloc[:FEW].to_parquet(few)
        prepare(few, folder, market, EVERY)  # kernels are compiled before a clock runs
        for part in options.only:
            parts[part]()


if __name__ == "__main__":
    main()
