"""Momentum and volatility columns on three frames with plain pandas and scikit-learn, as a careful user writes them."""

import math

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.preprocessing import RobustScaler

FLOOR = 1e-6
BLOCK = 65_536
RULES = {"open": "first", "high": "max", "low": "min", "close": "last"}


def features(bars: pd.DataFrame, frames: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Column name -> float32[N] of one-minute bars and of coarse frames joined as of the end of each minute."""
    columns = _float32(indicators(bars, coarse=False))
    known = pd.DataFrame({"known": bars.index + pd.Timedelta(minutes=1)})
    for minutes in frames:
        coarse = bars.resample(f"{minutes}min", origin="epoch").agg(RULES).dropna()
        table = pd.DataFrame(_float32(indicators(coarse, coarse=True)))
        table["known"] = coarse.index + pd.Timedelta(minutes=minutes)
        joined = pd.merge_asof(known, table, on="known")
        columns |= {f"{name}@{minutes}m": joined[name].to_numpy() for name in joined if name != "known"}
    return columns


def fit(columns: dict[str, np.ndarray], first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """(median, quartile distance) of each column over rows [first, stop)."""
    scaler = RobustScaler().fit(pd.DataFrame({name: column[first:stop] for name, column in columns.items()}))
    return scaler.center_, scaler.scale_


def write(columns: dict[str, np.ndarray], path: str) -> None:
    # Whole pages at once, which pyarrow writes a fifth faster than its small default batches.
    plain = {"compression": None, "use_dictionary": False, "write_statistics": False}
    pd.DataFrame(columns, copy=False).to_parquet(path, **plain, write_batch_size=BLOCK, data_page_size=4 * BLOCK)


def indicators(bars: pd.DataFrame, *, coarse: bool) -> dict[str, pd.Series]:
    high, low, close, before = bars["high"], bars["low"], bars["close"], bars["close"].shift()
    log_close = np.log(close)
    ret = log_close.diff()
    span = (np.maximum(high, before) - np.minimum(low, before)).where(before.notna())
    atr = _wilder(span, 14)
    shared = {"ret": ret, "span": span, "atr": atr, "log_close": log_close}
    shared |= {f"dev_{n}": _deviation(ret, n) for n in (24, 48)}
    shared |= {"std_20": close.rolling(20).std(ddof=0), "top_14": high.rolling(14).max()}
    shared["bottom_14"] = low.rolling(14).min()
    if not coarse:
        shared |= {"top_48": high.rolling(48).max(), "bottom_48": low.rolling(48).min()}
    return momentum(bars, shared, coarse) | volatility(bars, shared, coarse)


def momentum(bars: pd.DataFrame, shared: dict[str, pd.Series], coarse: bool) -> dict[str, pd.Series]:
    high, low, close = bars["high"], bars["low"], bars["close"]
    span, atr, log_close = (shared[name] for name in ("span", "atr", "log_close"))
    change, up, down = close.diff(), high.diff(), -low.diff()
    out = {f"return_{n}": log_close.diff(n) / (shared["dev_48"] * math.sqrt(n)) for n in (1, 4, 12)}
    gain, loss = change.clip(lower=0), (-change).clip(lower=0)
    out["rsi_14"] = _rsi(gain, loss, 14)
    ema = {n: close.ewm(span=n, adjust=False).mean() for n in ((12, 26) if coarse else (12, 26, 20, 50))}
    line = ema[12] - ema[26]
    out["macd_12_26"] = line / atr
    out["macd_histogram_9"] = (line - line.ewm(span=9, adjust=False).mean()) / atr
    plus = _wilder(up.where((up > down) & (up > 0), 0.0), 14)
    minus = _wilder(down.where((down > up) & (down > 0), 0.0), 14)
    out["adx_14"] = _wilder(100 * _ratio((plus - minus).abs(), plus + minus, 0.0), 14)
    out["di_14"] = 100 * (plus - minus) / atr
    out["cci_20"] = _cci((high + low + close) / 3, 20)
    place = 100 * _ratio(close - shared["bottom_14"], shared["top_14"] - shared["bottom_14"], 0.5)
    out["stochastic_14"] = place
    out["efficiency_24"] = _ratio(close.diff(24), change.abs().rolling(24).sum(), 0.0)
    vortex = (high - low.shift()).abs() - (low - high.shift()).abs()
    out["vortex_14"] = _ratio(vortex.rolling(14).sum(), span.rolling(14).sum(), 0.0)
    if coarse:
        return out
    out |= {f"return_{n}": log_close.diff(n) / (shared["dev_48"] * math.sqrt(n)) for n in (2, 24, 48)}
    out["rsi_5"] = _rsi(gain, loss, 5)
    out["stochastic_slow_14_3"] = place.rolling(3).mean()
    out["channel_48"] = 100 * _ratio(close - shared["bottom_48"], shared["top_48"] - shared["bottom_48"], 0.5)
    pressure, ultimate = close - np.minimum(low, close.shift()), 0.0
    for n, weight in ((7, 4), (14, 2), (28, 1)):
        ultimate += 100 / 7 * weight * _ratio(pressure.rolling(n).sum(), span.rolling(n).sum(), 0.5)
    out["ultimate_7_14_28"] = ultimate
    out["aroon_25"] = 4 * (_bars_since_max(-low, 26) - _bars_since_max(high, 26))
    out["slope_24"], out["slope_fit_24"] = _line(close, atr, 24)
    out["ema_gap_20"], out["ema_gap_20_50"] = (close - ema[20]) / atr, (ema[20] - ema[50]) / atr
    side = np.sign(change)
    run = (side != side.shift()).cumsum()
    out["streak"] = side * (side.groupby(run).cumcount() + 1)
    return out


def volatility(bars: pd.DataFrame, shared: dict[str, pd.Series], coarse: bool) -> dict[str, pd.Series]:
    high, low, close = bars["high"], bars["low"], bars["close"]
    ret, span, atr, dev_24, dev_48 = (shared[name] for name in ("ret", "span", "atr", "dev_24", "dev_48"))
    squares = ret**2
    realised, mean, std = squares.rolling(48).sum(), close.rolling(20).mean(), shared["std_20"]
    reach = np.log(high / low)
    parkinson = _root_mean(reach**2 / (4 * math.log(2)), 24)
    out = {"natr_14": 100 * atr / close}
    out["bollinger_place_20"] = _ratio(close - mean, 4 * std, 0.0)
    out["bollinger_width_20"] = 4 * std / mean
    longest = np.maximum(shared["top_14"], close.shift(14)) - np.minimum(shared["bottom_14"], close.shift(14))
    out["choppiness_14"] = np.log(_ratio(span.rolling(14).sum(), longest, 1.0)) / math.log(14)
    falls = squares.where(ret < 0, 0.0)
    out["downside_share_48"] = _ratio(falls.rolling(48).sum(), realised, 0.5) - 0.5
    out["parkinson_ratio_24"] = np.log(parkinson / dev_24)
    out["deviation_ratio_6_48"] = np.log(_deviation(ret, 6) / dev_48)
    if coarse:
        return out
    size, body = ret.abs(), np.log(close / bars["open"])
    up, down = np.log(high / bars["open"]), np.log(low / bars["open"])
    garman_klass = _root_mean(0.5 * reach**2 - (2 * math.log(2) - 1) * body**2, 24)
    rogers_satchell = up * (up - body) + down * (down - body)
    out["garman_klass_ratio_24"] = np.log(garman_klass / parkinson)
    out["rogers_satchell_ratio_24"] = np.log(_root_mean(rogers_satchell, 24) / garman_klass)
    k = 0.34 / (1.34 + 25 / 23)
    jump = np.log(bars["open"] / close.shift()).rolling(24).var() + k * body.rolling(24).var()
    yang_zhang = np.sqrt((jump + (1 - k) * rogers_satchell.rolling(24).mean()).clip(lower=FLOOR**2))
    out["yang_zhang_ratio_24"] = np.log(yang_zhang / dev_24)
    out["deviation_ratio_24_96"] = np.log(dev_24 / _deviation(ret, 96))
    bipower = math.pi / 2 * 48 / 47 * (size * size.shift()).rolling(47).sum()
    out["jump_share_48"] = 1 - _ratio(bipower, realised, 1.0)
    out["range_surprise_14"] = span / atr.shift() - 1
    out["range_dispersion_48"] = span.rolling(48).std(ddof=0) / span.rolling(48).mean()
    out["skew_48"] = ret.rolling(48).skew() * 46 / math.sqrt(48 * 47)
    out["kurtosis_48"] = (ret.rolling(48).kurt() * 46 * 45 / 47 - 6) / 49
    one, two, three = size, size.shift(), size.shift(2)
    middle = np.maximum(np.minimum(one, two), np.minimum(np.maximum(one, two), three)) ** 2
    scale = math.pi / (6 - 4 * math.sqrt(3) + math.pi) * 48 / 46
    out["median_jump_share_48"] = 1 - _ratio(scale * middle.rolling(46).sum(), realised, 1.0)
    out["downside_share_12"] = _ratio(falls.rolling(12).sum(), squares.rolling(12).sum(), 0.5) - 0.5
    smooth = np.sqrt(squares.ewm(alpha=0.06, adjust=False).mean().clip(lower=FLOOR**2))
    out["ewma_ratio_48"] = np.log(smooth / dev_48)
    dev_12 = _deviation(ret, 12)
    out["deviation_dispersion_12_48"] = dev_12.rolling(48).std(ddof=0) / dev_12.rolling(48).mean()
    out["squeeze_20"] = 2 * std / (1.5 * atr) - 1
    out["channel_width_48"] = (shared["top_48"] - shared["bottom_48"]) / (math.sqrt(48) * atr) - 1
    above = ((high - bars["open"]) - (bars["open"] - low)).rolling(24).sum()
    out["range_asymmetry_24"] = _ratio(above, (high - low).rolling(24).sum(), 0.0)
    least = atr.rolling(96).min()
    out["atr_place_96"] = _ratio(atr - least, atr.rolling(96).max() - least, 0.5) - 0.5
    out["leverage_48"] = size.rolling(48).corr(ret.shift(), ddof=0).fillna(0.0)
    out["clustering_48"] = size.rolling(48).corr(size.shift(), ddof=0).fillna(0.0)
    return out


def _float32(columns: dict[str, pd.Series]) -> dict[str, np.ndarray]:
    return {name: column.to_numpy(np.float32) for name, column in columns.items()}


def _ratio(a: pd.Series, b: pd.Series, empty: float) -> pd.Series:
    return (a / b).mask(b == 0, empty)


def _wilder(x: pd.Series, n: int) -> pd.Series:
    return x.ewm(alpha=1 / n, adjust=False).mean()


def _rsi(gain: pd.Series, loss: pd.Series, n: int) -> pd.Series:
    up, down = _wilder(gain, n), _wilder(loss, n)
    return 100 * _ratio(up, up + down, 0.5)


def _deviation(ret: pd.Series, n: int) -> pd.Series:
    return ret.rolling(n).std(ddof=0).clip(lower=FLOOR)


def _root_mean(variance: pd.Series, n: int) -> pd.Series:
    return np.sqrt(variance.rolling(n).mean().clip(lower=FLOOR**2))


def _cci(typical: pd.Series, n: int) -> pd.Series:
    mean, moved = typical.rolling(n).mean(), np.full(len(typical), np.nan)
    windows = sliding_window_view(typical.to_numpy(), n)
    for begin in range(0, len(windows), BLOCK):
        part = windows[begin : begin + BLOCK]
        centre = mean.to_numpy()[n - 1 + begin : n - 1 + begin + len(part), None]
        moved[n - 1 + begin : n - 1 + begin + len(part)] = np.abs(part - centre).mean(axis=1)
    return ((typical - mean) / (0.015 * moved)).mask(moved < 1e-12 * typical, 0.0)


def _bars_since_max(x: pd.Series, n: int) -> pd.Series:
    """Rows since the largest of n, the latest of equals."""
    windows, out = sliding_window_view(x.to_numpy(), n)[:, ::-1], np.full(len(x), np.nan)
    for begin in range(0, len(windows), BLOCK):
        part = windows[begin : begin + BLOCK]
        out[n - 1 + begin : n - 1 + begin + len(part)] = part.argmax(axis=1)
    return pd.Series(out, x.index)


def _line(close: pd.Series, atr: pd.Series, n: int) -> tuple[pd.Series, pd.Series]:
    """(slope in ATRs, signed share of variance) of a line through n closes."""
    time = pd.Series(np.arange(len(close), dtype=float), close.index)
    together, spread = close.rolling(n).cov(time, ddof=0), (n * n - 1) / 12
    fit = _ratio(together * together.abs(), spread * close.rolling(n).var(ddof=0), 0.0)
    return together / (spread * atr), fit.clip(-1, 1)
