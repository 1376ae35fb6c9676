"""Cleaning a workspace: what nothing needs goes, and what a run, a model in use, an export or resume needs stays."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ml_factory import CheckpointManager, Workspace, pipeline
from tests.contract.doors import ArtifactRegistry, DatasetStore, files, fingerprint_json, report_progress_to

DATA = fingerprint_json("data")


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of compiled kernels and local copies
    return Workspace(tmp_path / "workspace")


def run_id(number: int, task: str = "train", model: str = "xgboost", attempt: str = "") -> str:
    return f"{task}-{model}-h5-s0-{number:010x}{attempt}"


def add_run(workspace, number, task="train", model="xgboost", *, attempt="", ended=True, data=DATA, settings=None):
    """Write a run's folder as a training does; the higher its number, the later it was begun."""
    name = run_id(number, task, model, attempt)
    folder = workspace.results / "MES" / name
    record = {
        "run_id": name, "task": task, "model": model, "horizon": 5, "data": data, "symbol": "MES",
        "settings": settings or {}, "sources": {}, "seed": 0, "quick": False,
        "begun_at": f"2026-01-{number + 1:02}T00:00:00+00:00",
    }  # fmt: skip
    files.write_json(folder / "run.json", record)
    files.write(folder / "predictions.parquet", b"p" * 1000)
    if ended:
        files.write_json(folder / "done.json", {"run_id": name})
    return folder


def add_model(workspace, number, model="xgboost", kind="model", *, data=DATA, models=None, attempt=""):
    task = "stack" if kind == "stack" else "train"
    facts = {"run_id": run_id(number, task, model, attempt), "horizon": 5, "data": data}
    made_from = {"run": facts["run_id"], "data": data} | ({"models": models} if models else {})
    state = {"number": number, "model": model, "attempt": attempt}
    return ArtifactRegistry(workspace.models).register("MES", kind, model, state, facts, made_from)


def add_pairs(workspace, numbers) -> tuple[list[Path], list]:
    """Runs with these numbers and their models."""
    return [add_run(workspace, n) for n in numbers], [add_model(workspace, n) for n in numbers]


def add_data_set(workspace, number, rows=50) -> DatasetStore:
    """Write a data set; it becomes the current one."""
    store = DatasetStore.begin(workspace.processed("MES"), fingerprint_json({"data set": number}))
    cut = {name: np.arange(rows) for name in ("known_at", "segment", "close")}
    matrix = SimpleNamespace(values=np.ones((rows, 2), np.float32), names=["a", "b"], **cut)
    store.write_features(lambda keep: keep(matrix.values, rows) or matrix)
    store.commit({})
    store.make_current()
    return store


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below the folder with its content, but for locks, leases and records of sessions."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock" and not {"leases", "locks"} & set(path.parts)
    }  # fmt: skip


def kinds(result) -> dict[str, int]:
    found = [item.kind for item in result.items]
    return {kind: found.count(kind) for kind in sorted(set(found))}


def test_clean_keeps_newest_models_and_deletes_older_ones_with_results(workspace):
    folders, models = add_pairs(workspace, range(5))
    old = add_run(workspace, 5, "folds")
    for n in (6, 7):
        add_run(workspace, n, "folds")
    before = tree(workspace.root)
    listed = pipeline.clean(workspace, "MES", 2, dry_run=True)
    assert tree(workspace.root) == before and not listed.deleted
    assert kinds(listed) == {"model": 3, "results": 4}
    gone = [model.path for model in models[:3]] + [*folders[:3], old]
    assert {item.path for item in listed.items} == set(gone)
    assert listed.bytes == sum(file.stat().st_size for path in gone for file in path.rglob("*") if file.is_file())
    assert [item.size for item in listed.items] == sorted((item.size for item in listed.items), reverse=True)
    assert "not needed any more" in listed.summary()
    result = pipeline.clean(workspace, "MES", 2)
    assert result.deleted and kinds(result) == kinds(listed) and not result.skipped
    left = {
        name: content
        for name, content in before.items()
        if not any(str(path) in f"{workspace.root}/{name}" for path in gone)
    }
    assert tree(workspace.root) == left
    assert not pipeline.clean(workspace, "MES", 2).items


