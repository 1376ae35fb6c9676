"""A twin shares no memory with the function it is of, and does what that one did before its first call."""

import functools
import threading

import numpy as np
import pytest

from ml_factory.features import stateless_copy
from ml_factory.features.stateless_copy import clone_isolated

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
def first_asked(x, met=[]):  # noqa: B006
    met.append(x)
    return len(met)


def by_helper(x):
    return first_asked(x)


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
def test_a_twin_has_met_nothing_and_tells_nothing(function):
    before = clone_isolated(function)
    answers = [function(x) for x in (5, 6, 7)]
    assert answers[1:] == [answers[0] + 1, answers[0] + 2]  # it does remember
    for _ in range(2):
        fresh = clone_isolated(before)
        assert [fresh(x) for x in (5, 6, 7)] == answers
    assert function(8) == answers[0] + 3


def test_what_it_is_set_to_stays():
    weights = np.arange(3.0)

    def weighted(x, least=LIMITS["least"]):
        return max(x @ weights, least, LIMITS["least"])

    same = clone_isolated(weighted)
    assert same(np.ones(3)) == weighted(np.ones(3)) == 3 and same.__name__ == "weighted"
    weights[:] = 9
    assert weighted(np.ones(3)) == 27 and same(np.ones(3)) == 3


def test_what_cannot_be_copied_is_shared():
    lock = threading.Lock()

    def locked():
        return lock

    assert clone_isolated(locked)() is lock
    assert (
        clone_isolated(stateless_copy.clone_isolated) is stateless_copy.clone_isolated
        and clone_isolated(np.mean) is np.mean
    )  # libraries keep what they keep
