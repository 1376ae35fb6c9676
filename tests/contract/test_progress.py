"""What a watcher hears of long work, and a line every few seconds while it goes on, in a pipe."""

import threading

import pytest

from tests.contract.doors import (
    Heartbeat,
    ProgressPhase,
    format_duration,
    progress_phase,
    record_progress,
    report_progress_to,
)


def test_watch_reports_phase_begin_steps_and_end_only_inside_block():
    received = []
    with report_progress_to(lambda one: received.append((one.name, one.done, one.over))):
        with progress_phase("features", 100) as done:
            done(40)
            done(40)
        with progress_phase("labels", 5):
            pass
    with progress_phase("splits", 5):
        pass
    assert received == [
        ("features", 0, False), ("features", 40, False), ("features", 80, False), ("features", 100, True),
        ("labels", 0, False), ("labels", 5, True),
    ]  # fmt: skip


def test_phase_after_exception_ends_at_last_step_and_removes_watcher():
    received = []
    with pytest.raises(ZeroDivisionError), report_progress_to(received.append), progress_phase("labels", 10) as done:
        done(3)
        raise ZeroDivisionError
    assert (received[-1].done, received[-1].over) == (3, True)
    count = len(received)
    with progress_phase("labels", 1):
        pass
    assert len(received) == count


def test_record_of_nested_phases_lists_outer_phase_only():
    with record_progress() as ended:
        with progress_phase("proof", 10) as done:
            with progress_phase("features", 99) as inner:
                inner(5)
            done(10)
        with progress_phase("writing", 3):
            pass
    assert [(one.name, one.done) for one in ended] == [("proof", 10), ("writing", 3)]


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


def test_phase_line_rate_and_remaining_time_match_hand_calculation():
    """300 of 1,000 rows, 100 of them before this session, 200 in 50 s: 4 a second, 175 s for the other 700."""
    one = ProgressPhase("training", 1_000, done=300, start=100, seconds=50.0, over=True, of="rounds")
    assert one.rate == 4.0 and one.left == 175.0
    assert one.line() == "training: 300 of 1,000 rounds, 4 a second, 3 min left"
    assert ProgressPhase("reading", None).line() == "reading" and ProgressPhase("reading", None).left is None
    assert ProgressPhase("x", 10, done=4, start=4).left is None  # nothing done in this session yet
    assert (format_duration(119.4), format_duration(121)) == ("119 s", "2 min")
