"""Backtest of forecasts on bars: trades, equity and metrics after costs, without a look ahead.

A forecast is decided at its `known_at` and filled at the open of the first bar that starts then or later, at half the
spread and the slippage worse. A barrier is reached as by the labels (`targets.barrier_kernels`): a bar that opens
beyond it exits at its open; a bar that holds both exits at the worse one. Exits at the horizon, at the scheduled end of
a session and before a roll are orders at a bar's close: their moment is known in advance. A hole is not: there the
label ends at the last bar before it, and so does the trade, with the exit "hole", counted in the metrics. Every exit
pays as an entry.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.data.resample import segments_of_bars, trading_intervals
from ml_factory.data.sessions import (
    DAY_NS,
    HOLE_MINUTES,
    MINUTE_NS,
    PRICES,
    assign_sessions,
    scheduled_session_days,
)
from ml_factory.errors import BarsError
from ml_factory.evaluation.backtest.contracts import ContractSpec, contract_spec
from ml_factory.evaluation.backtest.fill_kernel import END, EXITS, HOLE, ROLL, SESSION, STAY, simulate_fills_kernel
from ml_factory.evaluation.backtest.metrics import backtest_metrics
from ml_factory.evaluation.backtest.rules import CostSpec, TradingRule

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Backtest:
    """Result of `run`.

    trades : a row per contract and round trip: side, entry_time (the bar's start), exit_time (the bar's start, or its
        end for an exit at its close), prices before and fills after spread and slippage, exit, gross and cost and net
        in currency, net_ticks, bars
    equity : index known_at of every bar; equity (currency after costs, open positions at the close), position, session
    metrics : name -> number, `backtest_metrics`
    """

    trades: pd.DataFrame
    equity: pd.DataFrame
    metrics: dict[str, float]


def run(
    bars: pd.DataFrame, predictions: pd.DataFrame, contract: str | ContractSpec = "ES", *,
    costs: CostSpec | None = None, rule: TradingRule | None = None,
) -> Backtest:  # fmt: skip
    """Trade forecasts on bars and return trades, equity and metrics.

    Parameters
    ----------
    bars : index = UTC start, increasing; open, high, low, close; where they have them `known_at` (UTC, when the bar is
        complete), `contract` (a change is a roll) and `segment` (as of `ResampledBars`; else found by the calendar)
    predictions : index known_at (UTC); p_short and p_long, or `side` (-1, 0, 1); where they have them `up` and `down`,
        positive log distances of the label's barriers from the last close
    contract : a symbol of `contract_spec`, or the facts themselves
    costs : spread and slippage; default: one tick of spread and half a tick of slippage
    rule : from forecasts to positions
    """
    spec = contract_spec(contract) if isinstance(contract, str) else contract
    costs, rule = costs or CostSpec(), rule or TradingRule()
    start, known_at, prices = _checked_bars(bars)
    sessions = assign_sessions(known_at - 1, spec.calendar)
    session, forecasts = sessions.id.astype(np.int64), _forecast_orders(predictions, start, prices[3], rule)
    contract_of_bar = pd.factorize(bars["contract"])[0] if "contract" in bars else np.zeros(len(start), np.int64)
    rolled, leave = np.diff(contract_of_bar) != 0, np.full(len(start), STAY, np.int8)
    forecasts[0][1:][rolled] = 0  # a forecast of the old contract
    if rule.flat_at_session_end:
        forecasts[0][1:][np.diff(session) != 0] = 0  # the forecast is older than the session
        leave[:-1][np.diff(_segments(bars, start, known_at, contract_of_bar, spec.calendar)) != 0] = HOLE
    leave[:-1][rolled] = ROLL
    if rule.flat_at_session_end:
        leave[known_at >= sessions.close_ns] = SESSION
    leave[-1] = END if leave[-1] == STAY else leave[-1]
    size = int(np.count_nonzero(forecasts[0]))
    trades, floats = np.zeros((size, 5), np.int64), np.zeros((size, 5))
    equity, held = np.empty(len(start)), np.empty(len(start), np.int64)
    made = simulate_fills_kernel(
        prices, (session, leave), forecasts, costs.ticks_of_fill,
        (float(spec.tick), float(spec.multiplier), float(spec.commission + spec.exchange_fee), float(spec.fee_rate)),
        (float(rule.reverse), float(rule.daily_loss_limit or np.inf)),
        trades, floats, equity, held,
    )  # fmt: skip
    table = _trade_table(trades[:made], floats[:made], start, known_at, spec)
    curve = pd.DataFrame(
        {"equity": equity, "position": held, "session": session},
        index=pd.DatetimeIndex(known_at.view("M8[ns]"), tz="UTC", name="known_at"),
    )
    notional = float(prices[3][0]) * spec.multiplier
    a_year = _count_sessions_in_year(spec.calendar, int(start[0]))
    return Backtest(table, curve, backtest_metrics(table, curve, spec.tick_value, notional, a_year))


def _count_sessions_in_year(calendar: str, start_ns: int) -> float:
    """Return the sessions that a calendar has in the year from this moment (UTC ns): 365.25 days' share of 365."""
    first = start_ns // DAY_NS
    return len(scheduled_session_days(calendar, first, first + 364)[0]) * 365.25 / 365


