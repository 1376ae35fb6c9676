"""What a watcher hears of long work."""

import pytest

from ml_factory.progress import phase, watch


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
