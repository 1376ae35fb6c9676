"""A chain of lives: killed, resumed, killed again, and at last compared with an uninterrupted life."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cloud import Disk, Mounted
from tests.chaos.hooks import Kill
from tests.chaos.lives import Ended, live
from tests.chaos.work import Hashes
from tests.faults.mount import why_not


@dataclass(frozen=True)
class Plan:
    """One chain: `kills` in order, each with the name under which it counts.

    lossy : each kill also takes the machine with its local disk, and the workspace is what the cloud had received.
    """

    unit: str
    kills: tuple[tuple[str, Kill], ...]
    seed: int
    lossy: bool
    broken: str = ""

    def words(self) -> str:
        kills = ", ".join(f"{kill.event}#{kill.n}" for _, kill in self.kills)
        return f"{self.unit} seed {self.seed} [{kills}]{' disk lost' if self.lossy else ''} {self.broken}".strip()


@dataclass
class Outcome:
    """kills : (name, event, resumed from) of those that happened.  missed : kills whose place was not reached.

    mismatches : hashes that differ from the uninterrupted run's.  trouble : what else went wrong, in words.
    """

    plan: Plan
    kills: list[tuple[str, str, str]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    trouble: str = ""


def run_chain(
    plan: Plan, template: Path, reference: Hashes, folder: Path, broken: Callable[[], None] | None = None
) -> Outcome:
    """Live through the plan in `folder`, and compare. A chain that failed stays there to be looked at."""
    folder.mkdir(parents=True)
    machine = (Mounted if plan.lossy and not why_not() else Disk)(folder, template, plan.seed)
    outcome, waiting = Outcome(plan), []
    lives = [kill for _, kill in plan.kills] + [None]
    for number, kill in enumerate(lives):
        ended = live(machine, plan.unit, kill, broken=broken, number=number, new_machine=plan.lossy)
        if waiting and (resumed := _went_on_from(ended)):
            outcome.kills += [(*one, resumed) for one in waiting]
            waiting = []
        if not ended.killed:
            outcome.missed += [f"{kill.event}#{kill.n}" for kill in lives[number:-1]]
            break
        waiting.append((plan.kills[number][0], f"{kill.event}#{kill.n}"))
        if plan.lossy:
            machine.lose()
    outcome.kills += [(*one, "nothing") for one in waiting]
    if ended.hashes is None:
        outcome.trouble = "\n".join(ended.text.splitlines()[-12:]) or "it died without a word"
    else:
        outcome.mismatches = [name for name in reference if ended.hashes.get(name) != reference[name]]
    machine.remove() if not (outcome.trouble or outcome.mismatches) else machine.close()
    return outcome


def _went_on_from(ended: Ended) -> str:
    """The checkpoints a life went on from: of several (a fold, and the fit inside it) all, in order."""
    return ", ".join(dict.fromkeys(f"{one['step']} of {one['phase']}" for one in ended.loaded))
