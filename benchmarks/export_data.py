"""Rows of PostgreSQL to a file: ours, pandas.read_sql and COPY TO CSV, and our peak memory at 1 and 4 times the rows.

    python -m benchmarks.export_data [--rows 5000000] [--repeats 5]

Prints one JSON line a side: wall and CPU seconds of this process (the best of interleaved repeats), rows a second, and
how many times our wall and CPU time it took; `ours_by_this_median` is the median over the rounds of our time divided by
its time. A server of its own is started in a temporary folder and reached through a socket; the table has the primary
key (symbol, ts), seven columns and one symbol. `ours` counts the rows in the server, then writes them to a Parquet
file. `pandas` (SQLAlchemy and psycopg) ends with a frame in memory. `copy_table` is `COPY bars TO file` as CSV in the
server itself, in no order; `copy_rows` the same rows in the same order as ours. The memory is that of a whole process,
imports included. Needs psycopg in addition to the project, and PostgreSQL's programs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pandas as pd
import sqlalchemy

from benchmarks.measure import in_turns, median_ratio, print_json, rated, times
from ml_factory.workflows.export_data import export_data
from tests.data.postgres_server import PostgresServer, postgres_server

TABLE = """
CREATE TABLE bars (symbol text, ts timestamptz, open float8, high float8, low float8, close float8, volume bigint,
                   PRIMARY KEY (symbol, ts));
INSERT INTO bars SELECT 'MES', '2010-01-01Z'::timestamptz + i * interval '1 min', p, p + 1.25, p - 1.5, p + .25, i % 977
FROM (SELECT i, 4000 + round((200 * sin(i / 9000.0) + (i % 23) / 4.0)::numeric * 4) / 4 AS p
      FROM generate_series(1, {rows}) i) AS made;
VACUUM ANALYZE bars;
"""
ROWS = "SELECT ts AS timestamp, open, high, low, close, volume FROM bars WHERE symbol = 'MES' ORDER BY ts"
PEAK = """
import sys
from pathlib import Path
from ml_factory.workflows.export_data import export_data
export_data(sys.argv[1], sys.argv[2], table="bars", symbol="MES", end=sys.argv[3] or None)
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # ru_maxrss would be the parent's
"""


def ours(server: PostgresServer, folder: Path) -> None:
    export_data(server.source(), folder / "bars.parquet", table="bars", symbol="MES")


def with_pandas(server: PostgresServer) -> pd.DataFrame:
    engine = sqlalchemy.create_engine(server.source().replace("postgresql://", "postgresql+psycopg://"))
    try:
        with engine.connect() as connection:
            return pd.read_sql(sqlalchemy.text(ROWS), connection)
    finally:
        engine.dispose()


def with_copy(server: PostgresServer, what: str) -> None:
    server.run_sql(f"COPY {what} TO '{server.folder}/bars.csv' (FORMAT csv, HEADER)")


def peak_bytes(server: PostgresServer, folder: Path, end: str) -> int:
    command = [sys.executable, "-c", PEAK, server.source(), str(folder / "peak.parquet"), end]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."})
    return 1024 * int(done.stdout)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=5_000_000)
    options.add_argument("--repeats", type=int, default=5)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name, postgres_server("shared_buffers=512MB") as server:
        folder = Path(name)
        server.run_sql(TABLE.format(rows=chosen.rows))
        ours(server, folder)
        pd.testing.assert_frame_equal(
            pd.read_parquet(folder / "bars.parquet"), with_pandas(server), check_dtype=False, check_freq=False
        )
        sides = {
            "ours": partial(ours, server, folder), "pandas": partial(with_pandas, server),
            "copy_table": partial(with_copy, server, "bars"), "copy_rows": partial(with_copy, server, f"({ROWS})"),
        }  # fmt: skip
        runs = in_turns(sides, chosen.repeats)
        for side, clocks in runs.items():
            compared = rated(clocks, chosen.rows) | times(clocks, runs["ours"])
            ratio = round(median_ratio(runs["ours"], clocks), 3)
            print_json(bench="export_data", side=side, rows=chosen.rows, **compared, ours_by_this_median=ratio)
        quarter = server.run_sql(f"SELECT '2010-01-01Z'::timestamptz + {chosen.rows // 4 + 1} * interval '1 min'")
        peaks = [peak_bytes(server, folder, end) for end in (quarter, "")]
        for rows, peak in zip((chosen.rows // 4, chosen.rows), peaks, strict=True):
            print_json(bench="export_data_memory", side="ours", rows=rows, peak_mb=round(peak / 1e6))


if __name__ == "__main__":
    main()
