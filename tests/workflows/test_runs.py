"""Runs: several attempts, the one line on what is found, what a kill left undone, and what W&B gives back."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import CheckpointManager, code_fingerprint, pipeline, runs
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.runs import Run, RunFolder, RunOptions, open_run, open_run_checkpoints, progress_words
from ml_factory.settings import RunSettings
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace
from ml_factory.tracking import wandb_process
from ml_factory.workflows import folds
from ml_factory.workflows import train as train_module
from tests.conftest import ROOT
from tests.tracking.metrics_table import read_log
from tests.tracking.wandb_stand_in import KEY, install, settle, versions

TREES = {"rounds": 30, "block": 5, "depth": 3, "threads": 1}
UNTHREADED = {name: value for name, value in TREES.items() if name != "threads"}
FOLDS = RunSettings("MES", 10, "lightgbm", "folds", 0, False, "0" * 64, (("folds", 3), ("rounds", 20)))
TRAIN = replace(FOLDS, task="train", settings=(("rounds", 20),))
BASES = (("base_models", ["xgboost", "lightgbm"]), ("bases", ["a", "b"]), ("folds", 2))
STACK = RunSettings("MES", 10, "stack", "stack", 0, False, "0" * 64, BASES)


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(tmp_path)


def save(workspace: Workspace, run: Run, phase: str, **metrics) -> None:
    with CheckpointManager(workspace.checkpoints, run=run.run_id) as manager:
        assert manager.save_checkpoint(phase, {"a": 1}, force=True, metrics=metrics)


def begun(workspace: Workspace, spec: RunSettings) -> Run:
    with open_run(workspace, spec) as run:
        run.begin()
    return run


def line(workspace: Workspace, spec: RunSettings) -> str:
    with open_run(workspace, spec) as run:
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
    """Other code also changes the models that a stack is built on: it is not told as other settings."""
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
        with open_run(workspace, TRAIN, RunOptions(mirror="off", **options)) as run:
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
    ("train", {"source": "there"}, "registry or wandb"),
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
    with open_run_checkpoints(workspace, RunFolder(run_id, workspace.results)) as manager:
        return progress_words(manager.list_checkpoints(phase)[-1]["metrics"])


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


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """The library's sources in a repository of their own; run ids are computed from them."""
    place = tmp_path / "checkout"
    shutil.copytree(code_fingerprint.PACKAGE, place / "ml_factory", ignore=shutil.ignore_patterns("__pycache__"))
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", place, *words], check=True, capture_output=True)
    monkeypatch.setattr(code_fingerprint, "PACKAGE", place / "ml_factory")
    return place


def test_train_after_code_change_starts_new_run(often, checkout):
    train(often, 4)
    first = next((often.results / "DEMO").glob("train-*/run.json"))
    reported = json.loads(first.read_text())
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert reported["commit"] == commit and set(reported["sources"]) == {"data", "fit"}
    source = checkout / "ml_factory" / "seeding.py"
    before = source.read_text()
    source.write_text(before + "\n\nCHANGED = 1\n")
    with pytest.raises(NotPreparedError, match="certificate is of other code"):
        train(often)
    result, (line,) = train(often, uncertified=True)
    assert "was begun with other code. Opens a new run" in line
    assert result.resumed_from is None and result.run_id != reported["run_id"]
    assert reached(often, reported["run_id"]) == "round 20"  # nothing of it was touched
    with pytest.raises(SettingsError, match=r"cannot be resumed.*begun with other code"):
        train(often, run=reported["run_id"], uncertified=True)
    source.write_text(before)
    result, (line,) = train(often, run=reported["run_id"])
    assert result.resumed_from == 4 and result.run_id == reported["run_id"]


def test_train_with_run_of_other_settings_raises_else_resumes(often):
    train(often, 2)
    name = next((often.results / "DEMO").glob("train-*/run.json")).parent.name
    with pytest.raises(SettingsError, match="other settings"):
        train(often, run=name, model_settings=TREES | {"depth": 2})
    with pytest.raises(SettingsError, match=rf"No such run.*{name}"):
        train(often, run="train-xgboost-of-nobody")
    assert train(often, run=name)[0].resumed_from == 2


