"""Bad rows of a CSV: all at once, by line of the file; skipped where asked; columns under names of their own."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.io import import_bars, load_bars
from ml_factory.data.validation import RawBarSpec
from ml_factory.errors import BarsError, NotPreparedError, SettingsError, WorkspaceError
from ml_factory.storage.mirror import Mirror
from ml_factory.storage.remote import Remote
from ml_factory.storage.workspace import Workspace
from tests.storage.gcs import gcs_bucket  # noqa: F401 - a fixture


@pytest.fixture
def place(tmp_path) -> Workspace:
    return Workspace(tmp_path / "w")


@pytest.fixture
def spoiled(make_raw, tmp_path):
    """A CSV of 400 bars with five bad lines (and a blank one before them), and the lines' numbers."""
    lines = make_raw(400).to_csv(index=False).splitlines()
    lines.insert(5, "")
    lines[10] = lines[10].replace(lines[10].split(",")[4], "n/a-ish", 1)
    lines[20] = "yesterday," + lines[20].split(",", 1)[1]
    stamp, first, high, low, close, volume = lines[30].split(",")
    lines[30] = ",".join([stamp, first, low, high, close, volume]) if high != low else lines[30]
    lines[40] = ",".join([*lines[40].split(",")[:5], "-3"])
    lines[50] = ",".join([*lines[50].split(",")[:4], "", lines[50].split(",")[5]])
    path = tmp_path / "spoiled.csv"
    path.write_text("\n".join(lines) + "\n")
    return path, [11, 21, 31, 41, 51], lines


def test_import_bars_bad_csv_rows_error_lists_all_lines_with_text(spoiled, place):
    path, numbers, lines = spoiled
    with pytest.raises(BarsError) as caught:
        import_bars(path, place, "MES")
    message = str(caught.value)
    assert "5 bad rows in all" in message and "--skip-bad" in message
    for number in numbers:
        assert f"line {number}: {lines[number - 1]!r}" in message
    assert not place.raw_bars("MES").exists()


def test_import_bars_skip_bad_drops_bad_rows_and_writes_skipped_list(spoiled, place, make_raw):
    path, numbers, lines = spoiled
    lines[60] += ",one field more"
    path.write_text("\n".join(lines) + "\n")
    report = import_bars(path, place, "MES", RawBarSpec(skip_bad=True))
    finding = report.get_finding("skipped_rows")
    assert "6 bad rows of 400 skipped: line 11" in finding.message
    listed = pd.read_csv(place.raw / "MES_skipped.csv")
    assert listed["line"].tolist() == [*numbers, 61] and listed["text"].tolist() == [
        lines[k - 1] for k in listed["line"]
    ]
    kept, _ = load_bars(place, "MES")
    rows = np.delete(np.arange(400), [number - 3 for number in listed["line"]])  # header, and the blank line
    want = make_raw(400).iloc[rows]
    assert kept.index.equals(pd.DatetimeIndex(want["timestamp"]).as_unit(kept.index.unit))
    np.testing.assert_array_equal(kept["close"], want["close"])


def test_import_bars_skip_bad_clean_file_keeps_all_rows(make_raw, place, tmp_path):
    make_raw(400).to_csv(tmp_path / "clean.csv", index=False)
    report = import_bars(tmp_path / "clean.csv", place, "MES", RawBarSpec(skip_bad=True))
    assert (
        report.get_finding("skipped_rows") is None
        and report.rows == 400
        and not (place.raw / "MES_skipped.csv").exists()
    )


def test_import_bars_lines_with_extra_fields_error_lists_all_lines(make_raw, place, tmp_path):
    lines = make_raw(400).to_csv(index=False).splitlines()
    for number in (101, 201):
        lines[number - 1] += ",more"
    lines[150] = "n" + lines[150]
    (tmp_path / "long.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(BarsError, match=r"3 bad rows in all: line 101: .*line 151: .*line 201: "):
        import_bars(tmp_path / "long.csv", place, "MES")


def test_import_bars_with_column_mapping_reads_mapped_columns(make_raw, place, tmp_path):
    raw = make_raw(400)
    spelled = raw.rename(columns={"close": "Schluss", "open": "Anfang"}).assign(close=1.0)  # a decoy
    spelled.to_csv(tmp_path / "german.csv", index=False)
    spec = RawBarSpec(columns=(("close", "Schluss"), ("open", "Anfang")))
    import_bars(tmp_path / "german.csv", place, "MES", spec)
    kept, _ = load_bars(place, "MES")
    np.testing.assert_array_equal(kept[["open", "close"]], raw[["open", "close"]])
    adjusted = raw.rename(columns={"close": "Close"}).assign(**{"Close": 1.0, "Adj Close": raw["close"]})
    adjusted.to_csv(tmp_path / "adjusted.csv", index=False)
    import_bars(tmp_path / "adjusted.csv", place, "ES", RawBarSpec(columns=(("close", "Adj Close"),)))
    np.testing.assert_array_equal(load_bars(place, "ES")[0]["close"], raw["close"])
    with pytest.raises(BarsError, match=r"Schlus=|did you mean|one of 'timestamp'"):
        import_bars(tmp_path / "german.csv", place, "MES", RawBarSpec(columns=(("close", "Schlus"),)))
    with pytest.raises(SettingsError, match="no such column of bars"):
        RawBarSpec(columns=(("clse", "Schluss"),))


def test_load_bars_unknown_symbol_error_lists_existing_symbols(make_raw, place, tmp_path):
    make_raw(400).to_csv(tmp_path / "clean.csv", index=False)
    for symbol in ("MES", "NQ"):
        import_bars(tmp_path / "clean.csv", place, symbol)
    with pytest.raises(NotPreparedError, match="symbols here: MES, NQ"):
        load_bars(place, "MESS")


def test_import_bars_bucket_address_twice_downloads_file_once(gcs_bucket, make_raw, place, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = Mirror(gcs_bucket, tmp_path / "theirs")
    make_raw(400).to_csv(there.folder / "bars.csv", index=False)
    (there.folder / "other.csv").write_text("not asked for")
    there.push()
    address, copies = f"{gcs_bucket}/bars.csv", []
    get = Remote.get
    monkeypatch.setattr(
        Remote, "get", lambda self, name, *given, **more: (copies.append(name), get(self, name, *given, **more))
    )
    for _ in range(2):
        assert import_bars(address, place, "MES").rows == 400
    assert copies == ["bars.csv"]
    with pytest.raises(WorkspaceError, match=r"absent\.csv"):
        import_bars(f"{gcs_bucket}/absent.csv", place, "MES")
