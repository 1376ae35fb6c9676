"""A workspace gs://bucket/prefix on Colab: gcsfs comes along and the person signs in, once and only there."""

import sys
import time
import types

import pytest

from ml_factory.checkpoints import compute_session
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


def test_hours_expected_on_free_tpu_is_a_usual_session_at_most(monkeypatch):
    for name in ("ML_FACTORY_COLAB_TIER", "TPU_ACCELERATOR_TYPE", "COLAB_TPU_1VM", "ML_FACTORY_SESSION_HOURS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    monkeypatch.setattr(compute_session, "runtime_start_time", lambda: time.time() - 3600)
    assert compute_session.expected_hours_left() == pytest.approx(11, abs=0.01)
    monkeypatch.setenv("COLAB_TPU_1VM", "1")
    assert compute_session.expected_hours_left() == 1.5
    assert "at most 11.0 h; a free TPU session usually ends after 1.5 h" in colab_setup._time_left(
        compute_session.configured_hours_remaining()
    )
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "1.75")
    assert compute_session.expected_hours_left() == pytest.approx(0.75, abs=0.01)
