"""Time the compiled backtest against a plain loop over the same orders, and compare their equity.

    python -m benchmarks.backtest                    # 200,000 bars
    python -m benchmarks.backtest --rows 1000000 --repeats 1

The plain loop holds one object a position and one method a step; the compiled side is timed with everything around its
kernel: orders, tables and metrics. Where vectorbt is installed (`make bench`), the orders that it can express too, one
contract that each forecast reverses at the next open for a share of the value, are compared bar by bar and timed with
its table of trades, equity, Sharpe ratio and drawdown.
"""

import argparse
import importlib.util
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from benchmarks.measure import in_turns, print_json, rated, times
from ml_factory.data.sessions import assign_sessions
from ml_factory.evaluation.backtest import ContractSpec, CostSpec, TradingRule, contract_spec, run


@dataclass
class Position:
    """One open contract of the plain loop."""

    side: int
    bar: int
    price: float
    fill: float
    fee: float
    upper: float
    lower: float
    deadline: float


class PlainBacktest:
    """Event loop in plain Python: one call a bar; `trades` (side, entry, exit, reason, net) and `equity`."""

    def __init__(self, contract: ContractSpec, costs: CostSpec, rule: TradingRule):
        self.contract, self.costs, self.rule = contract, costs, rule
        self.positions: list[Position] = []
        self.trades: list[tuple] = []
        self.equity: list[float] = []
        self.cash = self.day_start = 0.0
        self.session, self.stopped, self.must_close = None, False, False

    def worse(self, price: float, side: int) -> float:
        """Price after spread and slippage of an order of this side."""
        return price + side * (self.costs.spread_ticks / 2 + self.costs.slippage_ticks) * self.contract.tick

    def fee(self, fill: float) -> float:
        """Commission and fees of a fill."""
        facts = self.contract
        return facts.commission + facts.exchange_fee + facts.fee_rate * facts.multiplier * abs(fill)

    def leave(self, position: Position, bar: int, price: float, reason: str) -> None:
        fill = self.worse(price, -position.side)
        fee = self.fee(fill)
        won = position.side * (fill - position.fill) * self.contract.multiplier
        self.cash += won - fee
        self.trades.append((position.bar, position.side, bar, reason, won - fee - position.fee))
        self.positions.remove(position)

    def touched(self, position: Position, prices: tuple) -> tuple[str, float] | None:
        """Exit at a barrier in this bar: at the open beyond it, else the barrier that is worse for the position."""
        first, high, low, _ = prices
        slack = 1e-6 * self.contract.tick
        if first >= position.upper - slack:
            return "upper", first
        if first <= position.lower + slack:
            return "lower", first
        reached = []
        if high >= position.upper - slack:
            reached.append((position.side * position.upper, "upper", position.upper))
        if low <= position.lower + slack:
            reached.append((position.side * position.lower, "lower", position.lower))
        return min(reached)[1:] if reached else None

    def on_bar(self, bar: int, prices: tuple, session: int, leaves: dict[str, bool], order) -> None:
        """Trade one bar. `leaves`: reasons to leave at its close; `order`: (side, upper, lower, deadline), or None."""
        if session != self.session:
            self.session, self.stopped = session, False
            self.day_start = self.equity[-1] if self.equity else 0.0
        if self.stopped:
            order = None
        against = bool(order and self.positions and self.positions[0].side != order[0])
        if self.must_close or (against and self.rule.reverse):
            for position in list(self.positions):
                self.leave(position, bar, prices[0], "loss_limit" if self.must_close else "reverse")
            self.must_close = against = False
        if order and not against and not self.positions:
            fill = self.worse(prices[0], order[0])
            fee = self.fee(fill)
            self.cash -= fee
            self.positions.append(Position(order[0], bar, prices[0], fill, fee, *order[1:]))
        for position in list(self.positions):
            found = self.touched(position, prices)
            if found:
                self.leave(position, bar, found[1], found[0])
                continue
            reasons = {"horizon": bar >= position.deadline} | leaves
            reason = next((name for name, true in reasons.items() if true), None)
            if reason:
                self.leave(position, bar, prices[3], reason)
        opened = sum(one.side * (prices[3] - one.fill) * self.contract.multiplier for one in self.positions)
        self.equity.append(self.cash + opened)
        limit = self.rule.daily_loss_limit
        if limit is not None and self.equity[-1] - self.day_start <= -limit:
            self.stopped, self.must_close = True, bool(self.positions)