def test_clean_keeps_models_of_kept_and_of_unfinished_stacks_and_of_exports(workspace):
    _, bases = add_pairs(workspace, range(6))
    add_model(workspace, 7, "stack", "stack", models={"xgboost": bases[0].hash, "linear": "f" * 64})
    add_run(workspace, 7, "stack", "stack", settings={"base_models": ["xgboost"]})
    unfinished = {"base_models": ["xgboost"], "bases": [bases[1].hash]}
    add_run(workspace, 8, "stack", "stack", ended=False, settings=unfinished)
    exported = workspace.results / "MES" / run_id(4) / "MES-h5-xgboost.bundle"
    exported.write_bytes(b"what a user wrote there")
    result = pipeline.clean(workspace, "MES", 1)
    assert {item.path.name for item in result.items} == {
        *(base.path.name for base in bases[2:4]), *(run_id(n) for n in (2, 3)),
    }  # fmt: skip
    assert all(base.is_intact() for base in (bases[0], bases[1], *bases[4:])) and exported.is_file()


def test_clean_keeps_unfinished_run_with_checkpoints_data_and_model(workspace):
    first = add_data_set(workspace, 1)
    add_data_set(workspace, 2)
    folder = add_run(workspace, 0, ended=False, data=first.fingerprint)
    registered = add_model(workspace, 1)  # its process was killed before it marked the run as ended
    add_run(workspace, 1, ended=False)
    add_pairs(workspace, range(2, 5))
    with CheckpointManager(workspace.checkpoints, run=run_id(0)) as manager:
        manager.save_checkpoint("train_xgboost", {"weights": np.ones(1000)}, force=True)
    result = pipeline.clean(workspace, "MES", 1)
    assert kinds(result) == {"model": 2, "results": 2}
    assert folder.is_dir() and registered.is_intact()
    assert DatasetStore.find(workspace.processed("MES"), first.fingerprint) is not None
    with CheckpointManager(workspace.checkpoints, run=run_id(0)) as manager:
        assert manager.phase("train_xgboost").latest()["state"]["weights"].sum() == 1000


def test_clean_deletes_superseded_and_interrupted_data(workspace):
    old, current = add_data_set(workspace, 1), add_data_set(workspace, 2)
    processed = workspace.processed("MES")
    begun = DatasetStore.begin(processed, fingerprint_json("under way"))
    begun.folder.mkdir()
    (begun.folder / "rows.npy").write_bytes(b"x" * 100)
    listed = pipeline.clean(workspace, "MES", dry_run=True)
    assert len(listed.items) == 2 and not (processed / "prepare.lock").exists()  # a list writes nothing, no lock either
    result = pipeline.clean(workspace, "MES")
    assert kinds(result) == {"prepared data": 2}  # with the one that no process has the lock of
    assert not begun.folder.exists() and not old.folder.exists()
    store = DatasetStore.current(processed)
    assert store.fingerprint == current.fingerprint and not store.verify() and len(store.values) == 50


def test_clean_keeps_newest_model_of_current_data_whatever_its_age(workspace):
    store = add_data_set(workspace, 1)
    old = add_model(workspace, 0, data=store.fingerprint)
    add_run(workspace, 0)
    add_pairs(workspace, range(1, 5))
    assert {item.path.name for item in pipeline.clean(workspace, "MES", 1).items if item.kind == "results"} == {
        run_id(n) for n in (1, 2, 3)
    }
    assert old.is_intact()


def test_clean_keeps_all_attempts_while_one_is_needed(workspace):
    for n, attempt in enumerate(("", "-2", "-3")):
        add_model(workspace, 4, attempt=attempt)
        folder = add_run(workspace, 4, attempt=attempt)
        record = files.read_json(folder / "run.json") | {"begun_at": f"2026-02-0{n + 1}T00:00:00+00:00"}
        files.write_json(folder / "run.json", record)
    assert kinds(pipeline.clean(workspace, "MES", 1)) == {"model": 2}
    assert len(list((workspace.results / "MES").iterdir())) == 3
    add_model(workspace, 5)
    add_run(workspace, 5)
    assert kinds(pipeline.clean(workspace, "MES", 1)) == {"model": 1, "results": 3}


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_clean_with_unreadable_run_record_keeps_models_results_and_data(damage, workspace):
    add_data_set(workspace, 1)
    add_data_set(workspace, 2)
    for n in range(3):
        add_model(workspace, n)
        record = add_run(workspace, n) / "run.json"
    record.unlink() if damage == "missing" else record.write_text("{")
    before = tree(workspace.root)
    result = pipeline.clean(workspace, "MES", 1)
    assert not result.items and tree(workspace.root) == before
    assert run_id(2) in result.summary() and "no readable record" in result.summary()


