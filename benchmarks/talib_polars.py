"""The peer of `benchmarks.pipeline`: momentum and volatility columns by TA-Lib, numpy and polars, on three frames.

TA-Lib wherever it has the function or the running sum it is made of, which is faster than polars and pandas; numpy in
between, in two threads, since both let go of the interpreter while they work.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("POLARS_MAX_THREADS", "2")

import numpy as np
import polars as pl
import talib

FLOOR = 1e-6
THREADS = 2
PRICES = ("open", "high", "low", "close")


def table(bars) -> pl.DataFrame:
    """The bars as polars holds them."""
    made = pl.DataFrame({"timestamp": bars.index.asi8} | {name: bars[name].to_numpy() for name in PRICES})
    return made.with_columns(pl.col("timestamp").cast(pl.Datetime("ns")).set_sorted())


def features(bars: pl.DataFrame, frames: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Column name -> float32[N] of one-minute bars and of coarse frames joined as of the end of each minute."""
    with ThreadPoolExecutor(THREADS) as pool:
        base = Series(*(bars[name].to_numpy() for name in PRICES), pool)
        jobs = [pool.submit(momentum, base, False), pool.submit(volatility, base, False)]
        jobs += [pool.submit(_on_frame, bars, minutes) for minutes in frames]
        return {name: column for job in jobs for name, column in job.result().items()}


