"""The default workspace on Colab, and of an installation without a checkout."""

import pytest

from ml_factory.errors import WorkspaceError
from ml_factory.storage import workspace as module
from ml_factory.storage.workspace import Workspace


def test_workspace_of_installation_without_checkout_is_in_the_current_folder(tmp_path, monkeypatch):
    for name in ("COLAB_RELEASE_TAG", "ML_FACTORY_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "_CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert module.default_workspace_root() == tmp_path / "workspace"


def test_workspace_on_colab_uses_drive_and_raises_if_drive_is_not_mounted(tmp_path, monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab-20260801")
    monkeypatch.delenv("ML_FACTORY_ROOT", raising=False)
    monkeypatch.setattr(module, "COLAB_ROOT", tmp_path / "MyDrive" / "ml_factory")
    with pytest.raises(WorkspaceError, match="not mounted"):
        Workspace()
    assert not (tmp_path / "MyDrive").exists()
    (tmp_path / "MyDrive").mkdir()
    assert Workspace().root == tmp_path / "MyDrive" / "ml_factory"


def test_workspace_that_a_verb_hands_out_is_uploaded_by_later_verbs(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(Workspace, "push", lambda self: pushed.append(self.root))
    verb = module.push_workspace_on_exit(lambda workspace: Workspace(workspace))
    outer = module.push_workspace_on_exit(verb)
    verb(outer(tmp_path))
    assert pushed == [tmp_path] * 2
