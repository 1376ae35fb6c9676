"""Forecasts against costs that are known, plans against every other order, the cadence against a search."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.planner import learned, optimum, share
from ml_factory.checkpoints.schedule import SaveTimer, reserved_save_seconds
from ml_factory.checkpoints.session_planner import SessionBudget, WorkCost, WorkCostModel, WorkUnit, plan_session_work
from ml_factory.errors import SettingsError


def line(fixed: float, slope: float, memory: float = 0.0, disk: float = 0.0) -> WorkCostModel:
    return WorkCostModel(WorkCost(fixed, memory, disk), WorkCost(slope))


def test_cost_model_fit_of_two_measurements_gives_line():
    model = WorkCostModel.fit([(100, WorkCost(7.0, 50, 9)), (400, WorkCost(13.0, 200, 9))])
    assert model.forecast(1000).seconds == pytest.approx(25.0)
    assert model.forecast(1000).memory_bytes == pytest.approx(500.0)
    assert model.forecast(1000).disk_bytes == pytest.approx(9.0)


def test_cost_model_fit_gives_no_negative_part():
    falling = WorkCostModel.fit([(100, WorkCost(5.0)), (400, WorkCost(4.0))])
    assert falling.slope.seconds == 0 and 4 <= falling.forecast(1e6).seconds <= 5
    steep = WorkCostModel.fit([(100, WorkCost(1.0)), (400, WorkCost(8.0))])
    assert steep.fixed.seconds == 0 and 0.01 <= steep.slope.seconds <= 0.02


def test_cost_model_fit_weights_relative_errors():
    rng = np.random.default_rng(3)
    works = np.geomspace(1e3, 1e6, 12)
    measured = [(work, WorkCost((2 + 1e-4 * work) * math.exp(rng.normal(0, 0.05)))) for work in works]
    model = WorkCostModel.fit(measured)
    assert model.forecast(2e3).seconds == pytest.approx(2.2, rel=0.1)
    assert model.forecast(3e6).seconds == pytest.approx(302, rel=0.1)


def test_cost_model_fit_of_one_size_raises():
    with pytest.raises(SettingsError, match="two sizes"):
        WorkCostModel.fit([(100, WorkCost(1.0)), (100, WorkCost(2.0))])


def test_plan_shortest_first_finishes_most_units_within_budget():
    units = [WorkUnit(f"u{i}", line(0, 1), seconds) for i, seconds in enumerate([50, 10, 30, 20])]
    for life in (25, 61, 75, 200):
        planned = sum(row.fits == "whole" for row in plan_session_work(units, SessionBudget(seconds=life)))
        until = life - reserved_save_seconds(0)
        best = max(
            sum(end <= until for end in itertools.accumulate(unit.work for unit in order))
            for order in itertools.permutations(units)
        )
        assert planned == best


def test_plan_puts_begun_unit_first_with_remaining_cost():
    begun = WorkUnit("begun", line(4, 1), 100, completed=0.75)
    rows = plan_session_work([WorkUnit("short", line(0, 1), 5), begun], SessionBudget(seconds=1000))
    assert [row.unit.name for row in rows] == ["begun", "short"]
    assert rows[0].cost.seconds == pytest.approx(29) and rows[1].starts == pytest.approx(29)


def test_plan_begins_last_unit_in_part_only_if_progress_can_be_saved():
    save = WorkCost(10.0)
    budget = SessionBudget(seconds=200 + reserved_save_seconds(10.0))
    rows = plan_session_work([WorkUnit("a", line(0, 1), 150), WorkUnit("b", line(5, 1), 300)], budget, save)
    assert [row.fits for row in rows] == ["whole", "in part"]
    rows = plan_session_work([WorkUnit("a", line(0, 1), 190), WorkUnit("b", line(5, 1), 300)], budget, save)
    assert [row.fits for row in rows] == ["whole", "later"]


def test_plan_marks_only_units_lacking_memory_or_disk():
    units = [
        WorkUnit("greedy", line(1, 0, memory=9e9), 1), WorkUnit("fat", line(2, 0, disk=8e8), 1),
        WorkUnit("plain", line(3, 0, memory=1e9, disk=3e8), 1), WorkUnit("plain too", line(4, 0, disk=3e8), 1),
    ]  # fmt: skip
    budget = SessionBudget(seconds=1000, memory_bytes=4e9, disk_bytes=7e8)
    fits = {row.unit.name: row.fits for row in plan_session_work(units, budget, WorkCost(1, disk_bytes=1e8))}
    assert fits == {"greedy": "memory", "fat": "disk", "plain": "whole", "plain too": "whole"}


@pytest.mark.parametrize("announced", [True, False])
def test_save_timer_in_simulated_sessions_loses_little_work(announced):
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


def test_plan_units_share_one_checkpoint_pool_of_largest_size():
    def unit(name, seconds, pool):
        return WorkUnit(name, WorkCostModel(WorkCost(seconds, 0, 1e8, pool), WorkCost(0.0)), 1)

    units = [unit("first", 1, 5e8), unit("second", 2, 5e8), unit("large", 3, 9e8), unit("small", 4, 1e8)]
    rows = {row.unit.name: row for row in plan_session_work(units, SessionBudget(seconds=1000, disk_bytes=1.35e9))}
    assert {name: row.fits for name, row in rows.items()} == dict.fromkeys(rows, "whole")  # 0.9 slots, 0.4 models
    took = {name: row.takes_bytes for name, row in rows.items()}
    assert took == {"first": 6e8, "second": 1e8, "large": 5e8, "small": 1e8}
    fits = {row.unit.name: row.fits for row in plan_session_work(units, SessionBudget(seconds=1000, disk_bytes=1.0e9))}
    assert fits == {"first": "whole", "second": "whole", "large": "disk", "small": "whole"}


def test_plan_skips_cost_of_existing_slots_and_marks_device_memory():
    def unit(name, pool, device):
        return WorkUnit(name, WorkCostModel(WorkCost(1, 0, 1e8, pool, device), WorkCost(0.0)), 1)

    budget = SessionBudget(seconds=1000, disk_bytes=3e8, device_bytes=1e9, pool_bytes=4e8)
    rows = {row.unit.name: row for row in plan_session_work([unit("a", 5e8, 1e9), unit("b", 5e8, 2e9)], budget)}
    assert (rows["a"].fits, rows["a"].takes_bytes, rows["b"].fits) == ("whole", 2e8, "device memory")


def test_plan_puts_dependent_unit_after_dependencies_that_fit():
    units = [
        WorkUnit("stack", line(0, 1), 1, depends_on=("a", "b")),
        WorkUnit("a", line(0, 1), 10),
        WorkUnit("b", line(0, 1), 60),
    ]
    rows = plan_session_work(units, SessionBudget(seconds=100 + reserved_save_seconds(0)))
    assert [(row.unit.name, row.fits) for row in rows] == [("a", "whole"), ("b", "whole"), ("stack", "whole")]
    rows = plan_session_work(units, SessionBudget(seconds=50 + reserved_save_seconds(0)))
    assert [(row.unit.name, row.fits) for row in rows] == [("a", "whole"), ("b", "in part"), ("stack", "later")]
    begun = plan_session_work(
        [WorkUnit("stack", line(0, 1), 30, completed=0.5, depends_on=("a",))], SessionBudget(seconds=100)
    )
    assert begun[0].fits == "whole"  # what it waited for is no unit any more
