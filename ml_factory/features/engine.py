"""Feature engine for batch and streaming: bars of a frame in, in chunks or singly, the families' columns out.

A family sees a block: the HISTORY previous rows, then the rows to write. Windows are computed from the history alone,
recursions from numbers that the block keeps: so any division into blocks, down to single bars, gives the same bits, and
a prefix of a file gives the bits of the whole. The state between two blocks is the last HISTORY rows of the bars and
the kept numbers: plain arrays, saved and restored to the bit.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import numpy as np

from ml_factory.data.resample import ResampledBars, empty_bars
from ml_factory.data.sessions import MarketSpec
from ml_factory.features.windows import FLOOR, exponential_mean, lag, window_std, window_sum

HISTORY = 256
"""Rows that the windows of a column may look back, all its nested windows together."""
CHUNK = 8192
"""Rows in a block at most: columns stay in the processor's second cache, and calls of NumPy are few."""


class Block:
    """The HISTORY previous rows, then the rows to write; arrays are float64[M] and NaN before the first bar.

    open, high, low, close, volume : the bars; volume is None where the market has none
    session : int64[M], the exchange day; -1 before the first bar
    start, known_at : int64 ns, of the rows to write alone
    family : the name of the family that reads the block
    coarse : a family yields its shorter list of columns
    calendar : the market's
    ret : log return of one bar
    span : true range
    atr : Wilder's mean of 14 true ranges, at least FLOOR of the price
    """

    def __init__(
        self, bars: ResampledBars, before: np.ndarray, sessions: np.ndarray, memory: dict[str, np.ndarray],
        market: MarketSpec, coarse: bool,
    ):  # fmt: skip
        volume = np.full(len(bars), np.nan) if bars.volume is None else bars.volume
        self.bars_KM = np.concatenate([before, [bars.open, bars.high, bars.low, bars.close, volume]], axis=1)
        self.open, self.high, self.low, self.close, self.volume = self.bars_KM
        self.volume = self.volume if market.has_volume else None
        self.session = np.concatenate([sessions, bars.session])
        self.start, self.known_at, self.coarse, self.calendar = bars.start, bars.known_at, coarse, market.calendar
        self.family, self._memory, self._known = "", memory, {}
        self.log_open, self.log_high, self.log_low, self.log_close = np.log(self.bars_KM[:4])
        closed = lag(self.close)
        self.ret = self.log_close - lag(self.log_close)
        # A missing close before the first bar makes the true range missing too.
        self.span = np.maximum(self.high, closed) - np.minimum(self.low, closed)
        past = self.memory("atr rows", *[np.nan] * HISTORY)  # windows look back on it
        self.atr = np.maximum(self.wilder("atr", self.span, 14), FLOOR * self.close)
        self.atr[:HISTORY] = past
        past[:] = self.atr[-HISTORY:]

    def memory(self, name: str, *initial: float) -> np.ndarray:
        """Return the numbers that a recursion keeps from one block to the next, to be changed in place.

        name : unique in its family. initial : the numbers before the first bar
        """
        key = f"{self.family}.{name}"
        if key not in self._memory:
            self._memory[key] = np.array(initial, np.float64)
        return self._memory[key]

    def mean(self, name: str, x: np.ndarray, n: int, alpha: float) -> np.ndarray:
        """Return `windows.exponential_mean` of x, kept as `name`; NaN in the history."""
        return exponential_mean(x, HISTORY, float(n), alpha, self.memory(name, 0.0, 0.0))

    def wilder(self, name: str, x: np.ndarray, n: int) -> np.ndarray:
        """Return Wilder's mean of n values."""
        return self.mean(name, x, n, 1.0 / n)

    def ema(self, name: str, x: np.ndarray, n: int) -> np.ndarray:
        """Return the exponential mean of span n."""
        return self.mean(name, x, n, 2.0 / (n + 1.0))

    def return_std(self, n: int) -> np.ndarray:
        """Return the population standard deviation of the last n log returns, at least FLOOR."""
        return self._once(("return std", n), lambda: np.maximum(window_std(self.ret, n), FLOOR))

    def sum(self, name: str, n: int) -> np.ndarray:
        """Return the sum of the last n values of a series of the block, such as "volume" or "span"."""
        return self._once((name, n), lambda: window_sum(getattr(self, name), n))

    def _once(self, key: tuple[str, int], make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


Column = tuple[str, np.ndarray]
FeatureFamily = Callable[[Block], Iterator[Column]]
"""A family yields (name, column) in order; the first columns alone where the block is `coarse`. A column has the rows
to write last; what stands before them is not read."""


class FeatureEngine:
    """The columns of some families on one frame.

    names : the columns
    push : bars -> float64[n, F] (or into `out`), one row a bar, past only; NaN until a column's window is full
    """

    def __init__(self, market: MarketSpec, families: Mapping[str, FeatureFamily], *, coarse: bool):
        self.market, self.families, self.coarse = market, families, coarse
        self._prices = np.full((5, HISTORY), np.nan)
        self._session = np.full(HISTORY, -1, np.int64)
        self._memory: dict[str, np.ndarray] = {}
        self.names = [name for family in families.values() for name in column_names(family, market, coarse)]

    def push(self, bars: ResampledBars, out: np.ndarray | None = None) -> np.ndarray:
        """Return values of the new bars, which follow those pushed before.

        out : [n, F] of float32 or float64 to write into
        """
        if out is None:
            out = np.empty((len(bars), len(self.names)))
        for begin in range(0, len(bars), CHUNK):
            part = bars.part(begin, begin + CHUNK)
            # Columns a power of two apart would drive each other out of the cache.
            values = np.empty((len(self.names), len(part) + 16), out.dtype)[:, : len(part)]
            with np.errstate(all="ignore"):  # bars before the first are missing; ratios of nothing are replaced
                block = Block(part, self._prices, self._session, self._memory, self.market, self.coarse)
                for row, (_, column) in zip(values, self._columns(block), strict=True):
                    row[:] = column[-len(part) :]
            out[begin : begin + CHUNK] = values.T
            self._prices, self._session = block.bars_KM[:, -HISTORY:].copy(), block.session[-HISTORY:].copy()
        return out

    def _columns(self, block: Block) -> Iterator[Column]:
        for name, family in self.families.items():
            block.family = name
            yield from family(block)

    def get_state(self) -> dict:
        """Return plain numbers and arrays, from which an equal engine continues to the bit."""
        sizes = {name: len(numbers) for name, numbers in self._memory.items()}
        memory = np.concatenate([*self._memory.values(), np.empty(0)])  # one array: each costs a state's writer time
        return {"prices": self._prices.copy(), "session": self._session.copy(), "sizes": sizes, "memory": memory}

    def load_state(self, state: Mapping) -> None:
        """Continue from a state of `get_state`."""
        self._prices, self._session = state["prices"].copy(), state["session"].copy()
        parts = np.split(state["memory"], np.cumsum(list(state["sizes"].values()), dtype=int))
        self._memory = {name: part.copy() for name, part in zip(state["sizes"], parts, strict=False)}


@lru_cache(maxsize=512)
def column_names(family: FeatureFamily, market: MarketSpec, coarse: bool) -> tuple[str, ...]:
    """Return the names of a family's columns, read off a block without bars."""
    with np.errstate(all="ignore"):
        block = Block(empty_bars(), np.full((5, HISTORY), np.nan), np.full(HISTORY, -1, np.int64), {}, market, coarse)
        return tuple(name for name, _ in family(block))


def compute_family_columns(
    family: FeatureFamily, bars: ResampledBars, market: MarketSpec, coarse: bool
) -> dict[str, np.ndarray]:
    """Return column name -> float64[N] of one family on a whole frame."""
    engine = FeatureEngine(market, {"": family}, coarse=coarse)
    return dict(zip(engine.names, engine.push(bars).T, strict=True))
