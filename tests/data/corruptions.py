"""Real bars spoiled in one named way at five random places, and what the report must say of it and no more.

Each injector takes a `Market` and a random generator and returns `Spoiled`: the table, where each of its rows came
from, and the (kind, row) pairs that the report must gain and lose.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd

from ml_factory.data.sessions import MINUTE_NS
from tests.data.real_markets import PLACES, PRICES, Market, Pair, Spoiled


def edited(table: pd.DataFrame, added: set[Pair]) -> Spoiled:
    return Spoiled(table, np.arange(len(table)), added)


def named(kind: str, rows) -> set[Pair]:
    return {(kind, int(row)) for row in rows}


def rearranged(table: pd.DataFrame, source: np.ndarray, fresh: pd.DataFrame, kinds: dict[str, np.ndarray]) -> Spoiled:
    """The table's rows in the order of `source`, -1 for the next row of `fresh`; `kinds` marks rows (bool[M])."""
    new = table.iloc[np.maximum(source, 0)].reset_index(drop=True)
    if len(fresh):
        new.loc[source < 0, fresh.columns] = fresh.to_numpy()
        new = new.astype(table.dtypes.to_dict())
    added = set().union(*(named(kind, np.flatnonzero(mask)) for kind, mask in kinds.items()))
    return Spoiled(new, source, added)


def dropped(market: Market, spans: list[tuple[int, int]], kind: str) -> Spoiled:
    """Without the rows of these spans [first, after); the row after each is named."""
    keep = np.ones(len(market.table), bool)
    for first, after in spans:
        keep[first:after] = False
    source = np.flatnonzero(keep)
    rows = np.searchsorted(source, [after for _, after in spans])
    lost = {("no_trade", after) for _, after in spans} & market.pairs  # a gap there was part of the hole
    return Spoiled(market.table.iloc[source].reset_index(drop=True), source, named(kind, rows), lost)


def copied(market: Market, rng: np.random.Generator, kind: str, change: Callable | None = None) -> Spoiled:
    places = market.places(rng)
    source = np.insert(np.arange(len(market.table)), np.array(places) + 1, -1)
    fresh = market.table.iloc[places].copy()
    if change is not None:
        change(fresh)
    return rearranged(market.table, source, fresh, {kind: source < 0})


def duplicate(market, rng):
    return copied(market, rng, "duplicate")


def conflict(market, rng):
    def other_close(rows):
        rows["close"] = np.where(rows["close"] == rows["high"], rows["low"], rows["high"])

    return copied(market, rng, "conflict", other_close)


def unsorted(market, rng):
    source = np.arange(len(market.table))
    places = market.places(rng)
    for row in places:
        source[[row, row + 1]] = row + 1, row
    return Spoiled(market.table.iloc[source].reset_index(drop=True), source, named("unsorted", np.array(places) + 1))


def one_cell(kind: str, column: str, value: Callable) -> Callable:
    """An injector that sets one cell a place: value(row of the table, market)."""

    def inject(market, rng):
        table, places = market.table.copy(), market.places(rng)
        for row in places:
            table.loc[row, column] = value(table.loc[row], market)
        return edited(table, named(kind, places))

    return inject


def off_tick(market, rng):
    table, places = market.table.copy(), market.places(rng)
    for row in places:
        table.loc[row, "high"] += 1.4 * market.quantum
    return edited(table, named("off_tick", places))


def steps(market: Market, row: int, moves: float) -> float:
    """So many mean moves of the day around this row, as a step of price in whole ticks."""
    close = market.table["close"].iloc[max(row - 400, 0) : row + 400]
    size = close.iloc[0] * np.expm1(moves * np.log(close).diff().abs().mean())
    return round(size / market.quantum) * market.quantum


