"""Backtests: hand-worked trades, equality with a plain loop, no look-ahead, costs lost without an edge, metrics."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from benchmarks.backtest import (
    HELD_OVERNIGHT,
    market_without_rolls,
    plain_run,
    random_forecasts,
    random_market,
    vectorbt_run,
)
from ml_factory.errors import BarsError, FileError, SettingsError
from ml_factory.evaluation.backtest import ContractSpec, CostSpec, TradingRule, contract_spec, run
from ml_factory.evaluation.luck import sharpe_moments
from tests.contract import doors

ES = ContractSpec("ES", "cme", 0.25, multiplier=50, commission=1.0, exchange_fee=0.5)
FREE = replace(ES, commission=0.0, exchange_fee=0.0)
NO_COST = CostSpec(0, 0)


def bars_of(*rows: tuple[float, float, float, float], start: str = "2024-01-03 15:00", minutes: int = 5):
    """Bars from (open, high, low, close)."""
    index = pd.date_range(start, periods=len(rows), freq=f"{minutes}min", tz="UTC")
    return pd.DataFrame(rows, index=index, columns=["open", "high", "low", "close"], dtype=float)


def forecasts(*pairs: tuple[str, int], day: str = "2024-01-03", **columns: float):
    """Forecasts from (clock time, side)."""
    index = pd.DatetimeIndex([pd.Timestamp(f"{day} {clock}", tz="UTC") for clock, _ in pairs])
    return pd.DataFrame({"side": [side for _, side in pairs], **columns}, index=index)


FLAT = (100.0, 100.0, 100.0, 100.0)


def test_run_long_to_upper_barrier_equals_hand_worked_trade():
    # Decided 15:05 at close 100, filled at the open 100.5 of 15:05; upper barrier 102, reached in 15:10.
    bars = bars_of(FLAT, (100.5, 101, 99.5, 101), (101, 103, 100.75, 102.5), FLAT)
    known = forecasts(("15:05", 1), up=np.log(1.02), down=np.log(1.02))
    found = run(bars, known, ES, costs=CostSpec(spread_ticks=2, slippage_ticks=1), rule=TradingRule(horizon=5))
    (trade,) = found.trades.to_dict("records")
    assert (trade["side"], trade["exit"], trade["bars"]) == (1, "upper", 2)
    assert trade["entry_time"] == pd.Timestamp("2024-01-03 15:05", tz="UTC")
    assert trade["entry_price"] == 100.5 and trade["entry_fill"] == 101.0  # half of 2 ticks and 1 more: 0.5
    assert trade["exit_price"] == pytest.approx(102) and trade["exit_fill"] == pytest.approx(101.5)
    assert trade["gross"] == pytest.approx(1.5 * 50) and trade["net"] == pytest.approx(0.5 * 50 - 2 * 1.5)
    assert trade["cost"] == pytest.approx(50 + 3) and trade["net_ticks"] == pytest.approx(22 / 12.5)
    # At 15:10's close: 1.5 paid for entry, marked at 101 against a fill of 101.
    assert found.equity["equity"].to_list() == pytest.approx([0, -1.5, 22, 22])
    assert found.equity["position"].to_list() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("side", "bar", "exit_", "price"),
    [
        (1, (100, 103, 97, 100), "lower", 98),  # both barriers in one bar: the worse one
        (-1, (100, 103, 97, 100), "upper", 102),
        (1, (97, 97.5, 96, 97), "lower", 97),  # opens beyond: at the open, worse than the barrier
        (-1, (103, 104, 102.5, 103), "upper", 103),
        (1, (100, 101, 99, 100.25), "horizon", 100.25),
    ],
)
def test_run_exit_of_second_bar_equals_hand_worked_price(side, bar, exit_, price):
    bars = bars_of(FLAT, FLAT, bar, FLAT)
    known = forecasts(("15:05", side), up=np.log(1.02), down=-np.log(0.98))
    (trade,) = run(bars, known, FREE, costs=NO_COST, rule=TradingRule(horizon=2)).trades.to_dict("records")
    assert trade["exit"] == exit_ and trade["exit_price"] == pytest.approx(price)
    assert trade["net"] == pytest.approx(side * (price - 100) * 50)


def test_run_forecast_between_bars_is_filled_at_next_open_never_at_its_own_bar():
    bars = bars_of(FLAT, (100, 110, 100, 110), (111, 111, 111, 111), (112, 112, 112, 112))
    (trade,) = run(bars, forecasts(("15:06", 1)), FREE, costs=NO_COST).trades.to_dict("records")
    assert trade["entry_price"] == 111 and trade["exit"] == "end"


def test_run_forecast_without_bar_within_wait_expires():
    bars = bars_of(FLAT, FLAT, FLAT)
    later = bars.set_axis(bars.index + pd.Timedelta(minutes=90))
    bars = pd.concat([bars, later])
    assert len(run(bars, forecasts(("15:15", 1)), FREE, rule=TradingRule(longest_wait_minutes=60)).trades) == 0
    assert len(run(bars, forecasts(("15:15", 1)), FREE, rule=TradingRule(longest_wait_minutes=80)).trades) == 1


def test_run_at_session_end_is_flat_by_choice_and_carries_otherwise():
    # CME: the session ends 22:00 UTC in winter and the next opens 23:00.
    early = bars_of(FLAT, FLAT, (100, 101, 100, 101), start="2024-01-03 21:45")
    late = bars_of((105, 105, 105, 105), (106, 106, 106, 106), start="2024-01-03 23:00")
    bars, known = pd.concat([early, late]), forecasts(("21:50", 1), ("22:00", -1))
    flat = run(bars, known, FREE, costs=NO_COST).trades
    assert flat["exit"].to_list() == ["session"] and flat["exit_price"].to_list() == [101]  # 22:00's expires
    assert flat["exit_time"].iloc[0] == pd.Timestamp("2024-01-03 22:00", tz="UTC")
    carried = run(bars, known.iloc[:1], FREE, costs=NO_COST, rule=TradingRule(flat_at_session_end=False)).trades
    assert carried["exit"].to_list() == ["end"] and carried["exit_price"].to_list() == [106]


def test_run_before_roll_closes_at_last_close_of_old_contract():
    bars = bars_of(FLAT, FLAT, (100, 100, 99, 99), (140, 140, 140, 140)).assign(contract=["H", "H", "H", "M"])
    (trade,) = run(bars, forecasts(("15:05", 1)), FREE, costs=NO_COST).trades.to_dict("records")
    assert trade["exit"] == "roll" and trade["net"] == -50
    late = forecasts(("15:15", 1), up=np.log(1.02), down=np.log(1.02))  # of the old contract, whose barriers it has
    assert len(run(bars, late, FREE, costs=NO_COST).trades) == 0


@pytest.mark.parametrize("first", ["21:40", "18:00"])
def test_run_before_missing_bars_leaves_at_last_close_by_choice(first):
    """Three bars, then the session's rest is missing; before 22:00 UTC a silence of over an hour is a hole too."""
    early = bars_of(FLAT, FLAT, (100, 101, 100, 101), start=f"2024-01-03 {first}")
    late = bars_of((140,) * 4, (141,) * 4, start="2024-01-03 23:00" if first == "21:40" else "2024-01-03 19:20")
    bars, known = pd.concat([early, late]), forecasts((f"{first[:3]}{int(first[3:]) + 5:02d}", 1))
    found = run(bars, known, FREE, costs=NO_COST)
    assert found.trades["exit"].to_list() == ["hole"] and found.trades["exit_price"].to_list() == [101]
    assert found.metrics["hole_exits"] == 1 and found.metrics["roll_exits"] == 0
    carried = run(bars, known, FREE, costs=NO_COST, rule=TradingRule(flat_at_session_end=False))
    assert carried.trades["exit_price"].to_list() == [141] and carried.metrics["hole_exits"] == 0


