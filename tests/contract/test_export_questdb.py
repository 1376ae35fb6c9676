"""Exports of QuestDB's REST interface: a login stays with its host, and the next command is safe to paste."""

import shlex

import pandas as pd
import pytest

from tests.contract.doors import export_data
from tests.data.questdb_server import LOGIN, questdb_server

COLUMNS = [("symbol", "SYMBOL"), ("ts", "TIMESTAMP"), ("open", "DOUBLE"), ("high", "DOUBLE"), ("low", "DOUBLE"),
           ("close", "DOUBLE"), ("volume", "LONG")]  # fmt: skip
TIMES = pd.date_range("2024-01-01", periods=50, freq="1min").strftime("%Y-%m-%dT%H:%M:%S.%fZ")
ROWS = [("MES", at, 4000.5 + n, 4001.0 + n, 4000.0 + n, 4000.75 + n, n) for n, at in enumerate(TIMES)]


@pytest.fixture
def quest():
    with questdb_server() as server:
        server.add_table("bars", COLUMNS, ROWS)
        yield server


def test_questdb_password_goes_to_its_host_and_into_no_text(quest, tmp_path, monkeypatch, call):
    quest.guarded = True
    words = "export-data", "--symbol", "MES", "--output", tmp_path / "b.csv", "--source"
    monkeypatch.delenv("PGPASSWORD", raising=False)
    code, _, err = call(*words, quest.source)
    assert code == 1 and "PGPASSWORD" in err
    monkeypatch.setenv("PGPASSWORD", LOGIN[1])
    code, out, err = call(*words, quest.source.replace("//", f"//{LOGIN[0]}@"))
    assert code == 0 and LOGIN[1] not in out + err + (tmp_path / "b.csv.json").read_text()


def test_export_names_a_command_that_a_shell_takes_as_words_and_a_legal_symbol(quest, tmp_path):
    symbol, folder = "$HOME & #x", tmp_path / "a b"
    folder.mkdir()
    quest.add_table("odd", COLUMNS, [(symbol, *row[1:]) for row in ROWS])
    summary = export_data(quest.source, folder / "bars.parquet", table="odd").summary()
    words = shlex.split(summary.partition("next: ")[2])
    assert words[-4:] == ["--data", str(folder / "bars.parquet"), "--symbol", "HOME-X"]
