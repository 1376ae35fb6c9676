"""`python -m tests.faults`: every fault at every file operation, and the table of what survived.

--every 1       each so-many-th operation only
--from 0        the first of them
--only load     actions or faults whose name holds this text
--json PATH     the same facts for machines
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.faults.matrix import ACTIONS, FAULTS, Fault, Table, cells, operations, run

_CHUNK = 200


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--from", type=int, default=0, dest="offset")
    parser.add_argument("--jobs", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    began = time.perf_counter()
    todo = [cell for cell in cells(given.every, given.offset) if given.only in cell[0] or given.only in cell[1].name]
    table = Table()
    with ProcessPoolExecutor(given.jobs) as workers:
        for part in workers.map(part_of, [todo[start : start + _CHUNK] for start in range(0, len(todo), _CHUNK)]):
            table.struck += part.struck
            table.survived += part.survived
            table.failures += part.failures
    print(words(table))
    print(f"{time.perf_counter() - began:.0f} s")
    if given.json:
        facts = {" / ".join(cell): [table.survived[cell], count] for cell, count in table.struck.items()}
        given.json.write_text(json.dumps({"survived of struck": facts, "failures": table.failures}, indent=2))
    return bool(table.failures)


def part_of(todo: list[tuple[str, Fault, int]]) -> Table:
    table = Table()
    for cell in todo:
        run(table, *cell)
    return table


def words(table: Table) -> str:
    """Survivors of struck, a row for each fault, a column for each action; then by kind of operation."""
    lines = [
        f"{'file operations':<28}" + "".join(f"{operations(action):>12}" for action in ACTIONS),
        f"{'fault':<28}" + "".join(f"{action:>12}" for action in ACTIONS) + f"{'all':>14}",
    ]
    for fault in FAULTS:
        row = [_count(table, action, name=fault.name) for action in ACTIONS]
        lines.append(
            f"{fault.name:<28}" + "".join(f"{cell:>12}" for cell in row) + f"{_count(table, name=fault.name):>14}"
        )
    lines.append(
        f"{'all':<28}" + "".join(f"{_count(table, action):>12}" for action in ACTIONS) + f"{_count(table):>14}"
    )
    kinds = sorted({kind for _, kind, _ in table.struck})
    lines.append("by operation: " + ", ".join(f"{kind} {_count(table, kind=kind)}" for kind in kinds))
    return "\n".join([*lines, *(f"FAILURE {failure}" for failure in table.failures)])


def _count(table: Table, action: str = "", kind: str = "", name: str = "") -> str:
    """survived/struck over the cells that match."""
    chosen = [
        cell for cell in table.struck if action in ("", cell[0]) and kind in ("", cell[1]) and name in ("", cell[2])
    ]
    struck, survived = (sum(counts[cell] for cell in chosen) for counts in (table.struck, table.survived))
    return f"{survived}/{struck}" if struck else "-"


if __name__ == "__main__":
    sys.exit(main())
