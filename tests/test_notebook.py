"""What notebooks share: parameters read, converted and checked; tables and pictures."""

import json
import types

import pandas as pd
import pytest
from matplotlib.figure import Figure

from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.notebook import (
    EpochLine,
    LiveCurves,
    check_parameters,
    convert_parameters,
    draw_progress,
    finish,
    markets,
    notebook_parameters,
    progress,
    read_parameters,
)
from ml_factory.runs.workspace import Workspace
from tests.notebook_lint import FOLDER

CELL = """#@title Parameters
SYMBOL: str = "DEMO"  #@param {type: "string"}
HORIZON: int = 20  #@param {type: "integer"}
MODEL: str = "xgboost"  #@param {type: "string"}
QUICK: bool = False  #@param {type: "boolean"}
RATE: float = 0.5  #@param {type: "number"}
"""


def shell(injected: str = "", *, cell: str = CELL, later: str = "", title: str = "# Parameters"):
    """A stand-in for IPython's: the cells run so far, and what they left in the namespace."""
    space: dict = {}
    cells = ["", "import os", cell] + ([f"{title}\n{injected}"] if injected else []) + ([later] if later else [])
    for text in cells:
        exec(text, space)
    space["In"] = [*cells, "chosen = check_parameters()"]
    return types.SimpleNamespace(user_ns=space)


def test_defaults_pass_and_come_back_in_small_letters(capsys):
    chosen = check_parameters(shell=shell())
    assert vars(chosen) == {"symbol": "DEMO", "horizon": 20, "model": "xgboost", "quick": False, "rate": 0.5}
    assert capsys.readouterr().out == "SYMBOL 'DEMO' · HORIZON 20 · MODEL 'xgboost' · QUICK False · RATE 0.5\n"


def test_injected_values_win():
    chosen = check_parameters(shell=shell('SYMBOL = "ES"\nHORIZON = 5\nRATE = 1'))
    assert (chosen.symbol, chosen.horizon, chosen.rate) == ("ES", 5, 1)


def test_a_shared_name_that_is_not_declared_is_accepted_and_told(capsys):
    chosen = check_parameters(shell=shell('WORKSPACE = "/x"\nSEED = 3'))
    assert chosen.seed == 3
    assert "Not used in this notebook: WORKSPACE, SEED" in capsys.readouterr().out


def test_cells_of_the_user_between_the_two_are_their_own():
    assert check_parameters(shell=shell(later="mine = 5\nTYPO = 1")).symbol == "DEMO"


def test_only_what_was_injected_after_the_last_parameters_cell_counts():
    found = shell("TYPO = 1")
    found.user_ns["In"].insert(4, CELL)
    assert check_parameters(shell=found).horizon == 20