def plain_run(
    bars: pd.DataFrame, predictions: pd.DataFrame, contract: ContractSpec, costs: CostSpec, rule: TradingRule
) -> PlainBacktest:
    """Trade the forecasts by the plain loop: the same rules as `run`, read off one bar at a time."""
    loop, waiting = PlainBacktest(contract, costs, rule), list(predictions.sort_index().itertuples())
    edges = assign_sessions(bars["known_at"].astype("int64").to_numpy() - 1, contract.calendar)
    names = list(bars["contract"]) if "contract" in bars else [0] * len(bars)
    previous, following = None, 0
    for bar, one in enumerate(bars.itertuples()):
        order, day = None, int(edges.id[bar])
        while following < len(waiting) and waiting[following].Index <= one.Index:
            row, following = waiting[following], following + 1
            minutes = (one.Index - row.Index).total_seconds() / 60
            if previous is None or minutes > rule.longest_wait_minutes:
                continue
            edge = row.p_long - row.p_short
            side = int(np.sign(edge)) if abs(edge) >= rule.least_edge else 0
            ends = bar + rule.horizon - 1 if rule.horizon else np.inf
            up, down = np.inf, -np.inf
            if rule.barriers and hasattr(row, "up"):
                up, down = previous.close * np.exp(row.up), previous.close * np.exp(-row.down)
            order = (side, up, down, ends) if side else None
        if bar and ((rule.flat_at_session_end and day != edges.id[bar - 1]) or names[bar] != names[bar - 1]):
            order = None
        leaves, final = {"session": rule.flat_at_session_end and one.known_at.value >= edges.close_ns[bar]}, True
        if bar + 1 < len(bars):
            silence = (bars.index[bar + 1] - one.known_at).total_seconds() / 60
            another = day != edges.id[bar + 1] or edges.close_ns[bar] != edges.close_ns[bar + 1]
            leaves["roll"], final = names[bar + 1] != names[bar], False
            leaves["hole"] = rule.flat_at_session_end and (another or silence > 60)
        prices = (one.open, one.high, one.low, one.close)
        loop.on_bar(bar, prices, day, leaves | {"end": final}, order)
        previous = one
    return loop


