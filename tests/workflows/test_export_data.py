"""Exports of a real PostgreSQL server: right rows of every type, resumed to the byte, reconciled, nothing injected."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from ml_factory.data.bar_files import read_bars_table
from ml_factory.data.databases import export_parts
from ml_factory.data.databases.exported_file import open_writer, read_batches
from ml_factory.data.databases.postgres import PostgresRows
from ml_factory.data.io import import_bars
from ml_factory.data.validation import RawBarSpec
from ml_factory.errors import BarsError, CheckpointError, DatabaseError, SettingsError, WorkspaceError
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import export_data as export_module
from ml_factory.workflows.export_data import export_data
from tests.postgres_server import (
    GUARDED,
    PASSWORD,
    missing_postgres_programs,
    postgres_proxy,
    postgres_server,
)
from tests.storage.gcs import gcs_bucket  # noqa: F401 - a fixture

pytest.importorskip("adbc_driver_postgresql", reason="adbc_driver_postgresql is not installed")
ROOT = Path(__file__).resolve().parents[2]
ROWS = 200_000
BARS = """
CREATE TABLE {name} (symbol text NOT NULL, ts timestamptz NOT NULL, open float8, high float8, low float8, close float8,
                     volume bigint, PRIMARY KEY (symbol, ts));
INSERT INTO {name}
SELECT 'MES', '2020-01-01Z'::timestamptz + i * interval '1 min', p, p + 1.25, p - 1.5, p + 0.25, i % 977 FROM (
      SELECT i, 4000 + round((200 * sin(i / 9000.0) + (i % 23 * 7919 % 23) / 4.0)::numeric * 4) / 4 AS p
      FROM generate_series(1, {rows}) i) AS made;
INSERT INTO {name} SELECT 'ES=F', ts, open + 1, high, low, close, volume FROM {name} LIMIT 1000;
ANALYZE {name};
"""
# A child that exports in small parts, slowly enough to be killed.
CHILD = """
import sys, time
from ml_factory.data.databases import export_parts
from ml_factory.workflows.export_data import export_data
export_parts.ROWS_PER_PART = 4_000
add = export_parts.ExportParts.add
def slow(*given):
    add(*given)
    time.sleep(0.01)
export_parts.ExportParts.add = slow
print(export_data(sys.argv[1], sys.argv[2], table=sys.argv[3], symbol="MES").resumed_rows)
"""


@pytest.fixture(scope="module")
def server():
    if missing := missing_postgres_programs():
        pytest.skip(f"no PostgreSQL server on this machine: {', '.join(missing)} not found")
    with postgres_server() as running:
        running.run_sql(BARS.format(name="bars", rows=ROWS))
        running.run_sql("CREATE TABLE other_bars AS SELECT * FROM bars LIMIT 3")
        running.run_sql(
            "CREATE TABLE ticks AS SELECT 'MES'::text AS symbol, (1600000000 + i / 7)::bigint AS ts, i % 3 AS open, "
            "nullif(i % 5, 0)::float8 AS high, (i % 2)::text AS side FROM generate_series(1, 60000) i ORDER BY random()"
        )
        running.run_sql(f"CREATE ROLE {GUARDED} LOGIN PASSWORD '{PASSWORD}'; GRANT SELECT ON bars TO {GUARDED}")
        yield running


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(export_parts, "ROWS_PER_PART", 4_000)


@pytest.fixture
def socket_folder():
    folder = Path(tempfile.mkdtemp(prefix="pq-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 900
    return text


# ---- right rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_export_of_200000_bars_equals_copy_of_the_server(server, tmp_path, suffix):
    result = export_data(server.source(), tmp_path / f"bars{suffix}", table="bars", symbol="MES")
    text = server.run_sql(
        "SET timezone = 'UTC'; COPY (SELECT ts AS timestamp, open, high, low, close, volume FROM bars "
        "WHERE symbol = 'MES' ORDER BY ts) TO STDOUT (FORMAT csv, HEADER)"
    )
    (tmp_path / "copy.csv").write_text(text + "\n")
    wanted = pd.read_csv(tmp_path / "copy.csv", parse_dates=["timestamp"])
    got = read_bars_table(result.path)
    got["timestamp"] = pd.to_datetime(got["timestamp"], format="ISO8601", utc=True)
    assert len(got) == ROWS and list(got) == list(wanted)
    for name in got:
        np.testing.assert_array_equal(got[name].to_numpy(), wanted[name].dt.tz_convert("UTC").to_numpy()
                                      if name == "timestamp" else wanted[name].to_numpy())  # fmt: skip
    record = json.loads((tmp_path / f"bars{suffix}.json").read_text())
    assert (record["rows"], record["first"]) == (ROWS, "2020-01-01T00:01:00.000000Z") == (result.rows, result.first)
    assert record["compared"] == "hash computed by the database" and len(record["content_hash"]) == 32
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["copy.csv", f"bars{suffix}", f"bars{suffix}.json"]
    )


def test_exported_files_of_both_formats_are_one_market_to_prepare(server, tmp_path):
    reports = []
    for suffix in (".parquet", ".csv"):
        path = export_data(server.source(), tmp_path / f"b{suffix}", table="bars", symbol="MES", end="2020-01-09").path
        reports.append(import_bars(path, Workspace(tmp_path / suffix[1:]), "MES"))
    assert reports[0].rows == 11_519 and reports[0].fingerprint == reports[1].fingerprint


TYPES = """
CREATE TABLE types (at {time}, open numeric(14, 4), high double precision, low real, close numeric, volume integer,
                    note varchar(9), ok boolean, kind char(3), tags jsonb);
