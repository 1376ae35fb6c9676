"""Session lifetimes: preempted sessions are complete observations, clean exits right-censored ones."""

import json

import numpy as np
import pytest

from ml_factory.checkpoints import session_lifetimes
from ml_factory.checkpoints.session_lifetimes import SessionLifetimeLog

HOUR = 3600.0


def record(folder, name, began, seen, ended=None):
    folder.mkdir(exist_ok=True)
    (folder / f"{began:012.0f}-{name}.json").write_text(json.dumps({"began": began, "seen": seen, "ended": ended}))


def test_session_log_without_records_gives_default_mean_life(tmp_path):
    assert SessionLifetimeLog(tmp_path / "none").mean_life() == 2 * HOUR


def test_session_log_mean_life_matches_hand_calculation(tmp_path):
    record(tmp_path, "taken", 0, HOUR)
    record(tmp_path, "clean", 0, 3 * HOUR, 3 * HOUR)
    record(tmp_path, "living", 90 * HOUR, 99.5 * HOUR)
    log = SessionLifetimeLog(tmp_path, now=lambda: 100 * HOUR)
    # (2 usual + 1 + 3 + 9.5 hours) over (1 usual + 1) taken away: half an hour's silence is no end
    assert log.mean_life() == pytest.approx((2 + 1 + 3 + 9.5) * HOUR / 2)


@pytest.mark.parametrize("life", [0.5 * HOUR, 8 * HOUR])
def test_session_log_mean_life_approaches_observed_mean(tmp_path, life):
    rng = np.random.default_rng(5)
    for i, lived in enumerate(rng.exponential(life, 50)):
        record(tmp_path, f"s{i}", i * 1e5, i * 1e5 + lived)
    mean = SessionLifetimeLog(tmp_path, now=lambda: 1e9).mean_life()
    assert mean == pytest.approx(life, rel=0.4)


def test_session_log_writes_record_and_skips_torn_files(tmp_path):
    clock = iter([1000.0, 1060.0, 2000.0])
    log = SessionLifetimeLog(tmp_path, "me", now=lambda: next(clock))
    log.record_alive(hours_left=2)
    observed = json.loads((tmp_path / "000000001000-me.json").read_text())
    assert observed == {"began": 1000.0, "seen": 1060.0, "ended": None, "limit": 1060.0 + 2 * HOUR}
    log.record_end()
    (tmp_path / "torn.json").write_text('{"began": 1')
    (tmp_path / "odd.json").write_text("[1, 2]")
    other = SessionLifetimeLog(tmp_path, "other", now=lambda: 2000.0 + 2 * HOUR)
    assert other.mean_life() == pytest.approx((2 * HOUR + 1000.0) / 1)


def test_session_log_reads_only_newest_50_records(tmp_path, monkeypatch):
    for i in range(80):
        record(tmp_path, f"s{i}", i * 1e5, i * 1e5 + HOUR)
    read = []
    monkeypatch.setattr(
        session_lifetimes.files, "read_json", lambda path: read.append(path.name) or json.loads(path.read_text())
    )
    assert SessionLifetimeLog(tmp_path, now=lambda: 1e9).mean_life() == pytest.approx((2 + 50) * HOUR / 51)
    assert len(read) == 50 and min(read).startswith("000003000000")