def test_session_of_few_bars_counts_with_its_neighbour():
    curve = {"equity": [1.0, 2, 3, 5, 6, 7, 9, 9, 9, 10, 8], "session": [1, *[2] * 3, *[3] * 3, *[4] * 3, 5]}
    assert doors.session_gains(pd.DataFrame(curve)).tolist() == [5, 4, -1]
    whole = pd.DataFrame({"equity": [1.0, 2, 5, 6], "session": [1, 1, 2, 2]})
    assert doors.session_gains(whole).tolist() == [2, 4]


def test_run_reversal_equals_hand_worked_trades():
    bars = bars_of(*[(float(p), float(p), float(p), float(p)) for p in (100, 101, 102, 103, 104, 105)])
    known = forecasts(("15:05", 1), ("15:10", 1), ("15:15", 1), ("15:20", -1))
    turned = run(bars, known, FREE, costs=NO_COST)
    assert turned.equity["position"].to_list() == [0, 1, 1, 1, -1, 0]
    assert turned.trades["exit"].to_list() == ["reverse", "end"]
    assert turned.trades["net"].to_list() == [150, -50]
    held = run(bars, known, FREE, costs=NO_COST, rule=TradingRule(reverse=False))
    assert held.trades["net"].to_list() == [200]


def test_run_daily_loss_limit_closes_at_next_open_and_blocks_the_session():
    bars = bars_of(FLAT, (100, 100, 98, 98), (97, 97, 97, 97), FLAT, FLAT)
    known = forecasts(("15:05", 1), ("15:15", 1))
    rule = TradingRule(daily_loss_limit=100)
    trades = run(bars, known, FREE, costs=NO_COST, rule=rule).trades
    assert trades["exit"].to_list() == ["loss_limit"] and trades["net"].to_list() == [-150]
    assert len(run(bars, known, FREE, costs=NO_COST, rule=replace(rule, daily_loss_limit=101)).trades) == 1
    unblocked = run(bars, known.iloc[1:], FREE, costs=NO_COST, rule=rule).trades
    assert len(unblocked) == 1 and unblocked["exit"].to_list() == ["end"]


