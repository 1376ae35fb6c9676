"""Exports of a real PostgreSQL server: right rows of every type, one snapshot, compared, nothing injected."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from ml_factory.errors import BarsError, SettingsError, WorkspaceError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import RawBarSpec, export_data, import_bars, read_bars_table
from tests.data.postgres_server import GUARDED, PASSWORD, missing_postgres_programs, postgres_server

pytest.importorskip("adbc_driver_postgresql", reason="adbc_driver_postgresql is not installed")
ROOT = Path(__file__).resolve().parents[2]
ROWS = 60_000
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
LONG = """
DROP VIEW IF EXISTS long; CREATE VIEW long AS SELECT 'MES' AS symbol, '2000-01-01Z'::timestamptz + i * interval '1 min'
AS ts, i / 2.0::float8 AS open, i + 0.1::float8 AS high, sqrt(i) AS low, i::float8 AS close, i::bigint AS volume
FROM generate_series(1, {rows}) i
"""


@pytest.fixture(scope="module")
def server():
    if missing := missing_postgres_programs():
        pytest.skip(f"no PostgreSQL server on this machine: {', '.join(missing)} not found")
    with postgres_server() as running:
        running.run_sql(BARS.format(name="bars", rows=ROWS))
        running.run_sql("CREATE TABLE other_bars AS SELECT * FROM bars LIMIT 3")
        running.run_sql(f"CREATE ROLE {GUARDED} LOGIN PASSWORD '{PASSWORD}'; GRANT SELECT ON bars TO {GUARDED}")
        yield running


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 900
    return text


# ---- right rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_export_of_bars_equals_copy_of_the_server(server, tmp_path, suffix):
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
    assert record["file_hash"] == result.file_hash == hashlib.sha256(result.path.read_bytes()).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["copy.csv", f"bars{suffix}", f"bars{suffix}.json"]
    )


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


@pytest.mark.parametrize(
    ("kind", "suffix"), [*((kind, ".parquet") for kind in TIMES), ("timestamptz", ".csv"), ("numeric(20,3)", ".csv")]
)
def test_export_of_column_types_nulls_and_duplicates_keeps_values(server, tmp_path, kind, suffix):
    times = [*TIMES[kind], TIMES[kind][0]]
    rows = [f"({', '.join((at, *row))})" for at, row in zip(times, VALUES, strict=True)]
    server.run_sql(f"DROP TABLE IF EXISTS types; {TYPES.format(time=kind)} INSERT INTO types VALUES {', '.join(rows)}")
    result = export_data(server.source(), tmp_path / f"types{suffix}", table="types", time_column="at")
    assert result.rows == 4
    got = _read(result.path, _schema_of(result.columns, kind)).to_pylist()
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


def _read(path: Path, schema: pyarrow.Schema) -> pyarrow.Table:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path)
    options = pyarrow.csv.ConvertOptions(column_types=schema, null_values=[""], strings_can_be_null=True,
                                         quoted_strings_can_be_null=False)  # fmt: skip
    return pyarrow.csv.read_csv(path, convert_options=options)


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


@pytest.mark.parametrize("kind", ["bigint", "char(5)", "name"])
def test_export_of_symbols_that_are_no_text_finds_the_only_one_and_the_named_one(server, tmp_path, kind):
    server.run_sql(f"DROP TABLE IF EXISTS coded; CREATE TABLE coded (ts timestamptz, close float8, sym {kind}); "
                   "INSERT INTO coded VALUES ('2020-01-01Z', 1, '17')")  # fmt: skip
    result = export_data(server.source(), tmp_path / "a.parquet", table="coded")
    assert (result.symbol, result.columns) == ("17", ["timestamp", "close"])
    server.run_sql("INSERT INTO coded VALUES ('2020-01-01Z', 2, '18')")
    result = export_data(server.source(), tmp_path / "a.parquet", table="coded", symbol="18")
    assert pd.read_parquet(result.path)["close"].tolist() == [2.0]


def test_export_to_path_that_is_a_folder_is_refused_in_one_line(server, tmp_path):
    (tmp_path / "es.parquet").mkdir()
    with pytest.raises(WorkspaceError) as error:
        export_data(server.source(), tmp_path / "es.parquet", table="bars", symbol="ES=F")
    assert "es.parquet" in one_line(error)


def test_export_of_rows_without_time_and_of_no_rows_is_refused(server, tmp_path):
    server.run_sql("DROP TABLE IF EXISTS gaps; CREATE TABLE gaps (ts timestamptz, open int); "
                   "INSERT INTO gaps VALUES ('2020-01-01', 1), (NULL, 2)")  # fmt: skip
    with pytest.raises(BarsError, match=r"Rows without a time.*1 rows"):
        export_data(server.source(), tmp_path / "gaps.parquet", table="gaps")
    with pytest.raises(BarsError, match="0 rows of the symbol 'NQ'"):
        export_data(server.source(), tmp_path / "bars.parquet", table="bars", symbol="NQ")


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
from ml_factory.workflows.export_data import export_data
export_data(sys.argv[1], sys.argv[2], table=sys.argv[3], symbol="MES")
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024)  # ru_maxrss: the parent's too
"""


def test_export_peak_memory_does_not_grow_with_rows(server, tmp_path):
    """Held in memory, the rows added would be 53 MB."""
    peaks = []
    for count in (200_000, 1_300_000):
        server.run_sql(LONG.format(rows=count))
        done = subprocess.run(
            [sys.executable, "-c", PEAK, server.source(), str(tmp_path / f"{count}.parquet"), "long"],
            text=True, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] + 25, peaks
