"""Metrics of trades and equity: net result, Sharpe ratio with its error, drawdown, turnover, cost to break even.

Returns are those of exchange days, on the value of the largest position at the first close. Ratios are annualised by
the sessions that the market's calendar has in a year.
"""

import numpy as np
import pandas as pd

from ml_factory.evaluation.intervals import FEWEST, newey_west_standard_error

NAN = float("nan")


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
    mean = {name: float(trades[name].mean()) if count else NAN for name in ("gross", "cost")}
    return {
        "net": float(net.sum()), "gross": float(trades["gross"].sum()), "cost": float(trades["cost"].sum()),
        "net_ticks": float(net.sum() / tick_value), "net_percent": float(100 * net.sum() / notional),
        "sharpe": ratio * root, "sharpe_error": error * root,
        "drawdown": fall, "drawdown_sessions": length,
        "trades": count, "turnover": 2 * count / len(daily), "exposure": float((equity["position"] != 0).mean()),
        "hit_rate": float((net > 0).mean()) if count else NAN,
        "profit_factor": float(gains / losses) if losses > 0 else NAN,
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
    """Return (mean / deviation of a period's return, its standard error under autocorrelation).

    Lo (2002), "The Statistics of Sharpe Ratios": the delta method on mean and variance, whose influence on the ratio is
    z - SR / 2 (z² - 1) with z the standardised return. Its long-run variance by Newey and West; for independent normal
    returns it is Lo's 1 + SR² / 2. NaN for constant returns; no error below 8 of them.
    """
    returns = np.asarray(returns, np.float64)
    deviation = returns.std() if len(returns) else 0.0
    if not deviation > 0:
        return NAN, NAN
    z = (returns - returns.mean()) / deviation
    ratio = float(returns.mean() / deviation)
    if len(returns) < FEWEST:
        return ratio, NAN
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
