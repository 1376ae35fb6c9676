"""Exports of QuestDB's REST interface, a fake server on loopback: right rows, and no half answer taken."""

import json
import signal

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import DatabaseError, SettingsError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import connections, export_data, import_bars
from tests.contract.service import guide_message
from tests.data.questdb_server import questdb_server

COLUMNS = [("symbol", "SYMBOL"), ("ts", "TIMESTAMP"), ("open", "DOUBLE"), ("high", "DOUBLE"), ("low", "DOUBLE"),
           ("close", "DOUBLE"), ("volume", "LONG"), ("note", "VARCHAR"), ("live", "BOOLEAN")]  # fmt: skip
ROWS = 12_000


@pytest.fixture(scope="module")
def made_rows() -> list[tuple]:
    times = pd.date_range("2024-01-01", periods=ROWS, freq="1min").strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    rows = [
        (
            "MES",
            at,
            4000.5 + n,
            4001.1 + n,
            3999.25 + n,
            4000.0 + n + n % 3 / 3,
            n if n % 7 else None,
            f'n"{n % 5}',
            "true",
        )
        for n, at in enumerate(times)
    ]
    return [*rows, ("BTC/USDT", times[3], 1.0, 1.0, 1.0, 1.0, 1, None, "false")]


@pytest.fixture
def quest(made_rows):
    with questdb_server() as server:
        server.add_table("bars", COLUMNS, made_rows)
        yield server


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(connections, "BLOCK", 1 << 14)


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_questdb_export_equals_table_and_is_read_by_prepare(quest, tmp_path, made_rows, suffix):
    result = export_data(quest.source, tmp_path / f"bars{suffix}", symbol="MES")
    assert (result.rows, result.table) == (ROWS, "bars")
    got = pd.read_parquet(result.path) if suffix == ".parquet" else pd.read_csv(result.path)
    assert list(got) == ["timestamp", "open", "high", "low", "close", "volume", "note", "live"]
    for place, name in enumerate(("open", "high", "low", "close", "volume"), start=2):
        wanted = np.array([np.nan if row[place] is None else row[place] for row in made_rows[:-1]], float)
        np.testing.assert_array_equal(got[name].to_numpy(float), wanted)
    assert got["note"].tolist() == [row[7] for row in made_rows[:-1]] and got["live"].all()
    assert import_bars(result.path, Workspace(tmp_path / "w"), "MES").rows == ROWS
    assert json.loads((tmp_path / f"bars{suffix}.json").read_text())["rows"] == ROWS


def test_questdb_export_of_a_live_table_holds_the_rows_of_its_start(quest, tmp_path, made_rows):
    later = pd.date_range("2024-01-20", periods=9, freq="1min").strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    quest.arriving = [("MES", at, *made_rows[0][2:]) for at in later]
    result = export_data(quest.source, tmp_path / "bars.parquet", symbol="MES")
    assert (result.rows, len(pd.read_parquet(result.path))) == (ROWS, ROWS) and len(quest.arriving) < 9


@pytest.mark.parametrize(
    ("fault", "at"), [("short", 0.02), ("silent", 0.6), ("chunk", 0.6), ("short", 0.98), ("silent", 0.98)]
)
def test_questdb_answer_that_ends_early_is_refused_and_the_older_file_stays(quest, tmp_path, fault, at):
    path = tmp_path / "bars.parquet"
    path.write_bytes(b"older")
    quest.fault, quest.fault_at = fault, at
    with pytest.raises(DatabaseError, match="connection to the database was lost") as error:
        export_data(quest.source, path, symbol="MES")
    assert "\n" not in str(error.value) and path.read_bytes() == b"older" and list(tmp_path.iterdir()) == [path]
    quest.fault = ""
    assert export_data(quest.source, path, symbol="MES").rows == len(pd.read_parquet(path)) == ROWS


def test_questdb_rows_that_come_in_below_the_end_are_refused(quest, tmp_path, made_rows):
    quest.arriving = [("MES", "2024-01-01T00:00:30.000000Z", *made_rows[0][2:])]
    with pytest.raises(DatabaseError, match=r"12,001 rows.* in the file.* wanted 12,000 rows"):
        export_data(quest.source, tmp_path / "bars.parquet", symbol="MES")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"table": "bars; DROP TABLE bars"}, "no such table"),
        ({"table": 'bars"; DROP TABLE bars; --'}, "no such table"),
        ({"symbol": "MES'; DROP TABLE bars; --"}, "cannot be the name"),
        ({"symbol": "MES", "columns": ['open" FROM bars; --']}, "no such column"),
        ({"symbol": "MES", "start": "' OR 1=1"}, "not a time"),
        ({}, "several symbols"),
    ],
)
def test_questdb_export_of_hostile_or_unknown_name_asks_nothing_of_it(quest, tmp_path, given, words):
    with pytest.raises(SettingsError, match=words) as error:
        export_data(quest.source, tmp_path / "bars.parquet", **given)
    assert "\n" not in str(error.value) and not any("DROP" in query or "1=1" in query for query in quest.queries)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, {}, b'{"error": "table busy", "position": 3}'), 'HTTP 400 Bad Request: {"error": "table busy"'),
        ((500, {}, b"<html>\nbroken"), "HTTP 500"),
        ((302, {"Location": "http://127.0.0.1:9/"}, b""), "HTTP 302"),
        ((200, {}, b"<html>a page of something else"), "not QuestDB"),
        ((200, {}, b"[" * 100_000), "not QuestDB"),
    ],
)
def test_questdb_error_answers_are_one_line(quest, tmp_path, answer, words):
    quest.answer = answer
    with pytest.raises(DatabaseError) as error:
        export_data(quest.source, tmp_path / "bars.parquet", symbol="MES")
    assert words in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize(("case", "table"), [("hostile SQL", "bars; DROP TABLE bars"), ("interrupted export", "bars")])
def test_guide_message_is_what_the_command_prints(case, table, call, tmp_path, monkeypatch):
    if case == "interrupted export":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job begins with it ignored
        monkeypatch.setattr(
            "ml_factory.workflows.export_data.SelectedRows", lambda *given: signal.raise_signal(signal.SIGINT)
        )
    with questdb_server() as quest:
        quest.add_table("bars", COLUMNS[:3], [("MES", "2024-01-01T00:00:00.000000Z", 1.0)])
        words = "--source", quest.source, "--table", table, "--symbol", "MES", "--output", tmp_path / "bars.parquet"
        assert guide_message(case).fullmatch(call("export-data", *words)[2].splitlines()[-1])
        assert quest.tables.keys() == {"bars"} and not any("DROP" in query for query in quest.queries)
