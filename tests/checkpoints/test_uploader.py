"""The threads that carry checkpoints: one failure is one line, and no later job is lost for it."""

import threading

from ml_factory.background_thread import BackgroundThread
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.store import StorageTiers


def test_background_thread_with_failing_job_runs_next_job(caplog):
    executor, done = BackgroundThread("test"), []
    executor.submit(lambda: 1 / 0)
    executor.submit(lambda: done.append("next"))
    assert executor.wait(60) and done == ["next"]
    assert "ZeroDivisionError" in caplog.text
    executor.close()


def test_background_thread_after_close_runs_later_jobs_in_order():
    executor, done, go = BackgroundThread("test"), [], threading.Event()
    executor.submit(lambda: (go.wait(), done.append(1)))
    executor.close()
    executor.close()
    executor.submit(lambda: done.append(2))
    go.set()
    assert executor.wait(60) and done == [1, 2]
    executor.close()


def test_manager_saving_after_close_writes_checkpoint(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save_checkpoint("p", {"value": 1}, force=True)
    manager.close()
    manager.save_checkpoint("p", {"value": 2}, force=True)
    assert manager.wait(60)
    manager.close()
    with CheckpointManager(tmp_path) as again:
        assert again.load_latest_checkpoint("p")["state"] == {"value": 2}


def test_manager_with_failing_on_saved_callback_still_copies_checkpoint(tmp_path, caplog):
    def observed():
        raise OSError("a record that cannot be written")

    with CheckpointManager(tmp_path / "mount", tiers=StorageTiers(tmp_path / "local"), on_saved=observed) as manager:
        saved = manager.save_checkpoint("p", {"value": 1}, force=True)
        assert manager.wait(60) and saved["status"].startswith("copied")
    assert "a record that cannot be written" in caplog.text
