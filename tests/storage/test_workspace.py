"""Folders of a workspace, and names that may become folders."""

from pathlib import Path

import pytest

from ml_factory.errors import SettingsError, WorkspaceError
from ml_factory.storage import workspace as module
from ml_factory.storage.workspace import Workspace, check_symbol


def test_workspace_creates_documented_folders_and_paths(tmp_path):
    workspace = Workspace(tmp_path / "w")
    made = {str(path.relative_to(workspace.root)) for path in workspace.root.rglob("*")}
    assert made == {"data", "data/raw", "data/processed", "models", "checkpoints", "results"}
    assert workspace.raw_bars("MES") == tmp_path / "w/data/raw/MES_1m.parquet"
    assert workspace.processed("BRK.B") == tmp_path / "w/data/processed/BRK.B"
    assert {Workspace(workspace).root, Workspace(str(workspace.root)).root} == {workspace.root}


def test_workspace_default_root_follows_environment_then_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    monkeypatch.setenv("ML_FACTORY_ROOT", str(tmp_path / "given"))
    assert Workspace("").root == Workspace(None).root == tmp_path / "given"
    monkeypatch.delenv("ML_FACTORY_ROOT")
    assert module.default_workspace_root() == Path(module.__file__).resolve().parents[2] / "workspace"
    monkeypatch.setattr(module, "_CHECKOUT", tmp_path)  # installed without a checkout
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


def test_workspace_with_file_as_root_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkspaceError, match="cannot be made"):
        Workspace(tmp_path / "file")


@pytest.mark.parametrize(
    ("symbol", "proposal"),
    [
        ("mes", "'MES'"), ("BTC/USDT", "'BTC-USDT'"), ("../../etc", "'ETC'"), (".hidden", "'HIDDEN'"),
        ("A..B", "'A.B'"), ("A.", "'A'"),
        ("X" * 33, "'" + "X" * 32 + "'"), ("MES\n", "'MES'"), (1e5, "'100000.0'"), ("", "such as 'MES'"),
    ],
)  # fmt: skip
def test_check_symbol_of_illegal_symbol_raises_with_legal_proposal(symbol, proposal):
    with pytest.raises(SettingsError) as caught:
        check_symbol(symbol)
    assert proposal in caught.value.next_step