@pytest.mark.parametrize(
    ("injected", "words"),
    [
        ("TYPO = 1", ["Unknown parameter", "TYPO"]),
        ("HORIZEN = 5", ["HORIZEN", "did you mean 'HORIZON'?"]),
        ("SYMBOL = 100000.0", ["SYMBOL", "100000.0 (float)", "wanted str", "-r SYMBOL"]),
        ("SYMBOL = 123", ["SYMBOL", "123 (int)", "-r SYMBOL"]),
        ("SYMBOL = None", ["SYMBOL", "None (NoneType)"]),
        ('HORIZON = "twenty"', ["HORIZON", "'twenty' (str)", "wanted int"]),
        ("HORIZON = 20.0", ["HORIZON", "20.0 (float)"]),
        ("HORIZON = True", ["HORIZON", "True (bool)", "wanted int"]),
        ("HORIZON = 0", ["HORIZON", "got 0", "1 or more"]),
        ("QUICK = 1", ["QUICK", "1 (int)", "wanted bool"]),
        ('RATE = "fast"', ["RATE", "wanted float"]),
        ('SYMBOL = "mes"', ["'mes'", "MES"]),
        ('SYMBOL = "BTC/USDT"', ["BTC-USDT"]),
        ('SYMBOL = "../../etc"', ["symbol"]),
        ('MODEL = "xgbost"', ["did you mean 'xgboost'?"]),
        ('MODEL = "lstm"', ["lstm", "xgboost, lightgbm, catboost, linear.", "03_train_sequence.ipynb"]),
        ('MODEL = "tft"', ["got tft", "04_train_advanced.ipynb"]),
        ("SEED = -1", ["SEED", "0 or more"]),
        ("WORKSPACE = 5", ["WORKSPACE", "wanted str"]),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(injected, words):
    with pytest.raises(SettingsError) as caught:
        check_parameters("tabular", shell=shell(injected))
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_a_runner_without_history_finds_the_annotations():
    found = shell("HORIZON = 0")
    found.user_ns["In"] = [""]
    with pytest.raises(SettingsError, match="HORIZON"):
        check_parameters(shell=found)
    found.user_ns["HORIZON"] = 5
    assert check_parameters(shell=found).horizon == 5


def test_without_the_parameters_cell_it_says_so():
    with pytest.raises(SettingsError, match="run the cell above"):
        check_parameters(shell=shell(cell="x = 1"))


@pytest.mark.parametrize(("value", "quick"), [("1", True), ("0", False), ("", False)])
def test_the_environment_makes_it_quick(value, quick, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_QUICK", value)
    assert check_parameters(shell=shell()).quick is quick


def test_base_models_become_names():
    cell = CELL + 'BASE_MODELS: str = "xgboost, lstm"  #@param {type: "string"}\n'
    assert check_parameters(shell=shell(cell=cell)).base_models == ("xgboost", "lstm")
    with pytest.raises(SettingsError, match="did you mean 'patchtst'"):
        check_parameters(shell=shell('BASE_MODELS = "xgboost,patchtsd"', cell=cell))


@pytest.mark.parametrize(
    "source", ["x = 1", "x: int", "x: list = []", "x: int = 1 + y", "import os", 'x: "int | None" = 1']
)
def test_a_cell_that_papermill_would_misread_is_refused(source):
    with pytest.raises(ValueError):
        read_parameters(source)


def test_every_notebook_declares_what_the_contract_shares():
    declared = notebook_parameters(FOLDER / "02_train_tabular.ipynb")
    assert list(declared) == ["SYMBOL", "HORIZON", "MODEL", "WORKSPACE", "SEED", "QUICK", "FRESH"]
    assert (declared["QUICK"].kind, declared["QUICK"].default) == (bool, False)


def test_texts_of_the_command_line_get_the_declared_types():
    given = {"HORIZON": "5", "QUICK": "true", "FRESH": "0", "SYMBOL": "1E5", "MODEL": "lightgbm"}
    assert convert_parameters(FOLDER / "02_train_tabular.ipynb", given) == {
        "HORIZON": 5, "QUICK": True, "FRESH": False, "SYMBOL": "1E5", "MODEL": "lightgbm",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "text", "words"), [
    ("HORIZON", "twenty", "wanted int"),
    ("HORIZON", "2.5", "wanted int"),
    ("QUICK", "maybe", "wanted True or False"),
    ("TYPO", "1", "Unknown parameter"),
    ("MODAL", "x", "did you mean 'MODEL'"),
])  # fmt: skip
def test_texts_that_cannot_be_read_are_refused(name, text, words):
    with pytest.raises(SettingsError, match=words):
        convert_parameters(FOLDER / "02_train_tabular.ipynb", {name: text})


def test_a_notebook_without_parameters_is_refused(tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps({"cells": []}))
    with pytest.raises(SettingsError, match="No cell is tagged"):
        notebook_parameters(path)


def test_errors_show_their_message_alone_in_a_notebook():
    assert SettingsError("What", got=1, next_step="do it")._render_traceback_() == [
        "SettingsError: What. got 1. Next: do it."
    ]


def test_progress_and_markets_tell_what_the_workspace_holds(tmp_path):
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
    assert markets(workspace).to_dict("records") == [{"symbol": "ES", "MB": 2.0}]
    done = progress(workspace, "ES")
    assert [name[:2] for name, things in done.items() if things] == ["01", "03", "05", "06", "07"]
    texts = [item.get_text() for item in draw_progress(done, "ES").axes[0].texts]
    assert "train sequence\nlstm" in texts and "train advanced" in texts


def test_finish_names_sizes_and_the_next_notebook(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 1_500_000)
    finish([tmp_path / "a"], following="01_data_pipeline")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'a'}  (1.50 MB in 1 file)\nNext: 01_data_pipeline.ipynb\n"
    with pytest.raises(NotPreparedError, match="absent"):
        finish([tmp_path / "b"])


def test_one_line_serves_all_epochs(monkeypatch):
    shown, updated = [], []
    handle = types.SimpleNamespace(update=lambda line, raw: updated.append(line["text/plain"]))
    monkeypatch.setattr("ml_factory.notebook.display", lambda line, **_: shown.append(line["text/plain"]) or handle)
    monkeypatch.setattr("ml_factory.notebook.status_line", lambda: "")  # of checkpoints that other tests saved
    line = EpochLine()
    for epoch in (1, 2, 3):
        line(epoch, {"train_loss": 1.0 / epoch, "val_loss": None})
    assert shown == ["epoch 1 · train_loss 1"]
    assert updated == ["epoch 2 · train_loss 0.5", "epoch 3 · train_loss 0.3333"]


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


def test_curves_are_drawn_anew_epoch_by_epoch_where_somebody_looks(screen, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "03_train_sequence.ipynb")
    monkeypatch.setattr(LiveCurves, "SECONDS_BETWEEN", 0.0)
    curves = LiveCurves()
    for epoch in (1, 2):
        curves(epoch, {"train_loss": 1.0 / epoch, "val_loss": 1.1, "seconds": 1.0})
    assert screen == [("picture", "shown"), ("line", "shown"), ("picture", "updated"), ("line", "updated")]


def test_curves_of_a_run_that_goes_on_begin_with_the_epochs_from_before(screen, monkeypatch):
    drawn = []
    monkeypatch.setenv("JPY_SESSION_NAME", "03_train_sequence.ipynb")
    monkeypatch.setattr(LiveCurves, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(
        "ml_factory.evaluation.figures.learning_curves",
        lambda history, resumed_from: drawn.append((history["epoch"].tolist(), resumed_from)) or Figure(),
    )
    curves = LiveCurves()
    curves.remember([{"epoch": epoch, "train_loss": 1.0, "val_loss": 1.0, "seconds": 1.0} for epoch in (1, 2)])
    curves(3, {"train_loss": 0.9, "val_loss": 1.0, "seconds": 1.0})
    assert drawn == [([1, 2], 2), ([1, 2, 3], 2)]
    assert [what for what, _ in screen] == ["picture", "picture", "line"]


def test_fast_epochs_are_not_all_drawn_and_headless_none_is(screen, monkeypatch):
    headless = LiveCurves()
    headless(1, {"train_loss": 1.0, "val_loss": None})
    assert screen == [("line", "shown")]
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    monkeypatch.setattr(LiveCurves, "SECONDS_BETWEEN", 3600.0)
    curves, before = LiveCurves(), len(screen)
    for epoch in (1, 2, 3):
        curves(epoch, {"train_loss": 1.0, "val_loss": None})
    assert [what for what, _ in screen[before:]].count("picture") == 1


def test_tables_and_text_are_displayed_as_such(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("ml_factory.notebook.display", shown.append)
    from ml_factory.notebook import show

    table = pd.DataFrame({"a": [1]})
    show("words", table, draw_progress({"01_x": []}, "ES"), table[:0])
    assert capsys.readouterr().out == "words\n(nothing to list)\n"
    assert shown[0].equals(table) and shown[1].data.startswith(b"\x89PNG")
