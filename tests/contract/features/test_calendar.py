"""Calendar columns against the exchange's clock, and session position against the bars so far."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import synthetic_bars
from tests.contract.doors import FAMILIES, MarketSpec, compute_family_columns, elapsed_session_share, resample_bars
from tests.contract.features.plain import atr

calendar = FAMILIES["calendar"]

CLOCK = {"ES": ("America/Chicago", 17 * 60, 23 * 60), "SPY": ("America/New_York", 9 * 60 + 30, 390)}


def progress(symbol):
    """Minutes since the open by the wall clock, over the regular session's length."""
    zone, opens, length = CLOCK[symbol]

    def reference(frame, i):
        wall = pd.Timestamp(frame.known_at[i], tz="UTC").tz_convert(zone)
        return (wall.hour * 60 + wall.minute - opens) % 1440 / length

    return reference


def session_rows(frame, i):
    return np.flatnonzero(frame.session[: i + 1] == frame.session[i])


def weekday(frame, i):
    return pd.Timestamp(int(frame.session[i]) * 86_400_000_000_000).weekday() / 7


def references(frame, symbol):
    unit, passed = atr(frame), progress(symbol)

    def move(f, i):
        rows = session_rows(f, i)
        return (f.close[i] - f.open[rows[0]]) / unit[i] / len(rows) ** 0.5

    def place(f, i):
        top, bottom = f.high[session_rows(f, i)].max(), f.low[session_rows(f, i)].min()
        return (f.close[i] - bottom) / (top - bottom) - 0.5

    def reach(f, i):
        rows = session_rows(f, i)
        return np.log((f.high[rows].max() - f.low[rows].min()) / unit[i] / len(rows) ** 0.5 + 0.01)

    def since(x, rows):
        return np.argmax(x[rows][::-1]) / len(rows)

    def gap(f, i):
        first = session_rows(f, i)[0]
        return (f.open[first] - f.close[first - 1]) / unit[i]

    return {
        "session_progress": lambda f, i: passed(f, i) - 0.5,
        "session_sine": lambda f, i: np.sin(2 * np.pi * passed(f, i)),
        "session_cosine": lambda f, i: np.cos(2 * np.pi * passed(f, i)),
        "week_sine": lambda f, i: np.sin(2 * np.pi * weekday(f, i)),
        "week_cosine": lambda f, i: np.cos(2 * np.pi * weekday(f, i)),
        "session_move": move,
        "session_place": place,
        "session_range": reach,
        "bars_since_session_high": lambda f, i: since(f.high, session_rows(f, i)),
        "bars_since_session_low": lambda f, i: since(-f.low, session_rows(f, i)),
        "overnight_gap": gap,
    }


def regular(frame, first, last):
    """Rows of a stretch of days without early closes, whose clock the twin knows."""
    from dataclasses import replace

    rows = slice(*np.searchsorted(frame.start, [pd.Timestamp(day, tz="UTC").value for day in (first, last)]))
    names = ("start", "known_at", "open", "high", "low", "close", "session", "segment")
    return replace(frame, volume=None, **{name: getattr(frame, name)[rows] for name in names})


@pytest.mark.parametrize(
    ("symbol", "first", "last"), [("ES", "2025-02-20", "2025-04-10"), ("SPY", "2024-10-01", "2024-11-20")]
)
def test_calendar_columns_across_dst_change_equal_exchange_clock(
    real_frame, markets, check_columns, symbol, first, last
):
    frame = regular(real_frame(symbol, 5), first, last)
    check_columns(calendar, frame, markets[symbol], references(frame, symbol))


def test_calendar_session_progress_on_early_close_day_ends_at_half(real_frame, markets):
    frame = real_frame("SPY", 5)
    passed = compute_family_columns(calendar, frame, markets["SPY"], False)["session_progress"]
    day = frame.session == np.datetime64("2024-11-29").astype(int)  # the day after Thanksgiving closes at 13:00
    assert day.sum() == 42
    assert passed[day][-1] == 0.5


def test_calendar_columns_of_24h_market_have_no_overnight_gap(make_frame):
    market = MarketSpec("BTCUSD", "24h", 0.01, True)
    assert "overnight_gap" not in compute_family_columns(calendar, make_frame(np.linspace(1, 2, 300)), market, False)


@pytest.mark.parametrize(
    ("hours", "start", "ends"),
    [
        ("24h", "2024-11-27", ["00:00"] * 3),
        ("cme", "2024-11-27", ["18:00", "18:15", "22:00"]),  # Thanksgiving and the day after stop early
        ("us_equity", "2024-11-27", ["21:00", "18:00", "21:00"]),  # which shares spend at rest, and the day after early
    ],
)
def test_session_progress_is_1_at_last_bar_before_scheduled_close(hours, start, ends):
    market = MarketSpec("TEST", hours, None, True)
    bars = resample_bars(synthetic_bars(len(ends), calendar=hours, start=start, missing=0.0), market, 5)
    passed = elapsed_session_share(bars.start, bars.known_at, market.calendar)
    done = np.flatnonzero(passed == 1.0)
    assert pd.to_datetime(bars.known_at[done]).strftime("%H:%M").tolist() == ends
    first = np.flatnonzero(np.diff(bars.session, prepend=-1))
    assert (passed > 0).all() and (passed[first] < 0.03).all()
