"""A stand-in of W&B's client and its public API for tests, and mirrors that are waited for."""

import json
from collections.abc import Callable
from pathlib import Path

from ml_factory.tracking import wandb_process

KEY = "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c"

# The stand-in: Artifact, Run.log_artifact and Api with the methods that are used, on a folder that holds a folder a
# version. It cannot show that the real service keeps what it is given.
STAND_IN = """
import json, os, pathlib, shutil, time, types
STORE = pathlib.Path(os.path.dirname(__file__)) / "store"
class Error(Exception): pass
class Settings:
    def __init__(self, **named): pass
class Artifact:
    def __init__(self, name, type, metadata): self.name, self.type, self.metadata, self.files = name, type, metadata, {}
    def add_file(self, path, name): self.files[name] = pathlib.Path(path).read_bytes()
def record(*call):
    with open(STORE.parent / "calls", "a") as file: print(json.dumps(call), file=file)
class Run:
    starting_step = 0
    def __init__(self): self.summary = {}
    def log(self, metrics, step): record("log", step, metrics)
    def log_artifact(self, artifact):
        last = max([int(path.name[1:]) for path in STORE.glob(artifact.name + "/v*")], default=-1)
        folder = STORE / artifact.name / f"v{last + 1}"
        folder.mkdir(parents=True)
        for name, data in artifact.files.items(): (folder / name).write_bytes(data)
        about = {"type": artifact.type, "metadata": artifact.metadata, "aliases": []}
        (folder.parent / f"about-{folder.name}.json").write_text(json.dumps(about))
    def finish(self, exit_code=0): record("finish", exit_code, self.summary)
def init(**named):
    CODE
    record("init", *[named.get(name) for name in ("id", "mode", "project", "config")])
    return Run()
class Kept:
    def __init__(self, folder):
        self.folder, self.version = folder, folder.name
        about = json.loads((folder.parent / f"about-{folder.name}.json").read_text())
        self.type, self.metadata = about["type"], about["metadata"]
        newest = max(folder.parent.glob("v*"), key=lambda path: int(path.name[1:]))
        self.aliases = about["aliases"] + (["latest"] if folder == newest else [])
        names = [path.name for path in folder.iterdir()] + about["metadata"].get("forged names", [])
        self.manifest = types.SimpleNamespace(entries=dict.fromkeys(names))
    def download(self, root): shutil.copytree(self.folder, root, dirs_exist_ok=True)
    def delete(self, delete_aliases=False):
        if self.aliases and not delete_aliases: raise ValueError("this version has aliases")
        shutil.rmtree(self.folder)
class Api:
    def __init__(self, overrides, timeout): ANSWER
    def artifact_exists(self, name): return bool(self._versions(self._plain(name)))
    def artifact(self, name): return self._versions(self._plain(name))[-1]
    def artifacts(self, type_name, name):
        found = self._versions(name.removeprefix("ohlcv-ml-factory/"))
        if not all(one.type == type_name for one in found): raise ValueError("no such type here")
        return found
    def _versions(self, name):
        return [Kept(path) for path in sorted(STORE.glob(name + "/v*"), key=lambda path: int(path.name[1:]))]
    def _plain(self, name):
        project, rest = name.split("/")
        assert project == "ohlcv-ml-factory" and rest.endswith(":latest"), name
        return rest.removesuffix(":latest")
"""


def install(tmp_path: Path, monkeypatch, answer: str = "pass", code: str = "pass") -> Path:
    """Put it before the real client in every child process; the folder where it keeps things.

    answer, code : of the service when it is queried, and when a run begins.
    """
    (tmp_path / "service").mkdir(exist_ok=True)
    (tmp_path / "service/wandb.py").write_text(STAND_IN.replace("ANSWER", answer).replace("CODE", code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "service"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("ML_FACTORY_WANDB", "auto")
    return tmp_path / "service/store"


def calls(store: Path) -> list[list]:
    """What runs did: ["init", id, mode, project, settings], ["log", step, metrics], ["finish", exit code, summary]."""
    path = store.with_name("calls")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def versions(store: Path, name: str) -> list[Path]:
    """The folders of the versions of an artifact, oldest first."""
    return sorted(store.glob(f"{name}/v*"), key=lambda path: int(path.name[1:]))


def settle(monkeypatch) -> Callable[[], list[bool]]:
    """Every mirror that `pipeline` starts from here on is waited for."""
    started = []
    begin = wandb_process.WandbMirrorProcess.start.__func__

    def start(cls, *rest):
        started.append(begin(cls, *rest))
        return started[-1]

    monkeypatch.setattr(wandb_process.WandbMirrorProcess, "start", classmethod(start))
    return lambda: [one.wait(120) for one in started]
