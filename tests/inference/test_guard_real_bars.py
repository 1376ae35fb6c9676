"""The guard on real bars, as `benchmarks.guard` measures it: few false alarms, declared drifts found."""

import json

import pytest

from benchmarks import guard

DEVELOPED_ON = ("NQ", "ETHUSD", "BTCUSD")  # thresholds' rule; the others were measured once, at the end


@pytest.mark.soak
@pytest.mark.parametrize("symbol", ["ES", "XAUUSD", "SPY", "FILUSDT"])
def test_guard_on_held_out_real_bars_meets_limits_of_alarms_and_drifts(shared_data, symbol, capsys, monkeypatch):
    assert symbol not in DEVELOPED_ON
    monkeypatch.setattr("sys.argv", ["guard", str(shared_data / "bars"), "--symbols", symbol])
    guard.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    (ours,) = (line for line in lines if line["side"] == "guard")
    assert ours["onsets_per_1000"] <= 1 and ours["found"] >= 7.5, ours  # 8 is missed on ES: docs/log.md