def _checked_bars(bars: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Return starts and ends (int64 ns) and prices of the bars. Raises BarsError for bars that no trade can use."""
    missing = [name for name in PRICES if name not in bars]
    if missing or not isinstance(bars.index, pd.DatetimeIndex) or bars.index.tz is None or len(bars) < 2:
        raise BarsError(
            "A backtest needs bars", where="bars", got=f"{len(bars)} rows of {', '.join(map(str, bars.columns))}",
            wanted="2 rows or more of open, high, low, close, indexed by their UTC start",
        )  # fmt: skip
    start = bars.index.as_unit("ns").asi8
    prices = tuple(np.ascontiguousarray(bars[name].to_numpy(float)) for name in PRICES)
    if (np.diff(start) <= 0).any() or not all(np.isfinite(price).all() for price in prices):
        raise BarsError("Bars of a backtest are in time order with finite prices", where="bars")
    if "known_at" in bars:
        known_at = pd.DatetimeIndex(bars["known_at"]).as_unit("ns").asi8
    else:  # the length of a bar is the least spacing of the first thousand, in whole minutes
        known_at = start + max(int(np.diff(start[:1000]).min()), MINUTE_NS)
    return start, known_at, prices


def _segments(
    bars: pd.DataFrame, start: np.ndarray, known_at: np.ndarray, contract: np.ndarray, calendar: str
) -> np.ndarray:
    """Return the segment of each bar, which changes at session edges, holes and rolls; -1 outside the sessions."""
    if "segment" in bars:
        return bars["segment"].to_numpy(np.int64)
    bar_ns = int(min(np.diff(start).min(), (known_at - start).min()))
    intervals = trading_intervals(np.unique(start // DAY_NS), calendar)
    silence_ns = HOLE_MINUTES * MINUTE_NS + bar_ns
    inside, _, found, _, _ = segments_of_bars(start, contract, intervals, bar_ns, silence_ns)
    segment = np.full(len(start), -1, np.int64)
    segment[inside] = found
    return segment


def _check_forecasts(predictions: pd.DataFrame) -> None:
    """Raise BarsError for forecasts that no rule can trade."""
    wanted = ["side"] if "side" in predictions else ["p_short", "p_long"]
    absent, index = [name for name in wanted if name not in predictions], predictions.index
    if absent or not isinstance(index, pd.DatetimeIndex) or index.tz is None:
        got = f"index {index.dtype}, columns {', '.join(map(str, predictions.columns))}"
        raise BarsError(
            "Forecasts of a backtest lack what it needs", where="predictions", got=got,
            wanted="UTC index known_at; p_short and p_long, or side",
            next_step="pass those of load_predictions; tz_localize an index without a zone",
        )  # fmt: skip
    if (np.diff(index.as_unit("ns").asi8) <= 0).any():
        raise BarsError("Forecasts of a backtest are in time order, one a moment", where="predictions")
    unknown = predictions[wanted].isna()
    if unknown.to_numpy().any():
        rows = unknown.any(axis=1)
        raise BarsError(
            "A forecast is not a number", where=f"predictions, {index[rows][0]} and {int(rows.sum()) - 1:,} more",
            got="NaN", wanted=f"numbers in {', '.join(wanted)}", next_step="leave these rows out with dropna()",
        )  # fmt: skip


def _forecast_orders(predictions: pd.DataFrame, start: np.ndarray, close: np.ndarray, rule: TradingRule):
    """Return side, barrier prices and last bar to hold of the order that each bar fills at its open.

    A forecast's bar is the first that starts at its `known_at` or later; of several the newest counts.
    """
    _check_forecasts(predictions)
    known = predictions.index.as_unit("ns").asi8
    if "side" in predictions:
        side = np.sign(predictions["side"].to_numpy(float))
    else:
        edge = predictions["p_long"].to_numpy(float) - predictions["p_short"].to_numpy(float)
        side = np.where(np.abs(edge) >= rule.least_edge, np.sign(edge), 0.0)
    bar = np.searchsorted(start, known)
    inside = bar < len(start)
    inside[inside] &= start[bar[inside]] - known[inside] <= rule.longest_wait_minutes * MINUTE_NS
    bar, rows, n = bar[inside], np.flatnonzero(inside), len(start)
    orders = np.zeros(n, np.int8)
    upper, lower, deadline = np.full(n, np.inf), np.full(n, -np.inf), np.full(n, NEVER)
    orders[bar] = side[rows]
    if rule.barriers and {"up", "down"} <= set(predictions.columns):
        last = close[np.maximum(bar - 1, 0)]
        upper[bar] = last * np.exp(predictions["up"].to_numpy(float)[rows])
        lower[bar] = last * np.exp(-predictions["down"].to_numpy(float)[rows])
    if rule.horizon is not None:
        deadline[bar] = bar + rule.horizon - 1
    orders[0] = 0  # no close before it
    return orders, upper, lower, deadline


def _trade_table(
    trades: np.ndarray, floats: np.ndarray, start: np.ndarray, known_at: np.ndarray, spec: ContractSpec
) -> pd.DataFrame:
    """Return the trades as a table, in order of their entries."""
    side, entry, leave, why, at_close = trades.T
    price_in, fill_in, price_out, fill_out, fees = floats.T
    gross = side * (price_out - price_in) * spec.multiplier
    net = side * (fill_out - fill_in) * spec.multiplier - fees
    moments = {"entry_time": start[entry], "exit_time": np.where(at_close > 0, known_at[leave], start[leave])}
    return pd.DataFrame(
        {
            "side": side,
            **{name: pd.DatetimeIndex(ns.view("M8[ns]"), tz="UTC") for name, ns in moments.items()},
            "entry_price": price_in, "entry_fill": fill_in, "exit_price": price_out, "exit_fill": fill_out,
            "exit": pd.Categorical.from_codes(why, categories=list(EXITS)),
            "gross": gross, "cost": gross - net, "net": net, "net_ticks": net / spec.tick_value,
            "bars": leave - entry + 1,
        }
    )  # fmt: skip
