"""A workspace gs://bucket/prefix on Colab: gcsfs comes along and the person signs in, once and only there."""

import sys
import time
import types

import pytest

from ml_factory.checkpoints import compute_session
from ml_factory.checkpoints.session_lifetimes import SessionLifetimeLog
from ml_factory.errors import WorkspaceError
from utils import colab_setup, runtime

IN_A_BUCKET = tuple(runtime.read_requirement_lines(runtime.BUCKETS))


class SafeStopResult(Exception):
    """Raised where the workspace would be opened."""


@pytest.fixture
def colab(monkeypatch):
    """A Colab without a network: what is installed and who signs in is written down; it stops before the bucket."""
    received = []
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "ML_FACTORY_ROOT", "COLAB_TPU_1VM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab-20260801")
    auth = types.SimpleNamespace(authenticate_user=lambda: received.append("signed in"))
    monkeypatch.setitem(sys.modules, "google.colab.auth", auth)
    monkeypatch.setattr(
        runtime, "install_missing_packages", lambda path, extra: received.append((path.name, *extra)) or ()
    )

    def opened(root):
        raise SafeStopResult(root)

    monkeypatch.setattr(
        colab_setup.workspaces, "Workspace", type("Workspace", (), {"__new__": lambda cls, root: opened(root)})
    )
    return received, auth


def test_colab_setup_with_bucket_installs_gcsfs_and_authenticates(colab, monkeypatch):
    monkeypatch.setenv("COLAB_TPU_1VM", "1")
    with pytest.raises(SafeStopResult, match="gs://bucket/prefix"):
        colab_setup.setup_colab_environment("gs://bucket/prefix")
    assert colab[0] == [("colab-tpu.txt", *IN_A_BUCKET), "signed in"]


def test_colab_setup_with_folder_or_key_file_does_not_authenticate(colab, monkeypatch, tmp_path):
    with pytest.raises(SafeStopResult):
        colab_setup.setup_colab_environment(tmp_path)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(SafeStopResult):
        colab_setup.setup_colab_environment("gs://bucket/prefix")
    assert colab[0] == [("colab-gpu.txt",), ("colab-gpu.txt", *IN_A_BUCKET)]


def test_colab_setup_with_refused_authentication_raises_with_next_step(colab):
    _, auth = colab

    def refuse():
        raise OSError("no page")

    auth.authenticate_user = refuse
    with pytest.raises(WorkspaceError, match="allow the access, or set GOOGLE_APPLICATION_CREDENTIALS"):
        colab_setup.setup_colab_environment("gs://bucket/prefix")


def test_default_life_of_free_tpu_session_is_90_minutes_until_observed(monkeypatch, tmp_path):
    monkeypatch.delenv("ML_FACTORY_COLAB_TIER", raising=False)
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    monkeypatch.delenv("COLAB_TPU_1VM", raising=False)
    assert compute_session.default_session_life() == 7200.0
    monkeypatch.setenv("COLAB_TPU_1VM", "1")
    assert compute_session.default_session_life() == 5400.0
    monkeypatch.setenv("ML_FACTORY_COLAB_TIER", "pro")
    assert compute_session.default_session_life() == 7200.0
    clock = [0.0]
    first = SessionLifetimeLog(tmp_path, "first", lambda: clock[0])
    first.record_alive()
    clock[0] = 9000.0
    first.record_alive()
    clock[0] = 50_000.0  # long not seen: taken away after 9,000 s; (5,400 + 9,000) s by 2
    assert SessionLifetimeLog(tmp_path, "second", lambda: clock[0]).mean_life(5400.0) == 7200.0


def test_hours_expected_on_free_tpu_is_mean_session_life(monkeypatch, tmp_path):
    for name in ("ML_FACTORY_COLAB_TIER", "TPU_ACCELERATOR_TYPE", "COLAB_TPU_1VM", "ML_FACTORY_SESSION_HOURS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    monkeypatch.setattr(compute_session, "runtime_start_time", lambda: time.time() - 3600)
    assert compute_session.expected_hours_left(tmp_path) == pytest.approx(11, abs=0.01)
    monkeypatch.setenv("COLAB_TPU_1VM", "1")
    assert compute_session.expected_hours_left(tmp_path) == 1.5
    assert "at most 11.0 h; a free TPU session usually ends after 1.5 h" in colab_setup._time_left(
        compute_session.configured_hours_remaining()
    )
    day_ago = time.time() - 86_400
    clock = [day_ago]
    taken = SessionLifetimeLog(tmp_path, "first", lambda: clock[0])
    taken.record_alive()
    clock[0] = day_ago + 9000
    taken.record_alive()  # and never again
    assert compute_session.expected_hours_left(tmp_path) == 2.0
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "1.75")
    assert compute_session.expected_hours_left(tmp_path) == pytest.approx(0.75, abs=0.01)
