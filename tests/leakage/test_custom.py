"""A feature that looks ahead in a few rows a month is met by the rows of sampled days."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.sessions import DAY_NS, resolve_market_spec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.features import custom
from ml_factory.features.build import FeatureSpec
from ml_factory.leakage.custom import check_custom_features, sample_calendar_days

FEBRUARY_20 = pd.Timestamp("2024-02-20", tz="UTC").value // DAY_NS


@pytest.fixture(scope="module")
def bars():
    return synthetic_bars(days=12, seed=5, start="2024-02-12")


def ahead(bars, where):
    """The next bar's move where `where` says, of days since 1970 and minutes of the day; else the bar's own."""
    move = np.diff(np.log(bars.close), prepend=np.log(bars.close[0]))
    day, minute = np.divmod(np.asarray(bars.known_at) // 60_000_000_000, 1440)
    return np.where(where(day, minute), np.append(move[1:], 0.0), move)


def peeks_in_an_hour_of_the_week(bars):
    return ahead(bars, lambda day, minute: ((day + 3) % 7 == 2) & (minute // 60 == 9))


def peeks_in_a_minute_of_the_month(bars):
    return ahead(bars, lambda day, minute: (day == FEBRUARY_20) & (minute == 9 * 60 + 35))


def looks_back(bars):
    close = pd.Series(np.asarray(bars.close))
    return (close / close.rolling(20, min_periods=1).mean() - 1).to_numpy()


def found_of(monkeypatch, bars, function, quick):
    monkeypatch.setattr(custom, "_FEATURES", {})
    with monkeypatch.context() as blind:
        blind.setattr(custom, "prove_custom_feature", lambda *given: None)
        custom.feature(function, memory=24)
    spec = FeatureSpec(custom=(function.__name__,))
    return check_custom_features(bars, resolve_market_spec("DEMO", bars).to_dict(), spec, quick=quick)


def test_check_sampled_days_quick_reports_look_ahead_in_one_hour_of_week(bars, monkeypatch):
    (leak,) = found_of(monkeypatch, bars, peeks_in_an_hour_of_the_week, True).leaks
    assert leak.column == "peeks_in_an_hour_of_the_week" and pd.Timestamp(leak.first_row).hour == 9


def test_check_sampled_days_full_reports_look_ahead_in_one_minute_of_month(bars, monkeypatch):
    (leak,) = found_of(monkeypatch, bars, peeks_in_a_minute_of_the_month, False).leaks
    assert leak.rows == 1 and pd.Timestamp(leak.first_row).strftime("%d %H:%M") == "20 09:35"


def test_check_sampled_days_backward_looking_feature_reports_no_leak(bars, monkeypatch):
    found = found_of(monkeypatch, bars, looks_back, True)
    assert found.leaks == () and found.compared["features, rows of sampled days"] > 1_000


def test_check_sampled_days_feature_that_raises_is_reported_as_leak(bars, monkeypatch):
    def fails(bars):
        raise ValueError("no value")

    monkeypatch.setitem(globals(), "fails", fails)
    (leak,) = found_of(monkeypatch, bars, fails, True).leaks
    assert "ValueError: no value" in leak.column


def test_sampled_days_cover_each_weekday_day_and_week_of_month():
    known_at = np.arange(19_723, 19_723 + 800) * DAY_NS
    dates = pd.DatetimeIndex((sample_calendar_days(known_at, 60) * DAY_NS).astype("M8[ns]"))
    assert len(dates) == 60 and set(dates.day) == set(range(1, 32)) and set(dates.month) == set(range(1, 13))
    assert len({(date.weekday(), (date.day - 1) // 7) for date in dates}) == 35
    week = pd.DatetimeIndex((sample_calendar_days(known_at, 7, weekdays_only=True) * DAY_NS).astype("M8[ns]"))
    assert sorted(date.weekday() for date in week) == list(range(7))
