"""`python -m tests.chaos`: kill everything everywhere, compare, and print the table.

--seed 0        which kills; the words printed for a chain name its kills
--small         the fixed few that `make test` runs
--sample 12     so many chains of the campaign, drawn with the seed
--only lstm     chains whose words hold this text
--json PATH     the same facts for machines
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from ml_factory.models.registry import available_models, build_model
from tests.chaos import work
from tests.chaos.chain import Outcome, run_chain
from tests.chaos.cloud import Disk
from tests.chaos.lives import live
from tests.chaos.plans import campaign, few
from tests.chaos.sabotage import FEW, SABOTAGE, sabotages
from tests.chaos.table import facts_of, words_of

LEAST = 5  # kills at each place of a whole campaign


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--only", default="")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where the lives are lived; chains that failed stay there")
    given = parser.parse_args(argv)
    began = time.perf_counter()
    for model in available_models():  # once, before the first fork
        build_model(model)
    folder = Path(given.folder or tempfile.mkdtemp(prefix="chaos-")).absolute()
    broken = sabotages(given.seed, names=FEW) if given.small else sabotages(given.seed)
    plans = [*(few() if given.small else campaign(given.seed)), *broken]
    plans = [plan for plan in plans if given.only in plan.words() or given.only in {name for name, _ in plan.kills}]
    if 0 < given.sample < len(plans):
        plans = random.Random(given.seed).sample(plans, given.sample)
    needed = sorted({plan.unit for plan in plans})
    templates = {name: make(folder / "templates" / name) for name, make in TEMPLATES.items()}
    found = spread(lambda unit: reference(unit, templates, folder), needed, given.jobs)
    references = dict(zip(needed, found, strict=True))
    print(f"seed {given.seed}: {len(needed)} units without a kill, {time.perf_counter() - began:.0f} s", flush=True)

    def lived(number: int) -> dict:
        plan = plans[number]
        broken = SABOTAGE[plan.broken][0] if plan.broken else None
        place = folder / f"chain-{number}"
        outcome = run_chain(plan, templates[template_of(plan.unit)], references[plan.unit], place, broken)
        print(line(outcome, place), flush=True)
        return asdict(outcome) | {"plan": plan.words()}

    outcomes = spread(lived, list(range(len(plans))), given.jobs)
    observed = facts_of(
        plans,
        outcomes,
        given.seed,
        time.perf_counter() - began,
        0 if given.small or given.only or given.sample else LEAST,
    )
    print(words_of(observed))
    if given.json:
        given.json.write_text(json.dumps(observed, indent=1))
    if not observed["failures"] and not given.folder:
        shutil.rmtree(folder)
    return 1 if observed["failures"] else 0


def line(outcome: Outcome, place: Path) -> str:
    """One chain in a line; where it failed, also where its remains are."""
    how = ["same bits" if not outcome.mismatches else f"DIFFERENT: {', '.join(outcome.mismatches)}"]
    how += [f"missed {', '.join(outcome.missed)}"] if outcome.missed else []
    if outcome.trouble:
        how = [f"FAILED, see {place}:\n{outcome.trouble}"]
    resumed = "; ".join(f"{event} -> {step}" for _, event, step in outcome.kills)
    return f"{outcome.plan.words()}: {resumed}: {', '.join(how)}"


# ---- templates, references, and many at once -----------------------------------------------------------------------


def _made(fill: Callable[[Path], None]) -> Callable[[Path], Path]:
    """Fill a workspace in a process of its own: the one that forks must stay without threads."""

    def make(root: Path) -> Path:
        if not root.exists():
            (done,) = spread(lambda place: fill(place), [root], 1)
            assert done is None
        return root

    return make


TEMPLATES = {"market": _made(work.market), "prepared": _made(work.prepared), "based": _made(work.based)}


def template_of(unit: str) -> str:
    """Return the prepared workspace of a unit before it begins."""
    return {"prepare": "market", "stack": "based"}.get(unit, "prepared")


def reference(unit: str, templates: dict[str, Path], folder: Path) -> work.Hashes:
    """Return the hashes of an uninterrupted life."""
    place = folder / f"reference-{unit}"
    place.mkdir(parents=True)
    machine = Disk(place, templates[template_of(unit)], 0)
    ended = live(machine, unit, None)
    if ended.hashes is None:
        raise RuntimeError(f"{unit} fails without any kill:\n{ended.text}")
    machine.remove()
    return ended.hashes


def spread(function: Callable, items: Sequence, jobs: int) -> list:
    """[function(item), …], each in a forked process, `jobs` at a time; what it returns travels as JSON."""
    results: list = [None] * len(items)
    waiting, running = list(enumerate(items)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, item = waiting.pop(0)
            read, write = os.pipe()
            if (pid := os.fork()) == 0:
                os.close(read)
                _answer(function, item, write)
            os.close(write)
            running[pid] = (number, read)
        pid, status = os.wait()
        number, read = running.pop(pid)
        with open(read, encoding="utf-8") as answer:
            text = answer.read()
        if status or not text:
            raise RuntimeError(f"item {items[number]!r} failed, see above")
        results[number] = json.loads(text)
    return results


def _answer(function: Callable, item: object, descriptor: int) -> None:
    code = 1
    try:
        text = json.dumps(function(item))
        with open(descriptor, "w", encoding="utf-8") as answer:
            answer.write(text)
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
