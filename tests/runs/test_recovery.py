"""What W&B keeps and gives back, against a stand-in of its public API; a record told again, read back from the real
client's own file; and no key in anything that a run leaves."""

import contextlib
import json
import shutil
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.__main__ import main
from ml_factory.errors import CheckpointError, NotPreparedError, WorkspaceError
from ml_factory.runs import mirror, recovery
from ml_factory.runs.checkpoints import CheckpointManager
from ml_factory.runs.mirror import mirror_mode
from ml_factory.runs.recovery import recover_artifact, recover_checkpoint, recover_quietly, replay
from ml_factory.runs.registry import Registry
from ml_factory.runs.retelling import Retelling
from ml_factory.runs.tracking import Tracker, read_log
from ml_factory.runs.workspace import Workspace
from ml_factory.suite import find_notebook, run_notebook
from tests.runs.offline_file import READ

KEY, PASSWORD = "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c", "netrc-5b4c3d2e1f00f1e2d3c0f1e2d3c4b5a6978"

# The stand-in: Artifact, Run.log_artifact and Api with the two methods that are used, on a folder. It cannot show that
# the real service keeps what it is given.
STAND_IN = """
import os, pathlib, shutil
STORE = pathlib.Path(os.path.dirname(__file__)) / "store"
class Error(Exception): pass
class Settings:
    def __init__(self, **named): pass
class Artifact:
    def __init__(self, name, type, metadata): self.name, self.files = name, {}
    def add_file(self, path, name): self.files[name] = pathlib.Path(path).read_bytes()
class Run:
    id, dir, starting_step = "run", "x/files", 0
    def __init__(self): self.summary = {}
    def log(self, metrics, step): pass
    def log_artifact(self, artifact):
        folder = STORE / artifact.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in artifact.files.items(): (folder / name).write_bytes(data)
    def finish(self, exit_code=0): pass
def init(**named): return Run()
class Kept:
    def __init__(self, name): self.name = name
    def download(self, root): shutil.copytree(STORE / self.name, root, dirs_exist_ok=True)
class Api:
    def __init__(self, overrides, timeout): ANSWER
    def artifact_exists(self, name): return (STORE / self._plain(name)).is_dir()
    def artifact(self, name): return Kept(self._plain(name))
    def _plain(self, name):
        project, rest = name.split("/")
        assert project == "ohlcv-ml-factory" and rest.endswith(":latest"), name
        return rest.removesuffix(":latest")
"""


@pytest.fixture(autouse=True)
def account(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mirror, "_told", set())


@pytest.fixture
def service(tmp_path, monkeypatch):
    """The stand-in, before the real client in every child process; the folder where it keeps things."""

    def install(answer: str = "pass") -> Path:
        (tmp_path / "service").mkdir(exist_ok=True)
        (tmp_path / "service/wandb.py").write_text(STAND_IN.replace("ANSWER", answer))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "service"))
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("ML_FACTORY_WANDB", "auto")
        return tmp_path / "service/store"

    return install


def settle(monkeypatch):
    """Every mirror that `pipeline` starts from here on is waited for."""
    started = []
    begin = mirror.MirrorProcess.start.__func__

    def start(cls, *rest):
        started.append(begin(cls, *rest))
        return started[-1]

    monkeypatch.setattr(mirror.MirrorProcess, "start", classmethod(start))
    return lambda: [one.wait(120) for one in started]


def test_models_and_the_stack_come_back_into_an_empty_workspace(
    prepared, prepared_template, tmp_path, monkeypatch, service
):
    store, done = service(), settle(monkeypatch)
    bases = ("linear", "lightgbm")
    first = pipeline.stack(prepared, "DEMO", 5, bases, folds=2, quick=True)
    assert done() == [True] * 3 and len(list(store.iterdir())) == 3
    shutil.copytree(prepared_template, tmp_path / "empty")
    monkeypatch.setattr("ml_factory.units.holdout.build_model", None)  # nothing is trained
    again = pipeline.stack(tmp_path / "empty", "DEMO", 5, bases, folds=2, quick=True)
    assert again.artifact.name == first.artifact.name and again.predictions_hash == first.predictions_hash
    assert first.lineage.drop(columns="here").equals(again.lineage.drop(columns="here"))
    assert again.lineage["kind"].tolist() == ["stack", "run", "data"] + ["model", "run", "data"] * 2
    # Asked for by name, W&B gives the bases although the registry has them; what it lacks, it is said to lack.
    sequence = max(one.sequence for one in Registry(tmp_path / "empty/models").list("DEMO"))
    pipeline.stack(tmp_path / "empty", "DEMO", 5, bases, folds=2, quick=True, source="wandb")
    assert max(one.sequence for one in Registry(tmp_path / "empty/models").list("DEMO")) == sequence + 2
    shutil.rmtree(store)
    with pytest.raises(NotPreparedError, match="W&B has no such model"):
        pipeline.train(tmp_path / "empty", "DEMO", 5, "linear", quick=True, source="wandb")


