"""One life of a process: forked from one that has imported everything, in a session and a home of its own."""

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.cloud import Cloud
from tests.chaos.hooks import Hooks, Kill, install
from tests.chaos.work import UNITS, Hashes


@dataclass(frozen=True)
class Place:
    """The folders of one chain of lives: the machine's disk (workspace and home) and the cloud behind it."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "machine" / "workspace"

    @property
    def home(self) -> Path:
        return self.folder / "machine" / "home"

    @property
    def cloud(self) -> Path:
        return self.folder / "cloud"


@dataclass(frozen=True)
class Ended:
    """How a life ended. killed : by its hook, with what the hook wrote.  hashes : of the finished unit.

    loaded : checkpoints it went on from, in order.  text : what it printed, with the traceback of a failure.
    """

    killed: dict | None
    hashes: Hashes | None
    loaded: list[dict]
    text: str


def live(
    place: Place, unit: str, kill: Kill | None, seed: int, *, lossy: bool,
    broken: Callable[[], None] | None = None, number: int = 0,
) -> Ended:  # fmt: skip
    """Do `unit` in a process of its own, until it ends or is killed.

    lossy : what the machine writes goes to a cloud that receives only some of it.  broken : sabotage done first.
    """
    place.home.mkdir(parents=True, exist_ok=True)
    diary, out = place.folder / f"life-{number}.jsonl", place.folder / f"life-{number}.txt"
    pid = os.fork()
    if pid == 0:
        _child(place, unit, kill, seed, lossy, broken, diary, out)
    _, status = os.waitpid(pid, 0)
    lines = [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []
    said = {what: [line for line in lines if line["what"] == what] for what in ("killed", "loaded", "hashes")}
    text = out.read_text(errors="replace")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and said["killed"]:
        return Ended(said["killed"][0], None, said["loaded"], text)
    return Ended(None, said["hashes"][0]["value"] if said["hashes"] else None, said["loaded"], text)


def _child(place, unit, kill, seed, lossy, broken, diary, out) -> None:
    code = 1
    with contextlib.suppress(BaseException):
        os.setsid()
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1), os.dup2(descriptor, 2)
        for name in ("XDG_CACHE_HOME", "ML_FACTORY_QUICK", "ML_FACTORY_ROOT"):
            os.environ.pop(name, None)
        os.environ |= {"HOME": str(place.home), "ML_FACTORY_WANDB": "off", "ML_FACTORY_SAVE_MINUTES": "0"}
        try:
            hooks = Hooks(diary, kill, Cloud(place.root, place.cloud, seed) if lossy else None)
            install(hooks)
            if broken:
                broken()
            hooks.write("hashes", value=UNITS[unit](place.root))
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it was, the parent reads of it
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)
