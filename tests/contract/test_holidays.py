"""Closes of short days by product group, against what the exchange published and what real files hold."""

import numpy as np
import pandas as pd
import pytest

from tests.contract.doors import assign_sessions, exchange_days, resolve_market_spec

# Chicago time of the last trade; "" where the day is a regular one (16:00; NYMEX until 2015: 16:15).
# By day, the notice that says so:
#   2013-07-03, 2013-07-04, 2013-12-24: brokers' copies of the CME Globex schedule (TransAct, RanSquawk)
#   2019-01-21: CME Globex holiday calendar (index, Bitcoin, rates, currencies, energy, metals: halt at 12:00)
#   2023-02-20, 2024-07-03, 2024-07-04: DTN's copies of the CME Globex schedule
#   2025-01-09: CME Group's press release of 2024-12-30
PUBLISHED = [
    ("2013-07-03", {"cme": "12:15", "nymex": "16:15", "comex": "16:15", "cme_fx": "", "cme_rates": ""}),
    ("2013-07-04", {"cme": "10:30", "nymex": "12:15", "comex": "12:15", "cme_fx": "12:00", "cme_rates": "12:00"}),
    ("2013-12-24", {"cme": "12:15", "nymex": "12:45", "cme_fx": "12:15", "cme_rates": "12:15"}),
    ("2019-01-21", dict.fromkeys(("cme", "nymex", "comex", "cme_crypto", "cme_fx", "cme_rates"), "12:00")),
    ("2023-02-20", {"cme": "12:00", "cme_rates": "12:00", "nymex": "13:30", "comex": "13:30", "cme_crypto": ""}),
    ("2024-07-03", {"cme": "12:15", "nymex": "", "comex": "", "cme_crypto": "", "cme_fx": "", "cme_rates": ""}),
    ("2024-07-04", {"cme": "12:00", "cme_rates": "12:00", "nymex": "13:30", "comex": "13:30", "cme_fx": ""}),
    ("2025-01-09", {"cme": "08:30", "cme_rates": "12:15", "nymex": "", "comex": "", "cme_crypto": "", "cme_fx": ""}),
    ("2023-07-03", {"cme": "12:15", "nymex": ""}),  # Monday
    ("2025-07-03", {"cme": "12:15", "nymex": ""}),  # Thursday
    ("2026-07-03", {"cme": "12:00", "nymex": "13:30"}),  # Friday: the holiday itself
    ("2020-07-02", {"cme": "", "nymex": ""}),  # the holiday was Friday the 3rd
]


@pytest.mark.parametrize(
    ("day", "group", "close"),
    [(day, group, close) for day, closes in PUBLISHED for group, close in closes.items()],
)
def test_sessions_of_short_day_closes_at_published_time(day, group, close):
    morning = pd.Timestamp(f"{day} 07:00", tz="America/Chicago")
    got = assign_sessions(np.array([morning.value]), group)
    assert pd.Timestamp(got.close_ns[0], tz="UTC") == pd.Timestamp(f"{day} {close or '16:00'}", tz="America/Chicago")
    days, short = exchange_days(group)
    assert int(np.datetime64(day).astype(int)) in days and set(short) <= set(days.tolist())


# file -> the group whose schedule its bars end by; the last bar of a short day may be missing by this many minutes
@pytest.mark.parametrize(
    ("name", "symbol", "slack"),
    [("bars/NQ_1m", "NQ", 1), ("bars/ES_1m", "ES", 1), ("bars_5m/MNQ_5m", "MNQ", 5), ("bars/XAUUSD_1m", "XAUUSD", 6)],
)
def test_short_days_last_bar_of_real_file_is_at_scheduled_close(shared_data, name, symbol, slack):
    """Every short session of the file ends with its scheduled minute."""
    stamps = pd.DatetimeIndex(pd.read_parquet(shared_data / f"{name}.parquet", columns=["timestamp"])["timestamp"])
    sessions = assign_sessions(stamps.as_unit("ns").asi8, resolve_market_spec(symbol).calendar)
    last = pd.Series(stamps.as_unit("ns").asi8).groupby(sessions.id).max()
    local = pd.DatetimeIndex(last.to_numpy(), tz="UTC").tz_convert("America/Chicago")
    seen = pd.Series(local.hour * 60 + local.minute, index=last.index)
    planned = pd.Series(exchange_days(resolve_market_spec(symbol).calendar)[1]).reindex(seen.index).dropna()
    planned = planned[planned.index < seen.index[-1]]  # the file's last day may be cut short by the file itself
    late = planned - seen[planned.index]
    broker = pd.DatetimeIndex(late.index.to_numpy().astype("datetime64[D]"))
    late = late[~((symbol == "XAUUSD") & (broker.month == 12))]  # this broker closes at 12:00 before holidays
    assert len(late) >= 2 and late.between(1, slack).all(), late
