"""`python -m tests.mutants`: change the library in one place at a time and see whether the tests that meet it fail.

--count 100      mutants, drawn with --seed 0; repeat them with the same seed
--only data      files whose path holds this text
--sites FILE     repeat the sites of an earlier report instead of drawing
--suite PATH     tests below this path alone; `contract` is tests/contract, `old` all others; two to compare suites
--seconds 120    of tests for one mutant and suite
--record         run the tests once under coverage.py first (done by itself where no record is); all else after `--`
                 goes to that run of pytest
--json PATH      the report: one object a mutant and suite

Which tests meet a line is read from the record, the quickest first. A mutant is killed by a test, or it is
SURVIVED (every chosen test passed), NO TEST (no recorded test of the suite runs the line), TIME (undecided: the tests
took longer) or FLAKY (the test that failed fails without the mutant too). A site that no recorded test runs at all ends
in exit code 1. Code that numba compiles is not seen by coverage.py: such a site meets the tests of its callers.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT: dict[str, str] = {}  # site -> why no test can tell
COMPARE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "workspace", "dist", "build", ".*_cache")
JIT = ("njit", "overload", "_compiled")  # decorators of code that numba compiles
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CONTEXT = "ML_FACTORY_COVERAGE_CONTEXT"  # the test that runs now, for the processes that it starts
RECORDED = "ML_FACTORY_COVERAGE_FOLDER"
CONFIG = (
    "[run]\nsource = {package}\ndata_file = {folder}/coverage\nparallel = true\ncontext = ${{%s-}}\npatch = _exit\n"
)
CONFIG = CONFIG % CONTEXT + "disable_warnings = no-data-collected,module-not-measured,module-not-imported\n"


@dataclass(frozen=True)
class Site:
    """One change of one expression: `start` and `end` are offsets of the text in the file that `new` replaces."""

    file: str
    function: str  # with the classes and functions around it
    number: int  # of the change within its function
    line: int
    old: str
    new: str
    start: int
    end: int
    first: int  # line of the statement that evaluates it, and its last
    last: int

    def __str__(self) -> str:
        return f"{self.file}:{self.function}#{self.number}"


def changes(node: ast.AST, text: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield (expression, its replacement) for every change of one node."""
    part = lambda one: f"({ast.get_source_segment(text, one)})"  # noqa: E731
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
        yield node, f"{part(node.left)} {COMPARE[type(node.ops[0])]} {part(node.comparators[0])}"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield node, f"{part(node.left)} {ARITHMETIC[type(node.op)]} {part(node.right)}"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, word.join(part(one) for one in node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, part(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, repr(node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test, f"not {part(node.test)}"


def functions(tree: ast.AST, around: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield (qualified name, function) of every function, outer ones first."""
    for node in ast.iter_child_nodes(tree):
        name = f"{around}{node.name}" if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else ""
        if isinstance(node, FUNCTIONS):
            yield name, node
        yield from functions(node, f"{name}." if name else around)


def statement_lines(tree: ast.AST) -> dict[int, tuple[int, int]]:
    """First and last line of the statement that evaluates each node, by the node's id.

    The head alone of a statement with a body; of a function's defaults its body, since they are evaluated at import.
    """
    lines = {}
    for statement in (node for node in ast.walk(tree) if isinstance(node, ast.stmt)):  # outer ones first
        body = getattr(statement, "body", None)
        own = (statement.lineno, max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno)
        lines.update(dict.fromkeys(map(id, ast.walk(statement)), own))
        if isinstance(statement, FUNCTIONS):
            lines.update(dict.fromkeys(map(id, ast.walk(statement.args)), (body[0].lineno, body[-1].end_lineno)))
    return lines


def sites(path: Path, root: Path) -> list[Site]:
    """List every change of a file, function by function; annotations, decorators and f-strings stay."""
    text, found, starts = path.read_text(encoding="utf-8"), {}, [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(text)
    lines = statement_lines(tree)
    for name, function in functions(tree):
        left_out = [node for node in ast.walk(function) if isinstance(node, ast.JoinedStr)] + function.decorator_list
        left_out += [node.annotation for node in ast.walk(function) if isinstance(node, ast.arg | ast.AnnAssign)]
        skipped = {id(child) for node in [*left_out, function.returns] if node for child in ast.walk(node)}
        number = 0
        for node in ast.walk(function):
            for one, new in [] if id(node) in skipped else changes(node, text):
                start, end = starts[one.lineno - 1] + one.col_offset, starts[one.end_lineno - 1] + one.end_col_offset
                old, file = text.encode()[start:end].decode(), path.relative_to(root).as_posix()
                site = Site(file, name, number, one.lineno, old, f"({new})", start, end, *lines[id(one)])
                found[start, end, new] = site
                number += 1
    return list(found.values())


# --- the record: a plugin of pytest, with coverage.py started in every process by its own .pth file

_seen: dict = {"tests": {}, "fixtures": {}, "uses": {}, "failed": []}


def _enter(name: str) -> None:
    os.environ[CONTEXT] = name
    coverage.Coverage.current().switch_context(name)


def _named(fixture: pytest.FixtureDef) -> str:
    """Name a fixture with the place that defines it: several files have one of the same name."""
    return f"{fixture.baseid}::{fixture.argname}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    _enter(item.nodeid)
    _seen["uses"][item.nodeid] = [_named(defined[-1]) for defined in item._fixtureinfo.name2fixturedefs.values()]
    began, before = time.monotonic(), sum(_seen["fixtures"].values())
    try:
        return (yield)
    finally:
        of_fixtures = sum(_seen["fixtures"].values()) - before
        _seen["tests"][item.nodeid] = time.monotonic() - began - of_fixtures


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef):
    """What a fixture of many tests runs belongs to all of them, not to the first."""
    if fixturedef.scope == "function":
        return (yield)
    test, began = os.environ[CONTEXT], time.monotonic()
    _enter(f"fixture {_named(fixturedef)}")
    try:
        return (yield)
    finally:
        _enter(test)
        _seen["fixtures"][_named(fixturedef)] = time.monotonic() - began


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _seen["failed"].append(report.nodeid)


def pytest_sessionfinish() -> None:
    path = Path(os.environ[RECORDED], f"tests.{os.getpid()}.json")
    path.write_text(json.dumps(_seen), encoding="utf-8")


def record(folder: Path, root: Path, words: Sequence[str]) -> None:
    """Run pytest with these words once, and keep in `folder` which tests run which lines of the library."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = folder / "coveragerc"
    config.write_text(CONFIG.format(package=root / "ml_factory", folder=folder), encoding="utf-8")
    state = {path.relative_to(root).as_posix(): _hash(path) for path in (root / "ml_factory").rglob("*.py")}
    env = os.environ | {"COVERAGE_PROCESS_START": str(config), RECORDED: str(folder), "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants", *words]
    code = subprocess.run(command, cwd=root, env=env, check=False).returncode
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"mutants: pytest ended with {code}; nothing is recorded")
    merged: dict = {"files": state, "tests": {}, "fixtures": {}, "uses": {}, "failed": []}
    for path in folder.glob("tests.*.json"):
        for name, part in json.loads(path.read_text(encoding="utf-8")).items():
            merged[name] = merged[name] + part if name == "failed" else merged[name] | part
        path.unlink()
    whole = coverage.Coverage(config_file=str(config))
    whole.combine()
    whole.save()
    (folder / "tests.json").write_text(json.dumps(merged), encoding="utf-8")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Record:
    """Which tests run a site, as `record` saw it."""

    def __init__(self, folder: Path, root: Path):
        self.root, self.facts = root, json.loads((folder / "tests.json").read_text(encoding="utf-8"))
        self.data = coverage.CoverageData(str(folder / "coverage"))
        self.data.read()
        files = {path.relative_to(root).as_posix(): _hash(path) for path in (root / "ml_factory").rglob("*.py")}
        if files != self.facts["files"]:
            raise SystemExit("mutants: the library has changed since the record. Next: --record")

    @cached_property
    def _named(self) -> dict[str, list[tuple[str, str, int, int]]]:
        """Where each function is named by another: its name -> (file, function, first line, last line)."""
        found: dict[str, list] = {}
        for file in self.facts["files"]:
            tree = ast.parse((self.root / file).read_text(encoding="utf-8"))
            lines = statement_lines(tree)
            for function, node in functions(tree):
                for one in ast.walk(node):
                    name = getattr(one, "id", getattr(one, "attr", ""))
                    if name and isinstance(one, ast.expr):
                        found.setdefault(name, []).append((file, function, *lines[id(one)]))
        return found

    def contexts(self, file: str, function: str, first: int, last: int, known: frozenset = frozenset()) -> set[str]:
        """Names of the tests and fixtures that run these lines; where none does, those of the function's callers."""
        by_line = self.data.contexts_by_lineno(str(self.root / file))
        names = {name for line in range(first, last + 1) for name in by_line.get(line, ()) if name}
        if names or not self._compiled(file, function):
            return names
        own = function.rpartition(".")[2]
        callers = [one for one in self._named.get(own, []) if one[1] != function and one[1] not in known]
        return {name for one in callers for name in self.contexts(*one, known | {function})}

    def _compiled(self, file: str, function: str) -> bool:
        tree = ast.parse((self.root / file).read_text(encoding="utf-8"))
        around = [node for name, node in functions(tree) if f"{function}.".startswith(f"{name}.")]
        return any(word in ast.unparse(one) for node in around for one in node.decorator_list for word in JIT)

    def tests_of(self, site: Site) -> list[str]:
        """Tests that run the site and passed when they were recorded, the quickest with their fixtures first."""
        names, seconds = self.contexts(site.file, site.function, site.first, site.last), self.facts["tests"]
        fixtures = {name.removeprefix("fixture ") for name in names if name not in seconds}
        found = {test for test in seconds if test in names or fixtures & set(self.facts["uses"][test])}
        uses, of_fixtures = self.facts["uses"], self.facts["fixtures"]
        cost = {test: seconds[test] + sum(of_fixtures.get(name, 0.0) for name in uses[test]) for test in found}
        return sorted(found - set(self.facts["failed"]), key=lambda test: (cost[test], test))

    def within(self, tests: Iterable[str], seconds: float) -> list[str]:
        """The first of these tests that take no longer together, each shared fixture counted once; one at least."""
        chosen: list[str] = []
        paid: set[str] = set()
        for test in tests:
            new = set(self.facts["uses"][test]) & self.facts["fixtures"].keys() - paid
            seconds -= self.facts["tests"][test] + sum(self.facts["fixtures"][name] for name in new)
            if seconds < 0 and chosen:
                break
            paid |= new
            chosen.append(test)
        return chosen


def in_suite(test: str, suite: str) -> bool:
    """Whether a test belongs to a suite: a path, `contract`, `old` or "" for all."""
    if suite == "old":
        return not test.startswith("tests/contract/")
    path = "tests/contract" if suite == "contract" else suite.rstrip("/")
    return not path or test == path or test.startswith((f"{path}/", f"{path}::"))


def outcome(site: Site, tests: Sequence[str], root: Path, seconds: float) -> tuple[str, str]:
    """Run these tests on a tree that holds the mutant: ("killed", by which) or (why not, "")."""
    path = root / site.file
    text, times = path.read_bytes(), path.stat()
    path.write_bytes(text[: site.start] + site.new.encode() + text[site.end :])
    try:
        test = failing(tests, root, seconds)
    except subprocess.TimeoutExpired:
        return "TIME", ""
    finally:
        path.write_bytes(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what is compiled of it stays valid
    if test and failing([test], root, None):
        return "FLAKY", test
    return ("killed", test) if test else ("SURVIVED", "")


def failing(tests: Sequence[str], root: Path, seconds: float | None) -> str:
    """Return the id of the first of these tests that fails, or "". Raises TimeoutExpired."""
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider"]
    command += [] if seconds is None else ["--timeout", f"{max(seconds / 2, 5):g}"]  # an endless loop fails its test
    env = os.environ | {"PYTHONPATH": str(root)}  # child processes of the tests too import this tree
    done = subprocess.run([*command, *tests], cwd=root, env=env, capture_output=True, text=True, timeout=seconds)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not failed:
        return tests[0]  # the process itself died, or a file of tests could not be imported
    return failed[-1].split(" ", 1)[1].split(" - ")[0] if failed else ""


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("--count", 100), ("--seed", "0"), ("--seconds", 120.0), ("--only", "")):
        parser.add_argument(name, type=type(usual), default=usual)
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--sites", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args(argv)
    folder = root / "build" / "mutants"
    if options.record or not (folder / "tests.json").is_file():
        record(folder, root, options.pytest or ["-m", "not notebooks and not soak", "-n", "2", "--dist", "loadfile"])
    known = Record(folder, root)
    files = sorted(file for file in (root / "ml_factory").rglob("*.py") if options.only in file.as_posix())
    every = {str(site): site for file in files for site in sites(file, root)}
    if options.sites:
        drawn = list(dict.fromkeys(one["site"] for one in json.loads(options.sites.read_text())))
    else:
        drawn = random.Random(options.seed).sample(sorted(every), min(options.count, len(every)))
    tree = folder / "tree" / root.name  # always in one place, so that compiled kernels of the last time serve
    shutil.rmtree(tree.parent, ignore_errors=True)
    shutil.copytree(root, tree, symlinks=True, ignore=LEFT_OUT)
    if (root.parent / "shared").exists():
        (tree.parent / "shared").symlink_to(root.parent / "shared")  # real data, without which tests skip
    report = []
    for name in drawn:
        site = every[name]
        tests = known.tests_of(site)
        for suite in options.suite or [""]:
            mine = [test for test in tests if in_suite(test, suite)]
            chosen = known.within(mine, options.seconds / 2)
            what, test = outcome(site, chosen, tree, options.seconds) if chosen else ("NO TEST", "")
            if name in EQUIVALENT:
                what, test = "equivalent", ""
            line = {"site": name, "suite": suite, "outcome": what, "by": test, "tests": len(chosen), "of": len(mine)}
            report.append(line | asdict(site) | {"untested": not tests})
            ran = test or f"{len(chosen)} of {len(mine)} tests"
            print(f"{what:10} {suite:10} {name} line {site.line}: {site.old} -> {site.new} ({ran})", flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1))
    return summary(report)


def summary(report: Sequence[dict]) -> int:
    """Print the figures of each suite, and what one kills and another does not; 1 where a site has no test at all."""
    killed: dict[str, list[str]] = {}
    for suite in dict.fromkeys(one["suite"] for one in report):
        mine = [one for one in report if one["suite"] == suite and one["outcome"] != "equivalent"]
        killed[suite] = [one["site"] for one in mine if one["outcome"] == "killed"]
        others = [one["outcome"] for one in mine if one["outcome"] != "killed"]
        counts = ", ".join(f"{others.count(word)} {word}" for word in dict.fromkeys(others))
        print(f"{suite or 'all tests'}: {len(killed[suite])} of {len(mine)} mutants killed; {counts or 'nothing else'}")
    for one in killed:
        for other in killed:
            missed = [site for site in killed[one] if site not in killed[other]]
            if one != other:
                print(f"killed by {one}, not by {other}: {len(missed)}", *missed, sep="\n  ")
    untested = list(dict.fromkeys(one["site"] for one in report if one["untested"]))
    if untested:
        print(f"mutants: {len(untested)} sites that no recorded test runs:", *untested, sep="\n  ", file=sys.stderr)
    return 1 if untested else 0


if __name__ == "__main__":
    raise SystemExit(main())