def random_market(seed: int, rows: int, *, tick: float = 0.25, step: float = 4.0) -> pd.DataFrame:
    """Driftless bars of 5 minutes on the tick, CME hours, with gaps at opens; `contract` changes twice."""
    rng = np.random.default_rng(seed)
    day, bar = np.divmod(np.arange(rows), 276)
    minutes = (day // 5 * 7 + day % 5) * 1440 + 5 * bar
    start = np.datetime64("2023-01-08 23:00", "ns") + minutes.astype("timedelta64[m]")
    moves = np.rint(rng.normal(0, step, (rows, 4)))
    first = np.cumsum(moves.sum(axis=1)) - moves.sum(axis=1) + 40_000
    path = first[:, None] + np.cumsum(moves, axis=1)
    open_ = first + np.rint(rng.normal(0, 0.5, rows))
    inside = np.column_stack([open_, path])
    index = pd.DatetimeIndex(start, tz="UTC", name="start")
    columns = {"open": open_, "high": inside.max(axis=1), "low": inside.min(axis=1), "close": path[:, -1]}
    bars = pd.DataFrame({name: values * tick for name, values in columns.items()}, index=index)
    cuts = np.sort(rng.integers(0, rows, 2))
    known_at = (index + pd.Timedelta(minutes=5)).as_unit("ns")
    return bars.assign(known_at=known_at, contract=np.searchsorted(cuts, np.arange(rows)))


def random_forecasts(seed: int, bars: pd.DataFrame, share: float = 0.5) -> pd.DataFrame:
    """Forecasts without an edge for a share of the bars, with barriers."""
    rng = np.random.default_rng([seed, 1])
    chosen = bars["known_at"][rng.random(len(bars)) < share]
    p = rng.dirichlet((2.0, 1.0, 2.0), len(chosen))
    frame = pd.DataFrame(p, columns=["p_short", "p_neutral", "p_long"], index=pd.DatetimeIndex(chosen))
    return frame.assign(up=rng.uniform(2e-4, 3e-3, len(chosen)), down=rng.uniform(2e-4, 3e-3, len(chosen)))


HELD_OVERNIGHT = TradingRule(barriers=False, flat_at_session_end=False, longest_wait_minutes=1e9)
FEE_RATE = 1e-4


def market_without_rolls(rows: int) -> tuple[pd.DataFrame, pd.DataFrame, ContractSpec]:
    """Bars, forecasts and contract of the case that vectorbt expresses too."""
    bars = random_market(1, rows).drop(columns="contract")
    coin = ContractSpec("COIN", "24h", 0.25, fee_rate=FEE_RATE)
    return bars, random_forecasts(1, bars)[["p_short", "p_neutral", "p_long"]], coin


def vectorbt_run(bars: pd.DataFrame, predictions: pd.DataFrame) -> tuple[np.ndarray, pd.DataFrame, tuple[float, float]]:
    """Trade the same forecasts by vectorbt: (gain after costs at each close, trades, (Sharpe ratio, drawdown))."""
    vectorbt = importlib.import_module("vectorbt")
    side, place = np.zeros(len(bars) + 1), bars.index.searchsorted(predictions.index)
    side[place] = np.sign(predictions["p_long"] - predictions["p_short"])  # of several for one bar the newest
    side = side[:-1]
    capital = 1e9
    portfolio = vectorbt.Portfolio.from_signals(
        bars["close"], entries=side > 0, short_entries=side < 0, price=bars["open"], size=1.0, size_type="amount",
        fees=FEE_RATE, upon_opposite_entry="reverse", init_cash=capital, freq="5min",
    )  # fmt: skip
    metrics = float(portfolio.sharpe_ratio()), float(portfolio.max_drawdown())
    return portfolio.value().to_numpy() - capital, portfolio.trades.records_readable, metrics


def compare_with_vectorbt(rows: int, repeats: int) -> None:
    """Print the largest difference of equity, and the times of both in turns."""
    bars, forecasts, coin = market_without_rolls(rows)
    free = CostSpec(0, 0)
    sides = {
        "compiled": partial(run, bars, forecasts, coin, costs=free, rule=HELD_OVERNIGHT),
        "vectorbt": partial(vectorbt_run, bars, forecasts),
    }
    ours, (equity, trades, _) = sides["compiled"](), sides["vectorbt"]()
    apart = float(np.abs(ours.equity["equity"].to_numpy() - equity)[:-1].max())  # ours pays for leaving at the end
    facts = {"trades": len(ours.trades), "trades_of_vectorbt": len(trades), "largest_difference": apart}
    print_json(bench="backtest vectorbt", rows=rows, **facts)
    runs = in_turns(sides, repeats)
    for name, taken in runs.items():
        print_json(bench="backtest vectorbt", side=name, **rated(taken, rows))
    print_json(bench="backtest vectorbt", side="vectorbt / compiled", **times(runs["vectorbt"], runs["compiled"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    bars = random_market(1, given.rows)
    forecasts, contract = random_forecasts(1, bars), contract_spec("ES")
    costs, rule = CostSpec(), TradingRule(horizon=20, least_edge=0.1)
    sides = {
        "compiled": partial(run, bars, forecasts, contract, costs=costs, rule=rule),
        "plain loop": partial(plain_run, bars, forecasts, contract, costs, rule),
    }
    first, plain = sides["compiled"](), sides["plain loop"]()  # compiles once, and compares
    apart = float(np.abs(first.equity["equity"].to_numpy() - np.array(plain.equity)).max())
    print_json(bench="backtest", rows=given.rows, trades=len(plain.trades), largest_difference=apart)
    runs = in_turns(sides, given.repeats)
    for name, taken in runs.items():
        print_json(bench="backtest", side=name, **rated(taken, given.rows))
    print_json(bench="backtest", side="plain loop / compiled", **times(runs["plain loop"], runs["compiled"]))
    if importlib.util.find_spec("vectorbt"):
        compare_with_vectorbt(given.rows, given.repeats)


if __name__ == "__main__":
    main()
