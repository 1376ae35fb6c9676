"""Saves come at once, soon while young, and then at Young's interval for what they cost here."""

import math

import pytest

from ml_factory.runs.planner import cadence
from ml_factory.runs.timer import SaveTimer


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saves(timer: SaveTimer, clock: Clock, seconds: int) -> list[int]:
    """When a loop that asks every second saves."""
    began, moments = clock.now, []
    for second in range(seconds):
        clock.now = began + second
        if timer.due():
            timer.saved()
            moments.append(second)
    return moments


def test_first_at_once_then_every_two_minutes_then_every_thirty():
    clock = Clock()
    moments = saves(SaveTimer(1800, 120, clock=clock), clock, 6000)
    assert moments == [*range(0, 1801, 120), 3600, 5400]


@pytest.mark.parametrize(("cost", "life"), [(10.0, 1800.0), (2.0, 28800.0)])
def test_what_a_save_costs_decides_where_sessions_are_taken_away(cost, life):
    clock = Clock()
    timer = SaveTimer(1800, 120, clock=clock, mean_life=life)
    saves(timer, clock, 4000)
    timer.measured(cost, 0.0)
    moments = saves(timer, clock, 8000)
    assert moments[-1] - moments[-2] == math.ceil(cadence(cost, life))
    assert timer.interval == cadence(cost, life) < 1800


def test_cheap_saves_do_not_keep_a_mount_busy_and_dear_ones_come_within_the_promise():
    timer = SaveTimer(1800, 120, clock=Clock(), mean_life=7200.0)
    timer.measured(0.001, 0.001)
    assert timer.interval == 30
    timer.measured(100, 6000)
    assert timer.interval == 1800


def test_where_nobody_takes_the_machine_away_the_promise_stands():
    timer = SaveTimer(1800, 120, clock=Clock())
    timer.measured(1.0, 1.0)
    assert timer.interval == 1800
