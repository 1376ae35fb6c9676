"""`python -m tests.mutants`: change the library in one place at a time and see whether the tests of its package fail.

--count 100      mutants, drawn with --seed 0
--only data      files whose path holds this text
--sites FILE     repeat the sites of an earlier report instead of drawing
--json PATH      the report: one object a mutant
--seconds 600    of tests for one mutant; more count as killed, and are reported apart
A mutant meets the tests of its own file first, then those of its package. `EQUIVALENT` lists sites left out.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT: dict[str, str] = {}  # site -> why no test can tell
COMPARE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "workspace", "dist", ".*_cache")


@dataclass(frozen=True)
class Site:
    """One change of one expression: `start` and `end` are offsets of the text in the file that `new` replaces."""

    file: str
    function: str
    number: int  # of the change within its function
    line: int
    old: str
    new: str
    start: int
    end: int

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


def sites(path: Path, root: Path) -> list[Site]:
    """List every change of a file, function by function; annotations, decorators and f-strings stay."""
    text, found, starts = path.read_text(encoding="utf-8"), [], [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(text)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        left_out = [node for node in ast.walk(function) if isinstance(node, ast.JoinedStr)] + function.decorator_list
        left_out += [node.annotation for node in ast.walk(function) if isinstance(node, ast.arg | ast.AnnAssign)]
        skipped = {id(child) for node in [*left_out, function.returns] if node for child in ast.walk(node)}
        number = 0
        for node in ast.walk(function):
            for one, new in [] if id(node) in skipped else changes(node, text):
                start, end = starts[one.lineno - 1] + one.col_offset, starts[one.end_lineno - 1] + one.end_col_offset
                old, file = text.encode()[start:end].decode(), path.relative_to(root).as_posix()
                found.append(Site(file, function.name, number, one.lineno, old, f"({new})", start, end))
                number += 1
    return list({(site.start, site.end, site.new): site for site in found}.values())


def tests_of(site: Site, root: Path) -> list[list[str]]:
    """Test files to try, in two rounds: that of the file, then all of its package."""
    path = Path(site.file)
    mirror = Path("tests", *[part for part in path.parts[1:-1] if part != "commands"])  # tests/test_cli.py has those
    whole = sorted(file.relative_to(root).as_posix() for file in (root / mirror).glob("test_*.py"))
    own = f"/test_{path.stem}.py"
    return [[file for file in whole if file.endswith(own)], [file for file in whole if not file.endswith(own)]]


def killed_by(site: Site, root: Path, seconds: float) -> str:
    """Run the tests on a tree that holds the mutant; the round that failed, or "" where it survived."""
    path, deadline = root / site.file, time.monotonic() + seconds
    text = path.read_bytes()
    path.write_bytes(text[: site.start] + site.new.encode() + text[site.end :])
    try:
        rounds = zip(("own tests", "package"), tests_of(site, root), strict=True)
        found = ((name, failing(files, root, deadline - time.monotonic())) for name, files in rounds if files)
        killer, test = next((one for one in found if one[1]), ("", ""))
    except subprocess.TimeoutExpired:
        return "time"
    finally:
        path.write_bytes(text)
    if test and failing([test], root, None):
        raise SystemExit(f"{test} fails without a mutant: mend it first")
    return killer


def failing(tests: Sequence[str], root: Path, seconds: float | None) -> str:
    """Return the id of the first of these tests that fails, or "". Raises TimeoutExpired."""
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-m", "not notebooks and not soak"]
    env = os.environ | {"PYTHONPATH": str(root)}  # child processes of the tests too import this tree
    done = subprocess.run([*command, *tests], cwd=root, env=env, capture_output=True, text=True, timeout=seconds)
    if done.returncode == pytest.ExitCode.USAGE_ERROR:
        raise SystemExit(f"pytest ran no test: {done.stderr}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[-1].split(" ", 1)[1].split(" - ")[0] if failed else ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("--count", 100), ("--seed", 0), ("--seconds", 600.0), ("--only", "")):
        parser.add_argument(name, type=type(usual), default=usual)
    parser.add_argument("--sites", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    files = sorted(file for file in (ROOT / "ml_factory").rglob("*.py") if options.only in file.as_posix())
    every = {str(site): site for file in files for site in sites(file, ROOT)}
    names = [one["site"] for one in json.loads(options.sites.read_text())] if options.sites else sorted(every)
    drawn = names if options.sites else random.Random(options.seed).sample(names, min(options.count, len(names)))
    report = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(ROOT, Path(folder) / "tree", symlinks=True, ignore=LEFT_OUT))
        (Path(folder) / "shared").symlink_to(ROOT.parent / "shared")  # real data, without which tests skip
        for name in drawn:
            site = every[name]
            round_ = "equivalent" if name in EQUIVALENT else killed_by(site, root, options.seconds)
            report.append(asdict(site) | {"site": name, "killed_by": round_})
            change = f"{site.function}: {site.old} -> {site.new}"
            print(f"{round_ or 'SURVIVED':10} {site.file}:{site.line} {change}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1))
    tried = [one["killed_by"] for one in report if one["killed_by"] != "equivalent"]
    print(f"{sum(map(bool, tried))} of {len(tried)} mutants killed, {tried.count('time')} of them by the time limit")


if __name__ == "__main__":
    main()
