"""The command line: exit codes, one clear line for a user's mistake, JSON for machines."""

import ast
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import nbformat
import pandas as pd
import pytest
from rich.console import Console

from ml_factory import Bundle, pipeline
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import FactoryError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import BASELINES, DatasetStore, cli_output, progress_phase, verbs
from tests.small_data import SMALL_DATA_WORDS

ROOT = Path(__file__).resolve().parents[2]
VERBS = tuple(verbs())


@pytest.fixture
def call(call, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """As for every test, with nothing set and in 200 columns."""
    monkeypatch.delenv("ML_FACTORY_QUICK", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return call


def one_line(code: int, out: str, err: str) -> str:
    """The one line of an error that the library found; everything else about it must be quiet."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code in (1, 2) and out == "" and "Traceback" not in err
    assert len(lines) == 1 and err.rstrip().endswith(lines[0]), err
    return lines[0]


# ---- progress ------------------------------------------------------------------------------------------------------


def drawn(terminal: bool) -> str:
    written = io.StringIO()
    with cli_output.cli_progress_bars("working", Console(file=written, force_terminal=terminal, width=120)):
        with progress_phase("features", 2_000) as done:
            done(500)
        with progress_phase("labels [/20]", 3):
            pass
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue())


def test_cli_progress_on_terminal_shows_bar_with_rows_per_second_per_phase():
    output = drawn(terminal=True)
    assert (
        re.search(r"features: 2,000 of 2,000 rows, [\d,]+ a second", output) and "labels [/20]: 3 of 3 rows" in output
    )


def test_cli_progress_without_terminal_or_of_a_further_process_draws_no_bar(monkeypatch):
    assert drawn(terminal=False) == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "1")
    assert drawn(terminal=True) == ""


def test_status_line_is_printed_as_it_is(capsys):
    line = f"[linear, x] in /mnt/a[/old]/w :x: 12 {'word ' * 40}"
    cli_output.print_status(line)
    assert capsys.readouterr().err == f"{line}\n"


# ---- mistakes ------------------------------------------------------------------------------------------------------


# words -> exit code and what the line says; on prepared data, with a horizon unless one is given
MISTAKES = {
    ("train", "--horizon", "0"): (2, "HORIZON"), ("train", "--seed", "-1"): (2, "SEED"),
    ("train", "--horizon", "twenty"): (2, "--horizon"),
    ("train", "--horizon", "5", "--horizon", "6"): (2, "multiple times"),
    ("train", "--model", "xgbost"): (2, "did you mean 'xgboost'?"), ("train", "--symbol", "BTC/USDT"): (2, "BTC-USDT"),
    ("train", "--set", "depth=deep"): (2, "depth"), ("train", "--set", "no_such=1"): (2, "no_such"),
    ("train", "--set", "batch_size"): (2, "NAME=VALUE"),
    ("train", "--set", "rounds=3", "--set", "rounds=4"): (2, "given twice [--set]. got rounds"),
    ("cross-validate", "--folds", "1"): (2, "folds"), ("cross-validate", "--scheme", "purged"): (2, "scheme"),
    ("cross-validate", "--scheme", "walk_forward_rolling", "--window", "0"): (2, "window"),
    ("stack", "--base-model", "xgbost"): (2, "did you mean 'xgboost'?"), ("stack", "--folds", "1"): (2, "folds"),
    ("stack", "--base-model", "xgboost"): (2, "A stack needs different models"),
    ("stack", "--set", "gru.hidden=8"): (2, "xgboost, lstm, patchtst"),
    ("evaluate",): (1, "Nothing is trained yet"), ("evaluate", "--model", "xgbost"): (2, "did you mean 'xgboost'?"),
    ("evaluate", "--model", "linear"): (1, "No finished linear"),
    ("evaluate", "--model", "stack"): (1, "stack them first"),
    ("backtest", "--horizon", "0"): (2, "HORIZON"), ("backtest", "--spread", "-1"): (2, "spread"),
    ("plan", "--units_per_hour", "0"): (2, "units_per_hour"),  # dashes are underscores
    ("predict", "--model", "xgbost"): (2, "did you mean 'xgboost'?"),
    ("predict", "--data", "none.csv"): (1, "No such file"),
    ("predict", "--zone", "UTC"): (2, "is that of a file [bars]. got zone, wanted data"),
    ("export", "--horizon", "0"): (2, "HORIZON"), ("export", "--format", "zip"): (2, "zip"),
    ("audit", "--model", "xgbost"): (2, "did you mean 'xgboost'?"), ("audit", "--cuts", "0"): (2, "cuts"),
    ("prepare", "--horizon", "0"): (2, "HORIZON"), ("prepare", "--calendar", "moon"): (2, "calendar"),
    ("prepare", "--symbol", "mes"): (2, "MES"), ("prepare", "--data", "none.csv"): (1, "No such file"),
    ("prepare", "--minutes", "7"): (2, "got 7, wanted 1, "),
    ("prepare", "--data", __file__): (2, "--symbol"),
    ("suite", "--horizon", "0"): (2, "HORIZON"), ("suite", "--seed", "-1"): (2, "SEED"),
    ("suite", "--symbol", "mes"): (2, "MES"),
}  # fmt: skip


def test_cli_mistakes_exit_with_their_code_in_one_line_and_write_nothing(call, prepared):
    there = {path: path.stat().st_mtime_ns for path in prepared.root.rglob("*")}
    for words, (wanted, message) in MISTAKES.items():
        with_horizon = () if "--horizon" in words else ("--horizon", 5)
        code, out, err = call(words[0], "--workspace", prepared.root, *with_horizon, *words[1:])
        assert code == wanted and message in one_line(code, out, err), (words, err)
        assert {path: path.stat().st_mtime_ns for path in prepared.root.rglob("*")} == there, words


@pytest.mark.parametrize("verb", ["prepare", "suite"])
def test_cli_wrong_values_make_no_workspace(verb, call, tmp_path):
    of_prepare = [("--calendar", "moon"), ("--set", "labels.upper=-1")] if verb == "prepare" else []
    for words in (("--horizon", 0), ("--symbol", "mes"), ("--symbol", "MES", "--data", "none.csv"), *of_prepare):
        code, out, err = call(verb, "--workspace", tmp_path / "w", *words)
        assert code == (1 if "--data" in words else 2) and one_line(code, out, err)
        assert not list(tmp_path.iterdir()), words


def test_cli_symbol_without_bars_exits_1_and_proposes_the_nearest(call, tmp_path):
    (tmp_path / "data" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "raw" / "MESX_5m.parquet").touch()
    code, out, err = call("prepare", "--workspace", tmp_path, "--symbol", "MES")
    assert code == 1 and "no raw bars" in one_line(code, out, err)
    assert "symbols here: MESX" in err and "did you mean 'MESX'?" in err


class Reached(FactoryError):
    """What a verb gave to the pipeline is known now."""


@pytest.mark.parametrize(
    ("verb", "words", "wanted"),
    [
        ("train", ["--model", "lstm"], {"batch_size": 64, "dropout": 0.2}),
        ("cross-validate", ["--model", "lstm"], {"batch_size": 64, "dropout": 0.2}),
        ("stack", [], {"lstm": {"batch_size": 64, "dropout": 0.2}, "patchtst": {"batch_size": 64, "dropout": 0.2}}),
        ("stack", ["--set", "xgboost.depth=4"], {"xgboost": {"depth": 4}}),
        ("plan", ["--model", "linear", "--model", "lstm", "--set", "linear.rounds=9"],
         {"lstm": {"batch_size": 64, "dropout": 0.2}, "linear": {"rounds": 9}}),
    ],
)  # fmt: skip
def test_cli_set_option_reaches_model_settings_of_training_verbs(verb, words, wanted, call, prepared, monkeypatch):
    given = {}

    def record(*positional, model_settings, **named):
        given.update(model_settings)
        raise Reached("recorded")

    monkeypatch.setattr(pipeline, verb.replace("-", "_"), record)
    sets = ["--set", "batch_size=64", "--set", "dropout=0.2"]
    code, _, err = call(verb, "--workspace", prepared.root, "--horizon", 5, *words, *sets)
    assert code == 1 and "recorded" in err
    assert {name: given[name] for name in wanted} == wanted


def test_cli_prepare_search_has_the_rules_of_bars_in_both_prepares(call, tmp_path, monkeypatch):
    record = Mock(return_value=Mock(summary=lambda: ""))
    for verb in ("prepare", "search-barriers"):
        monkeypatch.setattr(pipeline, verb.replace("-", "_"), record)
    words = ("--symbol", "MES", "--horizon", 5, "--data", __file__, "--set", "bars.strict=true", "--search")
    assert call("prepare", "--workspace", tmp_path, *words)[0] == 0
    assert [one.kwargs["settings"].bars.strict for one in record.call_args_list if one.kwargs] == [True, True]


def test_cli_prepare_with_too_few_bars_exits_1_and_keeps_prepared_data(call, tmp_path):
    place = ("--workspace", tmp_path / "w", "--symbol", "MES", *SMALL_DATA_WORDS)
    for name, days in (("long", 12), ("short", 2)):
        synthetic_bars(days=days).reset_index().to_csv(tmp_path / f"{name}.csv", index=False)
    assert call("prepare", *place, "--horizon", 5, "--data", tmp_path / "long.csv")[0] == 0
    code, out, err = call("prepare", *place, "--horizon", 5, "--data", tmp_path / "short.csv")
    assert code == 1 and "Too few bars" in one_line(code, out, err) and "bars of 60m, 110 wanted" in err
    folders = [path.name for path in Workspace(tmp_path / "w").processed("MES").iterdir() if path.is_dir()]
    assert len(folders) == 2 and "certificates" in folders  # and the data set of before
    code, out, _ = call("prepare", *place, "--horizon", 5)
    assert code == 0 and "found as prepared before" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("02", "-p", "HORIZONT=20"), "did you mean 'HORIZON'?"),
        (("02", "-p", "HORIZON=twenty"), "'twenty'"),
        (("02", "-p", "HORIZON"), "NAME=VALUE"),
        (("02_train_tabula",), "did you mean '02_train_tabular'?"),
        (("99",), "No such notebook"),
    ],
)
def test_cli_run_with_wrong_parameters_exits_2_before_notebook_starts(words, message, call, tmp_path, monkeypatch):
    monkeypatch.setattr("papermill.execute_notebook", None)  # would fail if it were called
    code, out, err = call("run", *words, "--workspace", tmp_path)
    assert code == 2 and message in one_line(code, out, err)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_cli_doctor_with_unusable_workspace_exits_1_in_one_line(call, tmp_path, caplog, gcs_bucket):
    (tmp_path / "file").write_text("here already")
    code, out, err = call("doctor", "--workspace", tmp_path / "file")
    assert code == 1 and str(tmp_path / "file") in one_line(code, out, err)
    code, out, err = call("doctor", "--workspace", tmp_path / "typo")
    assert code == 1 and "No such workspace" in one_line(code, out, err) and not (tmp_path / "typo").exists()
    code, out, err = call("doctor", "--workspace", "gs://absent/prefix")
    assert code == 1 and "absent" in one_line(code, out, err)
    assert not [record for record in caplog.records if record.name == "gcsfs"]  # a page of frames beside that line


# ---- what works ----------------------------------------------------------------------------------------------------


def test_cli_prepare_train_predict_json_reports_paths_and_matching_hashes(call, prepared, tmp_path):
    place = ("--workspace", prepared.root, "--json")
    code, out, _ = call("prepare", *place, "--horizon", 5, "--horizon", 6, *SMALL_DATA_WORDS)
    facts = json.loads(out)
    assert code == 0 and facts["horizons"] == [5, 6] and facts["seconds"] > 0 and Path(facts["folder"]).is_dir()
    code, out, _ = call("train", *place, "--horizon", 5, "--model", "lightgbm", "--quick", "--seed", 3)
    facts = json.loads(out)
    assert code == 0 and facts["reused"] is False and facts["limited"] and facts["resumed_from"] is None
    assert "-s3-quick-" in facts["run_id"]
    assert {row["name"] for row in facts["metrics"]} == {"lightgbm", *BASELINES}
    written = Path(facts["predictions_path"])
    assert hashlib.sha256(written.read_bytes()).hexdigest() == facts["predictions_hash"]
    assert Path(facts["report_path"]).is_file() and Path(facts["artifact"]).is_dir()
    code, out, _ = call("train", *place, "--horizon", 5, "--model", "lightgbm", "--quick", "--seed", 3)
    assert json.loads(out)["reused"] is True
    target = tmp_path / "said.parquet"
    code, out, _ = call("predict", *place, "--horizon", 5, "--model", "lightgbm", "--out", target)
    facts = json.loads(out)
    assert code == 0 and facts["path"] == str(target) and facts["rows"] == len(pd.read_parquet(target))
    assert hashlib.sha256(target.read_bytes()).hexdigest() == facts["frame_hash"]


def test_cli_export_predict_and_evaluate_print_run_and_why_it_was_taken(call, prepared, tmp_path):
    place = ("--workspace", prepared.root, "--horizon", 5, "--model", "linear")
    runs, formats = [], ("--format", "bundle", "--out", tmp_path)
    for rounds, choice in ((3, "the only finished run"), (4, "the newest finished run of 2; another with --run")):
        code, out, err = call("train", *place, "--set", f"rounds={rounds}", "--json")
        assert code == 0, err
        runs.append(json.loads(out)["run_id"])
        for words in (("export", *place, *formats), ("predict", *place)):
            code, out, err = call(*words)
            assert code == 0 and f"run {runs[-1]} ({choice}" in out.splitlines()[0], err
    call("train", *place, "--set", "rounds=3")  # is found finished, and stays the older one
    code, out, _ = call("export", *place, *formats)
    assert code == 0 and f"from run {runs[1]}" in out and f"such as --run {runs[0]})" in out.splitlines()[0]
    code, out, _ = call("export", *place, *formats, "--run", runs[0])
    assert code == 0 and f"from run {runs[0]} (the requested run)" in out
    assert Bundle.load(tmp_path / "DEMO-h5-linear.bundle").description["run_id"] == runs[0]
    code, out, _ = call("evaluate", *place, "--run", runs[0], "--title", "Two", "--json")
    facts = json.loads(out)
    assert code == 0 and {row["name"] for row in facts["metrics"]} == {"linear", *BASELINES}
    assert "<p class=title>Two</p>" in Path(facts["report_path"]).read_text()
    assert facts["run_ids"] == {"linear": runs[0]} and facts["choices"] == {"linear": "the requested run"}
    for run in ("train-linear-h5-s0-none", f"../{runs[0]}"):
        assert "No finished run of this id" in one_line(*call("evaluate", *place, "--run", run))


def test_cli_doctor_with_unknown_colab_tier_reports_it_as_check(call, prepared, monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setenv("ML_FACTORY_COLAB_TIER", "prro")
    _, out, _ = call("doctor", "--workspace", prepared.root, "--json")
    found = json.loads(out)["hours left"]
    assert not found["good"] and "prro" in found["value"]


def tiny_notebook(path: Path, body: str) -> Path:
    cells = [
        nbformat.v4.new_code_cell(
            'SYMBOL: str = "DEMO"\nHORIZON: int = 20\nWORKSPACE: str = ""\nQUICK: bool = False',
            metadata={"tags": ["parameters"]},
        ),
        nbformat.v4.new_code_cell(body),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
    return path


def test_cli_run_writes_executed_notebook_and_exits_1_on_failing_cell(call, tmp_path):
    good = tiny_notebook(tmp_path / "good.ipynb", "print((SYMBOL, HORIZON, QUICK, WORKSPACE))")
    place = tmp_path / "w"
    words = ("-p", "HORIZON=7", "-p", "QUICK=yes", "-p", "SYMBOL=1E5", "--workspace", place)
    code, out, _ = call("run", good, *words, "--json")
    written = Path(json.loads(out)["notebook"])
    assert code == 0 and written == place / "results" / "notebooks" / "good.ipynb"
    printed = nbformat.read(written, 4).cells[-1].outputs[0].text
    assert ast.literal_eval(printed) == ("1E5", 7, True, str(place))
    bad = tiny_notebook(tmp_path / "bad.ipynb", "raise RuntimeError('the cell gave up')")
    code, out, err = call("run", bad, "--workspace", place)
    line = one_line(code, out, err)
    assert code == 1 and "the cell gave up" in line and "bad.ipynb" in line and "cell " in line


def test_cli_suite_passes_declared_parameters_to_all_notebooks_in_order(call, prepared, monkeypatch):
    """The notebooks themselves are run elsewhere; here, what they are told and what is printed."""
    reported = []

    def execute(path, out, parameters, **_):
        reported.append((Path(path).stem, parameters))
        Path(out).write_text("{}")

    monkeypatch.setattr("papermill.execute_notebook", execute)
    place = ("--workspace", prepared.root, "--horizon", 5)
    assert call("train", *place, "--model", "lightgbm", "--quick")[0] == 0
    code, out, _ = call("suite", *place, "--quick", "--seed", 2, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["report"] == str(prepared.results / "report.html") and Path(facts["report"]).is_file()
    names = [name for name, _ in reported]
    assert names == sorted(names) and len(names) == 8 and list(facts["seconds"]) == names
    assert [Path(path).stem for path in facts["notebooks"]] == names
    given = dict(reported)["02_train_tabular"]
    assert given["HORIZON"] == 5 and given["SEED"] == 2 and given["QUICK"] is True and given["FRESH"] is False
    assert all(parameters["WORKSPACE"] == str(prepared.root) for _, parameters in reported)
    edge, sure, costs, oracle = facts["answer"]
    assert edge.startswith(("No verdict yet: ", "No edge found: ")) and "95 %" in sure
    assert re.match(r"After costs: [+-][\d,]+ .* trades", costs) and re.search(
        r"oracle.* \+0\.\d{4}, and lightgbm", oracle
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", 'model = "gru"\nhorizon = 6\nquick = true\n[set]\nbatch_size = 32\n', ["--horizon", 5]),
        ("a.json", '{"model": "gru", "horizon": 5, "quick": true, "set": {"batch_size": 32}}', []),
    ],
)
def test_options_of_a_file_are_defaults_that_typed_options_replace(name, text, words, call, prepared, monkeypatch):
    given = {}

    def record(place, symbol, horizon, model, **named):
        given.update(named, horizon=horizon, model=model)
        raise Reached("recorded")

    monkeypatch.setattr(pipeline, "train", record)
    path = prepared.root.parent / name
    path.write_text(text)
    sets = ["--set", "dropout=0.2"]
    code, _, err = call("train", "--workspace", prepared.root, "--config", path, *words, *sets)
    assert code == 1 and "recorded" in err
    assert given["horizon"] == 5 and given["model"] == "gru" and given["quick"] is True and given["seed"] == 0
    assert given["model_settings"] == {"batch_size": 32, "dropout": 0.2}


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("modle = 'gru'", 2, "did you mean 'model'?"),
        ("config = 'b.toml'", 2, "There is no such option"),
        ("model = {lstm = 1}", 2, "Only `set` is a table"),
        ("set = 3", 2, "Only `set` is a table"),
        ("model = ", 2, "These settings cannot be read"),
        (None, 1, "wanted one TOML or JSON file"),
    ],
)
def test_a_file_of_options_that_cannot_be_used_is_refused_in_one_line(text, code, message, call, tmp_path):
    path = tmp_path / "a.toml"
    if text is not None:
        path.write_text(text)
    got, out, err = call("train", "--workspace", tmp_path / "w", "--config", path)
    line = one_line(got, out, err)
    assert got == code and message in line and "a.toml" in line


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("labels.k_upp=1.2", "did you mean 'k_up'?"), ("label.k_up=1.2", "did you mean 'labels'?"),
        ("labels=1.2", "There is no such setting"), ("labels.k_up=-1", "k_up"), ("splits.train=abc", "train"),
        ("features.frames=5", "frames"), ("preprocess=robust", "There is no such step"),
        ("tick=abc", "tick"), ("calendar=cmee", "did you mean 'cme'"), ("calendar.x=1", "calendar"),
        ("roll.days=3", "--roll volume"),
    ],
)  # fmt: skip
def test_prepare_refuses_settings_that_cannot_be_used_in_one_line(setting, message, call, prepared):
    before = DatasetStore.current(prepared.processed("DEMO")).fingerprint
    code, out, err = call("prepare", "--workspace", prepared.root, "--horizon", 5, "--set", setting)
    assert code == 2 and message in one_line(code, out, err)
    assert DatasetStore.current(prepared.processed("DEMO")).fingerprint == before


def contracts_csv(path: Path) -> Path:
    """Two contracts of one walk over six days; the later one trades more from the fourth day on."""
    near = synthetic_bars(12, "null", seed=3, start="2024-03-04").reset_index()
    late = near["timestamp"] > near["timestamp"].iloc[len(near) // 2]
    far = near.assign(**{name: near[name] + 50.0 for name in ("open", "high", "low", "close")})
    near = near.assign(contract="ESH4", volume=near["volume"].where(~late, 1.0) + 1)
    far = far.assign(contract="ESM4", volume=(far["volume"] * late) + 1)
    pd.concat([near, far]).sort_values("timestamp", kind="stable").to_csv(path, index=False)
    return path


def test_cli_prepare_roll_options_set_contract_roll_times(call, tmp_path):
    file = contracts_csv(tmp_path / "es.csv")
    words = ("prepare", "--workspace", tmp_path / "place", "--symbol", "ES", "--data", file, "--horizon", 5)
    for wrong, output in (
        (("--set", "roll.forced.ESM4=2024-03-06T15:00Z"), "add --roll volume"),
        (("--roll", "volume", "--set", "roll.forced=ESM4"), "[forced]"),
        (("--roll", "volume", "--set", "roll.months=[3,13]"), "[months]"),
        (("--roll", "volume", "--set", "roll.forced.ESM4=2024-03-06T15:00"), "with its zone"),
    ):
        code, out, err = call(*words, *wrong)
        assert code == 2 and output in one_line(code, out, err)
    config = tmp_path / "es.toml"
    config.write_text('roll = "volume"\nhorizon = 5\n[set.roll]\nfirst = "ESH4"\nforced.ESM4 = 2024-03-06T15:00:00Z\n')
    sets = ("--set", "roll.months=[3,6]", *SMALL_DATA_WORDS)  # added to the file's
    code, out, err = call(*words[:-2], "--config", config, *sets, "--json")
    assert code == 0, err
    bars = pd.read_parquet(Workspace(tmp_path / "place").raw_bars("ES")).set_index("timestamp")
    rolls = bars.index[bars["contract"].diff() != 0]
    assert rolls.tolist() == [bars.index[0], pd.Timestamp("2024-03-06 15:00", tz="UTC")]
    assert bars["contract"].unique().tolist() == [202403, 202406]
    assert bars["chain"].nunique() == 2


# ---- the first answer ----------------------------------------------------------------------------------------------

HEAVY = (
    "torch", "xgboost", "lightgbm", "catboost", "sklearn", "scipy", "numba", "pandas", "pyarrow", "matplotlib", "wandb",
    "IPython", "papermill", "exchange_calendars", "gcsfs", "fastapi", "uvicorn",
)  # fmt: skip
REFUSED_AT_ONCE = [
    ("train", "--horizon", "0"), ("prepare", "--horizon", "0"), ("suite", "--horizon", "0"), ("train", "--seed", "-1"),
    ("suite", "--seed", "-1"), ("train", "--symbol", "BTC/USDT"), ("prepare", "--symbol", "mes"),
    ("prepare", "--symbol", "MES", "--data", "none.csv"),
]  # fmt: skip
FIRST_ANSWERS = [*((verb, "--help") for verb in VERBS), ("--help",), ("no-such-verb",), ("run", "99"), *REFUSED_AT_ONCE]


def test_cli_help_and_refused_arguments_import_no_heavy_library(tmp_path):
    """All in one process; after each answer no heavy module may have been imported."""
    ask = f"""
import contextlib, io, json, os, sys
from ml_factory.__main__ import main
found = {{}}
for words in {FIRST_ANSWERS!r}:
    sys.argv = ["ml_factory", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main()
            code = None
        except SystemExit as stop:
            code = stop.code
    found[" ".join(words)] = [code or 0, [name for name in {HEAVY!r} if name in sys.modules]]
print(json.dumps(found))
"""
    environment = {**os.environ, "ML_FACTORY_ROOT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {words: heavy for words, (_, heavy) in found.items() if heavy} == {}
    assert {words: code for words, (code, _) in found.items() if (code == 0) is not words.endswith("--help")} == {}
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == set()
