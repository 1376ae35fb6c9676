"""Runs: several attempts, the one line on what is found, what a kill left undone, and what W&B gives back."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from ml_factory import CheckpointManager, pipeline
from ml_factory.errors import SettingsError
from ml_factory.storage.workspace import Workspace
from tests.conftest import ROOT
from tests.contract import doors
from tests.tracking.metrics_table import read_log

TREES = {"rounds": 30, "block": 5, "depth": 3, "threads": 1}
UNTHREADED = {name: value for name, value in TREES.items() if name != "threads"}
FOLDS = doors.RunSettings("MES", 10, "lightgbm", "folds", 0, False, "0" * 64, (("folds", 3), ("rounds", 20)))
TRAIN = replace(FOLDS, task="train", settings=(("rounds", 20),))
BASES = (("base_models", ["xgboost", "lightgbm"]), ("bases", ["a", "b"]), ("folds", 2))
STACK = doors.RunSettings("MES", 10, "stack", "stack", 0, False, "0" * 64, BASES)


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(tmp_path)


def save(workspace: Workspace, run: doors.Run, phase: str, **metrics) -> None:
    with CheckpointManager(workspace.checkpoints, run=run.run_id) as manager:
        assert manager.save_checkpoint(phase, {"a": 1}, force=True, metrics=metrics)


def begun(workspace: Workspace, spec: doors.RunSettings) -> doors.Run:
    with doors.open_run(workspace, spec) as run:
        run.begin()
    return run


def line(workspace: Workspace, spec: doors.RunSettings) -> str:
    with doors.open_run(workspace, spec) as run:
        return run.status(finished=False)


def test_status_of_folds_counts_their_files_and_the_fit_in_the_next(workspace):
    assert "Starts from the beginning" in line(workspace, FOLDS)
    run = begun(workspace, FOLDS)
    assert "no checkpoint of it is there" in line(workspace, FOLDS)
    save(workspace, run, "folds_lightgbm_1", rounds=10)
    assert "unfinished at round 10 in the first fold (" in line(workspace, FOLDS)
    run.fold_path("lightgbm", 1, 3).touch()
    assert "unfinished at fold 1 of 3 (" in line(workspace, FOLDS)  # what fold 1 had come to counts no more
    save(workspace, run, "folds_lightgbm_2", epochs=1, step=5)
    assert "unfinished at fold 1 of 3, epoch 1, step 5 in the next (" in line(workspace, FOLDS)
    for number in (2, 3):
        run.fold_path("lightgbm", number, 3).touch()
    assert "unfinished at all folds (" in line(workspace, FOLDS)


@pytest.mark.parametrize("spec", [TRAIN, FOLDS, STACK], ids=["train", "folds", "stack"])
def test_status_names_what_the_newest_other_run_differs_in(workspace, spec):
    """Other code also changes the models that a stack is built on: it is not reported as other settings."""
    run = begun(workspace, spec)
    deeper = replace(spec, settings=(*spec.settings, ("depth", 4)))
    assert f"{run.run_id} is of other settings (depth as usual then, 4 now). Opens a new run" in line(workspace, deeper)
    assert f"{run.run_id} is of other data. Opens a new run" in line(workspace, replace(spec, data="1" * 64))
    other = tuple((name, ["c", "d"] if name == "bases" else one) for name, one in spec.settings)
    if spec is STACK:
        assert "is of other settings (other bases). Opens" in line(workspace, replace(spec, settings=other))
    path = run.folder / "run.json"
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps(record | {"sources": record["sources"] | {"seeding.py": "0" * 64}}))
    assert "was begun with other code" in line(workspace, replace(spec, data="1" * 64, settings=other))
    for name, value in (("settings", [None, "a"]), ("sources", 5)):  # a damaged record is left out
        path.write_text(json.dumps(record | {name: value}))
        assert run.run_id not in line(workspace, deeper)


def test_fresh_opens_an_attempt_beside_and_the_newest_is_opened_again(workspace):
    def opened(**options) -> str:
        with doors.open_run(workspace, TRAIN, doors.RunOptions(mirror="off", **options)) as run:
            return run.run_id

    first = opened(fresh=True)  # where there is none it is the first
    assert first == TRAIN.run_id and not list(workspace.results.rglob("*.json"))  # nothing is written before `begin`
    begun(workspace, TRAIN)
    assert (opened(), opened(fresh=True)) == (first, f"{first}-2")
    (workspace.results / "MES" / f"{first}-2").mkdir()
    assert (opened(), opened(fresh=True)) == (f"{first}-2", f"{first}-3")
    assert opened(run=first) == first


@pytest.mark.parametrize(("verb", "given", "words"), [
    ("train", {"quik": True}, "did you mean 'quick'"),
    ("cross_validate", {"source": "wandb"}, r"no such argument.*source"),
    ("train", {"seed": -1}, "SEED cannot be used"),
    ("train", {"source": "there"}, "registry, wandb"),
    ("train", {"model_settings": {"depth": 0}}, "depth"),
    ("train", {"model_settings": {"seed": 1}}, "seed= instead"),
    ("cross_validate", {"model_settings": {"dept": 3}}, "did you mean 'depth'"),
])  # fmt: skip
def test_unknown_option_of_a_run_raises_before_data_are_read(verb, given, words, workspace):
    with pytest.raises(SettingsError, match=words):
        getattr(pipeline, verb)(workspace, "DEMO", 5, "xgboost", **given)


@pytest.mark.parametrize("verb", ["cross_validate", "stack"])
def test_cross_validate_and_stack_in_second_rank_raise_and_write_nothing(verb, prepared, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    models = "xgboost" if verb == "cross_validate" else ("xgboost", "linear")
    with pytest.raises(SettingsError, match="Only train runs as several processes"):
        getattr(pipeline, verb)(prepared, "DEMO", 5, models)
    assert not list(prepared.results.rglob("run.json"))


# ---- a training, killed and run again ------------------------------------------------------------------------------


class Killed(BaseException):
    """Not an Exception: nothing on the way may catch it."""


def train(workspace: Workspace, until: int = 0, model: str = "xgboost", **how):
    """Return the result and the printed lines; killed after `until` blocks where that is above 0."""
    lines = []

    def kill(epoch, metrics):
        if epoch == until:
            raise Killed

    how = {"model_settings": TREES, "mirror": "off", "on_status": lines.append, "callbacks": (kill,)} | how
    try:
        return pipeline.train(workspace, "DEMO", 5, model, **how), lines
    except Killed:
        return None, lines


def reached(workspace: Workspace, run_id: str, phase: str = "train_xgboost") -> str:
    with doors.open_run_checkpoints(workspace, doors.RunFolder(run_id, workspace.results)) as manager:
        return doors.progress_words(manager.list_checkpoints(phase)[-1]["metrics"])


@pytest.fixture
def often(prepared, tmp_path, monkeypatch) -> Workspace:
    """A prepared workspace in which every block is saved, and caches of its own."""
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return prepared


def test_train_prints_one_line_on_found_run_and_next_action(often):
    _, (line,) = train(often, 2)
    assert line.startswith("Found nothing of xgboost on DEMO, horizon 5. Starts from the beginning, as train-xgboost-")
    result, (line,) = train(often)
    assert "unfinished at round 10" in line and line.endswith("Resumes from there.")
    assert result.found == line and result.resumed_from == 2 and result.exact
    again, (line,) = train(often)
    assert "finished before" in line and again.reused
    table = result.origin["value"]
    assert table["resumed from"] == "block 2" and table["bits"] == "as uninterrupted" and table["found"] == result.found
    assert again.origin["value"]["resumed from"] == "the end: it was finished before"


def test_train_with_run_of_other_settings_raises_else_resumes(often):
    train(often, 2)
    name = next((often.results / "DEMO").glob("train-*/run.json")).parent.name
    with pytest.raises(SettingsError, match="other settings"):
        train(often, run=name, model_settings=TREES | {"depth": 2})
    with pytest.raises(SettingsError, match=rf"No such run.*{name}"):
        train(often, run="train-xgboost-of-nobody")
    assert train(often, run=name)[0].resumed_from == 2


def test_train_restarted_with_fresh_never_overwrites_longer_run(often):
    """FRESH left on: a restart opens another run, and the one that had come furthest is still there."""
    train(often, 5, fresh=True)
    longest = next((often.results / "DEMO").glob("train-*/run.json")).parent.name
    train(often, 1, fresh=True)
    assert reached(often, longest) == "round 25"
    assert len(list((often.results / "DEMO").glob("train-*/run.json"))) == 2
    assert train(often, run=longest)[0].resumed_from == 5


# ---- what a kill left undone ---------------------------------------------------------------------------------------


def test_train_of_finished_run_without_log_summary_writes_summary(often):
    """Killed between the registration of the model and the end of the record; and a cloud that lost the log."""
    result, _ = train(often)
    log = result.report_path.parent / "log"
    whole, steps = (log / "summary.json").read_text(), list(result.history["epoch"])
    (log / "summary.json").unlink()
    [lost] = log.glob("0001-*.jsonl")
    lost.unlink()
    again, _ = train(often)
    assert again.reused
    reported = json.loads((log / "summary.json").read_text())
    assert (reported["status"], reported["summary"]) == ("finished", json.loads(whole)["summary"])
    assert list(read_log(log)["step"]) == steps


def test_model_registered_by_a_killed_training_ends_its_run_and_releases_checkpoints(often):
    """Killed between the registration of the model and the end of the run."""
    done, _ = train(often)
    (done.report_path.parent / "done.json").unlink()
    with CheckpointManager(often.checkpoints, run=done.run_id) as manager:
        manager.save_checkpoint("train_xgboost", {"a": 1}, force=True)
    assert train(often)[0].reused
    assert (done.report_path.parent / "done.json").is_file() and not list(often.checkpoints.rglob("*.ckpt"))
    state = done.artifact / "state.safetensors"
    whole = state.read_bytes()
    for spoil in (  # no model, a torn one
        lambda: doors.ArtifactRegistry(often.models).remove(
            doors.ArtifactRegistry(often.models).find("DEMO", 5, "xgboost")
        ),
        lambda: state.write_bytes(whole[:1000]),
    ):
        spoil()
        again, _ = train(often)
        assert not again.reused and again.artifact == done.artifact and state.read_bytes() == whole
        assert (again.artifact_hash, again.predictions_hash) == (done.artifact_hash, done.predictions_hash)


# ---- what comes back from W&B into an empty workspace --------------------------------------------------------------

SMALL = {"rounds": 20, "depth": 2, "block": 5, "patience": 0}


# ---- torchrun from the command line: two processes, the numbers of one, and one of them writes -----------------------

NETWORK = {"dropout": 0.0, "epochs": 2, "hidden": 8, "lookback": 6, "threads": 1, "precision": "fp32", "device": "cpu"}


def two_processes(root, model: str, settings: dict) -> tuple[dict, str]:
    """What `torchrun --nproc-per-node 2 -m ml_factory train` prints: the facts, and what it says next to them."""
    given = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    words = ["--workspace", root, "--symbol", "DEMO", "--horizon", "5", "--model", model, "--quick", "--json", *given]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    alike = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*start, "ml_factory", "train", *map(str, words)], cwd=ROOT, env=alike, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr  # two of them would not be JSON


@pytest.fixture
def second(prepared, tmp_path) -> Workspace:
    """A second copy of the prepared workspace."""
    shutil.copytree(prepared.root, tmp_path / "beside")
    return Workspace(tmp_path / "beside")


@pytest.mark.soak
def test_torchrun_train_in_two_processes_gives_losses_of_one_and_one_run(prepared, second):
    alone = pipeline.train(prepared, "DEMO", 5, "gru", quick=True, model_settings=NETWORK)
    reported, _ = two_processes(second.root, "gru", NETWORK)
    together = pipeline.train(second, "DEMO", 5, "gru", quick=True, model_settings=NETWORK)
    assert together.reused and reported["run_id"] == together.run_id == alone.run_id
    for name in ("train_loss", "val_loss"):
        np.testing.assert_allclose(together.history[name], alone.history[name], rtol=1e-6)
    # One attempt, one record, one artifact: the second process left nothing behind.
    runs = [path.name for path in (second.results / "DEMO").iterdir() if path.is_dir()]
    assert runs == [alone.run_id]
    logged = {path.name.split("-")[0] for path in (together.report_path.parent / "log").glob("*.jsonl")}
    assert logged == {"0001"}
    assert reported["artifact_hash"] == together.artifact_hash
    # What is finished is found, and the second process does not wait for a fit that does not come.
    again, _ = two_processes(second.root, "gru", NETWORK)
    assert again["reused"] and again["artifact_hash"] == reported["artifact_hash"]


@pytest.fixture
def further_rank(monkeypatch):
    """Make this process rank 1 of a torchrun group, as far as the environment says it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "group")
    monkeypatch.setenv("RANK", "1")


def files_of(workspace: Workspace) -> dict:
    return {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*") if path.is_file()}


def test_train_of_booster_in_further_rank_returns_none_and_writes_nothing(prepared, further_rank):
    before = files_of(prepared)
    assert pipeline.train(prepared, "DEMO", 5, "lightgbm", quick=True) is None
    assert files_of(prepared) == before