def spike(sign: int, column: str) -> Callable:
    """A bar whose close (with its high or low) or only its wick is sixty usual moves away."""

    def inject(market, rng):
        table, places = market.table.copy(), market.places(rng)
        side = "high" if sign > 0 else "low"
        for row in places:
            base = table.loc[row, "close" if column == "close" else side]
            level = base + sign * steps(market, row, 60)
            table.loc[row, side] = level
            if column == "close":
                table.loc[row, "close"] = level
        return edited(table, named("spike", places))

    return inject


def swapped_columns(market, rng):
    table, places = market.table.copy(), market.places(rng)
    rows = np.array([row + k for row in places for k in range(10)])
    table.loc[rows, ["high", "low"]] = table.loc[rows, ["low", "high"]].to_numpy()
    wide = (table.loc[rows, "high"] != table.loc[rows, "low"]).to_numpy()
    return edited(table, named("ohlc", rows[wide]))


def stale_run(market, rng):
    table, places, length = market.table.copy(), market.places(rng, after=60), 60
    for row in places:
        table.loc[row : row + length - 1, PRICES] = table.loc[row - 1, "close"]
    rows = [row + k for row in places for k in range(length)]
    was_off = {pair for pair in named("off_tick", rows) if pair in market.pairs}  # the repeated price is on the tick
    return replace(edited(table, named("stale_run", rows)), lost=was_off)


def zero_volume(market, rng):
    table, places = market.table.copy(), market.places(rng, after=40)
    rows = np.array([row + k for row in places for k in range(40)])
    table.loc[rows, "volume"] = 0.0
    return edited(table, named("zero_volume", rows))


def missing_block(market, rng):
    return dropped(market, [(row, row + 75) for row in market.places(rng, after=80)], "missing")


def absent_day(market, rng):
    sessions, start_ns = market.sessions, market.start_ns
    first = np.flatnonzero(np.append(True, np.diff(sessions.id) != 0))
    size = np.diff(np.append(first, len(start_ns)))
    whole = np.flatnonzero(size > 0.9 * np.median(size))
    whole = whole[(whole > 1) & (whole < len(first) - 2)]
    named_rows = {row for kind, row in market.pairs if kind not in ("session", "weekend", "off_tick", "no_trade")}
    whole = np.array([k for k in whole if not named_rows & {first[k], first[k + 1]}])
    chosen = np.sort(rng.choice(whole[rng.integers(2) :: 2], PLACES, replace=False))
    spoiled = dropped(market, [(first[k], first[k + 1]) for k in chosen], "download_hole")
    lost = {(kind, row) for kind, row in market.pairs if kind in ("session", "weekend") and row in first[chosen + 1]}
    return replace(spoiled, lost=spoiled.lost | lost)


def stretches(market: Market, rng: np.random.Generator, length: int, allowed=True) -> list[tuple[int, int]]:
    return [(row, row + length) for row in market.places(rng, after=length, allowed=allowed)]


def adjustment(market, rng):
    """Three for one, and back: threefold prices keep on or off the tick."""
    table, spans = market.table.copy(), stretches(market, rng, 150)
    for first, after in spans:
        table.loc[first : after - 1, PRICES] *= 3
    return edited(table, named("adjustment", np.array(spans).ravel()))


def roll(market, rng):
    """Another contract for a while, higher by eighty usual moves and by eight times the bars beside the rolls.

    Where the bars beside are so wild that this would be a split's ratio, no contract could be told from a trade.
    """
    table = market.table.copy()
    span = (table["high"] - table["low"]).rolling(7, center=True).max()
    most = 0.15 * table["low"]
    calm = (8 * span < most).to_numpy() & (8 * span < most).shift(-150, fill_value=False).to_numpy()
    spans = stretches(market, rng, 150, calm)
    for first, after in spans:
        size = max(steps(market, first, 80), 8 * max(span[first], span[after]))
        size = round(min(size, most[first]) / market.quantum) * market.quantum
        table.loc[first : after - 1, PRICES] += size
    return edited(table, named("roll", np.array(spans).ravel()))


def other_unit(market, rng):
    table, spans = market.table.copy(), stretches(market, rng, 30)
    for first, after in spans:
        table.loc[first : after - 1, PRICES] *= 100
    return edited(table, named("unit", [row for span in spans for row in range(*span)]))


