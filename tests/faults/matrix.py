"""Every fault at every file operation of save, rotate and load: what was struck, and who survived."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.disk import Killed
from tests.faults.rules import Rule
from tests.faults.world import KEEP, Uploaded, World, check_goes_on, check_load, quiet

ERRORS = ("ENOTCONN", "EIO", "ETIMEDOUT", "ESTALE", "EDQUOT", "ENOSPC")
FULL = ("EDQUOT", "ENOSPC")


@dataclass(frozen=True)
class Fault:
    """One column of the matrix.

    one_file : strikes every operation on slot number `index` and its manifest.
    rule, ops : what strikes, and which operations it can strike (all when empty).  lasting : from there on until the
    action is over.  after : what becomes of the machine then ("", "late", "process", "machine").  upload : a fault that
    strikes uploads from two saves before on.
    """

    name: str
    rule: str
    ops: tuple[str, ...] = ()
    lasting: bool = False
    after: str = ""
    upload: str = ""
    one_file: bool = False


FAULTS = (
    *(Fault(name, name) for name in ERRORS),
    *(Fault(f"{name} from here on", name, lasting=True) for name in ERRORS),
    Fault("EIO for one slot", "EIO", lasting=True, one_file=True),
    Fault("hang", "hang"),
    Fault("hang, done late", "hang", after="late"),
    Fault("hang, done late for another", "hang", after="late, another process"),
    Fault("short", "short", ("read", "write")),
    Fault("write dropped", "drop", ("write", "truncate")),
    Fault("write torn", "torn", ("write",)),
    Fault("killed", "die", after="process"),
    Fault("machine lost", "die", after="machine"),
    Fault("lost, upload dropped", "die", after="machine", upload="drop"),
    Fault("lost, upload torn", "die", after="machine", upload="torn"),
    Fault("lost, two of one name", "die", after="machine", upload="duplicate"),
)


@dataclass(frozen=True)
class Action:
    """One group of rows: so many saves, then `do` under a fault."""

    world: type[World]
    before: int
    do: Callable[[World], object]


ACTIONS = {
    "save": Action(World, 2, World.save),
    "rotate": Action(World, KEEP + 4, World.save),
    "load": Action(World, KEEP + 4, lambda world: check_load(world, faulty=True)),
    "carry": Action(Uploaded, KEEP + 4, Uploaded.save),
    "fetch": Action(Uploaded, KEEP + 4, lambda world: check_load(world, True, world.fetch)),
}


@dataclass
class Table:
    """(action, operation, fault) -> how often it was struck, how often everything survived."""

    struck: Counter = field(default_factory=Counter)
    survived: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def run(table: Table, action: str, fault: Fault, index: int) -> None:
    """The action with the fault at its operation number `index`; everything that must hold afterwards is checked."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        seed = index if fault.after == "machine" else 0
        chosen, lossy = ACTIONS[action], fault.after == "machine"
        world = chosen.world(Path(folder), {"seed": seed, "uploads": 0.3 if lossy else 0.0})
        try:
            for number in range(chosen.before):
                if fault.upload and number == chosen.before - 2:
                    path = "*.ckpt" if index % 2 else "*"
                    world.drive.faults.add(Rule(fault.upload, ("upload",), path, after=index % 3))
                assert world.save()
            kind = strike(world, fault, chosen.do, index)
            if kind is None:
                return
            cell = (action, kind, fault.name)
            table.struck[cell] += 1
            try:
                check(world, fault, loading=chosen.do not in (World.save, Uploaded.save))
                table.survived[cell] += 1
            except Exception as error:  # noqa: BLE001 - whatever went wrong is the finding
                table.failures.append(f"{action}, {fault.name} at operation {index} ({kind}): {error!r}"[:300])
        finally:
            world.end()


def strike(world: World, fault: Fault, do: Callable[[World], object], index: int) -> str | None:
    """Do the action under the fault; the kind of the operation that was struck, None for one it cannot strike."""
    drive, done = world.drive, len(world.drive.calls)
    if fault.one_file:
        names = sorted(path for path in drive.files if path.endswith(".ckpt"))
        if index >= len(names):
            return None
        drive.faults.add(Rule(fault.rule, path=f"{names[index].removesuffix('.ckpt')}.*"))
    else:
        drive.faults.add(Rule(fault.rule, after=index, times=None if fault.lasting else 1))
    world.escaped = None
    try:
        do(world)
    except Killed:
        pass
    except Exception as error:  # noqa: BLE001 - judged in check
        world.escaped = error
    if len(drive.calls) <= done + index:
        return None
    kind = "any" if fault.one_file else drive.calls[done + index].split()[0]
    return kind if not fault.ops or kind in fault.ops else None


def check(world: World, fault: Fault, loading: bool) -> None:
    """The newest verified checkpoint loads, nothing verified was lost, training goes on."""
    if world.escaped is not None:
        raise world.escaped
    kept = sorted(world.saved_files)[-(2 if fault.rule in FULL else KEEP) :]
    if fault.after == "machine":
        world.new_machine()
        world.saved_files = {number: world.saved_files[number] for number in world.alive()}  # the cloud's versions
        kept = []
    elif fault.after == "process":
        world.new_process()
    world.disk.heal()
    if fault.after.startswith("late"):
        if "another" in fault.after:
            late = world.disk.late
            world.new_process()
            world.disk.late = late
            loading = True
        if loading:
            world.resume()
        world.save()
        kept = sorted(world.saved_files)[-KEEP:]
        world.disk.wake()
    lost = set(kept) - set(world.alive())
    assert not lost, f"acknowledged and gone: {sorted(lost)} of {kept}"
    check_load(world, faulty=False)
    check_goes_on(world)
    world.new_process()
    check_load(world, faulty=False)


def operations(action: str) -> int:
    """Count the file operations of the action when nothing fails."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        chosen = ACTIONS[action]
        world = chosen.world(Path(folder))
        for _ in range(chosen.before):
            world.save()
        done = len(world.drive.calls)
        chosen.do(world)
        world.end()
        return len(world.drive.calls) - done


def cells(every: int = 1, offset: int = 0) -> Iterator[tuple[str, Fault, int]]:
    """All (action, fault, operation); with `every`, each so-many-th, from a place that moves with the fault."""
    for action in ACTIONS:
        count = operations(action)
        for number, fault in enumerate(FAULTS):
            for index in range((number + offset) % every, count, every):
                yield action, fault, index
