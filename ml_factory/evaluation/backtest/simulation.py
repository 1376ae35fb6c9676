"""Backtest of forecasts on bars: trades, equity and metrics after costs, without a look ahead.

A forecast is decided at its `known_at` and filled at the open of the first bar that starts then or later, at half the
spread and the slippage worse. A barrier is reached as by the labels (`targets.barrier_kernels`): a bar that opens
beyond it exits at its open; a bar that holds both exits at the worse one. Exits at the horizon, at the scheduled end of
a session and before a roll are orders at a bar's close: their moment is known in advance. A hole is not: there the
label ends at the last bar before it, and so does the trade, with the exit "hole", counted in the metrics. Every exit
pays as an entry.

Returns are those of exchange days, on the value of the largest position at the first close. Ratios are annualised by
the sessions that the market's calendar has in a year.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_settings
from ml_factory.data.resample import known_at_index, segments_of_bars, trading_intervals
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
from ml_factory.evaluation.intervals import FEWEST, newey_west_standard_error
from ml_factory.evaluation.luck import sharpe_moments

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class CostSpec:
    """Costs of a fill beyond commission and fees, which are the contract's.

    spread_ticks : distance of bid and ask, in ticks; each fill pays half of it
    slippage_ticks : further ticks that each fill pays
    """

    spread_ticks: float = 1.0
    slippage_ticks: float = 0.5

    def __post_init__(self) -> None:
        check_settings(self, spread_ticks="[0, inf)", slippage_ticks="[0, inf)")

    @property
    def ticks_of_fill(self) -> float:
        """Ticks that a fill pays."""
        return self.spread_ticks / 2 + self.slippage_ticks


@dataclass(frozen=True)
class TradingRule:
    """Rule that turns forecasts into positions of one contract.

    horizon : bars that a position is held at most, the bar of its fill included; None: until another exit
    least_edge : least |p_long - p_short| of a forecast that opens a position; None: the verb `backtest` chooses it on
        validation rows, and `run` opens at any
    reverse : a forecast of the other side closes the position and opens its own; False: it is ignored
    barriers : exit at the label's barriers, columns `up` and `down` of the forecasts, where they have them
    flat_at_session_end : close at the last bar of the scheduled session, and open nothing across its edge
    daily_loss_limit : currency; a session that loses as much at a bar's close is flat from the next open and stays so
    longest_wait_minutes : a forecast without a bar that starts so soon after it expires
    """

    horizon: int | None = None
    least_edge: float | None = None
    reverse: bool = True
    barriers: bool = True
    flat_at_session_end: bool = True
    daily_loss_limit: float | None = None
    longest_wait_minutes: float = 60.0

    def __post_init__(self) -> None:
        check_settings(
            self, horizon="[1, inf)", least_edge="[0, 1]", daily_loss_limit="(0, inf)", longest_wait_minutes="[0, inf)"
        )


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
    curve = pd.DataFrame({"equity": equity, "position": held, "session": session}, index=known_at_index(known_at))
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
        side = np.where(np.abs(edge) >= (rule.least_edge or 0.0), np.sign(edge), 0.0)
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


# ---- metrics -------------------------------------------------------------------------------------------------------


def backtest_metrics(
    trades: pd.DataFrame, equity: pd.DataFrame, tick_value: float, notional: float, sessions_a_year: float
) -> dict[str, float]:
    """Return the metrics of a backtest by name; NaN where one is not defined.

    net, gross, cost : currency; net_ticks; net_percent of `notional`
    sharpe, sharpe_error : annualised by the root of time; the error under autocorrelation, `sharpe_ratio`
    drawdown, drawdown_sessions : largest fall of the equity below its peak at bars' closes, currency; longest time
        below a peak
    turnover : contracts traded a session; exposure : share of bars with a position
    hit_rate : share of trades with a net gain; profit_factor : net gains over net losses of trades
    break_even_ticks : cost of a round trip, in ticks, at which these trades earn nothing; cost_ticks : what they paid
    hole_exits, roll_exits : trades that ended before missing bars, and before a roll

    Parameters
    ----------
    trades, equity : as of `Backtest`
    tick_value : currency of a tick of one contract
    notional : currency that a return is a share of
    sessions_a_year : of the market's calendar
    """
    daily, root = session_gains(equity), np.sqrt(sessions_a_year)
    ratio, error = sharpe_ratio(daily / notional)
    net, count = trades["net"].to_numpy(), len(trades)
    gains, losses = net[net > 0].sum(), -net[net < 0].sum()
    fall, length = drawdown(equity["equity"].to_numpy(), equity["session"].to_numpy())
    mean = {name: float(trades[name].mean()) if count else np.nan for name in ("gross", "cost")}
    return {
        "net": float(net.sum()), "gross": float(trades["gross"].sum()), "cost": float(trades["cost"].sum()),
        "net_ticks": float(net.sum() / tick_value), "net_percent": float(100 * net.sum() / notional),
        "sharpe": ratio * root, "sharpe_error": error * root,
        "drawdown": fall, "drawdown_sessions": length,
        "trades": count, "turnover": 2 * count / len(daily), "exposure": float((equity["position"] != 0).mean()),
        "hit_rate": float((net > 0).mean()) if count else np.nan,
        "profit_factor": float(gains / losses) if losses > 0 else np.nan,
        "break_even_ticks": mean["gross"] / tick_value, "cost_ticks": mean["cost"] / tick_value,
        "hole_exits": int((trades["exit"] == "hole").sum()), "roll_exits": int((trades["exit"] == "roll").sum()),
        "sessions": len(daily), "sessions_a_year": sessions_a_year,
    }  # fmt: skip


def session_gains(equity: pd.DataFrame) -> np.ndarray:
    """Return the gain of each session in currency, after costs; equity as of `Backtest`.

    A session with fewer than half the usual bars, cut by the rows' first or last one, counts with its neighbour.
    """
    session, value = equity["session"].to_numpy(), equity["equity"].to_numpy()
    last = np.append(np.flatnonzero(np.diff(session)), len(session) - 1)
    bars = np.diff(last, prepend=-1)
    at_end = value[last[2 * bars >= np.median(bars)]]
    at_end[-1] = value[-1]
    return np.diff(at_end, prepend=0.0)


def sharpe_ratio(returns: np.ndarray) -> tuple[float, float]:
    """Return (the ratio of `sharpe_moments`, its standard error under autocorrelation).

    Lo (2002), "The Statistics of Sharpe Ratios": the delta method on mean and variance, whose influence on the ratio is
    z - SR / 2 (z² - 1) with z the standardised return. Its long-run variance by Newey and West; for independent normal
    returns it is Lo's 1 + SR² / 2. NaN for constant returns; no error below 8 of them.
    """
    ratio, _, _, count = sharpe_moments(returns)
    if count < FEWEST or np.isnan(ratio):
        return ratio, np.nan
    z = (returns - returns.mean()) / returns.std()
    return ratio, newey_west_standard_error(z - ratio / 2 * (z**2 - 1), 1)[0]


def drawdown(equity: np.ndarray, session: np.ndarray) -> tuple[float, int]:
    """Return the largest fall below the highest equity so far, 0 at least, and the most sessions spent below it.

    equity : at bars' closes, from 0 before the first; session : int, of each bar
    """
    peak = np.maximum.accumulate(np.maximum(equity, 0.0))
    below, position = equity < peak, np.unique(session, return_inverse=True)[1]
    starts = np.flatnonzero(below & ~np.append(False, below[:-1]))
    stops = np.flatnonzero(below & ~np.append(below[1:], False))
    longest = int((position[stops] - position[starts] + 1).max()) if len(starts) else 0
    return float((peak - equity).max(initial=0.0)), longest