def spacing(market, rng):
    """Forty five-minute bars in the place of two hundred minutes."""
    table, start_ns = market.table.assign(row=np.arange(len(market.table))), market.start_ns
    whole = pd.Series(np.diff(start_ns, append=0) == MINUTE_NS).rolling(210).sum().shift(-204) == 210
    how = dict.fromkeys(table.columns, "first") | {"high": "max", "low": "min", "close": "last"}
    parts, at, places = [], 0, market.places(rng, after=210, allowed=whole & (start_ns % (5 * MINUTE_NS) == 0))
    for row in places:
        block = table.iloc[row : row + 200]
        parts += [table.iloc[at:row], block.groupby(np.arange(200) // 5).agg(how)]
        at = row + 200
    new = pd.concat([*parts, table.iloc[at:]], ignore_index=True)
    source, longer = new.pop("row").to_numpy(), [row + 5 * k for row in places for k in range(40)]
    return Spoiled(new, source, named("spacing", np.flatnonzero(np.isin(source, longer))))


def shifted_clock(market, rng):
    """All times read in another zone."""
    table = market.table.copy()
    table["timestamp"] += pd.Timedelta(hours=rng.choice([2, -1, -5, 5.5]))
    return edited(table, named("zone_mislabel", range(len(table))))


def bars_in_the_halt(market, rng):
    """Three bars while the market is closed, after a session's last one."""
    table, start_ns = market.table, market.start_ns
    ends = [row for kind, row in market.pairs if kind == "session"]
    gap = {row: start_ns[row] - start_ns[row - 1] for row in ends}
    off = {row for kind, row in market.pairs if kind == "off_tick"}
    ends = [row for row in sorted(ends) if gap[row] > 50 * MINUTE_NS and row - 1 not in off]
    chosen = np.sort(rng.choice(ends, PLACES, replace=False))
    fresh = table.iloc[np.repeat(chosen - 1, 3)].copy()
    minutes = np.tile([20, 21, 22], PLACES)
    fresh["timestamp"] += pd.to_timedelta(minutes, unit="min")
    for column in PRICES:
        fresh[column] = fresh["close"]
    source = np.insert(np.arange(len(table)), np.repeat(chosen, 3), -1)
    first = (source < 0) & (np.append(0, source[:-1]) >= 0)
    return rearranged(table, source, fresh, {"outside_session": source < 0, "session": first})


CORRUPTIONS: dict[str, Callable] = {
    "exact duplicate": duplicate,
    "conflicting duplicate": conflict,
    "unsorted pair": unsorted,
    "off-tick price": off_tick,
    "one-bar spike up": spike(+1, "close"),
    "one-bar spike down": spike(-1, "close"),
    "bad high wick": spike(+1, "high"),
    "bad low wick": spike(-1, "low"),
    "high below the body": one_cell("ohlc", "high", lambda bar, m: min(bar["open"], bar["close"]) - m.quantum),
    "zero price": one_cell("not_positive", "close", lambda bar, m: 0.0),
    "empty price": one_cell("not_finite", "open", lambda bar, m: np.nan),
    "infinite price": one_cell("not_finite", "high", lambda bar, m: np.inf),
    "negative volume": one_cell("volume", "volume", lambda bar, m: -1.0),
    "swapped columns": swapped_columns,
    "stale run": stale_run,
    "missing block": missing_block,
    "absent day": absent_day,
    "split": adjustment,
    "roll": roll,
    "another unit": other_unit,
    "spacing change": spacing,
    "stamp off the minute": one_cell("off_minute", "timestamp", lambda bar, m: bar["timestamp"] + pd.Timedelta("5s")),
    "empty stamp": one_cell("timestamp", "timestamp", lambda bar, m: pd.NaT),
    "shifted clock": shifted_clock,
    "bars in the halt": bars_in_the_halt,
    "run without volume": zero_volume,
}