def random_rule(rng: np.random.Generator) -> tuple[CostSpec, TradingRule, ContractSpec]:
    limit = float(rng.choice([300, 1_000, 5_000]))
    rule = TradingRule(
        horizon=int(rng.integers(1, 30)) if rng.random() < 0.8 else None, least_edge=float(rng.choice([0, 0.3])),
        reverse=bool(rng.random() < 0.5), barriers=bool(rng.random() < 0.8),
        flat_at_session_end=bool(rng.random() < 0.5), daily_loss_limit=limit if rng.random() < 0.5 else None,
    )  # fmt: skip
    costs = CostSpec(float(rng.integers(0, 3)), float(rng.random()))
    return costs, rule, replace(ES, fee_rate=float(rng.choice([0, 1e-4])))


def without_some_bars(seed: int, bars: pd.DataFrame) -> pd.DataFrame:
    """The bars without the last ones of some sessions, and without an hour and more inside some."""
    rng, keep = np.random.default_rng([seed, 3]), np.ones(len(bars), bool)
    for first in range(0, len(bars), 276):
        if rng.random() < 0.5:
            keep[first + 276 - rng.integers(1, 4) : first + 276] = False
        if rng.random() < 0.5:
            hole = first + rng.integers(20, 250)
            keep[hole : hole + rng.integers(11, 16)] = False  # 55 to 75 minutes; a hole is more than 60
    return bars[keep]


def assert_equals_plain_loop(seed: int) -> list[str]:
    rng = np.random.default_rng([seed, 2])
    bars = random_market(seed, int(rng.integers(20, 700)))
    if rng.random() < 0.7:
        bars = without_some_bars(seed, bars)
    known = random_forecasts(seed, bars, float(rng.choice([0.05, 0.3, 1.0])))
    costs, rule, contract = random_rule(rng)
    contract = replace(contract, calendar=str(rng.choice(["cme", "24h"])))
    found, plain = run(bars, known, contract, costs=costs, rule=rule), plain_run(bars, known, contract, costs, rule)
    scale = np.abs(plain.equity).max() + 1
    assert np.abs(found.equity["equity"].to_numpy() - np.array(plain.equity)).max() <= 1e-9 * scale, seed
    entries = bars.index.get_indexer(found.trades["entry_time"])
    same = sorted(plain.trades)
    assert entries.tolist() == [one[0] for one in same] and list(found.trades["exit"]) == [one[3] for one in same]
    np.testing.assert_allclose(found.trades["net"], [one[4] for one in same], atol=1e-9 * scale)
    return [one[3] for one in same]