def test_train_restarted_with_fresh_never_overwrites_longer_run(often):
    """FRESH left on: a restart opens a run beside, and the one that had come furthest is still there."""
    train(often, 5, fresh=True)
    longest = next((often.results / "DEMO").glob("train-*/run.json")).parent.name
    train(often, 1, fresh=True)
    assert reached(often, longest) == "round 25"
    assert len(list((often.results / "DEMO").glob("train-*/run.json"))) == 2
    assert train(often, run=longest)[0].resumed_from == 5


def test_train_resumed_with_other_core_count_and_library_is_marked_inexact_in_all_outputs(often, monkeypatch):
    installed = runs.installed_library_versions
    with monkeypatch.context() as patch:
        patch.setattr(runs, "cores", lambda: 64)
        patch.setattr(runs, "installed_library_versions", lambda names: installed(names) | {"numpy": "9.9"})
        train(often, 4, model_settings=UNTHREADED)
    result, (line,) = train(often, model_settings=UNTHREADED)
    reasons = [f"numpy: began with 9.9, now {np.__version__}", f"threads: began with 64, now {runs.cores()}"]
    reason = ", ".join(reasons)
    assert "unfinished at" in line and f"on another machine ({reason}): continued, not bit-exact" in line
    assert f"continued, not bit-exact: {reason}" in result.summary()
    assert result.origin["value"]["bits"] == "continued, not bit-exact"
    page = result.report_path.read_text()
    assert "Continued, not bit-exact" in page and reason in page
    facts = json.loads((result.artifact / "artifact.json").read_text())["facts"]
    assert facts["inexact"] == reasons and not facts["exact"]


def test_cross_validate_resumed_with_other_threads_is_marked_inexact(prepared, monkeypatch):
    asked = []

    def killed_in_the_second_fold(*given, **options):
        asked.append(given)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return fit(*given, **options)

    fit = folds.fit_on_rows
    with monkeypatch.context() as patch:
        patch.setattr(runs, "cores", lambda: 64)
        patch.setattr(folds, "fit_on_rows", killed_in_the_second_fold)
        with pytest.raises(KeyboardInterrupt):
            pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, model_settings=UNTHREADED)
    result = pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, model_settings=UNTHREADED)
    assert result.resumed_from == 1 and "unfinished at fold 1 of 2" in result.found
    assert not result.exact and any(
        "threads: began with" in reason and "64" in reason for reason in result.inexact_because
    )
    assert "continued, not bit-exact" in result.summary()
    straight = pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, seed=1, model_settings=UNTHREADED)
    assert straight.exact and "bit-exact" not in straight.summary()


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
        lambda: ArtifactRegistry(often.models).remove(ArtifactRegistry(often.models).find("DEMO", 5, "xgboost")),
        lambda: state.write_bytes(whole[:1000]),
    ):
        spoil()
        again, _ = train(often)
        assert not again.reused and again.artifact == done.artifact and state.read_bytes() == whole
        assert (again.artifact_hash, again.predictions_hash) == (done.artifact_hash, done.predictions_hash)


# ---- what comes back from W&B into an empty workspace --------------------------------------------------------------

SMALL = {"rounds": 20, "depth": 2, "block": 5, "patience": 0}


@pytest.fixture
def places(prepared_template, tmp_path, monkeypatch):
    """A workspace that dies, an empty one, and one that is mirrored nowhere: as they were prepared."""
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(wandb_process, "_warned", set())
    made = []
    for name in ("dies", "empty", "straight"):
        shutil.copytree(prepared_template, tmp_path / name)
        made.append(Workspace(tmp_path / name))
    return made


def dying(monkeypatch, owner, name: str, after: int):
    """The function of that name dies after so many calls."""
    whole, calls = getattr(owner, name), []

    def killed(*given, **named):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(1)
        return whole(*given, **named)

    monkeypatch.setattr(owner, name, killed)


