"""What a watcher hears of long work."""

import numba
import pytest

from ml_factory.progress import phase, record, watch


def test_a_watcher_hears_begin_steps_and_end_and_nothing_afterwards():
    heard = []
    with watch(lambda one: heard.append((one.name, one.done, one.over))):
        with phase("features", 100) as done:
            done(40)
            done(40)
        with phase("labels", 5):
            pass
    with phase("splits", 5):
        pass
    assert heard == [
        ("features", 0, False), ("features", 40, False), ("features", 80, False), ("features", 100, True),
        ("labels", 0, False), ("labels", 5, True),
    ]  # fmt: skip


def test_a_phase_that_fails_ends_where_it_was_and_forgets_its_watcher():
    heard = []
    with pytest.raises(ZeroDivisionError), watch(heard.append), phase("labels", 10) as done:
        done(3)
        raise ZeroDivisionError
    assert (heard[-1].done, heard[-1].over) == (3, True)
    count = len(heard)
    with phase("labels", 1):
        pass
    assert len(heard) == count


def test_the_rate_is_rows_by_seconds_and_never_more_than_all_rows():
    seen = []
    with watch(seen.append), phase("frames", 7) as done:
        done(50)
        assert seen[-1].done == 7
    assert seen[-1].rate == pytest.approx(7 / seen[-1].seconds)


def test_a_phase_inside_another_is_part_of_it():
    with record() as ended:
        with phase("proof", 10) as done:
            with phase("features", 99) as inner:
                inner(5)
            done(10)
        with phase("writing", 3):
            pass
    assert [(one.name, one.done) for one in ended] == [("proof", 10), ("writing", 3)]


def test_rows_that_only_the_end_tells():
    with record() as ended, watch(lambda one: seen.append(one.rows)):
        seen = []
        with phase("reading") as done:
            done(12)
    assert seen == [None, None, 12] and ended[0].done == 12


def test_what_is_compiled_on_first_use_is_told_apart():
    @numba.njit
    def inner(x):
        return x + 1.0

    @numba.njit
    def outer(x):
        return inner(x) * 2.0

    seen = []
    with record() as ended, watch(lambda one: seen.append(one.compiling)):
        for _ in range(2):
            with phase("features", 1):
                outer(1.0)
    cold, warm = ended
    assert 0.0 < cold.compiled <= cold.seconds and warm.compiled == 0.0
    assert seen == [False, True, False, False, False, False]