def test_run_equals_plain_loop_on_random_scripts():
    exits = [exit_ for seed in range(120) for exit_ in assert_equals_plain_loop(seed)]
    assert len(exits) > 1_000 and set(exits) == set(doors.EXITS)


@pytest.mark.soak
def test_run_equals_plain_loop_on_ten_thousand_random_scripts():
    assert sum(len(assert_equals_plain_loop(seed)) for seed in range(1_000, 11_000)) > 100_000


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # vectorbt's, not ours
def test_run_of_reversed_positions_equals_vectorbt():
    pytest.importorskip("vectorbt", reason="vectorbt is installed by make bench")
    bars, known, coin = market_without_rolls(20_000)
    ours, (equity, trades, _) = run(bars, known, coin, costs=NO_COST, rule=HELD_OVERNIGHT), vectorbt_run(bars, known)
    # Ours pays for leaving at the end; theirs has lost digits to a capital of 1e9.
    np.testing.assert_allclose(ours.equity["equity"][:-1], equity[:-1], rtol=0, atol=1e-5)
    assert len(ours.trades) == len(trades) > 1_000


@pytest.mark.parametrize("seed", range(10))
def test_run_with_bars_changed_after_a_moment_keeps_earlier_trades_and_equity(seed):
    rng = np.random.default_rng(seed)
    bars = random_market(seed, 900)
    known = random_forecasts(seed, bars)
    cut = int(rng.integers(100, 880))
    changed = bars.copy()
    prices = ["open", "high", "low", "close"]
    changed.iloc[cut:, :4] = random_market(seed + 100, 900)[prices].to_numpy()[cut:] + 500
    costs, rule, contract = random_rule(rng)
    one = run(bars, known, contract, costs=costs, rule=rule)
    other = run(changed, known, contract, costs=costs, rule=rule)
    moment = bars["known_at"].iloc[cut - 1]
    pd.testing.assert_frame_equal(one.equity.iloc[:cut], other.equity.iloc[:cut])
    before = [found.trades[found.trades["exit_time"] < moment] for found in (one, other)]
    pd.testing.assert_frame_equal(*before)
    assert len(before[0])
    late = run(bars, known[known.index < moment], contract, costs=costs, rule=rule)  # nor do later forecasts
    pd.testing.assert_frame_equal(one.equity.iloc[: cut - 1], late.equity.iloc[: cut - 1])


def test_run_of_forecasts_without_edge_loses_its_costs_within_interval():
    nets, costs = [], []
    for seed in range(40):
        bars = random_market(seed, 3_000)
        trades = run(bars, random_forecasts(seed, bars), ES, rule=TradingRule(horizon=10, barriers=False)).trades
        nets.append(trades["net"].mean())
        costs.append(trades["cost"].mean())
    lost, error = np.mean(nets) + np.mean(costs), np.std(nets, ddof=1) / np.sqrt(len(nets))
    assert np.mean(nets) < -5 * error and abs(lost) < 3 * error


def test_metrics_equal_hand_worked_numbers():
    bars = bars_of(*[(float(p),) * 4 for p in (100, 100, 102, 101, 101, 100, 100)])
    known = forecasts(("15:05", 1), ("15:15", -1), ("15:25", 1))
    got = run(bars, known, ES, costs=NO_COST, rule=TradingRule(horizon=2)).metrics
    # long 100 to 102: +100 - 3; short 101 to 101: -3; long 100 to 100: -3
    assert got["net"] == pytest.approx(91) and got["gross"] == 100 and got["cost"] == pytest.approx(9)
    assert got["net_ticks"] == pytest.approx(91 / 12.5) and got["net_percent"] == pytest.approx(100 * 91 / 5_000)
    assert got["hit_rate"] == pytest.approx(1 / 3) and got["profit_factor"] == pytest.approx(97 / 6)
    assert got["break_even_ticks"] == pytest.approx(100 / 3 / 12.5) and got["cost_ticks"] == pytest.approx(3 / 12.5)
    assert got["turnover"] == 6 and got["trades"] == 3 and got["drawdown"] == pytest.approx(6)
    assert got["exposure"] == pytest.approx(3 / 7)  # held at the close of the first bar of each of three trades
    # at exactly the break-even cost, all of it in spread, the same trades earn nothing
    at = run(bars, known, FREE, costs=CostSpec(got["break_even_ticks"], 0), rule=TradingRule(horizon=2)).metrics
    assert at["net"] == pytest.approx(0, abs=1e-9)


