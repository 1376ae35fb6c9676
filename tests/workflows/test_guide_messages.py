"""Messages of the table in docs/guide.md that are of databases; test_service.py compares those of the service."""

import signal

import pytest

from ml_factory.workflows import export_data
from tests.contract.service import guide_message
from tests.questdb_server import questdb_server

COLUMNS = [("symbol", "SYMBOL"), ("ts", "TIMESTAMP"), ("open", "DOUBLE")]


@pytest.mark.parametrize(("case", "table"), [("hostile SQL", "bars; DROP TABLE bars"), ("interrupted export", "bars")])
def test_guide_message_is_what_the_command_prints(case, table, call, tmp_path, monkeypatch):
    if case == "interrupted export":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job begins with it ignored
        monkeypatch.setattr(export_data, "SelectedRows", lambda *given: signal.raise_signal(signal.SIGINT))
    with questdb_server() as quest:
        quest.add_table("bars", COLUMNS, [("MES", "2024-01-01T00:00:00.000000Z", 1.0)])
        words = "--source", quest.source, "--table", table, "--symbol", "MES", "--output", tmp_path / "bars.parquet"
        assert guide_message(case).fullmatch(call("export-data", *words)[2].splitlines()[-1])
        assert quest.tables.keys() == {"bars"} and not any("DROP" in query for query in quest.queries)