"""
VALUES = [
    ("10.0001", "12.5", "9.25", "11.123456789012345678", "5", "'a,\"b'", "true", "'x'", "'{}'"),
    ("10.0001", "12.5", "9.25", "NULL", "NULL", "NULL", "NULL", "NULL", "NULL"),
    ("-0.5", "1e-300", "'NaN'", "1e20", "-2147483648", "''", "false", "'yy'", "'[1]'"),
    ("10.0001", "12.5", "9.25", "11.123456789012345678", "5", "'a,\"b'", "true", "'x'", "'{}'"),
]  # the first and the last are one row, twice
TIMES = {
    "timestamptz": ["'2024-03-10 01:30-05'", "'2024-03-10 03:30-04'", "'1969-12-31 23:59:59.999999Z'"],
    "timestamp": ["'2024-03-10 01:30'", "'2024-03-10 02:30'", "'2024-03-10 03:30:00.25'"],
    "date": ["'2024-03-10'", "'2024-03-11'", "'2024-03-12'"],
    "bigint": ["1710052200", "1710052260", "1710052320"],
    "integer": ["1710052200", "1710052260", "1710052320"],
    "double precision": ["1710052200.5", "1710052260.25", "1710052320"],
    "numeric(20,3)": ["1710052200.5", "1710052260.25", "1710052320"],
}


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
@pytest.mark.parametrize("kind", TIMES)
def test_export_of_column_types_nulls_and_duplicates_keeps_values(server, tmp_path, kind, suffix):
    times = [*TIMES[kind], TIMES[kind][0]]
    rows = [f"({', '.join((at, *row))})" for at, row in zip(times, VALUES, strict=True)]
    server.run_sql(f"DROP TABLE IF EXISTS types; {TYPES.format(time=kind)} INSERT INTO types VALUES {', '.join(rows)}")
    result = export_data(server.source(), tmp_path / f"types{suffix}", table="types", time_column="at")
    assert result.compared == "hash computed by the database" and result.rows == 4
    schema = _schema_of(result.columns, kind)
    got = pyarrow.Table.from_batches(export_module.read_batches(result.path, suffix, schema, 10)).to_pylist()
    assert [row["timestamp"] for row in got] == sorted(row["timestamp"] for row in got)
    by_time = "('1969' < left(at::text, 4)), at" if kind == "timestamptz" else "at"
    shown = server.run_sql(f"SELECT close::float8, volume, note, ok, kind, tags FROM types ORDER BY {by_time}, open")
    assert len(shown.splitlines()) == 4
    same = [row for row in got if row["note"] == 'a,"b']
    assert len(same) == 2 and same[0] == same[1] and same[0]["close"] == 11.123456789012345678
    (absent,) = (row for row in got if row["note"] is None)
    assert [absent[name] for name in ("close", "volume", "ok", "kind", "tags")] == [None] * 5 and absent[
        "open"
    ] == 10.0001
    (odd,) = (row for row in got if row["note"] == "")
    assert odd["high"] == 1e-300 and np.isnan(odd["low"]) and odd["volume"] == -(2**31) and odd["ok"] is False
    assert odd["close"] == 1e20 and odd["kind"].strip() == "yy" and odd["tags"] == "[1]"


def _schema_of(columns: list[str], kind: str) -> pyarrow.Schema:
    time_types = {"timestamptz": pyarrow.timestamp("us", "UTC"), "timestamp": pyarrow.timestamp("us"),
                  "date": pyarrow.timestamp("us"), "bigint": pyarrow.int64(), "integer": pyarrow.int64()}  # fmt: skip
    types = [time_types.get(kind, pyarrow.float64()), *[pyarrow.float64()] * 4, pyarrow.int64(), pyarrow.string(),
             pyarrow.bool_(), pyarrow.string(), pyarrow.string()]  # fmt: skip
    return pyarrow.schema(list(zip(columns, types, strict=True)))


@pytest.mark.parametrize("kind", ["timestamptz", "timestamp", "date", "bigint", "double precision"])
def test_export_start_and_end_select_half_open_range_in_every_time_type(server, tmp_path, kind):
    first = {"bigint": "extract(epoch FROM d)::bigint", "double precision": "extract(epoch FROM d)"}.get(kind, "d")
    server.run_sql(
        f"DROP TABLE IF EXISTS days; CREATE TABLE days AS SELECT ({first})::{kind} AS time, 1.0 AS open, 1.0 AS high, "
        "1.0 AS low, 1.0 AS close FROM generate_series('2024-01-01'::timestamp, '2024-01-31', '1 day') d"
    )
    result = export_data(server.source(), tmp_path / "days.parquet", table="days", start="2024-01-05", end="2024-01-08")
    assert result.rows == 3
    raw = pd.read_parquet(result.path)
    moments = pd.to_datetime(raw["timestamp"], unit="s" if raw["timestamp"].dtype.kind in "if" else None, utc=True)
    assert [f"{moment:%d %H}" for moment in moments] == ["05 00", "06 00", "07 00"]


def test_export_of_times_without_zone_advises_the_zone_that_prepare_needs(server, tmp_path):
    server.run_sql("DROP TABLE IF EXISTS naive; CREATE TABLE naive AS SELECT ts::timestamp AS ts, open, high, low, "
                   "close, volume FROM bars WHERE symbol = 'MES' AND ts < '2020-01-03'")  # fmt: skip
    result = export_data(server.source(), tmp_path / "naive.parquet", table="naive")
    assert "--zone" in result.summary()
    report = import_bars(result.path, Workspace(tmp_path / "w"), "MES", RawBarSpec(zone="America/New_York"))
    assert str(report.first) == "2020-01-01 05:01:00+00:00"


# ---- resumed ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(server, tmp_path_factory):
    """Bytes of each uninterrupted export, made in a child with the parts of the killed ones."""
    made = {}

    def bytes_of(table: str, suffix: str) -> bytes:
        if (table, suffix) not in made:
            path = tmp_path_factory.mktemp("whole") / f"out{suffix}"
            assert child(server, path, table) == 0
            made[table, suffix] = path.read_bytes()
        return made[table, suffix]

    return bytes_of


def start_child(server, path: Path, table: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CHILD, server.source(), str(path), table], stdout=subprocess.PIPE,
        text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def child(server, path: Path, table: str) -> int:
    """Rows that an export in a child found from before."""
    with start_child(server, path, table) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return int(out)


def kill_behind_part(server, path: Path, table: str, part: int, delay: float) -> None:
    """Kill an export some time behind the moment at which this part is there."""
    with start_child(server, path, table) as process:
        folder, until = path.with_name(f".{path.name}.parts"), time.monotonic() + 60
        while not list(folder.glob(f"*/{part:06d}-*")) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("table", "suffix", "seed"),
    [("bars", ".parquet", 1), ("ticks", ".csv", 2),
     *(pytest.param("bars" if seed % 2 else "ticks", (".csv", ".parquet")[seed % 3 > 0], seed, marks=pytest.mark.soak)
       for seed in range(3, 23))],
)  # fmt: skip
def test_export_killed_at_random_moments_ends_with_uninterrupted_bytes(
    server, uninterrupted, tmp_path, table, suffix, seed
):
    wanted, chosen, path = uninterrupted(table, suffix), random.Random(seed), tmp_path / f"out{suffix}"
    parts = ROWS // 4000 if table == "bars" else 15
    for part in sorted(chosen.sample(range(parts - 2), 1 if seed < 3 else 3)):
        kill_behind_part(server, path, table, part, chosen.random() * 0.05)
        assert not path.exists()
    assert child(server, path, table) > 0
    assert path.read_bytes() == wanted
    assert sorted(one.name for one in tmp_path.iterdir()) == [f"out{suffix}", f"out{suffix}.json"]


def interrupt(server, socket_folder: Path, path: Path, table: str = "bars", lose_after: int = 8_000_000) -> str:
    """Export until the connection is lost; the message."""
    with postgres_proxy(server, socket_folder, lose_after=lose_after) as proxy, pytest.raises(DatabaseError) as error:
        export_data(proxy.source(), path, table=table, symbol="MES")
    (socket_folder / f".s.PGSQL.{server.port}").unlink()
    return one_line(error)


@pytest.fixture
def same_source(monkeypatch):
    """The proxy and the server behind it are one database under two sockets: a plan names it once."""
    plan = export_module._plan
    monkeypatch.setattr(export_module, "_plan", lambda *given: plan(*given) | {"source": "one"})


def test_export_after_lost_connection_goes_on_and_ends_with_same_bytes(
    server, socket_folder, tmp_path, small_parts, same_source
):
    export_data(server.source(), tmp_path / "whole.parquet", table="bars", symbol="MES")
    said = interrupt(server, socket_folder, tmp_path / "bars.parquet")
    assert "connection to the database was lost" in said and "run the same command again" in said
    assert not (tmp_path / "bars.parquet").exists()
    result = export_data(server.source(), tmp_path / "bars.parquet", table="bars", symbol="MES")
    assert 0 < result.resumed_rows < ROWS and result.resumed_rows % 4_000 == 0
    assert (tmp_path / "bars.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_export_counts_and_reads_one_snapshot_in_two_connections(server, tmp_path, monkeypatch):
    server.run_sql("DROP TABLE IF EXISTS busy; CREATE TABLE busy AS SELECT * FROM bars WHERE symbol = 'ES=F'")
    summarize, connections = PostgresRows._summarize, []

    def slow(self, *given):
        server.run_sql("UPDATE busy SET close = close + 1; DELETE FROM busy WHERE volume % 2 = 0")
        connections.append(server.run_sql(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ml_factory' AND xact_start IS NOT NULL"
        ))  # fmt: skip
        return summarize(self, *given)

    export_data(server.source(), tmp_path / "before.parquet", table="busy")
    monkeypatch.setattr(PostgresRows, "_summarize", slow)
    result = export_data(server.source(), tmp_path / "busy.parquet", table="busy")
    assert connections == ["2"] and result.rows == 1000 and result.compared == "hash computed by the database"
    assert result.path.read_bytes() == (tmp_path / "before.parquet").read_bytes()


def test_export_of_user_with_one_connection_counts_before_it_reads(server, tmp_path, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    whole = export_data(server.source(), tmp_path / "whole.parquet", table="bars", symbol="ES=F")
    server.run_sql(f"ALTER ROLE {GUARDED} CONNECTION LIMIT 1")
    try:
        result = export_data(server.source(user=GUARDED), tmp_path / "b.parquet", table="bars", symbol="ES=F")
    finally:
        server.run_sql(f"ALTER ROLE {GUARDED} CONNECTION LIMIT -1")
    assert result.compared == whole.compared and result.path.read_bytes() == whole.path.read_bytes()


def test_export_of_ended_backend_is_one_line(server, tmp_path, monkeypatch, small_parts):
    def cut(batches, *given):
        for number, table in enumerate(export_parts.cut_batches(batches, *given)):
            if number == 2:
                server.run_sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                               "AND backend_type = 'client backend'")  # fmt: skip
            yield table

    monkeypatch.setattr(export_module, "cut_batches", cut)
    with pytest.raises(DatabaseError) as error:
        export_data(server.source(), tmp_path / "bars.parquet", table="bars", symbol="MES")
    assert "lost" in one_line(error)


def test_export_resumed_over_changed_rows_reads_all_again(server, socket_folder, tmp_path, small_parts, same_source):
    server.run_sql("DROP TABLE IF EXISTS moving; CREATE TABLE moving AS SELECT * FROM bars WHERE symbol = 'MES'")
    interrupt(server, socket_folder, tmp_path / "moving.parquet", "moving")
    server.run_sql("UPDATE moving SET close = close + 1 WHERE ts = '2020-01-01 00:10Z'")
    result = export_data(server.source(), tmp_path / "moving.parquet", table="moving", symbol="MES")
    whole = export_data(server.source(), tmp_path / "whole.parquet", table="moving", symbol="MES")
    assert result.path.read_bytes() == whole.path.read_bytes() and result.resumed_rows == 0


@pytest.mark.parametrize("damage", ["bytes", "short", "gone", "other rows"])
def test_export_resumed_over_damaged_part_ends_with_same_bytes(
    server, socket_folder, tmp_path, small_parts, same_source, damage
):
    whole = export_data(server.source(), tmp_path / "whole.parquet", table="bars", symbol="MES")
    interrupt(server, socket_folder, tmp_path / "bars.parquet")
    parts = sorted((tmp_path / ".bars.parquet.parts").glob("*/*.arrow"))
    assert len(parts) >= 3
    content = bytearray(parts[1].read_bytes())
    content[len(content) // 2] ^= 1
    {
        "bytes": lambda: parts[1].write_bytes(content), "short": lambda: parts[1].write_bytes(content[:100]),
        "gone": lambda: parts[1].unlink(), "other rows": lambda: shutil.copy(parts[2], parts[1]),
    }[damage]()  # fmt: skip
    result = export_data(server.source(), tmp_path / "bars.parquet", table="bars", symbol="MES")
    assert result.resumed_rows == 4_000 and result.path.read_bytes() == whole.path.read_bytes()


def test_export_through_server_side_cursor_where_copy_is_refused_has_same_bytes(
    server, socket_folder, tmp_path, small_parts, caplog
):
    whole = export_data(server.source(), tmp_path / "whole.parquet", table="bars", symbol="MES")
    with caplog.at_level("INFO", "ml_factory"), postgres_proxy(server, socket_folder, refuse_copy=True) as proxy:
        result = export_data(proxy.source(), tmp_path / "bars.parquet", table="bars", symbol="MES")
    assert "refuses COPY" in caplog.text and result.rows == ROWS
    assert result.path.read_bytes() == whole.path.read_bytes()


# ---- reconciled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["timestamp", "close", "volume"])
def test_export_that_differs_from_database_in_one_value_is_refused(server, tmp_path, monkeypatch, column):
    path = tmp_path / "bars.parquet"
    path.write_bytes(b"older")

    def cut(batches, *given):
        for table in export_parts.cut_batches(batches, *given):
            values = table.column(column).to_pandas().copy()
            values.iloc[77] += pd.Timedelta("1us") if column == "timestamp" else 1
            place = table.schema.get_field_index(column)
            yield table.set_column(place, table.schema.field(place), pyarrow.array(values, table.schema.types[place]))

    monkeypatch.setattr(export_module, "cut_batches", cut)
    with pytest.raises(DatabaseError, match="content hash"):
        export_data(server.source(), path, table="bars", symbol="MES")
    assert path.read_bytes() == b"older" and not (tmp_path / "bars.parquet.json").exists()


def test_export_with_values_of_two_rows_swapped_is_refused(server, tmp_path, monkeypatch):
    def cut(batches, *given):
        for table in export_parts.cut_batches(batches, *given):
            place = table.schema.get_field_index("close")
            order = np.r_[30, 1:30, 0, 31 : len(table)]
            yield table.set_column(place, "close", table.column("close").take(order))

    monkeypatch.setattr(export_module, "cut_batches", cut)
    with pytest.raises(DatabaseError, match="content hash"):
        export_data(server.source(), tmp_path / "bars.parquet", table="bars", symbol="MES")


def test_export_that_loses_or_repeats_a_row_is_refused(server, tmp_path, monkeypatch):
    cut = export_parts.cut_batches
    for change in (lambda table: table.slice(1), lambda table: pyarrow.concat_tables([table, table.slice(5, 1)])):
        monkeypatch.setattr(export_module, "cut_batches", lambda *given, change=change: map(change, cut(*given)))
        with pytest.raises(DatabaseError, match=r"rows .* in the file"):
            export_data(server.source(), tmp_path / "bars.parquet", table="bars", symbol="MES")


def test_export_of_server_without_our_hash_is_compared_with_second_reading(server, tmp_path, monkeypatch):
    monkeypatch.setattr("ml_factory.data.databases.postgres.PostgresRows._has_our_hash", lambda self: False)
    result = export_data(server.source(), tmp_path / "bars.parquet", table="bars", symbol="ES=F")
    monkeypatch.undo()
    assert result.compared == "hash of the rows read a second time"
    assert export_data(server.source(), tmp_path / "b.parquet", table="bars", symbol="ES=F").content_hash == (
        result.content_hash
    )


def test_export_run_again_finds_the_file_until_the_table_changes(server, tmp_path):
    server.run_sql("DROP TABLE IF EXISTS again; CREATE TABLE again AS SELECT * FROM bars WHERE symbol = 'ES=F'")
    path = tmp_path / "again.parquet"
    assert not export_data(server.source(), path, table="again").reused
    assert export_data(server.source(), path, table="again").reused
    assert not export_data(server.source(), path, table="again", columns=["ts", "open"]).reused
    assert not export_data(server.source(), path, table="again").reused
    path.write_bytes(path.read_bytes()[:-1])
    assert not export_data(server.source(), path, table="again").reused
    server.run_sql("UPDATE again SET open = open + 1 WHERE ts = '2020-01-01 00:05Z'")
    assert not export_data(server.source(), path, table="again").reused


def test_export_with_damaged_record_writes_file_and_record_again(server, tmp_path):
    first = export_data(server.source(), tmp_path / "es.parquet", table="bars", symbol="ES=F")
    content = first.record_path.read_bytes()
    generator = np.random.default_rng(5)
    texts = [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"rows": 1e999}',
        b"[" * 100_000,
        content[:-9],
        content.replace(b"1000", b"1001"),
    ]
    for place in generator.integers(0, len(content), 12):
        texts.append(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    for text in texts:
        first.record_path.write_bytes(text)
        result = export_data(server.source(), tmp_path / "es.parquet", table="bars", symbol="ES=F")
        assert result.file_hash == first.file_hash and result.rows == 1000
        assert not result.reused or json.loads(text) == json.loads(content)
        assert json.loads(first.record_path.read_bytes()) == json.loads(content if not result.reused else text)


def test_export_to_path_that_is_a_folder_is_refused_in_one_line(server, tmp_path):
    (tmp_path / "es.parquet").mkdir()
    with pytest.raises(WorkspaceError) as error:
        export_data(server.source(), tmp_path / "es.parquet", table="bars", symbol="ES=F")
    assert "es.parquet" in one_line(error)


# ---- names and values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"table": "bars; DROP TABLE bars; --"}, "no such table"),
        ({"table": 'bars" WHERE true; DROP TABLE bars; --'}, "no such table"),
        ({"table": "pg_catalog.pg_authid"}, "no such table"),
        ({"table": "pg_authid"}, "no such table"),
        ({"table": "bar"}, "did you mean 'bars'?"),
        ({"table": "bars", "symbol": "MES'; DROP TABLE bars; --"}, "cannot be the name of a symbol"),
        ({"table": "bars", "symbol": "MES' OR '1'='1"}, "cannot be the name of a symbol"),
        ({"table": "bars", "symbol": "MES\n"}, "cannot be the name of a symbol"),
        ({"table": "bars", "columns": ["ts", "open FROM bars; DROP TABLE bars; --"]}, "no such column"),
        ({"table": "bars", "time_column": "ts; DROP TABLE bars"}, "no such column"),
        ({"table": "bars", "symbol": "MES", "symbol_column": "1=1 OR symbol"}, "no such column"),
        ({"table": "bars", "symbol": "MES", "start": "2020-01-01'; DROP TABLE bars"}, "not a time"),
        ({"table": "bars", "time_column": "symbol"}, "can be the time"),
        ({"table": "bars"}, "several symbols"),
        ({"table": None}, "--table"),
    ],
)
def test_export_of_hostile_or_unknown_name_is_refused_in_one_line(server, tmp_path, given, words):
    with pytest.raises(SettingsError, match=words.replace("?", r"\?")) as error:
        export_data(server.source(), tmp_path / "bars.parquet", **given)
    one_line(error)
    assert server.run_sql("SELECT count(*) FROM bars") == str(ROWS + 1000)
    assert not (tmp_path / "bars.parquet").exists()


def test_export_of_odd_names_reads_that_table_and_that_symbol_alone(server, tmp_path):
    server.run_sql(
        'CREATE SCHEMA IF NOT EXISTS "My ""data"""; DROP TABLE IF EXISTS "My ""data"""."a;b"; '
        'CREATE TABLE "My ""data"""."a;b" ("T""ime" timestamptz, "select" float8, "Ticker" varchar(20)); '
        "INSERT INTO \"My \"\"data\"\"\".\"a;b\" VALUES ('2020-01-01Z', 1, 'BTC/USDT'), ('2020-01-02Z', 2, '^GSPC'), "
        "('2020-01-03Z', 3, 'BTC/USDT')"
    )
    result = export_data(server.source(), tmp_path / "a.parquet", table='My "data".a;b', symbol="BTC/USDT")
    assert pd.read_parquet(result.path)["select"].tolist() == [1.0, 3.0] and result.columns == ["timestamp", "select"]