def fit(columns: dict[str, np.ndarray], first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """(median, quartile distance) of each column over rows [first, stop), by selection instead of sorting."""

    def three(column: np.ndarray) -> np.ndarray:
        return np.percentile(column[first:stop], (25, 50, 75))

    with ThreadPoolExecutor(THREADS) as pool:
        low, middle, high = np.array(list(pool.map(three, columns.values()))).T
    return middle, high - low


def write(columns: dict[str, np.ndarray], path: str) -> None:
    pl.DataFrame(columns).write_parquet(path, compression="uncompressed", statistics=False)


class Series:
    """Series that several columns share; float64[N] each."""

    def __init__(self, open_, high, low, close, pool: ThreadPoolExecutor | None = None):
        run = pool.map if pool else map
        self.open, self.high, self.low, self.close = open_, high, low, close
        self.log_close = np.log(close)
        self.ret = difference(self.log_close, 1)
        span, size = talib.TRANGE(high, low, close), np.abs(self.ret)
        calls = (
            lambda: talib.ATR(high, low, close, 14), lambda: deviation(self.ret, 24), lambda: deviation(self.ret, 48),
            lambda: talib.STDDEV(close, 20), lambda: talib.MAX(high, 14), lambda: talib.MIN(low, 14),
            lambda: talib.MAX(high, 48), lambda: talib.MIN(low, 48), lambda: talib.SUM(span, 14),
        )  # fmt: skip
        self.span, self.size = span, size
        made = list(run(lambda call: call(), calls))
        self.atr, self.dev_24, self.dev_48, self.std_20, self.top_14, self.bottom_14, *made = made
        self.top_48, self.bottom_48, self.path_14 = made


def momentum(s: Series, coarse: bool) -> dict[str, np.ndarray]:
    high, low, close, atr = s.high, s.low, s.close, s.atr
    out: dict[str, np.ndarray] = {}

    def put(name: str, values: np.ndarray) -> None:
        out[name] = values.astype(np.float32)

    for n in (1, 4, 12):
        put(f"return_{n}", difference(s.log_close, n) / (s.dev_48 * math.sqrt(n)))
    put("rsi_14", talib.RSI(close, 14))
    line, _, histogram = talib.MACD(close)
    put("macd_12_26", line / atr)
    put("macd_histogram_9", histogram / atr)
    put("adx_14", talib.ADX(high, low, close, 14))
    put("di_14", talib.PLUS_DI(high, low, close, 14) - talib.MINUS_DI(high, low, close, 14))
    put("cci_20", talib.CCI(high, low, close, 20))
    place = 100 * ratio(close - s.bottom_14, s.top_14 - s.bottom_14, 0.5)
    put("stochastic_14", place)
    path = talib.SUM(np.abs(difference(close, 1)), 24)
    put("efficiency_24", ratio(difference(close, 24), path, 0.0))
    turned = np.full(len(close), np.nan)
    turned[1:] = np.abs(high[1:] - low[:-1]) - np.abs(low[1:] - high[:-1])
    put("vortex_14", ratio(talib.SUM(turned, 14), s.path_14, 0.0))
    if coarse:
        return out
    for n in (2, 24, 48):
        put(f"return_{n}", difference(s.log_close, n) / (s.dev_48 * math.sqrt(n)))
    put("rsi_5", talib.RSI(close, 5))
    put("stochastic_slow_14_3", talib.SMA(place, 3))
    put("channel_48", 100 * ratio(close - s.bottom_48, s.top_48 - s.bottom_48, 0.5))
    put("ultimate_7_14_28", talib.ULTOSC(high, low, close, 7, 14, 28))
    put("aroon_25", talib.AROONOSC(high, low, 25))
    slope, spread = talib.LINEARREG_SLOPE(close, 24), (24 * 24 - 1) / 12
    put("slope_24", slope / atr)
    put("slope_fit_24", np.clip(ratio(slope * np.abs(slope) * spread, talib.VAR(close, 24), 0.0), -1, 1))
    ema_20 = talib.EMA(close, 20)
    put("ema_gap_20", (close - ema_20) / atr)
    put("ema_gap_20_50", (ema_20 - talib.EMA(close, 50)) / atr)
    put("streak", streak(close))
    return out


def volatility(s: Series, coarse: bool) -> dict[str, np.ndarray]:
    high, low, close, atr, ret, size = s.high, s.low, s.close, s.atr, s.ret, s.size
    out: dict[str, np.ndarray] = {}

    def put(name: str, values: np.ndarray) -> None:
        out[name] = values.astype(np.float32)

    squares = size * size
    realised, mean = talib.SUM(squares, 48), talib.SMA(close, 20)
    log_open, log_high, log_low = np.log(s.open), np.log(high), np.log(low)
    reach = log_high - log_low
    reach *= reach
    parkinson = root_mean(reach / (4 * math.log(2)), 24)
    put("natr_14", talib.NATR(high, low, close, 14))
    put("bollinger_place_20", ratio(close - mean, 4 * s.std_20, 0.0))
    put("bollinger_width_20", 4 * s.std_20 / mean)
    before = lag(close, 14)
    put("choppiness_14", np.log(ratio(s.path_14, np.maximum(s.top_14, before) - np.minimum(s.bottom_14, before), 1.0)))
    out["choppiness_14"] /= np.float32(math.log(14))
    falls = np.where(ret > 0, 0.0, squares)
    put("downside_share_48", ratio(talib.SUM(falls, 48), realised, 0.5) - 0.5)
    put("parkinson_ratio_24", np.log(parkinson / s.dev_24))
    put("deviation_ratio_6_48", np.log(deviation(ret, 6) / s.dev_48))
    if coarse:
        return out
    up, down, body = log_high - log_open, log_low - log_open, s.log_close - log_open
    garman_klass = root_mean(0.5 * reach - (2 * math.log(2) - 1) * body * body, 24)
    inner = up * (up - body) + down * (down - body)
    put("garman_klass_ratio_24", np.log(garman_klass / parkinson))
    put("rogers_satchell_ratio_24", np.log(root_mean(inner, 24) / garman_klass))
    k, jump = 0.34 / (1.34 + 25 / 23), log_open - lag(s.log_close, 1)
    yang_zhang = 24 / 23 * (talib.VAR(jump, 24) + k * talib.VAR(body, 24)) + (1 - k) / 24 * talib.SUM(inner, 24)
    put("yang_zhang_ratio_24", np.log(np.sqrt(np.maximum(yang_zhang, FLOOR**2)) / s.dev_24))
    put("deviation_ratio_24_96", np.log(s.dev_24 / deviation(ret, 96)))
    before = lag(size, 1)
    put("jump_share_48", 1 - ratio(math.pi / 2 * 48 / 47 * talib.SUM(size * before, 47), realised, 1.0))
    put("range_surprise_14", s.span / lag(atr, 1) - 1)
    put("range_dispersion_48", talib.STDDEV(s.span, 48) / talib.SMA(s.span, 48))
    for name, values in zip(("skew_48", "kurtosis_48"), moments(ret, squares, realised, 48), strict=True):
        put(name, values)
    least, most = np.minimum(before, size), np.maximum(before, size)
    middle = np.maximum(least, np.minimum(most, lag(size, 2)))
    scale = math.pi / (6 - 4 * math.sqrt(3) + math.pi) * 48 / 46
    put("median_jump_share_48", 1 - ratio(scale * talib.SUM(middle * middle, 46), realised, 1.0))
    put("downside_share_12", ratio(talib.SUM(falls, 12), talib.SUM(squares, 12), 0.5) - 0.5)
    smooth = exponential(squares, 0.06)
    put("ewma_ratio_48", np.log(np.sqrt(np.maximum(smooth, FLOOR**2)) / s.dev_48))
    dev_12 = deviation(ret, 12)
    put("deviation_dispersion_12_48", talib.STDDEV(dev_12, 48) / talib.SMA(dev_12, 48))
    put("squeeze_20", 2 / 1.5 * s.std_20 / atr - 1)
    put("channel_width_48", (s.top_48 - s.bottom_48) / (math.sqrt(48) * atr) - 1)
    whole = high - low
    put("range_asymmetry_24", ratio(talib.SUM((high - s.open) - (s.open - low), 24), talib.SUM(whole, 24), 0.0))
    least = talib.MIN(atr, 96)
    put("atr_place_96", ratio(atr - least, talib.MAX(atr, 96) - least, 0.5) - 0.5)
    put("leverage_48", talib.CORREL(lag(ret, 1), size, 48))
    put("clustering_48", talib.CORREL(before, size, 48))
    return out


def _on_frame(bars: pl.DataFrame, minutes: int) -> dict[str, np.ndarray]:
    column = {name: pl.col(name) for name in PRICES}
    grouped = bars.lazy().group_by_dynamic("timestamp", every=f"{minutes}m").agg(
        column["open"].first(), column["high"].max(), column["low"].min(), column["close"].last()
    )  # fmt: skip
    known = (pl.col("timestamp") + pl.duration(minutes=minutes)).alias("known").set_sorted()
    coarse = grouped.with_columns(known).with_row_index("row").collect()
    base = bars.lazy().select(known=(pl.col("timestamp") + pl.duration(minutes=1)).set_sorted())
    rows = base.join_asof(coarse.lazy().select("known", "row"), on="known").select("row").collect()["row"]
    rows = rows.fill_null(len(coarse)).to_numpy()
    series = Series(*(coarse[name].to_numpy() for name in PRICES))
    made = momentum(series, True) | volatility(series, True)
    return {f"{name}@{minutes}m": np.append(values, np.float32(np.nan))[rows] for name, values in made.items()}


def difference(x: np.ndarray, n: int) -> np.ndarray:
    out = np.full(len(x), np.nan)
    np.subtract(x[n:], x[:-n], out=out[n:])
    return out


def lag(x: np.ndarray, n: int) -> np.ndarray:
    out = np.full(len(x), np.nan)
    out[n:] = x[:-n]
    return out


def ratio(a: np.ndarray, b: np.ndarray, empty: float) -> np.ndarray:
    out = np.full(len(a), empty)
    return np.divide(a, b, out=out, where=b != 0)


def deviation(ret: np.ndarray, n: int) -> np.ndarray:
    out = talib.STDDEV(ret, n)
    return np.maximum(out, FLOOR, out=out)


def root_mean(variance: np.ndarray, n: int) -> np.ndarray:
    out = talib.SMA(variance, n)
    np.maximum(out, FLOOR**2, out=out)
    return np.sqrt(out, out=out)


def moments(x: np.ndarray, squares: np.ndarray, second: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(skewness, excess kurtosis) of windows, from sums of powers."""
    m1, m2, cubes = talib.SMA(x, n), second / n, squares * x
    m3, m4 = talib.SMA(cubes, n), talib.SMA(squares * squares, n)
    square = m1 * m1
    variance = m2 - square
    third = m3 - 3 * m1 * m2 + 2 * square * m1
    fourth = m4 - 4 * m1 * m3 + 6 * square * m2 - 3 * square * square
    return ratio(third, variance * np.sqrt(variance), 0.0), ratio(fourth, variance * variance, 3.0) - 3


def exponential(x: np.ndarray, alpha: float) -> np.ndarray:
    """polars passes over what is missing at the start; TA-Lib's exponential means take whole lengths only."""
    made = pl.Series(x).fill_nan(None).ewm_mean(alpha=alpha, adjust=False, ignore_nulls=True)
    return made.to_numpy()


def streak(close: np.ndarray) -> np.ndarray:
    side = np.sign(difference(close, 1))
    rows = np.arange(len(close))
    begins = np.flatnonzero(side[1:] != side[:-1]) + 1
    began = np.zeros(len(close), np.int64)
    began[begins] = begins
    return side * (rows - np.maximum.accumulate(began) + 1)
