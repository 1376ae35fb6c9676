"""The threads that carry checkpoints: one failure is one line, and no later job is lost for it."""

import threading

from ml_factory.background_thread import BackgroundThread
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.store import StorageTiers


def test_a_job_that_breaks_costs_no_other_job(caplog):
    executor, done = BackgroundThread("test"), []
    executor.submit(lambda: 1 / 0)
    executor.submit(lambda: done.append("next"))
    assert executor.wait(60) and done == ["next"]
    assert "ZeroDivisionError" in caplog.text
    executor.close()


def test_a_clerk_that_was_closed_does_what_comes_later_after_what_came_before():
    executor, done, go = BackgroundThread("test"), [], threading.Event()
    executor.submit(lambda: (go.wait(), done.append(1)))
    executor.close()
    executor.close()
    executor.submit(lambda: done.append(2))
    go.set()
    assert executor.wait(60) and done == [1, 2]
    executor.close()


def test_a_checkpoint_saved_after_close_is_on_the_disk(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save_checkpoint("p", {"value": 1}, force=True)
    manager.close()
    manager.save_checkpoint("p", {"value": 2}, force=True)
    assert manager.wait(60)
    manager.close()
    with CheckpointManager(tmp_path) as again:
        assert again.load_latest_checkpoint("p")["state"] == {"value": 2}


def test_what_is_told_after_a_save_may_fail_and_the_save_is_carried_on(tmp_path, caplog):
    def observed():
        raise OSError("a record that cannot be written")

    with CheckpointManager(tmp_path / "mount", tiers=StorageTiers(tmp_path / "local"), on_saved=observed) as manager:
        saved = manager.save_checkpoint("p", {"value": 1}, force=True)
        assert manager.wait(60) and saved["status"].startswith("copied")
    assert "a record that cannot be written" in caplog.text
