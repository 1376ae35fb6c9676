"""A library's call is tried in a fork: a signal there is reported, and nothing else changes here."""

import ctypes
import os
import time

import psutil
import pytest

from ml_factory.limited_fork import OUT_OF_MEMORY, failure_in_fork

LIMITS = {"memory": 1 << 30, "cpu_seconds": 60, "seconds": 60.0}


def read_null():
    ctypes.string_at(0)


def raise_error():
    raise ValueError("the caller meets this itself")


def burn():
    while True:
        pass


@pytest.mark.parametrize(
    ("call", "limits", "name"),
    [
        (lambda: None, {}, ""),
        (raise_error, {}, ""),
        (lambda: bytearray(2 << 30), {}, OUT_OF_MEMORY),
        (lambda: bytearray(1 << 29), {}, ""),
        (read_null, {}, "SIGSEGV"),
        (os.abort, {}, "SIGABRT"),
        (burn, {"cpu_seconds": 1}, "SIGXCPU"),
        (lambda: time.sleep(60), {"seconds": 0.2}, ""),  # a lock of another thread: nothing is known
    ],
)
def test_failure_in_fork_names_signal_or_memory_alone(call, limits, name, capfd):
    assert failure_in_fork(call, **{**LIMITS, **limits}) == name
    assert capfd.readouterr() == ("", "")


def test_failure_in_fork_leaves_no_child_behind():
    before = set(psutil.Process().children())
    failure_in_fork(read_null, **LIMITS)
    assert set(psutil.Process().children()) <= before
