"""Folders of a workspace, and names that may become folders."""

from pathlib import Path

import pytest

from ml_factory.errors import SettingsError, WorkspaceError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import check_symbol, default_workspace_root


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
    assert default_workspace_root() == Path(__file__).resolve().parents[2] / "workspace"


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