def test_the_last_checkpoint_comes_back(tmp_path, monkeypatch, service):
    store = service()
    state = {"weights": np.arange(5.0), "history": [1, 2]}
    with CheckpointManager(tmp_path / "one", run="r", background=False) as manager:
        manager.save_checkpoint("train_lstm", {"weights": np.zeros(5)}, force=True)
        manager.save_checkpoint("train_lstm", state, force=True)
        where = {"folder": str(manager.home_folder), "run": "r", "phase": "train_lstm"}
    with (
        contextlib.suppress(ZeroDivisionError),
        Tracker("r", {}, tmp_path / "w", tmp_path / "l", checkpoints=where) as t,
    ):
        t.log(1, {"loss": 1.0})
        _ = 1 / 0
    assert t.wait_mirror(60) and [path.name for path in store.iterdir()] == ["checkpoint-r-train_lstm"]
    with CheckpointManager(tmp_path / "two", run="r", background=False) as manager:
        assert recover_quietly(Registry(tmp_path / "m"), "model", manager, "train_lstm") == "checkpoint"
        found = manager.load_latest_checkpoint("train_lstm")
        assert found["sequence"] == 2 and found["state"]["history"] == [1, 2]
        assert found["state"]["weights"].tolist() == [0, 1, 2, 3, 4]
        assert not recover_checkpoint(manager, "train_gru")
    shutil.copytree(store / "checkpoint-r-train_lstm", store / "checkpoint-other-train_lstm")
    with CheckpointManager(tmp_path / "three", run="other", background=False) as manager:
        with pytest.raises(CheckpointError, match="another run"):
            recover_checkpoint(manager, "train_lstm")
        assert manager.load_latest_checkpoint("train_lstm") is None


@pytest.mark.parametrize("answer", ["import time; time.sleep(1000)", "raise RuntimeError('no key " + KEY + "')"])
def test_a_service_that_does_not_give_costs_its_deadline_once_and_one_line(
    tmp_path, monkeypatch, service, caplog, answer
):
    service(answer)
    monkeypatch.setattr(recovery, "ANSWER_SECONDS", 2.0 if "sleep" in answer else 60.0)
    with CheckpointManager(tmp_path / "c", run="r", background=False) as manager:
        assert mirror_mode("auto") == "online"
        assert recover_quietly(Registry(tmp_path / "m"), "model", manager, "p") == ""
    assert len(caplog.records) == 1 and "Nothing is restored" in caplog.text and KEY not in caplog.text
    assert mirror_mode("auto") == "offline"  # nobody waits for it again


def test_what_comes_back_damaged_is_refused(tmp_path, service):
    folder = service() / "model-r"
    kept = Registry(tmp_path / "a").register("ES", "model", "gru", {"v": 1}, {"run_id": "r"})
    shutil.copytree(kept.path, folder)
    registry = Registry(tmp_path / "b")
    assert recover_artifact(registry, "model", "r").hash == kept.hash
    (folder / "state.safetensors").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="torn"):
        recover_artifact(registry, "model", "r")
    assert recover_artifact(registry, "model", "unknown") is None and len(registry.list("ES")) == 1


# ---------------------------------------------------------------- going back


class Service:
    """A run at W&B as its own log tells it: a step at or below the last one is dropped, as the real one does."""

    class Error(Exception):
        pass

    def __init__(self, points, rewinds=True):
        self.runs, self.rewinds = {"run": dict(points)}, rewinds

    def begin(self, id, name, resume=None, resume_from=None):
        if resume_from:
            if not self.rewinds:
                raise self.Error("rewinding is not part of this plan")
            step = int(resume_from.removeprefix(f"{id}?_step="))
            self.runs[id] = {one: told for one, told in self.runs[id].items() if one <= step}
        points = self.runs.setdefault(id, {})

        class Run:
            starting_step = max(points, default=-1) + 1

            def log(self, metrics, step):
                assert step > max(points, default=-1), "dropped: told twice or out of order"
                points[step] = metrics["loss"]

            def finish(self, exit_code=0):
                pass

        return Run()


