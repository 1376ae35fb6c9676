"""Temporary folders after their process: removed at its end, or by the next process when it was killed."""

import os
import signal
import stat
import tempfile

import pytest

from ml_factory.storage.scratch_folder import scratch_folder

HOLD = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from ml_factory.storage.scratch_folder import scratch_folder
with scratch_folder("held-") as folder:
    (folder / "model").write_text("large")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_scratch_folder_is_private_and_removed_at_end_and_after_error():
    with scratch_folder("a-") as folder, scratch_folder("a-") as other:
        assert folder != other and folder.name.startswith("a-")
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
        (folder / "inner").mkdir()
    with pytest.raises(ZeroDivisionError), scratch_folder("a-"):
        raise ZeroDivisionError
    assert not list(folder.parent.iterdir())


def test_scratch_folder_of_killed_process_is_removed_and_of_living_one_kept(tmp_path, spawn):
    killed, living = spawn(HOLD, tmp_path), spawn(HOLD, tmp_path)
    left, kept = (process.stdout.readline().strip() for process in (killed, living))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert os.path.exists(left + "/model")
    with scratch_folder("b-"):
        assert not os.path.exists(left) and os.path.exists(kept + "/model")