def test_export_of_rows_without_time_and_of_no_rows_is_refused(server, tmp_path):
    for value in ("NULL", "'infinity'"):
        server.run_sql(f"DROP TABLE IF EXISTS gaps; CREATE TABLE gaps (ts timestamptz, open int); "
                       f"INSERT INTO gaps VALUES ('2020-01-01', 1), ({value}, 2)")  # fmt: skip
        with pytest.raises(BarsError, match=r"Rows without a time.*1 rows"):
            export_data(server.source(), tmp_path / "gaps.parquet", table="gaps")
    with pytest.raises(BarsError, match="0 rows of the symbol 'NQ'"):
        export_data(server.source(), tmp_path / "bars.parquet", table="bars", symbol="NQ")


def test_export_to_file_that_another_process_writes_is_refused(server, tmp_path):
    (tmp_path / ".bars.parquet.parts").mkdir()
    with open(tmp_path / ".bars.parquet.parts" / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="Another process is working on the export"):
            export_data(server.source(), tmp_path / "bars.parquet", table="bars", symbol="ES=F")


# ---- passwords -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["PGPASSWORD", ".pgpass", "address"])
def test_export_password_is_found_and_never_printed_or_stored(server, tmp_path, monkeypatch, call, place):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PGPASSWORD", raising=False)
    source = server.source(user=GUARDED, password=PASSWORD if place == "address" else "")
    if place == "PGPASSWORD":
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
    if place == ".pgpass":
        (tmp_path / ".pgpass").write_text(f"*:*:*:{GUARDED}:{PASSWORD.replace(':', chr(92) + ':')}\n")
        (tmp_path / ".pgpass").chmod(0o600)
    words = "export-data", "--source", source, "--table", "bars", "--symbol", "ES=F", "--output", tmp_path / "b.csv"
    code, out, err = call(*words)
    assert code == 0, err
    code, json_out, json_err = call(*words, "--json")
    assert code == 0 and json.loads(json_out)["rows"] == 1000
    code, _, wrong = call(*words[:5], "--symbol", "NQ", "--output", tmp_path / "c.csv")
    printed = out + err + json_out + json_err + wrong + (tmp_path / "b.csv.json").read_text()
    assert code == 1 and PASSWORD not in printed and "pass%20w" not in printed and GUARDED not in printed