@pytest.mark.parametrize(("known", "rewinds"), [(8, True), (8, False), (3, True), (0, True)])
def test_an_older_checkpoint_takes_the_service_back_and_no_point_is_lost(tmp_path, known, rewinds):
    """An attempt told `known` steps to the service; the next one resumes behind step 4, and says other numbers."""
    first = Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off")
    for step in range(8):
        first.log(step, {"loss": step})
    first._file.close()
    second = Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off")
    for step in range(5, 10):
        second.log(step, {"loss": step * 10})
    second.finish()
    service = Service({step: step for step in range(known)}, rewinds)
    spec = {"run_id": "run", "local": str(tmp_path / "l"), "folder": str(tmp_path / "w"), "mode": "online"}
    story = Retelling(service, {**spec, "attempt": list(second._attempt), "checkpoints": None}, service.begin)
    story.follow(lambda: True)
    told = service.runs["run" if rewinds else next(one for one in service.runs if one != "run")]
    assert told == {**{step: step for step in range(5)}, **{step: step * 10 for step in range(5, 10)}}
    assert list(told) == sorted(told)


# ---------------------------------------------------------------- the real client


def everything_told(folder, spawn):
    """What the one .wandb file below the folder says: [step, loss] of each point, and the names of artifacts."""
    lines = [json.loads(line) for line in spawn(READ, folder).stdout.read().splitlines()]
    return [one for one in lines if isinstance(one, list)], [one for one in lines if isinstance(one, str)]


def test_a_record_is_told_again_by_the_command_and_each_point_is_in_the_file(tmp_path, spawn, capsys, monkeypatch):
    pytest.importorskip("wandb")
    log = Workspace(tmp_path / "ws").results / "ES" / "train-x" / "log"
    first = Tracker("train-x", {"lr": 0.1}, log, tmp_path / "l", mirror="off")
    for step in range(1, 9):
        first.log(step, {"loss": 1 / step})
    first._file.close()
    with Tracker("train-x", {"lr": 0.1}, log, tmp_path / "l", mirror="off") as second:
        for step in range(6, 11):
            second.log(step, {"loss": 2 / step})
    words = ["tracking", "replay", "--run", "train-x", "--symbol", "ES", "--workspace", str(tmp_path / "ws")]
    monkeypatch.setattr(sys, "argv", ["ml_factory", *words, "--offline", "--json"])
    with contextlib.suppress(SystemExit):
        main()
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == "train-x" and told["steps"] == 10 and told["mode"] == "offline"
    points, _ = everything_told(log, spawn)
    assert points == [[step, 1 / step] for step in range(1, 6)] + [[step, 2 / step] for step in range(6, 11)]
    assert points == read_log(log)[["step", "loss"]].values.tolist()
    with pytest.raises(WorkspaceError, match="no record"):
        replay(tmp_path / "nothing")


def test_no_key_in_anything_that_a_notebook_leaves(prepared, tmp_path, monkeypatch, spawn):
    """Workspace, checkpoints' slots, local cache, the offline W&B folder and the executed notebook, with keys in the
    environment, in .netrc and in W&B's own settings; what is searched for is found where it was put."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("ML_FACTORY_WANDB", "offline")
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", "hf_" + KEY)
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    monkeypatch.setenv("NETRC", str(secrets / "netrc"))
    (secrets / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {PASSWORD}\n")
    given = {"SYMBOL": "DEMO", "HORIZON": "5", "MODEL": "linear", "QUICK": "True", "WORKSPACE": str(prepared.root)}
    written = run_notebook(find_notebook("02"), tmp_path / "02.ipynb", given)
    assert "linear on DEMO" in json.dumps(nbformat.read(written, 4))
    [log] = (prepared.results / "DEMO").glob("*/log")
    wanted = read_log(log)["step"].tolist()
    [local] = {path.parent for path in (tmp_path / "cache").rglob("segment-*.jsonl")}
    deadline = time.monotonic() + 120
    points, artifacts = [], []
    while not artifacts and time.monotonic() < deadline:
        with contextlib.suppress(ValueError):
            points, artifacts = everything_told(local, spawn)
        time.sleep(0.5)
    assert [step for step, _ in points] == wanted and artifacts == [f"model-{log.parent.name}"]
    assert list(prepared.checkpoints.glob("slot-*.ckpt"))
    files = [path for path in tmp_path.rglob("*") if path.is_file() and secrets not in path.parents]
    found = [path for path in files if any(one.encode() in path.read_bytes() for one in (KEY, PASSWORD))]
    assert len(files) > 30 and found == []
    assert PASSWORD in (secrets / "netrc").read_text()
