"""Exports of a real PostgreSQL server: right rows of every type, one snapshot, compared, nothing injected."""

import json

import pandas as pd
import pyarrow
import pytest

from ml_factory.data.databases.selected_rows import SelectedRows
from ml_factory.errors import DatabaseError
from ml_factory.workflows.export_data import export_data
from tests.contract.test_export_data import one_line, server  # noqa: F401 - the fixture
from tests.storage.gcs import gcs_bucket  # noqa: F401

pytest.importorskip("adbc_driver_postgresql", reason="adbc_driver_postgresql is not installed")


# ---- one snapshot, compared ------------------------------------------------------------------------------------------


def change_batches(monkeypatch, change) -> None:
    """Let `change` see the batches of an export before they are written."""
    batches = SelectedRows.batches
    monkeypatch.setattr(SelectedRows, "batches", lambda self: change(batches(self)))


def test_export_counts_and_reads_one_snapshot(server, tmp_path, monkeypatch):  # noqa: F811
    server.run_sql("DROP TABLE IF EXISTS busy; CREATE TABLE busy AS SELECT * FROM bars WHERE symbol = 'ES=F'")
    before = export_data(server.source(), tmp_path / "before.parquet", table="busy")

    def change(batches):
        server.run_sql("UPDATE busy SET close = close + 1; DELETE FROM busy WHERE volume % 2 = 0")
        return batches

    change_batches(monkeypatch, change)
    result = export_data(server.source(), tmp_path / "busy.parquet", table="busy")
    assert result.rows == 1000 and result.path.read_bytes() == before.path.read_bytes()
    monkeypatch.undo()
    assert export_data(server.source(), tmp_path / "busy.parquet", table="busy").rows < 1000


@pytest.mark.parametrize(
    "change",
    [lambda batch: batch.slice(1), lambda batch: batch.slice(0, batch.num_rows - 1), lambda batch: batch.slice(0, 0),
     lambda batch: pyarrow.concat_batches([batch, batch.slice(5, 1)])],
    ids=["no first row", "no last row", "no rows", "one row twice"],
)  # fmt: skip
def test_export_that_loses_or_repeats_a_row_is_refused_and_the_older_file_stays(server, tmp_path, monkeypatch, change):  # noqa: F811
    path = tmp_path / "bars.parquet"
    path.write_bytes(b"older")
    change_batches(monkeypatch, lambda batches: map(change, batches))
    with pytest.raises(DatabaseError, match=r"rows.* in the file") as error:
        export_data(server.source(), path, table="bars", symbol="ES=F")
    assert "wanted 1,000 rows" in one_line(error)
    assert path.read_bytes() == b"older" and list(tmp_path.iterdir()) == [path]


def test_export_to_bucket_uploads_file_and_record(server, tmp_path, monkeypatch, gcs_bucket):  # noqa: F811
    from ml_factory.storage.mirror import fetch_file

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = export_data(server.source(), f"{gcs_bucket}/set/es.parquet", table="bars", symbol="ES=F")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert result.path == f"{gcs_bucket}/set/es.parquet"
    assert len(pd.read_parquet(fetch_file(result.path))) == 1000
    assert json.loads(fetch_file(result.path + ".json").read_text())["file_hash"] == result.file_hash