def test_export_with_wrong_password_says_where_it_belongs(server, tmp_path, monkeypatch, call):
    monkeypatch.setenv("PGPASSWORD", "not-the-password")
    code, out, err = call("export-data", "--source", server.source(user=GUARDED), "--output", tmp_path / "b.csv")
    assert code == 1 and not out and "PGPASSWORD" in err and "not-the-password" not in err
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1


# ---- command line, script, bucket ------------------------------------------------------------------------------------


def test_script_of_the_guide_exports_only_table_of_database_url(server, tmp_path):
    server.run_sql("DROP DATABASE IF EXISTS single")
    server.run_sql("CREATE DATABASE single")
    source, two = server.source("single"), BARS.format(name="minute_bars", rows=500)
    server.run_sql(two.replace("'ES=F', ts,", "'MES', ts - interval '9 days',"), "single")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "export_training_data.py", "--output", "data/training_set.parquet"],
        cwd=tmp_path, env={**os.environ, "DATABASE_URL": source}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(pd.read_parquet(tmp_path / "data" / "training_set.parquet")) == 1000


def test_export_to_bucket_uploads_file_and_record(server, tmp_path, monkeypatch, gcs_bucket):  # noqa: F811
    from ml_factory.storage.bucket_sync import download_bucket_file

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = export_data(server.source(), f"{gcs_bucket}/set/es.parquet", table="bars", symbol="ES=F")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert result.path == f"{gcs_bucket}/set/es.parquet"
    assert len(pd.read_parquet(download_bucket_file(result.path))) == 1000
    assert json.loads(download_bucket_file(result.path + ".json").read_text())["sha256"] == result.file_hash


