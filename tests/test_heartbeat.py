"""A line every few seconds while work goes on, in a pipe."""

import threading

import pytest

from ml_factory.heartbeat import Heartbeat
from ml_factory.progress import ProgressPhase, format_duration, progress_phase


def test_heartbeat_line_states_work_phase_total_and_elapsed_time():
    lines, enough = [], threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        if "500 of 2,000" in line:
            enough.set()

    with Heartbeat(write, "preparing MES", seconds=0.01), progress_phase("features", 2_000) as done:
        done(500)
        assert enough.wait(10)
    count = len(lines)
    line = next(line for line in lines if "500 of 2,000" in line)
    assert line.startswith("preparing MES, features: 500 of 2,000 rows") and line.endswith("s so far")
    with progress_phase("labels", 5):
        pass
    assert len(lines) == count and not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_heartbeat_thread_stops_after_exception_in_block():
    with pytest.raises(ZeroDivisionError), Heartbeat(lambda line: None, seconds=60.0):
        raise ZeroDivisionError
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_phase_line_rate_and_remaining_time_match_hand_calculation():
    """300 of 1,000 rows, 100 of them before this session, 200 in 50 s: 4 a second, 175 s for the other 700."""
    one = ProgressPhase("training", 1_000, done=300, start=100, seconds=50.0, over=True, of="rounds")
    assert one.rate == 4.0 and one.left == 175.0
    assert one.line() == "training: 300 of 1,000 rounds, 4 a second, 3 min left"
    assert ProgressPhase("reading", None).line() == "reading" and ProgressPhase("reading", None).left is None
    assert ProgressPhase("x", 10, done=4, start=4).left is None  # nothing done in this session yet
    assert (format_duration(119.4), format_duration(121)) == ("119 s", "2 min")
