"""What notebooks show: tables and pictures, a fit while it runs, what was found and written."""

import pytest

from ml_factory.errors import NotPreparedError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import LiveCurves, draw_finished_notebooks, finish, markets, progress


def test_notebook_progress_and_markets_list_workspace_contents(tmp_path):
    workspace = Workspace(tmp_path)
    assert not any(progress(workspace, "ES").values())
    assert markets(workspace).empty
    (workspace.raw / "ES_1m.parquet").write_bytes(b"x" * 2_000_000)
    workspace.processed("ES").mkdir(parents=True, exist_ok=True)
    (workspace.processed("ES") / "current.json").write_text("{}")
    for folder in ("model-lstm-0123", "stack-stack-4567"):
        (workspace.models / "ES" / folder).mkdir(parents=True)
        (workspace.models / "ES" / folder / "artifact.json").write_text("{}")
    (workspace.results / "ES" / "folds-x").mkdir(parents=True)
    for name in ("folds-x/folds.parquet", "predictions-xgboost-h20.parquet"):
        (workspace.results / "ES" / name).touch()
    assert markets(workspace).to_dict("records") == [{"symbol": "ES", "minutes": 1, "MB": 2.0}]
    done = progress(workspace, "ES")
    assert [name[:2] for name, things in done.items() if things] == ["01", "03", "05", "06", "07"]
    texts = [item.get_text() for item in draw_finished_notebooks(done, "ES").axes[0].texts]
    assert "train sequence\nlstm" in texts and "train advanced" in texts


def test_notebook_finish_prints_written_sizes_and_next_notebook(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 1_500_000)
    finish([tmp_path / "a"], following="01_data_pipeline")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'a'}  (1.50 MB in 1 file)\nNext: 01_data_pipeline.ipynb\n"
    finish([], following="01_data_pipeline", answer="no edge found.")
    assert capsys.readouterr().out == "Answer: no edge found.\nNext: 01_data_pipeline.ipynb\n"
    with pytest.raises(NotPreparedError, match="absent"):
        finish([tmp_path / "b"])


def test_training_without_a_screen_shows_one_line_an_epoch(capsys):
    curves = LiveCurves()
    for epoch in (1, 2):
        curves(epoch, {"train_loss": 1.0 / epoch, "seconds": 3, "val_loss": None})
    first, second = capsys.readouterr().out.splitlines()
    assert "'epoch 1 · train_loss 1 · seconds 3" in first and "'epoch 2 · train_loss 0.5 · seconds 3" in second