def test_sharpe_ratio_and_error_equal_lo_and_sampling_deviation():
    rng = np.random.default_rng(5)
    ratio, error = doors.sharpe_ratio(np.array([1.0, 3.0] * 20))
    assert ratio == sharpe_moments(np.array([1.0, 3.0] * 20))[0] == pytest.approx(2 * np.sqrt(39 / 40))
    ratio, error = doors.sharpe_ratio(rng.normal(0.5, 1, 40_000))
    assert error == pytest.approx(np.sqrt((1 + ratio**2 / 2) / 40_000), rel=0.2)  # Lo (2002), equation 9
    shocks, series = rng.normal(size=(400, 1_200)), np.zeros((400, 1_200))
    for t in range(1, 1_200):
        series[:, t] = 0.5 * series[:, t - 1] + shocks[:, t]
    found = np.array([doors.sharpe_ratio(row[200:] + 0.1) for row in series])
    spread = found[:, 0].std()
    assert spread > 1.5 / np.sqrt(1_000)  # a plain error is too small here
    assert found[:, 1].mean() == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize(("calendar", "sessions"), [("us_equity", 252), ("24h", 366)])
def test_metrics_of_two_weeks_are_annualised_by_sessions_of_calendar(calendar, sessions):
    """New York traded on 252 days of 2024; ten sessions in eleven days and a half would make 318 a year."""
    days = pd.bdate_range("2024-01-02", "2024-01-12", tz="UTC") + pd.Timedelta(hours=15)
    closes = 100 + np.array([0, 1, 3, 2, 4, 5, 4, 6, 7])
    index = [moment + pd.Timedelta(minutes=m) for moment in days for m in (0, 5)]
    prices = np.column_stack([np.repeat(np.append(100, closes[:-1]), 2)] * 4).astype(float)
    prices[1::2] = closes[:, None]
    bars = pd.DataFrame(prices, index=pd.DatetimeIndex(index), columns=["open", "high", "low", "close"])
    known = pd.DataFrame({"side": 1}, index=pd.DatetimeIndex(index[:1]) + pd.Timedelta(minutes=5))
    spec = replace(FREE, calendar=calendar, multiplier=1.0)
    carried = TradingRule(flat_at_session_end=False, barriers=False)
    got = run(bars, known, spec, costs=NO_COST, rule=carried).metrics
    daily = np.diff(closes, prepend=closes[0]) / closes[0]
    a_year = sessions * 365.25 / 365
    assert got["sessions"] == 9 and got["sessions_a_year"] == pytest.approx(a_year, abs=1.1)
    ratio = daily.mean() / daily.std(ddof=1) * np.sqrt(got["sessions_a_year"])
    assert got["sharpe"] == pytest.approx(ratio) and got["net"] == pytest.approx(closes[-1] - closes[0])


def test_drawdown_equals_hand_worked_numbers():
    assert doors.drawdown(np.array([1.0, 5.0, 3.0, 4.0, 6.0, 2.0]), np.array([1, 1, 2, 3, 4, 5])) == (4, 2)
    assert doors.drawdown(np.array([-2.0, -1.0]), np.array([1, 1])) == (2, 1)


def test_metrics_without_trades_are_zero_or_nan():
    got = run(bars_of(FLAT, FLAT, FLAT), forecasts(("15:05", 0)), ES).metrics
    assert got["net"] == got["exposure"] == got["trades"] == 0 and np.isnan(got["hit_rate"]) and np.isnan(got["sharpe"])


