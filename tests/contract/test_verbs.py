"""Every verb of the command line: its help, its JSON, its exit codes, and one line for a user's mistake."""

import json
import re
from pathlib import Path

import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.storage.workspace import Workspace
from tests.contract import doors

KEYS = Path(__file__).with_name("json_keys.json")
SMALL = ("--symbol", "DEMO", "--horizon", 5)
# verb -> words with which it runs on a workspace of eight days; `--json` is added
RUNS = {
    "doctor": (),
    "prepare": (*SMALL, *doors.SMALL_DATA_WORDS),
    "audit": (*SMALL, "--cuts", 1, "--model", "linear"),
    "plan": (*SMALL, "--model", "linear", "--model", "xgboost"),
    "train": (*SMALL, "--model", "xgboost", "--quick"),
    "cross-validate": (*SMALL, "--model", "linear", "--folds", 2, "--quick"),
    "stack": (*SMALL, "--base-model", "linear", "--base-model", "xgboost", "--folds", 2, "--quick"),
    "auto": (*SMALL, "--trials", 1, "--model", "linear", "--folds", 2, "--quick"),
    "evaluate": (*SMALL, "--model", "linear"),
    "leaderboard": ("--symbol", "DEMO"),
    "backtest": (*SMALL, "--model", "linear"),
    "predict": (*SMALL, "--model", "linear"),
    "export": (*SMALL, "--model", "linear"),
    "clean": ("--symbol", "DEMO", "--dry-run"),
}
# Notebooks, the service, databases, W&B and slices have tests of their own: tests/test_notebooks.py, test_service.py
ELSEWHERE = {"suite", "run", "serve", "export-data", "tracking", "recipe", "tpu", "distribute"}
LIMIT = {"auto": ("--trials", 1)}  # without which it does not begin
ON_SYMBOL = (
    "prepare",
    "audit",
    "plan",
    "train",
    "cross-validate",
    "stack",
    "auto",
    "evaluate",
    "backtest",
    "predict",
    "export",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A workspace with eight days prepared, and a linear model trained."""
    made = Workspace(tmp_path_factory.mktemp("verbs") / "workspace")
    ensure_synthetic_demo_market(made, "DEMO", days=8)
    pipeline.prepare(made, "DEMO", (5,), settings=doors.SMALL_DATA)
    pipeline.train(made, "DEMO", 5, "linear", quick=True, mirror="off")
    return made.root


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("ML_FACTORY_QUICK", raising=False)


def refused(code: int, out: str, err: str) -> str:
    """The one line of an error; nothing was printed before it."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code in (1, 2) and out == "" and "Traceback" not in err and len(lines) == 1, err
    return lines[0]


def test_every_verb_has_a_run_or_is_tested_elsewhere():
    assert set(doors.verbs()) == set(RUNS) | ELSEWHERE


@pytest.mark.parametrize("verb", doors.verbs())
def test_help_has_an_example_whose_options_exist(verb, call):
    code, out, _ = call(verb, "--help")
    example = doors.verb_example(verb)
    assert code == 0 and f"python -m ml_factory {verb}" in out
    first = example.partition(" ")[0]
    if first[:1] not in ("", "-") and call(verb, first, "--help")[0] == 0:
        out += call(verb, first, "--help")[1]
    assert {word for word in example.split() if word.startswith("-")} <= set(re.findall(r"-{1,2}[a-z][a-z-]*", out))


@pytest.mark.parametrize("verb", RUNS)
def test_json_is_json_with_the_promised_keys(verb, root, call):
    code, out, err = call(verb, "--workspace", root, *RUNS[verb], "--json")
    assert code == 0, err
    found = json.loads(out)
    assert set(json.loads(KEYS.read_text())[verb]) <= set(found)
    if verb == "audit":
        return  # seconds again for the same words
    without, text, _ = call(verb, "--workspace", root, *RUNS[verb])
    assert without == 0 and text.strip() and not text.lstrip().startswith("{")


HOSTILE = {"../../etc": "use 'ETC'", "mes": "use 'MES'", "BTC/USDT": "use 'BTC-USDT'", "$(touch x)": "", "A" * 40: ""}


@pytest.mark.parametrize(
    ("verb", "symbol"), [*((verb, "../../etc") for verb in ON_SYMBOL), *(("prepare", symbol) for symbol in HOSTILE)]
)
def test_hostile_symbol_is_refused_and_nothing_is_written(verb, symbol, call, tmp_path):
    code, out, err = call(verb, "--workspace", tmp_path / "w", "--symbol", symbol)
    assert HOSTILE[symbol] in refused(code, out, err)
    assert code == 2 and not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("verb", [verb for verb in ON_SYMBOL if verb not in ("prepare", "suite")])
def test_absent_data_exits_1_with_the_next_step(verb, call, tmp_path):
    (tmp_path / "data" / "raw").mkdir(parents=True)
    code, out, err = call(verb, "--workspace", tmp_path, "--symbol", "MES", *LIMIT.get(verb, ()))
    assert "Next: " in refused(code, out, err) and code == 1
    code, out, err = call(verb, "--workspace", tmp_path / "mistyped", "--symbol", "MES", *LIMIT.get(verb, ()))
    assert "No such workspace" in refused(code, out, err) and code == 1 and not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("verb", doors.verbs())
def test_unknown_option_exits_2_in_words(verb, call):
    code, out, err = call(verb, "--no-such-option")
    assert code == 2 and out == "" and "Traceback" not in err and "no-such-option" in err


def test_unknown_verb_and_no_verb_exit_2(call):
    for words in ((), ("trian",)):
        code, out, err = call(*words)
        assert code == 2 and "Traceback" not in err and "Usage" in out + err
