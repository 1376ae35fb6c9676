"""A mirror that never delays the run, and restoring, with a stand-in of W&B; the real client offline.

No key is in any file of a run."""
# ruff: noqa: F811 - fixtures of the contract

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.tracking import wandb_sync
from ml_factory.tracking.tracker import Tracker
from ml_factory.tracking.wandb_sync import RunSnapshot, WandbSync
from tests.contract.test_wandb import account, service, snapshot_of  # noqa: F401 - fixtures
from tests.tracking.wandb_stand_in import versions


def import_stand_in(tmp_path):
    found = importlib.util.spec_from_file_location("stand_in_for_wandb", tmp_path / "service/wandb.py")
    found.loader.exec_module(wandb := importlib.util.module_from_spec(found))
    return wandb


def sync_of(client, tmp_path: Path, snapshot=None, attempt="0001-1-0.jsonl", **given) -> WandbSync:
    spec = {"run_id": "r", "local": str(tmp_path), "folder": str(tmp_path / "w"), "mode": "online", "settings": {}}
    spec |= {"attempt": attempt, "snapshot": snapshot and vars(snapshot), "init_seconds": 5, "finish_seconds": 7}
    return WandbSync(client, spec, **given)


@pytest.mark.parametrize("moment", [(RunSnapshot, "files"), (WandbSync, "delete_old_checkpoints")])
def test_wandb_sync_uploads_intact_copy_of_slot_that_is_overwritten(tmp_path, service, monkeypatch, moment):
    """Before its copy is verified, and after."""
    store, step, deadlines = service(), getattr(*moment), []
    with CheckpointManager(tmp_path / "c", run="r") as manager:
        saved = manager.save_checkpoint("p", {"a": 1}, force=True)
        manager.wait()
        path = Path(saved["path"])
        whole = path.read_bytes()
        sync = sync_of(import_stand_in(tmp_path), tmp_path, snapshot_of(manager, tmp_path),
                       set_deadline=lambda seconds, reason: deadlines.append(seconds))  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(*moment, lambda *given: (step(*given), path.write_bytes(whole[:-9]))[0])
            sync.upload_checkpoints()
        assert len(versions(store, "checkpoints-r")) == (moment[0] is WandbSync)
        path.write_bytes(whole)
        sync.upload_checkpoints()
    assert (versions(store, "checkpoints-r")[-1] / "p.ckpt").read_bytes() == whole
    assert deadlines[0] > 7 and deadlines[1] == 0  # a service that hangs ends the mirror, not the other way round


@pytest.mark.parametrize(("between", "sent"), [(600.0, 1), (0.0, 2)])
def test_wandb_sync_uploads_new_checkpoints_at_set_interval(tmp_path, service, monkeypatch, between, sent):
    store, calls = service(), []
    for name, seconds in (("FIRST_SECONDS", 0.0), ("CHECKPOINT_SECONDS", between), ("POLL_SECONDS", 0.0)):
        monkeypatch.setattr(wandb_sync, name, seconds)
    with CheckpointManager(tmp_path / "c", run="r") as manager:

        def over() -> bool:
            calls.append(1)
            if len(calls) in (2, 4):
                manager.save_checkpoint("p", {"asked": len(calls)}, force=True)
                manager.wait()
            return len(calls) > 9

        sync_of(import_stand_in(tmp_path), tmp_path, snapshot_of(manager, tmp_path)).follow_log(over)
    assert len(versions(store, "checkpoints-r")) == sent  # what is not new is not sent again


@pytest.mark.parametrize("known", [8, 3])
def test_wandb_sync_after_older_checkpoint_logs_each_missing_step_once(tmp_path, known, monkeypatch):
    """An attempt logged `known` steps to the service; the next one resumes after step 4, while its log is followed."""
    monkeypatch.setattr(wandb_sync, "POLL_SECONDS", 0.0)
    first, second = (Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off") for _ in range(2))
    for step in range(8):
        first.log(step, {"loss": step})
    logged, polls = [], []

    def over() -> bool:
        polls.append(1)
        for step in range(5, 10) if len(polls) == 2 else ():
            second.log(step, {"loss": 10 * step})
        return len(polls) > 2

    run = SimpleNamespace(starting_step=known, log=lambda metrics, step: logged.append((step, metrics["loss"])))
    client = SimpleNamespace(Settings=lambda **named: None, init=lambda **named: run)
    sync_of(client, tmp_path, attempt=second._path.name).follow_log(over)
    assert logged == [(step, step if step < 5 else 10 * step) for step in range(known, 10)]
