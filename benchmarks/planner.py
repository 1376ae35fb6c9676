"""A thousand runtimes, simulated: share of their time that becomes saved work, with announced ends and without.

    python -m benchmarks.planner [--runtimes 1000] [--save 20] [--local 4] [--blocking 1]

The timer, the times of saves, the reserve and the order of work are the library's own, on a simulated clock. A runtime
works on units of 0.05 to 3 hours in steps of 1 to 5 seconds; what a unit really takes differs from its forecast by
15 % (log-normal), a save from the last one by 30 %. A save blocks training for a while, is on the local disk later and
on the mount later still; a runtime that ends before then loses it. What background writing takes from the training
during it is drawn for each runtime, and is not what the timer believes. Our policy knows of a runtime's life what the
record of those before it reports. One JSON line a policy.
"""

import argparse
import json
import math
from dataclasses import dataclass

import numpy as np

from ml_factory.checkpoints.schedule import SaveDurations, SaveTimer, reserved_save_seconds, save_interval
from ml_factory.checkpoints.session_planner import SessionBudget, WorkCost, WorkCostModel, WorkUnit, plan_session_work

HOUR = 3600.0
COMPARED = (0.05, 0.3)  # between: the share of a second of training that a second of background writing takes
USUAL = 2 * HOUR  # the life that the library believes in before it has seen one end


@dataclass
class World:
    """One runtime's clock, and what became of its time."""

    rng: np.random.Generator
    ends: float
    blocking: float
    local: float
    durable: float
    compared: float
    now: float = 0.0
    saved: float = 0.0  # useful seconds that a verified checkpoint holds
    held: float = 0.0  # useful seconds since then
    unfinished: int = 0

    def save(self, times: SaveDurations) -> float | None:
        """Seconds in which a save blocked training, or None when the runtime ended before it was on the mount."""
        factor = math.exp(self.rng.normal(0, 0.3))
        blocking, durable = self.blocking * factor, self.durable * factor
        began = self.now
        self.now += blocking + self.compared * (durable - blocking)  # beside the writing, training is a little slower
        if began + durable > self.ends:
            self.unfinished += 1
            return None
        times.written, times.copied = self.local * factor, durable
        self.saved, self.held = self.saved + self.held, 0.0
        return blocking


def units(rng: np.random.Generator) -> list[WorkUnit]:
    """More work than any runtime has time for; work counts forecast seconds."""
    model = WorkCostModel(WorkCost(5.0), WorkCost(1.0))
    hours = rng.uniform(0.05, 3.0, 24)
    return [WorkUnit(f"unit {i}", model, seconds * HOUR) for i, seconds in enumerate(hours)]


def live(world: World, timer_of, announced: float) -> None:
    """Work through the plan until the runtime ends; stop in time where its end is announced."""
    times = SaveDurations()  # the last save tells what the next will take
    for row in plan_session_work(units(world.rng), SessionBudget(seconds=announced), WorkCost(world.durable)):
        timer, left = timer_of(lambda: world.now), row.unit.work * math.exp(world.rng.normal(0, 0.15))
        world.now += row.unit.model.fixed.seconds
        while left > 0:
            step = world.rng.uniform(1, 5)
            if world.now + step > world.ends:
                return
            world.now, world.held, left = world.now + step, world.held + step, left - step
            over = announced - world.now < reserved_save_seconds(times.seconds)
            if timer.due() or over or left <= 0:
                blocking = world.save(times)
                if blocking is None:
                    return
                timer.record_save()
                timer.record_cost(blocking, times.seconds - blocking)
            if over:
                return


def share(lives: np.ndarray, timer_of, announced: bool, given, seed: int = 7) -> dict:
    """Useful, saved time as a share of all; how many saves were cut off by an end."""
    useful = unfinished = 0
    for number, life in enumerate(lives):
        rng = np.random.default_rng([seed, number])
        world = World(rng, life, given.blocking, given.local, given.save, rng.uniform(*COMPARED))
        live(world, lambda clock, known=number: timer_of(clock, known), life if announced else math.inf)
        useful, unfinished = useful + world.saved, unfinished + world.unfinished
    return {"useful": useful / lives.sum(), "unfinished_saves": unfinished}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", type=int, default=1000)
    parser.add_argument("--save", type=float, default=20.0, help="seconds until a save is on the mount")
    parser.add_argument("--local", type=float, default=4.0, help="of them, seconds until it is on the local disk")
    parser.add_argument("--blocking", type=float, default=1.0, help="of them, seconds in which training stands still")
    given = parser.parse_args()
    rng = np.random.default_rng(11)
    facts = {"runtimes": given.runtimes, "save_seconds": given.save, "blocking_seconds": given.blocking}

    lives = rng.uniform(1 * HOUR, 12 * HOUR, given.runtimes)
    reported = share(lives, lambda clock, _: SaveTimer(clock=clock, mean_life=USUAL), True, given)
    print(json.dumps({"ends": "announced", "hours": "1 to 12", **reported, **facts}), flush=True)

    cost = given.blocking + sum(COMPARED) / 2 * (given.save - given.blocking)
    for mean in (0.5, 2.0, 8.0):
        lives = rng.exponential(mean * HOUR, given.runtimes)
        best = optimum(lives, given)
        known = learned(lives)
        policies = {
            "ours": lambda clock, number, known=known: SaveTimer(clock=clock, mean_life=known[number]),
            "fixed 30 minutes": lambda clock, _: SaveTimer(first_interval=1800.0, clock=clock),
        }
        for name, timer_of in policies.items():
            reported = share(lives, timer_of, False, given)
            line = {"ends": "unannounced", "mean_hours": mean, "policy": name, **reported, "best_interval": best}
            print(json.dumps({**line, "young_interval": save_interval(cost, mean * HOUR), **facts}), flush=True)


def learned(lives: np.ndarray) -> np.ndarray:
    """Mean session lifetime as each runtime estimates it (`checkpoints/session_lifetimes.py`)."""
    before = np.concatenate([[0.0], np.cumsum(lives)[:-1]])
    return (USUAL + before) / (1 + np.arange(len(lives)))


def optimum(lives: np.ndarray, given) -> dict:
    """The best of many fixed intervals on these very lives, found by trying."""
    tried = {
        interval: share(lives, lambda clock, _, i=interval: SaveTimer(i, i, clock=clock), False, given)["useful"]
        for interval in (30, 60, 120, 240, 480, 900, 1800)
    }
    interval = max(tried, key=tried.get)
    return {"interval": interval, "useful": tried[interval]}


if __name__ == "__main__":
    main()
