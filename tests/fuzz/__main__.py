"""`python -m tests.fuzz`: damage every kind of file that the library reads, and see what reading it does.

--count 400     damaged files in all
--seed 0        text that the damage is drawn with, such as a commit
--only model    kinds whose name holds this text
--case NUMBER   the damage of this number alone, to the first of these kinds
--json PATH     the table for machines
--known FOLDER  the workspace to damage, kept from an earlier call; made where it is missing
A child process reads the files. A reading may raise a FactoryError of one line, or return what the undamaged file gives
(where a hash protects the file; elsewhere anything). Counted as failures: code that ran, an end by a signal, another
exception, more than 5 s of CPU or 60 s in all, more than 500 MB above the idle process, another result.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.fuzz.damage import MARKER
from tests.fuzz.kinds import KINDS, Kind
from tests.fuzz.workspace import ROOT, build_workspace
from tests.limited_reading import peak_megabytes, reset_peak_memory, status_kilobytes

SECONDS, WAITING_SECONDS, MEGABYTES = 5, 60, 500
_MOST_MEMORY = 6 << 30  # bytes above the idle process, where a runaway child is stopped
REFUSED = {"refused", "same", "read"}  # outcomes that are no failure


def digest(value: object) -> str:
    """Hash arrays, tables and plain values."""
    if isinstance(value, dict):
        return digest([[str(key), digest(one)] for key, one in sorted(value.items(), key=lambda item: str(item[0]))])
    if isinstance(value, list | tuple):
        return hashlib.sha256("".join(digest(one) for one in value).encode()).hexdigest()
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = np.ascontiguousarray(value)
        return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()
    return hashlib.sha256(repr(value).encode()).hexdigest()


def cases(count: int, seed: str, only: str) -> list[tuple[str, int]]:
    """Return (kind, number of the damage), every kind as often."""
    kinds = [name for name in KINDS if only in name]
    start = int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16)
    return [(kinds[number % len(kinds)], start + number) for number in range(count)]


def read_all(root: Path, todo: Sequence[tuple[str, int]]) -> None:
    """Damage, read and restore file after file, in the child; a line before and after each reading."""
    known: dict[str, str] = {}
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)  # ends the process, also inside a library
    for position, (name, number) in enumerate(todo):
        kind, generator = KINDS[name], np.random.default_rng(number)
        if name not in known:
            known[name] = digest(kind.read(root))
        files = sorted(path for path in root.glob(kind.pattern) if path.is_file() and path.stat().st_size)
        path = files[int(generator.integers(len(files)))]
        before = {one: one.read_bytes() for one in (path, *(root.glob("**/manifest.json") if kind.seal else ()))}
        print("reading", position, name, path.relative_to(root), number, flush=True)
        path.write_bytes(kind.damage(before[path], generator))
        if kind.seal:
            kind.seal(root, path)
        reset_peak_memory()
        idle = peak_megabytes()
        most = status_kilobytes("VmSize") * 1024 + _MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of this process alone, however busy the machine is
        signal.alarm(WAITING_SECONDS)
        try:
            outcome = outcome_of(kind, root, known[name])
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            for one, whole in before.items():
                one.write_bytes(whole)
        if Path(os.environ[MARKER]).exists():
            outcome = "code ran"
        grown = peak_megabytes() - idle
        print("done", position, outcome if grown < MEGABYTES else f"memory {grown:.0f} MB", flush=True)


def outcome_of(kind: Kind, root: Path, known: str) -> str:
    from ml_factory.errors import FactoryError

    try:
        result = kind.read(root)
    except FactoryError as error:
        return "refused" if "\n" not in str(error).strip() else f"lines {str(error)[:200]!r}"
    except Exception as error:  # noqa: BLE001 (what a user would see as a traceback)
        where = error.__traceback__
        while where.tb_next is not None:
            where = where.tb_next
        line = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}"
        return f"traceback {type(error).__name__} at {line}: {str(error)[:120]!r}"
    if result is None:
        return "refused"
    if digest(result) == known:
        return "same"
    return "wrong" if kind.protected else "read"


def run(root: Path, todo: list[tuple[str, int]]) -> list[tuple[str, str, str]]:
    """Read all in children; return (kind, outcome, file and number of the damage) of each."""
    results, start = [], 0
    while start < len(todo):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(shutil.copytree(root, Path(folder) / "workspace"))
            environment = {
                **os.environ, "ML_FACTORY_WANDB": "off", "XDG_CACHE_HOME": str(Path(folder) / "cache"),
                MARKER: str(Path(folder) / "marker"),
            }  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-m", "tests.fuzz", "--child", str(place)], cwd=ROOT, env=environment,
                input=json.dumps(todo[start:]), capture_output=True, text=True, check=False,
            )  # fmt: skip
        lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith(("reading ", "done "))]
        ends = {int(line[1]): line[2] for line in lines if line[0] == "done"}
        begun = {int(line[1]): line[2] for line in lines if line[0] == "reading"}
        if not begun or (done.returncode > 0 and len(begun) == len(ends)):
            raise SystemExit(done.stderr[-3000:])
        last = max(begun)
        died = "hang" if done.returncode in (-signal.SIGALRM, -signal.SIGPROF) else f"signal {-done.returncode}"
        for position in range(last + 1):
            name = todo[start + position][0]
            results.append((name, ends.get(position, died), begun[position].removeprefix(f"{name} ")))
        start += last + 1
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--known", type=Path)
    parser.add_argument("--case", type=int)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        read_all(given.child, json.load(sys.stdin))
        return 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = given.known or Path(folder) / "workspace"
        if not root.exists():
            build_workspace(root)
        todo = cases(given.count, given.seed, given.only)
        results = run(root, [(name, given.case) for name, _ in todo[:1]] if given.case is not None else todo)
    table = Counter((name, outcome.split(" ")[0]) for name, outcome, _ in results)
    for name in dict.fromkeys(name for name, _, _ in results):
        print(
            f"{name:<27}", ", ".join(f"{count} {one}" for (kind, one), count in sorted(table.items()) if kind == name)
        )
    failures = [one for one in results if one[1] not in REFUSED]
    for failure in failures[:40]:
        print("FAILED", *failure)
    print(f"{len(results)} damaged files, {len(failures)} failures, {time.perf_counter() - began:.0f} s")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
