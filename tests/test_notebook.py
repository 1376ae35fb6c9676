"""What notebooks show: tables and pictures, a fit while it runs, what was found and written."""

import types

import pandas as pd
import pytest
from matplotlib.figure import Figure

from ml_factory.errors import NotPreparedError
from ml_factory.notebook import EpochLine, LiveCurves, draw_finished_notebooks, finish, markets, progress, show
from ml_factory.storage.workspace import Workspace


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
    with pytest.raises(NotPreparedError, match="absent"):
        finish([tmp_path / "b"])


def test_epoch_line_updates_one_display_for_all_epochs(monkeypatch):
    shown, updated = [], []
    handle = types.SimpleNamespace(update=lambda line, raw: updated.append(line["text/plain"]))
    monkeypatch.setattr("ml_factory.notebook.display", lambda line, **_: shown.append(line["text/plain"]) or handle)
    monkeypatch.setattr("ml_factory.notebook.save_status_line", lambda: "")  # of checkpoints that other tests saved
    line = EpochLine()
    for epoch in (1, 2, 3):
        line(epoch, {"train_loss": 1.0 / epoch, "val_loss": None})
    assert shown == ["epoch 1 · train_loss 1"]
    assert updated == ["epoch 2 · train_loss 0.5", "epoch 3 · train_loss 0.3333"]
    monkeypatch.setattr("ml_factory.notebook.save_status_line", lambda: "train_lstm #3 saved 12:00:00")
    line(4, {"train_loss": 0.25})
    assert updated[-1] == "epoch 4 · train_loss 0.25 · checkpoint train_lstm #3 saved 12:00:00"


def test_notebook_show_prints_long_table_text_in_full(monkeypatch):
    shown = []
    monkeypatch.setattr("ml_factory.notebook.display", lambda table: shown.append(table._repr_html_()))
    show(pd.DataFrame({"value": ["found " + "x" * 400 + " train-lstm-h20"]}))
    assert "x train-lstm-h20" in shown[0]


@pytest.fixture
def screen(monkeypatch):
    """What a screen was given: ("line" or "picture", shown anew or updated)."""
    given = []

    def kind(thing) -> str:
        return "line" if isinstance(thing, dict) else "picture" if thing.data.startswith(b"\x89PNG") else "?"

    def display(thing, **_):
        given.append((kind(thing), "shown"))
        return types.SimpleNamespace(update=lambda later, **_: given.append((kind(later), "updated")))

    monkeypatch.setattr("ml_factory.notebook.display", display)
    for name in ("COLAB_RELEASE_TAG", "JPY_SESSION_NAME"):
        monkeypatch.delenv(name, raising=False)
    return given


def test_live_curves_in_interactive_notebook_update_picture_every_epoch(screen, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "03_train_sequence.ipynb")
    monkeypatch.setattr(LiveCurves, "SECONDS_BETWEEN", 0.0)
    curves = LiveCurves()
    for epoch in (1, 2):
        curves(epoch, {"train_loss": 1.0 / epoch, "val_loss": 1.1, "seconds": 1.0})
    assert screen == [("picture", "shown"), ("line", "shown"), ("picture", "updated"), ("line", "updated")]


def test_live_curves_of_resumed_run_include_earlier_epochs(screen, monkeypatch):
    drawn = []
    monkeypatch.setenv("JPY_SESSION_NAME", "03_train_sequence.ipynb")
    monkeypatch.setattr(LiveCurves, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(
        "ml_factory.evaluation.plots.plot_learning_curves",
        lambda history, resumed_from: drawn.append((history["epoch"].tolist(), resumed_from)) or Figure(),
    )
    curves = LiveCurves()
    curves.remember([{"epoch": epoch, "train_loss": 1.0, "val_loss": 1.0, "seconds": 1.0} for epoch in (1, 2)])
    curves(3, {"train_loss": 0.9, "val_loss": 1.0, "seconds": 1.0})
    assert drawn == [([1, 2], 2), ([1, 2, 3], 2)]
    assert [what for what, _ in screen] == ["picture", "picture", "line"]


def test_live_curves_limit_drawing_rate_and_draw_none_if_headless(screen, monkeypatch):
    headless = LiveCurves()
    headless(1, {"train_loss": 1.0, "val_loss": None})
    assert screen == [("line", "shown")]
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    monkeypatch.setattr(LiveCurves, "SECONDS_BETWEEN", 3600.0)
    curves, before = LiveCurves(), len(screen)
    for epoch in (1, 2, 3):
        curves(epoch, {"train_loss": 1.0, "val_loss": None})
    assert [what for what, _ in screen[before:]].count("picture") == 1


def test_notebook_show_prints_text_and_displays_tables_and_pictures(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("ml_factory.notebook.display", shown.append)
    from ml_factory.notebook import show

    table = pd.DataFrame({"a": [1]})
    show("words", table, draw_finished_notebooks({"01_x": []}, "ES"), table[:0])
    assert capsys.readouterr().out == "words\n(nothing to list)\n"
    assert shown[0].equals(table) and shown[1].data.startswith(b"\x89PNG")
