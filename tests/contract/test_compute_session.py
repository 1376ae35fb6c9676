"""The runtime's age comes from its process 1, not from the notebook."""

import math
import os
import time

import pytest

from ml_factory.errors import SettingsError
from tests.contract.doors import compute_session


def test_runtime_started_reads_start_of_process_1_from_proc(tmp_path):
    assert compute_session.runtime_start_time(tmp_path / "absent") == pytest.approx(time.time(), abs=5)  # unknown
    (tmp_path / "1").mkdir()
    boot, started = 1_000_000, 1_700_000_000
    fields = " ".join(["S", *["7"] * 18, str((started - boot) * os.sysconf("SC_CLK_TCK")), "9", "9"])
    (tmp_path / "1" / "stat").write_text(f"1 (a (b) c) S 5) {fields}\n")
    (tmp_path / "stat").write_text(f"cpu 1 2 3\nbtime {boot}\nprocesses 5\n")
    assert compute_session.runtime_start_time(tmp_path) == pytest.approx(started, abs=0.02)


def test_session_ending_is_true_when_only_last_save_fits(monkeypatch):
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "1")
    for left, save, ends in ((60, 10, False), (60, 16, True), (40, 5, False), (20, 0, False), (14, 0, True)):
        monkeypatch.setattr(compute_session, "runtime_start_time", lambda left=left: time.time() - (3600 - left))
        assert compute_session.is_session_ending(save) is ends, (left, save)


def test_hours_left_beyond_tier_limit_uses_next_tier(monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    monkeypatch.setattr(compute_session, "runtime_start_time", lambda: time.time() - 3600 * 12 + 10)
    assert compute_session.is_session_ending(0)
    for hours, left in ((13, 11), (23.99, 0.01), (25, math.inf)):
        monkeypatch.setattr(compute_session, "runtime_start_time", lambda hours=hours: time.time() - 3600 * hours)
        assert compute_session.configured_hours_remaining() == pytest.approx(left, abs=1e-3)
        assert compute_session.is_session_ending(20) is (left < 0.02)
    assert compute_session.configured_hours_remaining(limit_hours=12) == 0
    assert compute_session.configured_hours_remaining("pro") == math.inf


@pytest.mark.parametrize("name", ["ML_FACTORY_SESSION_HOURS", "ML_FACTORY_COLAB_TIER"])
def test_wrong_variable_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "por")
    with pytest.raises(SettingsError, match=f"{name}.*'por'"):
        compute_session.configured_hours_remaining()
