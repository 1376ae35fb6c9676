"""What a watcher hears of long work."""

import numba
import pytest

from ml_factory.progress import progress_phase, record_progress, report_progress_to


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


def test_phase_rate_is_rows_per_second_capped_at_total_rows():
    seen = []
    with report_progress_to(seen.append), progress_phase("frames", 7) as done:
        done(50)
        assert seen[-1].done == 7
    assert seen[-1].rate == pytest.approx(7 / seen[-1].seconds)


def test_record_of_nested_phases_lists_outer_phase_only():
    with record_progress() as ended:
        with progress_phase("proof", 10) as done:
            with progress_phase("features", 99) as inner:
                inner(5)
            done(10)
        with progress_phase("writing", 3):
            pass
    assert [(one.name, one.done) for one in ended] == [("proof", 10), ("writing", 3)]


def test_phase_without_total_reports_rows_at_end():
    with record_progress() as ended, report_progress_to(lambda one: seen.append(one.rows)):
        seen = []
        with progress_phase("reading") as done:
            done(12)
    assert seen == [None, None, 12] and ended[0].done == 12


def test_phase_records_compile_time_of_first_kernel_call():
    @numba.njit
    def inner(x):
        return x + 1.0

    @numba.njit
    def outer(x):
        return inner(x) * 2.0

    seen = []
    with record_progress() as ended, report_progress_to(lambda one: seen.append(one.compiling)):
        for _ in range(2):
            with progress_phase("features", 1):
                outer(1.0)
    cold, warm = ended
    assert 0.0 < cold.compiled <= cold.seconds and warm.compiled == 0.0
    assert seen == [False, True, False, False, False, False]
