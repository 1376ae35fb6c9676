"""A twin shares no memory with the function it is of, and does what that one did before its first call."""

import functools
import threading

import numpy as np
import pytest

from tests.contract.doors import clone_function_without_state

SEEN: list[int] = []
LIMITS = {"least": 3}
_count = 0


def by_default(x, met=[]):  # noqa: B006 - what is to be copied
    met.append(x)
    return len(met)


def by_global(x):
    SEEN.append(x)
    return len(SEEN)


def by_name(x):
    global _count
    _count += 1
    return counted()


def counted():
    return _count


def by_attribute(x):
    by_attribute.calls += 1
    return by_attribute.calls


by_attribute.calls = 0


@functools.lru_cache(maxsize=8)
def first_requested(x, met=[]):  # noqa: B006
    met.append(x)
    return len(met)


def by_helper(x):
    return first_requested(x)


def by_closure():
    met = {}

    def counting(x):
        met[len(met)] = x
        return len(met)

    return counting


def by_wrapper():
    @functools.wraps(by_default)
    def wrapped(x):
        return by_default(x)

    return wrapped


@pytest.mark.parametrize(
    "function", [by_default, by_global, by_name, by_attribute, by_helper, by_closure(), by_wrapper()]
)
def test_clone_isolated_of_stateful_function_keeps_initial_state(function):
    before = clone_function_without_state(function)
    answers = [function(x) for x in (5, 6, 7)]
    assert answers[1:] == [answers[0] + 1, answers[0] + 2]  # it does remember
    for _ in range(2):
        fresh = clone_function_without_state(before)
        assert [fresh(x) for x in (5, 6, 7)] == answers
    assert function(8) == answers[0] + 3


def test_clone_isolated_keeps_captured_values_at_copy_time():
    weights = np.arange(3.0)

    def weighted(x, least=LIMITS["least"]):
        return max(x @ weights, least, LIMITS["least"])

    same = clone_function_without_state(weighted)
    assert same(np.ones(3)) == weighted(np.ones(3)) == 3 and same.__name__ == "weighted"
    weights[:] = 9
    assert weighted(np.ones(3)) == 27 and same(np.ones(3)) == 3


def test_clone_isolated_shares_locks_and_library_functions():
    lock = threading.Lock()

    def locked():
        return lock

    assert clone_function_without_state(locked)() is lock
    for kept in (clone_function_without_state, np.mean):  # libraries keep what they keep
        assert clone_function_without_state(kept) is kept
