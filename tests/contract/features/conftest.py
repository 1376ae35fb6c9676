"""Bars to hold the features against: real ones, and rough ones where nothing trades, nothing moves, or all jumps."""

import numpy as np
import pandas as pd
import pytest

from tests.contract.doors import MarketSpec, ResampledBars, engine, resample_bars

MINUTE_NS = 60_000_000_000
MARKETS = {
    "ES": MarketSpec("ES", "cme", 0.25, False),
    "SPY": MarketSpec("SPY", "us_equity", 0.01, True),
    "XAUUSD": MarketSpec("XAUUSD", "cme", 0.01, True),
    "NQ": MarketSpec("NQ", "cme", 0.25, False),
    "BTCUSD": MarketSpec("BTCUSD", "24h", None, True),
}


@pytest.fixture(scope="session")
def markets() -> dict[str, MarketSpec]:
    return MARKETS


@pytest.fixture(scope="session")
def real_bars(shared_data):
    """symbol -> (one-minute bars, market); read once."""
    kept = {}

    def read(symbol: str) -> tuple[pd.DataFrame, MarketSpec]:
        if symbol not in kept:
            bars = pd.read_parquet(shared_data / "bars" / f"{symbol}_1m.parquet").set_index("timestamp").sort_index()
            bars.index = bars.index.as_unit("ns")
            bars = bars[~bars.index.duplicated()]
            kept[symbol] = bars if MARKETS[symbol].has_volume else bars.drop(columns="volume"), MARKETS[symbol]
        return kept[symbol]

    return read


@pytest.fixture(scope="session")
def real_frame(real_bars):
    """(symbol, minutes) -> the frame."""
    return lambda symbol, minutes: resample_bars(*real_bars(symbol), minutes)


def _frame(price: np.ndarray, volume: np.ndarray | None = None, *, seed: int = 0, spread: float = 1.0) -> ResampledBars:
    """Five-minute bars around given closes, 60 to a session; ranges of up to `spread` around open and close."""
    n = len(price)
    wobble = np.abs(np.random.default_rng(seed).normal(size=(2, n))).round(1) * spread
    opens = np.append(price[0], price[:-1])
    day, place = np.divmod(np.arange(n), 60)
    start = ((19_723 + day) * 1440 + 15 * 60 + place * 5) * MINUTE_NS
    high, low = np.maximum(opens, price) + wobble[0], np.minimum(opens, price) - wobble[1]
    session = (19_723 + day).astype(np.int32)
    return ResampledBars(5, start, start + 5 * MINUTE_NS, opens, high, low, price, volume, session, session)


@pytest.fixture(params=["synthetic", "real"])
def either_frame(request):
    """A function that returns a frame of (symbol, minutes): the synthetic one, and the real one where it is there."""
    if request.param == "real":
        return request.getfixturevalue("real_frame")
    rough = request.getfixturevalue("rough")
    return lambda symbol, minutes: rough


@pytest.fixture(scope="session")
def make_frame():
    """Frames by hand: see `_frame`."""
    return _frame


@pytest.fixture(scope="session")
def rough() -> ResampledBars:
    """Prices on a tick, with jumps, ties, one long dead stretch and hours without volume."""
    n, seed = 1200, 1
    rng = np.random.default_rng(seed)
    price = 100.0 + np.cumsum(rng.integers(-3, 4, n) * 0.25 + (rng.random(n) < 0.01) * rng.normal(0, 5, n).round(2))
    volume = rng.integers(0, 50, n).astype(float)
    dead = slice(500, 800)
    price[dead] = price[499]
    volume[dead] = 0.0
    volume[900:960] = 0.0
    frame = _frame(price, volume, seed=seed)
    frame.high[dead], frame.low[dead], frame.open[dead] = price[dead], price[dead], price[dead]
    return frame


@pytest.fixture(scope="session")
def check_columns():
    """Hold every column of a family, on base and coarse frames, against its twin."""

    def check(
        family, frame: ResampledBars, market: MarketSpec, references: dict, *, start: int = 300, known: tuple = ()
    ) -> None:
        """twins : column -> function of (frame, row) giving the value, or the whole column as an array.

        known : columns that another test holds against a library.
        """
        columns, coarse = (engine.compute_family_columns(family, frame, market, one) for one in (False, True))
        assert set(references) | set(known) == set(columns)
        assert set(coarse) <= set(columns)
        rows = np.unique(np.random.default_rng(7).integers(start, len(frame), 120))
        for name, reference in references.items():
            got = columns[name][rows]
            want = (
                reference[rows] if isinstance(reference, np.ndarray) else np.array([reference(frame, i) for i in rows])
            )
            scale = max(float(np.nanstd(columns[name][start:])), 1e-12)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * scale, err_msg=name)
        for name, column in coarse.items():
            np.testing.assert_array_equal(column, columns[name], err_msg=name)

    return check