@pytest.mark.parametrize("symbol", ["MES", "ES", "MNQ", "NQ", "MGC", "GC", "MCL", "CL"])
def test_contract_spec_of_future_has_tick_value_of_its_rulebook(symbol):
    values = {"MES": 1.25, "ES": 12.5, "MNQ": 0.5, "NQ": 5, "MGC": 1, "GC": 10, "MCL": 1, "CL": 10}
    found = contract_spec(symbol)
    assert found.tick_value == pytest.approx(values[symbol])
    assert found.commission > 0 and found.exchange_fee > 0
    assert contract_spec(f"{symbol}Z24").tick_value == found.tick_value


def test_contract_spec_of_share_coin_and_file_of_user(tmp_path):
    assert contract_spec("SPY").multiplier == 1 and contract_spec("SPY").tick == 0.01
    assert contract_spec("BTC-USD", tick=0.01).fee_rate == 0.001
    file = tmp_path / "contracts.json"
    facts = {"tick": 0.015625, "multiplier": 1000, "commission": 2}
    file.write_text(
        json.dumps({"ZN": facts, "CL": {"commission": 0.25}, "XX": facts | {"calendar": "cme"}}), "utf-8-sig"
    )
    assert contract_spec("ZN", file=file).tick_value == contract_spec("XX", file=file).tick_value == 15.625
    assert contract_spec("ZN", file=file).calendar == "cme_rates"
    assert contract_spec("CL", file=file).commission == 0.25 and contract_spec("CL", file=file).multiplier == 1000
    assert contract_spec("CLZ24", file=file).commission == 0.25
    with pytest.raises(SettingsError, match="got ZN, CL, XX, wanted MES"):
        contract_spec("MES", file=file)
    with pytest.raises(FileError, match="No such file"):
        contract_spec("CL", file=tmp_path / "contract.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"CL": {"multiplyer": 5}}', "did you mean"),
     ('{"CL": {"tick": -1}}', "a number in .0, inf"), ('["CL"]', "by symbol"),
     ('{"CL": {"tick": "1"}}', "another kind"), ('{"CL": {"commission": -1}}', "a number in .0, inf"),
     ('{"CL": {"commission": [', "cannot be read"), ('{"CL": {"calendar": "cmee"}}', "cme, nymex")],
)  # fmt: skip
def test_contract_file_with_wrong_fact_is_refused(text, message, tmp_path):
    file = tmp_path / "contracts.json"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        contract_spec("CL", file=file)
    assert f"{file}, CL" in str(caught.value) or f"[{file}]" in str(caught.value)


def test_contract_spec_of_unknown_market_or_tick_names_next_step():
    for symbol in ("WHATEVER", "6E", "BTC-USD"):
        with pytest.raises(SettingsError, match="Next: give"):
            contract_spec(symbol)


@pytest.mark.parametrize(
    "wrong", [{"longest_wait_minutes": -1}, {"least_edge": 2}, {"horizon": 0}, {"daily_loss_limit": 0}]
)
def test_trading_rule_with_impossible_value_is_refused(wrong):
    with pytest.raises(SettingsError):
        TradingRule(**wrong)


def test_run_with_unusable_bars_or_forecasts_is_refused():
    bars = bars_of(FLAT, FLAT)
    for wrong in (bars.drop(columns="open"), bars.iloc[::-1], bars.assign(close=np.nan), bars.tz_localize(None)):
        with pytest.raises(BarsError):
            run(wrong, forecasts(("15:05", 1)), ES)
    with pytest.raises(BarsError):
        run(bars, forecasts(("15:05", 1), ("15:05", 1)), ES)
    known = forecasts(("15:05", 1))
    shares = known.drop(columns="side").assign(p_short=0.2, p_long=np.nan)
    for wrong, word in ((known.tz_localize(None), "tz_localize"), (known.drop(columns="side"), "p_short and p_long"),
                        (shares.drop(columns="p_long"), "p_long"), (known.reset_index(drop=True), "UTC index"),
                        (shares, "2024-01-03 15:05"), (known.assign(side=np.nan), "NaN")):  # fmt: skip
        with pytest.raises(BarsError, match=word):
            run(bars, wrong, ES)
