"""`python -m tests.cli_kills`: kill the command line at random moments, run the same command again, and compare.

--count 300    kills
--seed 0       which commands, victims and moments
--jobs 2       chains at once
--json PATH    every kill as an object

A chain is one command in a workspace of its own, killed with SIGKILL up to six times: all its processes; one child
alone, while the command goes on; or all of them, and then the newest checkpoint is damaged. At last it runs to its end.
Its artifact and predictions equal those of an uninterrupted command. Printed with the kills: the longest time whose
work a kill lost.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tests.chaos.work import BASES, HORIZON, HORIZONS, SYMBOL, market, settings_of

VICTIMS = ("all", "all", "child", "all, newest damaged")
NETWORKS = ("lstm", "tcn")
KILLS = 6  # in one chain at most
SAVE_SECONDS, MINUTE = 0.2, 60.0
START, END = 2.0, 300.0  # seconds that a command runs before it is killed, and at most
FACTS = ("artifact_hash", "predictions_hash", "fingerprint", "metrics")


@dataclass
class Kill:
    """One kill.

    victim : as of `VICTIMS`.
    seconds : since the start of the command.
    unsaved : seconds since the newest checkpoint, or since the start where none was written after it.
    """

    victim: str
    seconds: float
    unsaved: float


@dataclass
class Chain:
    """What happened to one command; `trouble` is "" where nothing went wrong."""

    command: str
    kills: list[Kill] = field(default_factory=list)
    trouble: str = ""


def commands() -> dict[str, list[str]]:
    """Return the command lines by name, without the workspace."""
    options = ["--symbol", SYMBOL, "--json"]
    found = {"prepare": ["prepare", *options, *(word for bars in HORIZONS for word in ("--horizon", str(bars)))]}
    for model in (*NETWORKS, "catboost", *BASES, "linear"):
        settings = settings_of(model) | ({"save_seconds": SAVE_SECONDS} if "save_seconds" in settings_of(model) else {})
        chosen = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        found[model] = ["train", *options, "--horizon", str(HORIZON), "--model", model, *chosen]
    return found


class Command:
    """One run of `python -m ml_factory`, in a process group of its own."""

    def __init__(self, words: Sequence[str], workspace: Path):
        self.began, self.output = time.monotonic(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "ml_factory", *words, "--workspace", workspace],
            stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True, env=environment(workspace),
        )  # fmt: skip

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def children(self) -> list[int]:
        """Return the process ids of its living descendants."""
        try:
            return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Kill the command and all its descendants."""
        for pid in [*self.children(), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        """Return what it printed."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


def environment(workspace: Path) -> dict[str, str]:
    """Return the environment of a command that logs to W&B offline, in a child process, and uploads nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ML_FACTORY_", "WANDB_"))}
    return kept | {"ML_FACTORY_WANDB": "offline", "TMPDIR": str(workspace.parent)}


def newest_checkpoint(workspace: Path) -> Path | None:
    """Return the slot that was written last."""
    found = []
    for path in (workspace / "checkpoints").glob("*.ckpt"):
        try:
            found.append((path.stat().st_mtime_ns, path))
        except FileNotFoundError:
            continue
    return max(found)[1] if found else None


def damage(path: Path, draw: random.Random) -> None:
    """Change one byte, cut the file, or zero a part of it."""
    size = path.stat().st_size
    if not size:
        return
    place = draw.randrange(size)
    with path.open("r+b") as file:
        if draw.random() < 0.3:
            file.truncate(place)
            return
        file.seek(place)
        changed = bytes([file.read(1)[0] ^ (1 << draw.randrange(8))])
        file.seek(place)
        file.write(changed if draw.random() < 0.5 else bytes(min(4096, size - place)))


def wait_for_moment(command: Command, workspace: Path, usual: float, draw: random.Random) -> bool:
    """Wait for a random moment of the work, half of the time right after a checkpoint; False when it ended before."""
    until, after_save = draw.uniform(START, max(START, usual)), draw.random() < 0.5
    seen = newest_time(workspace)
    while command.process.poll() is None and command.seconds() < until:
        time.sleep(0.002)
        if after_save and newest_time(workspace) != seen and draw.random() < 0.3:
            time.sleep(draw.uniform(0.0, 0.05))
            break
        seen = newest_time(workspace)
    return command.process.poll() is None


def newest_time(workspace: Path) -> int:
    """Return the time of the newest checkpoint in nanoseconds; 0 without one."""
    path = newest_checkpoint(workspace)
    try:
        return path.stat().st_mtime_ns if path else 0
    except FileNotFoundError:
        return 0


def run_to_end(command: Command) -> dict | str:
    """Return the facts that a finished command printed, or in words what went wrong."""
    try:
        command.process.wait(END)
    except subprocess.TimeoutExpired:
        command.kill()
        return f"still running after {END:.0f} s"
    text = command.text()
    if command.process.returncode:
        return f"ended with {command.process.returncode}: {text[-1500:]}"
    facts = json.loads(text[text.index("{\n") :])
    return {name: facts[name] for name in FACTS if name in facts}


def run_chain(name: str, kills: int, template: Path, reference: dict, usual: float, folder: Path, seed: int) -> Chain:
    """Kill one command `kills` times at most, let it end, and compare its facts with the reference."""
    draw, chain, workspace = random.Random(seed), Chain(name), folder / "workspace"
    shutil.copytree(template, workspace, symlinks=True)
    command = Command(commands()[name], workspace)
    while len(chain.kills) < kills and wait_for_moment(command, workspace, usual, draw):
        victim, children = draw.choice(VICTIMS), command.children()
        if victim == "child" and not children:
            victim = "all"
        seconds = command.seconds()
        chain.kills.append(Kill(victim, seconds, min(seconds, time.time() - newest_time(workspace) / 1e9)))
        if victim == "child":
            try:
                os.kill(draw.choice(children), signal.SIGKILL)
            except ProcessLookupError:
                chain.kills.pop()
            continue
        command.kill()
        if "damaged" in victim and (path := newest_checkpoint(workspace)):
            damage(path, draw)
        if "Traceback" in command.text():
            chain.trouble = command.text()[-1500:]
            return chain
        command = Command(commands()[name], workspace)
    facts = run_to_end(command)
    if facts != reference:
        chain.trouble = facts if isinstance(facts, str) else f"{facts} and not {reference}"
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return chain


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, usual in (("--count", 300), ("--seed", "0"), ("--jobs", 2)):
        parser.add_argument(option, type=type(usual), default=usual)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    folder, draw = Path(tempfile.mkdtemp(prefix="cli-kills-")), random.Random(given.seed)
    raw, ready = folder / "raw", folder / "ready"
    market(raw)
    shutil.copytree(raw, ready)
    prepared, usual = once("prepare", ready)
    templates = {name: raw if name == "prepare" else ready for name in commands()}
    names = sorted(templates)
    references = {"prepare": (prepared, usual)}
    with ThreadPoolExecutor(given.jobs) as pool:
        done = {name: pool.submit(once, name, folder / f"reference-{name}") for name in names if name != "prepare"}
        references |= {name: work.result() for name, work in done.items()}

        def killed(number: int, kills: int, seed: int) -> Chain:
            name = names[number % len(names)]
            chain = run_chain(name, kills, templates[name], *references[name], folder / f"chain-{number}", seed)
            words = ", ".join(f"{kill.victim} after {kill.seconds:.1f} s" for kill in chain.kills)
            print(f"{name} [{words}] {chain.trouble or 'equal'}", flush=True)
            return chain

        chains: list[Chain] = []
        while (missing := given.count - sum(len(chain.kills) for chain in chains)) > 0:
            batch = [(len(chains) + one, draw.randint(1, min(KILLS, missing)), draw.randrange(2**32))
                     for one in range(max(1, missing // KILLS))]  # fmt: skip
            chains += pool.map(lambda plan: killed(*plan), batch)
    return report(chains, folder, given.json)


def once(name: str, workspace: Path) -> tuple[dict, float]:
    """Run an uninterrupted command; return its facts and seconds."""
    if not workspace.exists():
        shutil.copytree(workspace.parent / "ready", workspace)
    command = Command(commands()[name], workspace)
    facts = run_to_end(command)
    if isinstance(facts, str):
        raise SystemExit(f"{name} without a kill {facts}")
    return facts, command.seconds()


def report(chains: Sequence[Chain], folder: Path, path: Path | None) -> int:
    """Print the counts, write them to `path`, and return 1 where a chain went wrong."""
    kills = [kill for chain in chains for kill in chain.kills]
    wrong = [chain for chain in chains if chain.trouble]
    longest = max((kill.unsaved for chain in chains if chain.command in NETWORKS for kill in chain.kills), default=0.0)
    print(f"{len(kills)} kills in {len(chains)} chains: {dict(Counter(kill.victim for kill in kills))}")
    print(f"{dict(Counter(chain.command for chain in chains for _ in chain.kills))}")
    print(
        f"networks, saved every {SAVE_SECONDS} s: at most {longest:.1f} s lost by a kill, the start of Python included"
    )
    print(f"{len(wrong)} chains with a mismatch or an error")
    if path:
        path.write_text(json.dumps([asdict(chain) for chain in chains], indent=1))
    if wrong or longest > SAVE_SECONDS + MINUTE:
        print(f"looked at in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
