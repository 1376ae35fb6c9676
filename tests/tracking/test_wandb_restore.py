"""Restore from a stand-in of W&B's public API; replay read back from the real client's own file; no key in any file
of a run.
"""

import contextlib
import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.__main__ import main
from ml_factory.checkpoints.lease import LeaseTakenOverError
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import CheckpointError, NotPreparedError, WorkspaceError
from ml_factory.notebook_suite import find_suite_notebook, run_suite_notebook
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.tracking import wandb_process, wandb_restore, wandb_sync
from ml_factory.tracking.tracker import Tracker
from ml_factory.tracking.wandb_process import wandb_mirror_mode
from ml_factory.tracking.wandb_restore import replay_log_to_wandb, restore_from_wandb, try_restore_from_wandb
from ml_factory.tracking.wandb_sync import RunSnapshot, WandbSync
from tests.tracking import wandb_stand_in
from tests.tracking.metrics_table import read_log
from tests.tracking.offline_file import READ
from tests.tracking.wandb_stand_in import KEY, settle, versions

PASSWORD = "netrc-5b4c3d2e1f00f1e2d3c0f1e2d3c4b5a6978"


@pytest.fixture(autouse=True)
def account(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_BASE_URL", "ML_FACTORY_WANDB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(wandb_process, "_warned", set())


@pytest.fixture
def service(tmp_path, monkeypatch):
    return lambda answer="pass": wandb_stand_in.install(tmp_path, monkeypatch, answer)


@pytest.mark.soak
def test_stack_with_models_in_wandb_is_restored_into_empty_workspace(
    prepared, prepared_template, tmp_path, monkeypatch, service
):
    store, done = service(), settle(monkeypatch)
    bases = ("linear", "lightgbm")
    first = pipeline.stack(prepared, "DEMO", 5, bases, folds=2, quick=True)
    assert done() == [True] * 3 and len(list(store.iterdir())) == 3  # no checkpoints: all of it is finished
    shutil.copytree(prepared_template, tmp_path / "empty")
    monkeypatch.setattr("ml_factory.workflows.train.build_model", None)  # nothing is trained
    again = pipeline.stack(tmp_path / "empty", "DEMO", 5, bases, folds=2, quick=True)
    assert again.artifact.name == first.artifact.name and again.predictions_hash == first.predictions_hash
    assert first.lineage.drop(columns="available").equals(again.lineage.drop(columns="available"))
    assert again.lineage["kind"].tolist() == ["stack", "run", "data"] + ["model", "run", "data"] * 2
    # Asked for by name, W&B gives the bases although the registry has them; what it lacks, it is said to lack.
    sequence = max(one.sequence for one in ArtifactRegistry(tmp_path / "empty/models").list("DEMO"))
    pipeline.stack(tmp_path / "empty", "DEMO", 5, bases, folds=2, quick=True, source="wandb")
    assert max(one.sequence for one in ArtifactRegistry(tmp_path / "empty/models").list("DEMO")) == sequence + 2
    assert all(done())
    shutil.rmtree(store)
    with pytest.raises(NotPreparedError, match="W&B has no such model"):
        pipeline.train(tmp_path / "empty", "DEMO", 5, "linear", quick=True, source="wandb")


@pytest.mark.soak
def test_notebook_05_with_wandb_source_restores_base_models_and_stack(
    prepared, prepared_template, tmp_path, monkeypatch, service
):
    service()
    done = settle(monkeypatch)
    first = pipeline.stack(prepared, "DEMO", 5, ("linear", "lightgbm"), folds=2, quick=True)
    assert all(done())
    shutil.copytree(prepared_template, tmp_path / "empty")
    given = {"SYMBOL": "DEMO", "HORIZON": "5", "BASE_MODELS": "linear,lightgbm", "FOLDS": "2", "SOURCE": "wandb"}
    given |= {"QUICK": "True", "WORKSPACE": str(tmp_path / "empty")}
    output = run_suite_notebook(find_suite_notebook("05"), tmp_path / "05.ipynb", given).read_text()
    for name in ("linear", "lightgbm", "stack"):
        assert f"Found {name} on DEMO, horizon 5: finished before" in output
    stack = ArtifactRegistry(tmp_path / "empty/models").find("DEMO", 5, "stack", kind="stack")
    assert stack.path.name == first.artifact.name and KEY not in output


def test_train_with_source_wandb_uses_artifact_of_wandb_and_raises_without_one(
    prepared, prepared_template, tmp_path, monkeypatch, service
):
    store, done = service(), settle(monkeypatch)
    first = pipeline.train(prepared, "DEMO", 5, "linear", quick=True)
    assert all(done())
    shutil.copytree(prepared_template, tmp_path / "empty")
    monkeypatch.setattr("ml_factory.workflows.train.build_model", None)  # nothing is trained
    restored = pipeline.train(tmp_path / "empty", "DEMO", 5, "linear", quick=True, source="wandb")
    assert restored.reused and restored.artifact_hash == first.artifact_hash
    assert restored.predictions_hash == first.predictions_hash and all(done())
    shutil.rmtree(store)
    with pytest.raises(NotPreparedError, match="W&B has no such model"):
        pipeline.train(tmp_path / "empty", "DEMO", 5, "linear", quick=True, source="wandb")


def snapshot_of(manager: CheckpointManager, folder: Path) -> RunSnapshot:
    return RunSnapshot(manager.run, str(manager.folder.folder), str(folder), "part-*.json")


def tracker_of(snapshot: RunSnapshot, tmp_path: Path) -> Tracker:
    return Tracker("r", {}, tmp_path / "w", tmp_path / "l", snapshot=snapshot)


def keep(snapshot: RunSnapshot, tmp_path: Path) -> None:
    """A short attempt that fails, mirrored and waited for."""
    tracker = tracker_of(snapshot, tmp_path)
    tracker.log(1, {"loss": 1.0})
    tracker.finish(status="failed")
    assert tracker._mirror.wait(60)


def test_restore_run_restores_last_checkpoints_of_all_phases_and_part_files(tmp_path, service):
    store = service()
    state = {"weights": np.arange(5.0), "history": [1, 2]}
    (tmp_path / "one").mkdir()
    with CheckpointManager(tmp_path / "one/c", run="r", background=False) as manager:
        manager.save_checkpoint("folds_lstm", {"weights": np.zeros(5)}, force=True)
        manager.save_checkpoint("folds_lstm", state, force=True)
        manager.save_checkpoint("folds_lstm_2", {"weights": np.ones(3)}, force=True)
        manager.save_checkpoint("given_back", {"weights": np.ones(3)}, force=True)
        manager.phase("given_back").remove_files()
        with CheckpointManager(tmp_path / "one/c", run="another", background=False) as other:
            other.save_checkpoint("p", {"a": 1}, force=True)
        (tmp_path / "one/part-0.json").write_text('{"a": 1}')
        keep(snapshot_of(manager, tmp_path / "one"), tmp_path)
    assert [path.name for path in store.iterdir()] == ["checkpoints-r"]
    (version,) = versions(store, "checkpoints-r")
    assert {path.name for path in version.iterdir()} == {
        "folds_lstm.ckpt", "folds_lstm_2.ckpt", "part-0.json",
    }  # fmt: skip
    with CheckpointManager(tmp_path / "two/c", run="r", background=False) as manager:
        snapshot = snapshot_of(manager, tmp_path / "two")
        assert try_restore_from_wandb("r", ArtifactRegistry(tmp_path / "m"), ["model"], snapshot)
        found = manager.load_latest_checkpoint("folds_lstm")
        assert found["sequence"] == 2 and found["state"]["history"] == [1, 2]
        assert found["state"]["weights"].tolist() == [0, 1, 2, 3, 4]
        assert manager.load_latest_checkpoint("folds_lstm_2")["state"]["weights"].tolist() == [1, 1, 1]
        assert manager.load_latest_checkpoint("given_back") is None
        assert (tmp_path / "two/part-0.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize("fault", ["changed", "another's checkpoint"])
def test_restore_run_of_damaged_checkpoints_raises_and_leaves_no_file(tmp_path, service, fault):
    store = service()
    with CheckpointManager(tmp_path / "c", run="r", background=False) as manager:
        for phase in ("p", "q"):
            manager.save_checkpoint(phase, {"a": 1}, force=True)
        keep(snapshot_of(manager, tmp_path), tmp_path)
    (version,) = versions(store, "checkpoints-r")
    last = version / "q.ckpt"
    if fault == "changed":
        last.write_bytes(last.read_bytes()[:-1] + b"x")
    else:
        with CheckpointManager(tmp_path / "d", run="s", background=False) as other:
            shutil.copy(other.save_checkpoint("q", {"a": 1}, force=True)["path"], last)
    with CheckpointManager(tmp_path / "e", run="r", background=False) as manager:
        with pytest.raises(CheckpointError, match=r"another run|torn or was changed"):
            restore_from_wandb("r", None, [], snapshot_of(manager, tmp_path / "f"))
        assert manager.list_checkpoints() == []


def test_session_that_was_taken_over_uploads_no_checkpoint(tmp_path, service):
    store = service()
    with CheckpointManager(tmp_path / "c", run="r", background=False) as manager:
        manager.save_checkpoint("p", {"a": 1}, force=True)
        with pytest.raises(LeaseTakenOverError), tracker_of(snapshot_of(manager, tmp_path), tmp_path) as tracker:
            raise LeaseTakenOverError("another session has it")
        assert tracker._mirror.wait(60) and not (store / "checkpoints-r").exists()


@pytest.mark.soak
def test_wandb_checkpoint_versions_keep_newest_and_user_aliased(tmp_path, service):
    store = service()
    with CheckpointManager(tmp_path / "c", run="r", background=False) as manager:
        for number in range(6):
            manager.save_checkpoint("p", {"number": number}, force=True)
            keep(snapshot_of(manager, tmp_path), tmp_path)
            if number == 1:
                about = store / "checkpoints-r/about-v1.json"
                about.write_text(json.dumps(json.loads(about.read_text()) | {"aliases": ["mine"]}))
        assert [path.name for path in versions(store, "checkpoints-r")] == ["v1", "v3", "v4", "v5"]
    with CheckpointManager(tmp_path / "d", run="r", background=False) as manager:
        assert restore_from_wandb("r", None, [], snapshot_of(manager, tmp_path)) == "checkpoints"
        assert manager.load_latest_checkpoint("p")["state"] == {"number": 5}


@pytest.mark.parametrize(("between", "sent"), [(600.0, 1), (0.0, 2)])
def test_wandb_sync_uploads_new_checkpoints_at_set_interval(tmp_path, service, monkeypatch, between, sent):
    store = service()
    found = importlib.util.spec_from_file_location("stand_in_for_wandb", tmp_path / "service/wandb.py")
    found.loader.exec_module(wandb := importlib.util.module_from_spec(found))
    for name, seconds in (("FIRST_SECONDS", 0.0), ("CHECKPOINT_SECONDS", between), ("POLL_SECONDS", 0.0)):
        monkeypatch.setattr(wandb_sync, name, seconds)
    (tmp_path / "l").mkdir()
    calls, deadlines = [], []
    with CheckpointManager(tmp_path / "c", run="r", background=False) as manager:

        def over() -> bool:
            calls.append(1)
            if len(calls) in (2, 4):
                manager.save_checkpoint("p", {"asked": len(calls)}, force=True)
            return len(calls) > 9

        spec = {"run_id": "r", "local": str(tmp_path / "l"), "folder": str(tmp_path / "w"), "mode": "online"}
        spec |= {"attempt": "0001-1-0.jsonl", "snapshot": vars(snapshot_of(manager, tmp_path)), "settings": {}}
        spec |= {"init_seconds": 5, "finish_seconds": 7}
        set_deadline = lambda seconds, reason: deadlines.append(seconds)  # noqa: E731
        WandbSync(wandb, spec, set_deadline).follow_log(over)
    assert len(versions(store, "checkpoints-r")) == sent  # what is not new is not sent again
    assert deadlines[0] > 7 and deadlines[1] is None  # a service that hangs ends the mirror, not the other way round


@pytest.mark.parametrize("answer", ["import time; time.sleep(1000)", "raise RuntimeError('no key " + KEY + "')"])
def test_try_restore_from_failing_service_warns_once_and_goes_offline(tmp_path, monkeypatch, service, caplog, answer):
    service(answer)
    monkeypatch.setattr(wandb_restore, "ANSWER_SECONDS", 2.0 if "sleep" in answer else 60.0)
    with CheckpointManager(tmp_path / "c", run="r", background=False) as manager:
        assert wandb_mirror_mode("auto") == "online"
        snapshot = snapshot_of(manager, tmp_path)
        assert try_restore_from_wandb("r", ArtifactRegistry(tmp_path / "m"), ["model"], snapshot) == ""
    assert len(caplog.records) == 1 and "Nothing is restored" in caplog.text and KEY not in caplog.text
    assert wandb_mirror_mode("auto") == "offline"  # nobody waits for it again


def test_restore_artifact_of_torn_copy_raises(tmp_path, service):
    folder = service() / "model-r" / "v0"
    kept = ArtifactRegistry(tmp_path / "a").register("ES", "model", "gru", {"v": 1}, {"run_id": "r"})
    shutil.copytree(kept.path, folder)
    (folder.parent / "about-v0.json").write_text('{"type": "model", "metadata": {}, "aliases": []}')
    registry = ArtifactRegistry(tmp_path / "b")
    assert restore_from_wandb("r", registry, ["model"]) == "model" and registry.find("ES").hash == kept.hash
    (folder / "state.safetensors").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="torn"):
        restore_from_wandb("r", registry, ["model"])
    assert restore_from_wandb("unknown", registry, ["model"]) == "" and len(registry.list("ES")) == 1


@pytest.mark.parametrize("name", ["../../outside", "/outside", "..\\outside", "folder/state.safetensors"])
def test_restore_artifact_with_file_name_that_is_a_path_raises(tmp_path, service, name):
    folder = service() / "model-r" / "v0"
    kept = ArtifactRegistry(tmp_path / "a").register("ES", "model", "gru", {"v": 1}, {"run_id": "r"})
    shutil.copytree(kept.path, folder)
    (folder.parent / "about-v0.json").write_text(
        json.dumps({"type": "model", "metadata": {"forged names": [name]}, "aliases": []})
    )
    registry = ArtifactRegistry(tmp_path / "b")
    with pytest.raises(WorkspaceError, match="cannot be a file's"):
        restore_from_wandb("r", registry, ["model"])
    assert registry.list("ES") == []


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("known", [8, 3, 0])
def test_wandb_sync_after_older_checkpoint_logs_each_missing_step_once(tmp_path, known):
    """An attempt logged `known` steps to the service; the next one resumes after step 4, with the same values."""
    first = Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off")
    for step in range(8):
        first.log(step, {"loss": step})
    first._file.close()
    second = Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off")
    for step in range(5, 10):
        second.log(step, {"loss": step})
    second.finish()
    logged = []
    run = SimpleNamespace(starting_step=known, log=lambda metrics, step: logged.append((step, metrics["loss"])))
    client = SimpleNamespace(Settings=lambda **named: None, init=lambda **named: run)
    spec = {"run_id": "run", "local": str(tmp_path / "l"), "folder": str(tmp_path / "w"), "mode": "online"}
    spec |= {"settings": {}, "init_seconds": 5, "snapshot": None}
    WandbSync(client, {**spec, "attempt": second._path.name}).follow_log(lambda: True)
    assert logged == [(step, step) for step in range(known, 10)]


# ---------------------------------------------------------------- the real client


def logged_steps(folder, spawn):
    """Return the content of the one .wandb file below the folder: [step, loss] of each point, and the artifacts'
    names.
    """
    lines = [json.loads(line) for line in spawn(READ, folder).stdout.read().splitlines()]
    return [one for one in lines if isinstance(one, list)], [one for one in lines if isinstance(one, str)]


@pytest.mark.soak
def test_cli_tracking_replay_writes_every_step_to_offline_file(tmp_path, spawn, capsys, monkeypatch):
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
    observed = json.loads(capsys.readouterr().out)
    assert observed["run"] == "train-x" and observed["steps"] == 10 and observed["mode"] == "offline"
    points, _ = logged_steps(log, spawn)
    assert points == [[step, 1 / step] for step in range(1, 6)] + [[step, 2 / step] for step in range(6, 11)]
    assert points == read_log(log)[["step", "loss"]].values.tolist()
    with pytest.raises(WorkspaceError, match="no log"):
        replay_log_to_wandb(tmp_path / "nothing")


@pytest.mark.soak
def test_notebook_02_outputs_contain_no_api_key(prepared, tmp_path, monkeypatch, spawn):
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
    written = run_suite_notebook(find_suite_notebook("02"), tmp_path / "02.ipynb", given)
    assert "linear on DEMO" in json.dumps(nbformat.read(written, 4))
    [log] = (prepared.results / "DEMO").glob("*/log")
    wanted = read_log(log)["step"].tolist()
    [local] = (tmp_path / "cache/ml_factory/runs").iterdir()
    deadline = time.monotonic() + 120
    points, artifacts = [], []
    while not artifacts and time.monotonic() < deadline:
        with contextlib.suppress(ValueError):
            points, artifacts = logged_steps(local, spawn)
        time.sleep(0.5)
    assert [step for step, _ in points] == wanted and artifacts == [f"model-{log.parent.name}"]
    assert not list(prepared.checkpoints.rglob("*.ckpt"))  # the run has ended
    written = [path for path in tmp_path.rglob("*") if path.is_file() and secrets not in path.parents]
    found = [path for path in written if any(one.encode() in path.read_bytes() for one in (KEY, PASSWORD))]
    assert len(written) > 30 and found == []
    assert PASSWORD in (secrets / "netrc").read_text()
