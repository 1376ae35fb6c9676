"""Compiled event loop of a backtest: opens, touches of barriers, exits at a close, equity at every bar.

Each bar in this order: fills at its open (loss limit, then the forecast's own), barriers from its high and low, exits
at its close, equity, loss limit. No step reads a later bar.
"""

from numba import njit

from ml_factory.targets.barrier_kernels import SLACK

EXITS = ("upper", "lower", "horizon", "session", "hole", "roll", "reverse", "loss_limit", "end")
UPPER, LOWER, HORIZON, SESSION, HOLE, ROLL, REVERSE, LOSS_LIMIT, END = range(9)
STAY = -1


@njit(cache=True, nogil=True)
def _open_lot(trades, floats, lot, side, bar, price, ticks, money):
    """Write a trade's entry; return the currency that it takes from the equity."""
    tick, multiplier, per_side, rate = money
    paid = price + side * ticks * tick
    trades[lot, 0], trades[lot, 1] = side, bar
    floats[lot, 0], floats[lot, 1], floats[lot, 4] = price, paid, per_side + rate * multiplier * abs(paid)
    return floats[lot, 4]


@njit(cache=True, nogil=True)
def _close_lot(trades, floats, lot, bar, price, ticks, at_close, why, money):
    """Write a trade's exit; return the currency that it adds to the equity."""
    tick, multiplier, per_side, rate = money
    side = trades[lot, 0]
    paid = price - side * ticks * tick
    fee = per_side + rate * multiplier * abs(paid)
    trades[lot, 2], trades[lot, 3], trades[lot, 4] = bar, why, at_close
    floats[lot, 2], floats[lot, 3] = price, paid
    floats[lot, 4] += fee
    return side * (paid - floats[lot, 1]) * multiplier - fee


@njit(cache=True, nogil=True)
def _touched_barrier(side, open_, high, low, above, below, slack):
    """Return (barrier, price) of one bar, -1 inside; a bar that holds both exits at the worse one."""
    if open_ >= above - slack:
        return UPPER, open_
    if open_ <= below + slack:
        return LOWER, open_
    up, down = high >= above - slack, low <= below + slack
    if up and (side < 0 or not down):
        return UPPER, above
    return (LOWER, below) if down else (-1, 0.0)


@njit(cache=True, nogil=True)
def simulate_fills_kernel(bars, marks, forecasts, fill_ticks, money, rule, trades, floats, equity, held):
    """Simulate the forecasts on N bars; return the number of trades.

    Parameters
    ----------
    bars : open, high, low, close, each float64[N]
    marks : int64[N] session; int8[N] why positions are closed at the bar's close, as position in EXITS, or STAY
    forecasts : int8[N] side (-1, 0, 1) to fill at each bar's open; float64[N] prices of upper and lower barrier
        (infinite without); int64[N] last bar to hold
    fill_ticks : ticks that a fill pays
    money : tick, multiplier, currency per contract and side, fee per side as share of the value
    rule : whether to reverse (0 or 1), daily loss limit (infinite without)
    trades : int64[M, 5], written: side, bars of entry and exit, position in EXITS, 1 for an exit at the close
    floats : float64[M, 5], written: entry price and fill, exit price and fill, fees
    equity, held : float64[N] currency after costs, int64[N] side held at each close, written
    """
    open_, high, low, close = bars
    session, leave = marks
    side_of, upper, lower, deadline = forecasts
    reverse, loss_limit = rule
    n, slack = len(close), SLACK * money[0]
    lot, made, cash, day_start, blocked, flatten = -1, 0, 0.0, 0.0, False, False  # lot: the open trade, -1 without
    for j in range(n):
        if j == 0 or session[j] != session[j - 1]:
            blocked, day_start = False, (equity[j - 1] if j else 0.0)
        signal = 0 if blocked else side_of[j]
        if lot >= 0 and (flatten or (reverse > 0 and signal != 0 and trades[lot, 0] == -signal)):
            why = LOSS_LIMIT if flatten else REVERSE
            cash += _close_lot(trades, floats, lot, j, open_[j], fill_ticks, 0, why, money)
            lot, flatten = -1, False
        if signal != 0 and lot < 0:
            cash -= _open_lot(trades, floats, made, signal, j, open_[j], fill_ticks, money)
            lot, made = made, made + 1
        marked = 0.0
        if lot >= 0:
            side, entered = trades[lot, 0], trades[lot, 1]
            why, price = _touched_barrier(side, open_[j], high[j], low[j], upper[entered], lower[entered], slack)
            at_close = 0
            if why < 0:
                price, at_close = close[j], 1
                why = HORIZON if j >= deadline[entered] else leave[j]
            if why >= 0:
                cash += _close_lot(trades, floats, lot, j, price, fill_ticks, at_close, why, money)
                lot = -1
            else:
                marked = side * (close[j] - floats[lot, 1]) * money[1]
        held[j] = trades[lot, 0] if lot >= 0 else 0
        equity[j] = cash + marked
        if equity[j] - day_start <= -loss_limit:
            blocked, flatten = True, lot >= 0
    return made
