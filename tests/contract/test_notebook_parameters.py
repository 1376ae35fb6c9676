"""A notebook's parameters: read from its cell, converted from texts, checked after papermill."""

import json
import types

import pytest

from ml_factory.errors import SettingsError
from tests.contract.doors import (
    check_parameters,
    convert_notebook_parameters,
    parse_notebook_parameters,
    read_notebook_parameters,
)
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


def test_check_parameters_with_defaults_returns_lower_case_names(capsys):
    chosen = check_parameters(shell=shell())
    assert vars(chosen) == {
        "family": "",
        "symbol": "DEMO",
        "horizon": 20,
        "model": "xgboost",
        "quick": False,
        "rate": 0.5,
    }
    assert capsys.readouterr().out == "SYMBOL 'DEMO' · HORIZON 20 · MODEL 'xgboost' · QUICK False · RATE 0.5\n"


def test_check_parameters_undeclared_shared_name_is_accepted_and_reported(capsys):
    chosen = check_parameters(shell=shell('WORKSPACE = "/x"\nSEED = 3'))
    assert chosen.seed == 3
    assert "Not used in this notebook: WORKSPACE, SEED" in capsys.readouterr().out


def test_check_parameters_ignores_names_of_intermediate_user_cells():
    assert check_parameters(shell=shell(later="mine = 5\nTYPO = 1")).symbol == "DEMO"


def test_check_parameters_ignores_values_injected_before_last_parameters_cell():
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
def test_check_parameters_invalid_value_raises_with_name_value_and_advice(injected, words):
    with pytest.raises(SettingsError) as caught:
        check_parameters("tabular", shell=shell(injected))
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_check_parameters_without_cell_history_uses_annotations():
    found = shell("HORIZON = 0")
    found.user_ns["In"] = [""]
    with pytest.raises(SettingsError, match="HORIZON"):
        check_parameters(shell=found)
    found.user_ns["HORIZON"] = 5
    assert check_parameters(shell=found).horizon == 5


def test_check_parameters_without_parameters_cell_raises():
    with pytest.raises(SettingsError, match="run the cell above"):
        check_parameters(shell=shell(cell="x = 1"))


@pytest.mark.parametrize(("value", "quick"), [("1", True), ("0", False), ("", False)])
def test_check_parameters_quick_follows_environment_variable(value, quick, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_QUICK", value)
    assert check_parameters(shell=shell()).quick is quick


def test_check_parameters_splits_base_models_and_rejects_unknown_model():
    cell = CELL + 'BASE_MODELS: str = "xgboost, lstm"  #@param {type: "string"}\n'
    assert check_parameters(shell=shell(cell=cell)).base_models == ("xgboost", "lstm")
    with pytest.raises(SettingsError, match="did you mean 'patchtst'"):
        check_parameters(shell=shell('BASE_MODELS = "xgboost,patchtsd"', cell=cell))


@pytest.mark.parametrize(
    "source", ["x = 1", "x: int", "x: list = []", "x: int = 1 + y", "import os", 'x: "int | None" = 1']
)
def test_read_parameters_of_cell_unreadable_by_papermill_raises(source):
    with pytest.raises(ValueError):
        parse_notebook_parameters(source)


def test_notebook_parameters_of_notebook_02_lists_shared_names_in_order():
    declared = read_notebook_parameters(FOLDER / "02_train_tabular.ipynb")
    assert list(declared) == ["SYMBOL", "HORIZON", "MODEL", "SETTINGS", "WORKSPACE", "SEED", "QUICK", "FRESH"]
    assert (declared["QUICK"].kind, declared["QUICK"].default) == (bool, False)


@pytest.mark.parametrize(("text", "value"), [
    ("true", True), ("TRUE ", True), ("1", True), ("yes", True), ("false", False), ("0", False), ("No", False),
])  # fmt: skip
def test_convert_parameters_of_a_switch_reads_each_spelling(text, value):
    converted = convert_notebook_parameters(FOLDER / "02_train_tabular.ipynb", {"QUICK": text})
    assert converted["QUICK"] is value


@pytest.mark.parametrize(("name", "text", "words"), [
    ("HORIZON", "twenty", "wanted int"),
    ("HORIZON", "2.5", "wanted int"),
    ("QUICK", "maybe", "wanted True or False"),
    ("TYPO", "1", "Unknown parameter"),
    ("MODAL", "x", "did you mean 'MODEL'"),
])  # fmt: skip
def test_convert_parameters_unreadable_text_raises_settings_error(name, text, words):
    with pytest.raises(SettingsError, match=words):
        convert_notebook_parameters(FOLDER / "02_train_tabular.ipynb", {name: text})


def test_notebook_parameters_without_tagged_cell_raises(tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps({"cells": []}))
    with pytest.raises(SettingsError, match="No cell is tagged"):
        read_notebook_parameters(path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"cells": 3}', '{"cells": [3]}', '{"cells": [{"metadata": {"tags": ["parameters"]}}]}',
     '{"cells": [{"metadata": {"tags": ["parameters"]}, "source": ["SYMBOL: str = ("]}]}', "[" * 100_000],
)  # fmt: skip
def test_notebook_parameters_of_damaged_file_raises(text, tmp_path):
    (tmp_path / "a.ipynb").write_text(text)
    with pytest.raises(SettingsError):
        read_notebook_parameters(tmp_path / "a.ipynb")


def test_check_parameters_with_stack_accepts_model_stack_without_settings():
    cell = '# Parameters\nMODEL: str = "stack"\nSETTINGS: str = ""\n'
    assert check_parameters(with_stack=True, shell=shell(cell=cell)).model == "stack"
    with pytest.raises(SettingsError, match="stack"):
        check_parameters(shell=shell(cell=cell))
    with pytest.raises(SettingsError, match="A finished stack takes no settings"):
        check_parameters(with_stack=True, shell=shell('SETTINGS = "depth=4"', cell=cell))