def train_xgboost(place, **named):
    def callback(step, metrics):
        if named.get("dies") and step == 3:
            raise KeyboardInterrupt

    return pipeline.train(place, "DEMO", 5, "xgboost", model_settings=SMALL, callbacks=[callback])


def cross_validate(place, **_):
    return pipeline.cross_validate(place, "DEMO", 5, "xgboost", folds=3, model_settings=SMALL)


def stack(place, **_):
    return pipeline.stack(place, "DEMO", 5, ("linear", "lightgbm"), folds=2, quick=True)


def left_by(result) -> list:
    """What a result is, to the bit."""
    if hasattr(result, "predictions_hash"):
        return [result.predictions_hash, files.sha256(result.artifact / "state.safetensors")]
    return [pd.util.hash_pandas_object(table).tolist() for table in (result.folds, result.fold_table.astype(str))]


@pytest.mark.soak_except("train")
@pytest.mark.parametrize(
    ("verb", "death", "reached"),
    [
        (train_xgboost, None, "unfinished at round 15"),
        (cross_validate, (folds, "fit_on_rows", 2), "unfinished at fold 2 of 3"),
        (stack, (folds, "fit_on_rows", 3), "unfinished at linear: all folds; lightgbm: fold 1 of 2"),
    ],
)
def test_run_restored_from_wandb_into_empty_workspace_resumes_bit_exact(
    verb, death, reached, places, tmp_path, monkeypatch
):
    dies, empty, straight = places
    wanted = left_by(verb(straight))  # mirrored nowhere
    store, done = install(tmp_path, monkeypatch), settle(monkeypatch)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if death:
            dying(patch, *death)
        verb(dies, dies=True)
    assert all(done())
    (name,) = (path.name for path in store.iterdir() if path.name.startswith("checkpoints-"))
    assert len(versions(store, name)) == 1
    result = verb(empty)
    assert left_by(result) == wanted
    assert reached in (result.found or str(result.resumed_from))
    assert result.exact
    assert all(done())
    # What left an artifact at W&B needs no checkpoints there; of the rest the last word stays.
    assert len(versions(store, name)) == (0 if verb in (train_xgboost, stack) else 2)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []


def test_finished_run_restored_from_wandb_is_not_fitted_again(places, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    done = settle(monkeypatch)
    first = cross_validate(places[0])
    assert all(done())
    with monkeypatch.context() as patch:
        patch.setattr(folds, "fit_on_rows", None)  # nothing is fitted
        again = cross_validate(places[1])
    assert left_by(again) == left_by(first)
    assert all(done())


# ---- torchrun from the command line: two processes, the numbers of one, and one of them writes -----------------------

NETWORK = {"dropout": 0.0, "epochs": 2, "hidden": 8, "lookback": 6, "threads": 1, "precision": "fp32", "device": "cpu"}


def two_processes(root, model: str, settings: dict) -> tuple[dict, str]:
    """What `torchrun --nproc-per-node 2 -m ml_factory train` prints: the facts, and what it says beside them."""
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


def test_train_of_network_in_further_rank_fits_on_training_rows_and_writes_nothing(prepared, further_rank, monkeypatch):
    monkeypatch.setattr(train_module, "broadcast_fit_decision", lambda spec, fitting=False: True)
    honest, fitted, before = train_module.build_untrained_model, [], files_of(prepared)

    class Recorded:
        def fit(self, x, y, w, *, validation):
            fitted.append((len(x), len(validation[0])))

    def observed(data, spec):
        model, train_rows, held_out, limits = honest(data, spec)
        wanted.append((len(train_rows), len(held_out)))
        Recorded.lookback = model.lookback
        return Recorded(), train_rows, held_out, limits

    wanted = []
    monkeypatch.setattr(train_module, "build_untrained_model", observed)
    assert pipeline.train(prepared, "DEMO", 5, "gru", quick=True, model_settings=NETWORK) is None
    assert len(fitted) == 1 and 0 < fitted[0][0] <= wanted[0][0] and 0 < fitted[0][1] <= wanted[0][1]
    assert files_of(prepared) == before
