"""No threshold leans on one file.

For every detector: the worst score of clean bars, the weakest score of what must be caught, and the threshold between
them. Each is drawn again from all files but one (half way between the two, in logarithms), and must still part the
file left out. One clean bar in 20,000 may score higher: real markets break sometimes, and that is reported too.
"""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data import gaps, level_shifts, price_anomalies, time_zone_check
from ml_factory.data.quality import adjacent_bars_mask
from ml_factory.data.sessions import MINUTE_NS, assign_sessions
from tests.data.corruptions import CORRUPTIONS
from tests.data.real_markets import Market

RARE = 20_000
SEED = 11
ONE_BAR = float(np.log(2 * price_anomalies.RUN_WINDOW))  # nats of a run of one bar where there is no other
ONE_IN_A_THOUSAND = 1e-3
PRICES = ("open", "high", "low", "close")


def parts(table: pd.DataFrame, calendar: str):
    """(starts, sessions, log prices, whether a bar follows closely) of a table of bars."""
    start_ns = table["timestamp"].dt.as_unit("ns").astype("int64").to_numpy()
    sessions = assign_sessions(start_ns, calendar)
    log = {name: np.log(table[name].to_numpy()) for name in PRICES}
    return start_ns, sessions, log, adjacent_bars_mask(start_ns, sessions.session_start_mask(), 1)


def by_row(count: int, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
    out = np.zeros(count)
    out[rows] = scores
    return out


def silence(table, calendar):
    start_ns, sessions, _, _ = parts(table, calendar)
    found = gaps.find_gaps(start_ns, sessions, calendar, 1)
    return by_row(len(table), found.row, found.score)


def stale(table, calendar):
    *_, adjacent = parts(table, calendar)
    first, _, score = price_anomalies.stale_price_runs({name: table[name].to_numpy() for name in PRICES}, adjacent)
    return by_row(len(table), first, score)


def no_volume(table, calendar):
    first, length = price_anomalies.find_runs_of_true(table["volume"].to_numpy() == 0)
    return by_row(len(table), first, price_anomalies.run_length_surprisal(first, length, len(table)))


def spike(table, calendar):
    _, sessions, log, adjacent = parts(table, calendar)
    usual = price_anomalies.outlier_robust_move_size(
        np.diff(log["close"], prepend=log["close"][0]), adjacent, sessions.session_start_mask()
    )
    return price_anomalies.spike_scores(log, adjacent, usual)


def jump(table, calendar):
    _, sessions, log, adjacent = parts(table, calendar)
    usual = price_anomalies.outlier_robust_move_size(
        np.diff(log["close"], prepend=log["close"][0]), adjacent, sessions.session_start_mask()
    )
    gap = np.diff(log["open"], prepend=log["open"][0])
    gap[1:] = log["open"][1:] - log["close"][:-1]
    return np.where(
        adjacent, level_shifts.level_shift_scores(gap, level_shifts.level_shift_local_range(log), usual), 0.0
    )


def outside(table, calendar):
    """The share of each week outside the sessions, at the week's rows."""
    start_ns, sessions, _, _ = parts(table, calendar)
    week = (start_ns // (1440 * MINUTE_NS) + 4) // 7
    return pd.Series(~sessions.inside).groupby(week).transform("mean").to_numpy()


# detector -> (score of each row, its threshold, what must be caught, the finding's kind)
DETECTORS = {
    "silence, nats": (silence, gaps.MISSING_NATS, ("missing block",), "missing"),
    "stale run, nats": (stale, price_anomalies.STALE_NATS, ("stale run",), "stale_run"),
    "no volume, nats": (no_volume, price_anomalies.NO_VOLUME_NATS, ("run without volume",), "zero_volume"),
    "spike, usual moves": (
        *(spike, price_anomalies.SPIKE_TIMES),
        *(("one-bar spike up", "one-bar spike down", "bad high wick", "bad low wick"), "spike"),
    ),
    "jump, of its limits": (jump, 1.0, ("roll", "split"), ("roll", "adjustment")),
    "week outside, share": (outside, time_zone_check.OUTSIDE_SHARE, ("shifted weeks",), "zone_mislabel"),
}


def clean_score(scores: np.ndarray) -> float:
    """The worst but one row in 20,000."""
    return float(np.sort(scores)[-1 - -(-len(scores) // RARE)])


def weakest(market: Market, score, names, kinds) -> float:
    """The lowest score at the injected places; a run is scored at its first row."""
    lowest = np.inf
    for name in names:
        spoiled = CORRUPTIONS[name](market, np.random.default_rng([SEED, len(name)]))
        rows = np.array(sorted(row for kind, row in spoiled.added if kind in kinds))
        rows = rows[np.diff(rows, prepend=-9) > 1]
        lowest = min(lowest, float(score(spoiled.table, market.spec.calendar)[rows].min()))
    return lowest


@pytest.mark.parametrize("detector", DETECTORS)
def test_detector_threshold_from_other_files_separates_left_out_file(real_markets, detector):
    score, threshold, names, kinds = DETECTORS[detector]
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    floor = ONE_BAR if "nats" in detector else ONE_IN_A_THOUSAND  # where the others' clean score is 0
    used = {
        symbol: market
        for symbol, market in real_markets.items()
        if not (detector.startswith("week") and symbol == "BTCUSD")
        and not (detector.startswith("no volume") and symbol == "ES")
    }
    clean = {symbol: clean_score(score(market.table, market.spec.calendar)) for symbol, market in used.items()}
    caught = {symbol: weakest(market, score, names, kinds) for symbol, market in used.items()}
    print(f"\n{detector}: threshold {threshold:g}")
    for symbol in used:
        others = [other for other in used if other != symbol]
        drawn = np.sqrt(max(floor, *(clean[o] for o in others)) * min(caught[o] for o in others))
        print(f"  without {symbol:7} {drawn:8.4g}   it: clean {clean[symbol]:8.4g}   to catch {caught[symbol]:8.4g}")
        assert clean[symbol] < drawn < caught[symbol]
        assert clean[symbol] < threshold < caught[symbol]


MARKETS = ("bars/BTCUSD_1m", "bars/ETHUSD_1m", "bars/FILUSDT_1m", "bars/XAUUSD_1m", "defects/BTCUSD_2013_1m")


def test_violent_days_threshold_separates_test_network_from_real_markets(shared_data):
    shares = {}
    for name in (*MARKETS, "defects/BTCUSDT_1m_testnet_not_market"):
        table = pd.read_parquet(shared_data / f"{name}.parquet")
        _, sessions, log, adjacent = parts(table, "24h")
        move = np.where(adjacent, np.diff(log["close"], prepend=log["close"][0]), 0.0)
        shares[name] = price_anomalies.share_of_extreme_move_days(
            price_anomalies.persistent_extreme_moves(log["close"], move), sessions.id
        )
    network = shares.pop("defects/BTCUSDT_1m_testnet_not_market")
    for left_out, share in shares.items():
        drawn = np.sqrt(max(value for name, value in shares.items() if name != left_out) * network)
        print(f"without {left_out:24} {drawn:.3f}   it: {share:.3f}   test network {network:.3f}")
        assert share < drawn < network
    assert max(shares.values()) < price_anomalies.VIOLENT_DAYS < network
