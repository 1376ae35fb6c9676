"""Two sessions that log into one folder."""

import json
import shutil

import pytest

from ml_factory.tracking.run_log import list_log_attempts
from ml_factory.tracking.tracker import Tracker
from tests.tracking.metrics_table import read_log


@pytest.mark.parametrize("seen", [True, False])
def test_tracker_of_superseded_session_does_not_mix_into_newer_log(tmp_path, monkeypatch, seen):
    """Not seen: the cloud showed the second session nothing of the first; both are attempt 1 of their own count."""
    folder = tmp_path / "w"

    def session(name):
        monkeypatch.setattr("ml_factory.tracking.tracker.process_id", lambda: name * 8)
        return Tracker("run", {}, folder, tmp_path / name, mirror="off")

    old = session("a")
    for step in range(1, 6):
        old.log(step, {"loss": step})
    if not seen:
        folder.rename(tmp_path / "unseen")
    new = session("b")
    for step in range(3, 7):
        new.log(step, {"loss": step * 10})
    if not seen:
        shutil.copytree(tmp_path / "unseen", folder, dirs_exist_ok=True)
    old.log(6, {"loss": 6})  # the zombie wakes up
    new.finish({"who": "new"})
    old.finish({"who": "old"})
    assert new._path.name.startswith("0002" if seen else "0001")
    assert read_log(folder)["loss"].tolist() == [1, 2, 30, 40, 50, 60]
    assert json.loads((folder / "summary.json").read_text())["summary"] == {"who": "new"}
    assert [name[-14:-6] for name in list_log_attempts(folder)] == ["a" * 8, "b" * 8]