@pytest.mark.parametrize(
    ("source", "output", "words"),
    [
        ("mysql://user:secretsecret@host/db", "a.parquet", "mysql:"),
        ("host/db", "a.parquet", "not the address"),
        ("", "a.parquet", "not the address"),
        ("user:secretsecret@host/db", "a.parquet", "not the address"),
        ("postgresql://user:secretsecret@host:port/db", "a.parquet", "not the address"),
        ("postgresql://user@host/db", "a.xlsx", "--output"),
        ("postgresql://user@host/db", "a", "--output"),
    ],
)
def test_export_of_wrong_address_or_format_is_wrong_usage(call, source, output, words):
    code, out, err = call("export-data", "--source", source, "--output", output)
    assert code == 2 and not out and words in err and "secretsecret" not in err and "Traceback" not in err


def test_export_of_absent_server_is_one_line(call, tmp_path):
    code, _, err = call(
        "export-data", "--source", f"postgresql://u@/db?host={tmp_path}", "--output", tmp_path / "a.csv"
    )
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 1 and "cannot be reached" in line and "Traceback" not in err


# ---- memory ----------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
from ml_factory.data.databases import export_parts
from ml_factory.workflows.export_data import export_data
export_parts.ROWS_PER_PART = int(sys.argv[4])
export_data(sys.argv[1], sys.argv[2], table=sys.argv[3], symbol="MES")
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024)  # ru_maxrss: the parent's too
"""
LONG = """
DROP VIEW IF EXISTS long; CREATE VIEW long AS SELECT 'MES' AS symbol, '2000-01-01Z'::timestamptz + i * interval '1 min'
AS ts, i / 2.0::float8 AS open, i + 0.1::float8 AS high, sqrt(i) AS low, i::float8 AS close, i::bigint AS volume
FROM generate_series(1, {rows}) i
"""


def test_exported_file_is_read_back_a_row_group_at_a_time(tmp_path):
    table = pyarrow.table({"x": np.random.default_rng(0).normal(size=50_000)})
    with open_writer(tmp_path / "x.parquet", ".parquet", table.schema) as writer:
        for _ in range(20):
            writer.write_table(table)
    before, most, rows = pyarrow.total_allocated_bytes(), 0, 0
    for batch in read_batches(tmp_path / "x.parquet", ".parquet", table.schema, 50_000):
        most, rows = max(most, pyarrow.total_allocated_bytes() - before), rows + len(batch)
    assert rows == 1_000_000 and most < 4 * table.nbytes


@pytest.mark.parametrize(
    ("rows", "part", "most"), [(ROWS, 10_000, 15), pytest.param(5_000_000, 1 << 17, 60, marks=pytest.mark.soak)]
)
def test_export_peak_memory_does_not_grow_with_rows(server, tmp_path, rows, part, most):
    """Held in memory, the rows added would be 29 MB in the short form, and 720 MB in the long one."""
    peaks = []
    for count in (rows, 4 * rows):
        server.run_sql(LONG.format(rows=count))
        done = subprocess.run(
            [sys.executable, "-c", PEAK, server.source(), str(tmp_path / f"{count}.parquet"), "long", str(part)],
            text=True, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] + most, peaks
