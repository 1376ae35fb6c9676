"""Saves come at once, soon while young, and then at Young's interval for what they cost here."""

import math

import numpy as np
import pytest

from ml_factory.checkpoints.schedule import SaveTimer, save_interval
from ml_factory.errors import SettingsError


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saves(timer: SaveTimer, clock: Clock, seconds: int) -> list[int]:
    """Return the times at which a loop that checks every second saves."""
    began, moments = clock.now, []
    for second in range(seconds):
        clock.now = began + second
        if timer.due():
            timer.record_save()
            moments.append(second)
    return moments


def test_save_timer_saves_at_once_then_every_two_and_thirty_minutes():
    clock = Clock()
    moments = saves(SaveTimer(1800, 120, clock=clock), clock, 6000)
    assert moments == [*range(0, 1800, 120), 3480, 5280]


def test_save_timer_due_in_predicts_next_due_time():
    """At every second the answer is the one a loop that asks each second then finds, also where the run grows old."""
    clock, observed = Clock(), {}
    timer, began = SaveTimer(1800, 120, clock=clock), clock.now
    for second in range(5300):
        clock.now = began + second
        if timer.due():
            assert timer.due_in() == 0
            assert {at + left for at, left in observed.items()} <= {second}
            observed = {}
            timer.record_save()
        observed[second] = timer.due_in()


@pytest.mark.parametrize(("cost", "life"), [(10.0, 1800.0), (2.0, 28800.0)])
def test_save_timer_with_mean_life_uses_save_interval_of_cost(cost, life):
    clock = Clock()
    timer = SaveTimer(1800, 120, clock=clock, mean_life=life)
    saves(timer, clock, 4000)
    timer.record_cost(cost, 0.0)
    moments = saves(timer, clock, 8000)
    assert moments[-1] - moments[-2] == math.ceil(save_interval(cost, life))
    assert timer.interval == save_interval(cost, life) < 1800


def test_save_timer_interval_stays_between_30_and_1800_seconds():
    timer = SaveTimer(1800, 120, clock=Clock(), mean_life=7200.0)
    timer.record_cost(0.001, 0.001)
    assert timer.interval == 30
    timer.record_cost(100, 6000)
    assert timer.interval == 1800


def test_save_timer_without_mean_life_keeps_fixed_intervals():
    clock = Clock()
    timer = SaveTimer(1800, 120, clock=clock)
    timer.record_save()
    timer.record_cost(1.0, 1.0)
    assert timer.interval == 120
    clock.now += 1800
    assert timer.interval == 1800


def test_save_interval_minimises_expected_waste():
    """Waste of a cadence T: a share C / T for saving and half a cadence lost at each end, T / 2M."""
    for cost, life in ((5.0, 1800.0), (20.0, 7200.0), (2.0, 28800.0)):
        candidates = np.geomspace(1, 1800, 20_000)
        best = candidates[np.argmin(cost / candidates + candidates / (2 * life))]
        assert save_interval(cost, life) == pytest.approx(best, rel=2e-3)
    assert save_interval(500.0, 28800.0) == 1800.0  # never longer than promised
    assert save_interval(20.0, math.inf) == 1800.0
    assert save_interval(0.0, 7200.0) == 1800.0
    with pytest.raises(SettingsError, match="No save interval"):
        save_interval(1.0, 0.0)
