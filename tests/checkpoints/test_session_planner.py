"""Forecasts against costs that are known, plans against every other order, the cadence against a search."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.planner import learned, optimum, share
from ml_factory.checkpoints.schedule import SaveTimer, reserved_seconds
from ml_factory.checkpoints.session_planner import Budget, Cost, CostModel, WorkUnit, plan
from ml_factory.errors import SettingsError


def line(fixed: float, slope: float, memory: float = 0.0, disk: float = 0.0) -> CostModel:
    return CostModel(Cost(fixed, memory, disk), Cost(slope))


def test_two_measurements_give_the_line_through_them():
    model = CostModel.fit([(100, Cost(7.0, 50, 9)), (400, Cost(13.0, 200, 9))])
    assert model.forecast(1000).seconds == pytest.approx(25.0)
    assert model.forecast(1000).memory_bytes == pytest.approx(500.0)
    assert model.forecast(1000).disk_bytes == pytest.approx(9.0)


def test_no_part_of_a_cost_is_negative():
    falling = CostModel.fit([(100, Cost(5.0)), (400, Cost(4.0))])
    assert falling.slope.seconds == 0 and 4 <= falling.forecast(1e6).seconds <= 5
    steep = CostModel.fit([(100, Cost(1.0)), (400, Cost(8.0))])
    assert steep.fixed.seconds == 0 and 0.01 <= steep.slope.seconds <= 0.02


def test_relative_errors_count_so_a_large_run_does_not_drown_the_small_ones():
    rng = np.random.default_rng(3)
    works = np.geomspace(1e3, 1e6, 12)
    measured = [(work, Cost((2 + 1e-4 * work) * math.exp(rng.normal(0, 0.05)))) for work in works]
    model = CostModel.fit(measured)
    assert model.forecast(2e3).seconds == pytest.approx(2.2, rel=0.1)
    assert model.forecast(3e6).seconds == pytest.approx(302, rel=0.1)


def test_one_size_is_refused():
    with pytest.raises(SettingsError, match="two sizes"):
        CostModel.fit([(100, Cost(1.0)), (100, Cost(2.0))])


def test_the_shortest_first_finishes_the_most_by_any_moment():
    units = [WorkUnit(f"u{i}", line(0, 1), seconds) for i, seconds in enumerate([50, 10, 30, 20])]
    for life in (25, 61, 75, 200):
        planned = sum(row.fits == "whole" for row in plan(units, Budget(seconds=life)))
        until = life - reserved_seconds(0)
        best = max(
            sum(end <= until for end in itertools.accumulate(unit.work for unit in order))
            for order in itertools.permutations(units)
        )
        assert planned == best


def test_what_was_begun_comes_first_and_costs_what_is_left_of_it():
    begun = WorkUnit("begun", line(4, 1), 100, completed=0.75)
    rows = plan([WorkUnit("short", line(0, 1), 5), begun], Budget(seconds=1000))
    assert [row.unit.name for row in rows] == ["begun", "short"]
    assert rows[0].cost.seconds == pytest.approx(29) and rows[1].starts == pytest.approx(29)


def test_the_last_unit_is_begun_in_part_only_when_something_of_it_can_be_saved():
    save = Cost(10.0)
    budget = Budget(seconds=200 + reserved_seconds(10.0))
    rows = plan([WorkUnit("a", line(0, 1), 150), WorkUnit("b", line(5, 1), 300)], budget, save)
    assert [row.fits for row in rows] == ["whole", "in part"]
    rows = plan([WorkUnit("a", line(0, 1), 190), WorkUnit("b", line(5, 1), 300)], budget, save)
    assert [row.fits for row in rows] == ["whole", "later"]


def test_lack_of_memory_or_disk_holds_up_only_the_unit_that_lacks_it():
    units = [
        WorkUnit("greedy", line(1, 0, memory=9e9), 1), WorkUnit("fat", line(2, 0, disk=8e8), 1),
        WorkUnit("plain", line(3, 0, memory=1e9, disk=3e8), 1), WorkUnit("plain too", line(4, 0, disk=3e8), 1),
    ]  # fmt: skip
    budget = Budget(seconds=1000, memory_bytes=4e9, disk_bytes=7e8)
    fits = {row.unit.name: row.fits for row in plan(units, budget, Cost(1, disk_bytes=1e8))}
    assert fits == {"greedy": "memory", "fat": "disk", "plain": "whole", "plain too": "whole"}


@pytest.mark.parametrize("announced", [True, False])
def test_simulated_runtimes_lose_no_save_they_knew_of_and_little_work(announced):
    given = SimpleNamespace(blocking=1.0, local=4.0, save=20.0)
    rng = np.random.default_rng(11)
    if announced:
        observed = share(
            rng.uniform(3600, 43200, 12), lambda clock, _: SaveTimer(clock=clock, mean_life=7200), True, given
        )
        assert observed["unfinished_saves"] == 0 and observed["useful"] > 0.97
        return
    lives = rng.exponential(1800, 40)
    known = learned(lives)
    ours = share(lives, lambda clock, number: SaveTimer(clock=clock, mean_life=known[number]), False, given)["useful"]
    fixed = share(lives, lambda clock, _: SaveTimer(first_interval=1800, clock=clock), False, given)["useful"]
    best = optimum(lives, given)["useful"]
    assert ours > best - 0.02 and fixed < best - 0.1


def test_units_share_one_pool_of_checkpoints_as_large_as_the_largest_needs():
    def unit(name, seconds, pool):
        return WorkUnit(name, CostModel(Cost(seconds, 0, 1e8, pool), Cost(0.0)), 1)

    units = [unit("first", 1, 5e8), unit("second", 2, 5e8), unit("large", 3, 9e8), unit("small", 4, 1e8)]
    rows = {row.unit.name: row for row in plan(units, Budget(seconds=1000, disk_bytes=1.35e9))}
    assert {name: row.fits for name, row in rows.items()} == dict.fromkeys(rows, "whole")  # 0.9 slots, 0.4 models
    took = {name: row.takes_bytes for name, row in rows.items()}
    assert took == {"first": 6e8, "second": 1e8, "large": 5e8, "small": 1e8}
    fits = {row.unit.name: row.fits for row in plan(units, Budget(seconds=1000, disk_bytes=1.0e9))}
    assert fits == {"first": "whole", "second": "whole", "large": "disk", "small": "whole"}


def test_slots_that_are_there_already_are_not_charged_and_a_device_that_is_too_small_is_named():
    def unit(name, pool, device):
        return WorkUnit(name, CostModel(Cost(1, 0, 1e8, pool, device), Cost(0.0)), 1)

    budget = Budget(seconds=1000, disk_bytes=3e8, device_bytes=1e9, pool_bytes=4e8)
    rows = {row.unit.name: row for row in plan([unit("a", 5e8, 1e9), unit("b", 5e8, 2e9)], budget)}
    assert (rows["a"].fits, rows["a"].takes_bytes, rows["b"].fits) == ("whole", 2e8, "device memory")


def test_what_waits_for_others_is_last_and_begins_when_they_fit_whole():
    units = [
        WorkUnit("stack", line(0, 1), 1, depends_on=("a", "b")),
        WorkUnit("a", line(0, 1), 10),
        WorkUnit("b", line(0, 1), 60),
    ]
    rows = plan(units, Budget(seconds=100 + reserved_seconds(0)))
    assert [(row.unit.name, row.fits) for row in rows] == [("a", "whole"), ("b", "whole"), ("stack", "whole")]
    rows = plan(units, Budget(seconds=50 + reserved_seconds(0)))
    assert [(row.unit.name, row.fits) for row in rows] == [("a", "whole"), ("b", "in part"), ("stack", "later")]
    begun = plan([WorkUnit("stack", line(0, 1), 30, completed=0.5, depends_on=("a",))], Budget(seconds=100))
    assert begun[0].fits == "whole"  # what it waited for is no unit any more