def test_clean_skips_run_that_another_process_works_on(workspace, spawn):
    folders, models = add_pairs(workspace, range(3))
    worker = spawn(
        "import sys; from ml_factory import CheckpointManager\n"
        "manager = CheckpointManager(sys.argv[1], run=sys.argv[2]); manager.phase('train_xgboost').load()\n"
        "print('owned', flush=True); import time; time.sleep(300)",
        workspace.checkpoints, run_id(0),
    )  # fmt: skip
    assert worker.stdout.readline().strip() == "owned"
    result = pipeline.clean(workspace, "MES", 1)
    assert {item.path for item in result.items} == {models[1].path, folders[1]}
    assert len(result.skipped) == 2 and all("Another process is working on" in one for one in result.skipped)
    assert models[0].is_intact() and folders[0].is_dir()


def test_clean_follows_no_symbolic_link(workspace, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_bytes(b"mine")
    folders, models = add_pairs(workspace, range(4))
    (folders[0] / "log").symlink_to(victim)  # inside of what is deleted
    (folders[0] / "report.html").symlink_to(victim / "file")
    moved = tmp_path / "moved"
    shutil.move(folders[1], moved)
    folders[1].symlink_to(moved)  # in the place of what would be deleted
    shutil.move(models[2].path, tmp_path / "model")
    models[2].path.symlink_to(tmp_path / "model")
    result = pipeline.clean(workspace, "MES", 1)
    assert (victim / "file").read_bytes() == b"mine" and not folders[0].exists()
    assert moved.is_dir() and (moved / "run.json").exists() and (tmp_path / "model" / "state.safetensors").exists()
    assert sum("symbolic link" in one for one in result.skipped) == 2


def test_clean_interrupted_anywhere_leaves_whole_things_and_is_finished_by_next(workspace, monkeypatch):
    add_pairs(workspace, range(4))
    unlink, count = os.unlink, iter(range(100))

    def stop(name, **named):
        if "dir_fd" in named and next(count) == 3:
            raise KeyboardInterrupt
        unlink(name, **named)

    monkeypatch.setattr(os, "unlink", stop)
    with pytest.raises(KeyboardInterrupt):
        pipeline.clean(workspace, "MES", 1)
    monkeypatch.undo()
    registry = ArtifactRegistry(workspace.models)
    assert all(model.is_intact() for model in registry.list("MES"))
    for folder in (workspace.results / "MES").glob("train-*"):
        assert {path.name for path in folder.iterdir()} == {"run.json", "done.json", "predictions.parquet"}
    assert kinds(pipeline.clean(workspace, "MES", 1))["leftover"] == 1
    assert len(registry.list("MES")) == 1 == len(list((workspace.results / "MES").iterdir()))


def test_clean_deletes_checkpoint_that_reached_the_drive_after_its_run_had_ended(workspace, monkeypatch):
    """Its upload hung while the run ended: no machine knew that it was there."""
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(workspace.root))
    drive = Path(workspace.address)
    add_model(workspace, 0)
    run = add_run(workspace, 0)
    for name in (run.name, f"{run.name}-user"):
        with CheckpointManager(drive.parent / "elsewhere", run=name) as manager:
            saved = manager.save_checkpoint("p", {"a": 1}, force=True)
        path = Path(saved["path"])
        files.write(drive / "checkpoints" / name / path.name, path.read_bytes())
    result = pipeline.clean(drive, "MES", 1)
    assert kinds(result) == {"checkpoints": 1}
    assert [path.name for path in (drive / "checkpoints").iterdir() if list(path.glob("*.ckpt"))] == [
        f"{run.name}-user"
    ]


KILLED_PREPARE = """
import sys, time
from types import SimpleNamespace
import numpy as np
from ml_factory import Workspace
from ml_factory.datasets.store import DatasetStore
from ml_factory.storage.locks import file_lock
processed = Workspace(sys.argv[1]).processed("MES")
with file_lock(processed / "prepare.lock"):
    store = DatasetStore.begin(processed, "ab" * 32)
    cut = {name: np.arange(50) for name in ("known_at", "segment", "close")}
    matrix = SimpleNamespace(names=["a", "b"], **cut)
    store.write_features(lambda keep: keep(np.ones((50, 2), np.float32), 50) or matrix)
    (store.folder / ".features.npy.0-1-2-3.tmp").write_bytes(b"half")
    print("written", flush=True)
    time.sleep(300)
"""


def test_clean_deletes_what_a_killed_prepare_left_and_nothing_of_a_live_one(workspace, spawn):
    kept = add_data_set(workspace, 1)
    before = tree(workspace.processed("MES"))
    process = spawn(KILLED_PREPARE, workspace.root)
    assert process.stdout.readline() == "written\n"
    begun = workspace.processed("MES") / ("ab" * 6)
    assert not pipeline.clean(workspace, "MES", dry_run=True).items and begun.is_dir()
    process.kill()
    process.wait()
    listed = pipeline.clean(workspace, "MES", dry_run=True)
    size = sum(path.stat().st_size for path in begun.iterdir())
    assert [(item.path, item.size) for item in listed.items] == [(begun, size)] and size > 500
    assert "interrupted prepare" in listed.summary()
    pipeline.clean(workspace, "MES")
    assert tree(workspace.processed("MES")) == before and kept.folder.is_dir()


def test_clean_of_listed_things_keeps_what_was_not_listed_or_is_needed_now(workspace):
    add_pairs(workspace, range(3))
    listed = pipeline.clean(workspace, "MES", 1, dry_run=True)
    again = add_model(workspace, 0)  # registered again, so it is the newest now
    result = pipeline.clean(workspace, "MES", 1, listed=listed)
    assert again.is_intact() and {item.path.name for item in result.items} < {item.path.name for item in listed.items}
    assert any(str(again.path) in one for one in result.skipped)
    assert (workspace.results / "MES" / run_id(2)).is_dir()


def test_clean_keeps_what_is_needed_again_while_it_deletes(workspace):
    """A stack that begins is made of one model, and another run, whose model was gone, finishes again."""
    folders, models = add_pairs(workspace, range(5))
    shutil.rmtree(models[1].path)
    counts = []

    def begin_stack(phase) -> None:
        counts.append(phase.done)
        if phase.done == 1:
            unfinished = {"base_models": ["xgboost"], "bases": [models[2].hash]}
            add_run(workspace, 9, "stack", "stack", ended=False, settings=unfinished)
            add_model(workspace, 1)

    with report_progress_to(begin_stack):
        result = pipeline.clean(workspace, "MES", 1)
    gone = {item.path for item in result.items}
    assert gone == {models[0].path, models[3].path, folders[0], folders[3]} and max(counts) == 7
    assert models[2].is_intact() and folders[1].is_dir() and folders[2].is_dir()
    assert len(result.skipped) == 3 and all("is needed" in one for one in result.skipped)


def test_cli_clean_lists_asks_and_deletes_after_yes(call, workspace, monkeypatch):
    add_pairs(workspace, range(3))
    words = ("clean", "--workspace", workspace.root, "--symbol", "MES", "--keep", 1)
    code, _, err = call(*words[:-1], 0)
    assert code == 2 and "At least one is kept" in err
    code, out, err = call(*words)
    assert code == 2 and "--yes" in err and len(ArtifactRegistry(workspace.models).list("MES")) == 3
    code, out, _ = call(*words, "--dry-run")
    assert code == 0 and "4 not needed any more" in out and len(ArtifactRegistry(workspace.models).list("MES")) == 3
    for answer, left in (("n\n", 3), ("y\n", 1)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True, readline=lambda answer=answer: answer))
        code, out, err = call(*words)
        assert len(ArtifactRegistry(workspace.models).list("MES")) == left and code == (0 if left == 1 else 1)
        assert "MB" in out and "Delete these?" in err
    code, out, _ = call(*words, "--yes", "--json")
    assert code == 0 and '"deleted": false' in out  # nothing was left to delete


def test_cli_clean_of_symbol_without_anything_exits_1_and_names_those_there_are(call, workspace):
    add_model(workspace, 1)
    for words in (("--symbol", "NOPE"), ("--symbol", "NOPE", "--dry-run", "--json"), ()):
        code, out, err = call("clean", "--workspace", workspace.root, *words)
        assert code == 1 and out == "" and "Nothing is stored of this symbol" in err and "wanted MES" in err
    assert call("clean", "--workspace", workspace.root, "--symbol", "MES", "--dry-run")[0] == 0
