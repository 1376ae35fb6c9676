"""Files in every state: other delimiters, gone, empty, cut short; and what is written is whole."""

import gzip
import os
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ml_factory.errors import BarsError, SettingsError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import RawBarSpec, RollSpec, custom, import_bars, load_bars, read_bars_table, validate_bars
from tests.data.bar_findings import finding_of
from tests.small_data import SMALL_DATA


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def reference(make_raw, workspace) -> str:
    return import_bars(make_raw(), workspace, "MES").fingerprint


@pytest.mark.parametrize("spoil", ["", "volume", "no volume", "holes", "contract"])
def test_imported_bars_are_those_of_the_file_that_is_read_again(spoil, make_raw, workspace):
    raw = make_raw()
    raw.loc[raw.index[300], "high"] *= 1.2
    if spoil == "volume":
        raw["volume"] = raw["volume"].astype(float).where(raw.index % 50 != 0)
    if spoil == "no volume":
        raw = raw.drop(columns="volume")
    if spoil == "holes":
        raw = raw.drop(index=raw.index[100:220])
    if spoil == "contract":
        raw["contract"] = np.where(raw.index < 400, "ESH4", "ESM4")
    imported, (bars, _) = import_bars(raw, workspace, "MES"), validate_bars(raw, symbol="MES")
    read, report = load_bars(workspace, "MES", quality=True)
    pd.testing.assert_frame_equal(bars, read, check_freq=False, check_exact=True)
    assert imported.fingerprint == report.fingerprint and finding_of(report, "spike")


def test_load_bars_after_import_bars_gives_same_fingerprint(make_raw, workspace):
    report = import_bars(make_raw(), workspace, "MES")
    bars, again = load_bars(workspace, "MES")
    assert again.fingerprint == report.fingerprint and len(bars) == 600
    stored = pd.read_parquet(workspace.raw_bars("MES"))
    assert list(stored.columns) == ["timestamp", "open", "high", "low", "close", "volume"]
    assert str(stored["timestamp"].dt.tz) == "UTC"


@pytest.mark.parametrize(
    ("delimiter", "ending", "encoding"),
    [(",", ".csv.gz", "utf-16"), (";", ".csv", "utf-8-sig"), ("\t", ".txt", "utf-16"), ("|", ".csv", "utf-8")],
)
def test_import_bars_csv_with_any_delimiter_or_mark_gives_same_bars(
    make_raw, workspace, tmp_path, reference, delimiter, ending, encoding
):
    path = tmp_path / f"bars{ending}"
    make_raw().to_csv(path, sep=delimiter, index=False, encoding=encoding)
    assert import_bars(path, workspace, "MES").fingerprint == reference


def test_read_table_unquoted_decimal_commas_raises_bars_error(make_raw, tmp_path):
    lines = make_raw(50).to_csv(index=False).splitlines()
    path = tmp_path / "bars.csv"
    path.write_text("\n".join([lines[0], *(line.replace(".", ",") for line in lines[1:])]) + "\n")
    with pytest.raises(BarsError, match=r"11 fields in line 2, wanted 6.*semicolons"):
        read_bars_table(path)


def test_read_table_absent_file_error_suggests_similar_name(tmp_path):
    (tmp_path / "MES_1m.parquet").write_bytes(b"x")
    with pytest.raises(BarsError, match=r"No such file \[.*MES_1min.parquet\].*did you mean 'MES_1m.parquet'"):
        read_bars_table(tmp_path / "MES_1min.parquet")
    with pytest.raises(BarsError, match="Not a file"):
        read_bars_table(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("bars.csv", b"", "The file is empty"), ("bars.parquet", b"\n  \n", "The file is empty"),
     ("bars.csv", b"timestamp,open,high,low,close\n", "a header and no rows"),
     ("bars.parquet", b"timestamp,open\n", "another format"),  # the right name
     ("bars.csv", b"2024-03-05 14:30,1,1,1,1\n" * 9, "The first line is no header"),
     ("bars.csv", b"hello world\nthis is a letter\n", "No columns found"),
     ("bars.csv", bytes(range(128, 256)) * 20, "neither Parquet nor text"),
     ("bars.xlsx", b"PK\x03\x04" + bytes(200), "save the sheet")],
)  # fmt: skip
def test_read_table_of_file_that_is_no_table_raises_bars_error(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BarsError, match=words):
        read_bars_table(tmp_path / name)


def test_read_table_truncated_parquet_raises_bars_error(make_raw, tmp_path):
    path = tmp_path / "bars.parquet"
    make_raw().to_parquet(path)
    whole = path.read_bytes()
    for size in (2, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(BarsError, match="cut short"):
            read_bars_table(path)


def test_read_table_parquet_with_damaged_notes_of_pandas_raises_bars_error(make_raw, tmp_path):
    path = tmp_path / "bars.parquet"
    table = pa.Table.from_pandas(make_raw())
    notes = table.schema.metadata[b"pandas"].replace(b'"pandas_type"', b'"pandas_typo"')
    pq.write_table(table.replace_schema_metadata({b"pandas": notes}), path)
    with pytest.raises(BarsError, match=r"Parquet file cannot be read .*got 'pandas_type'"):
        read_bars_table(path)


def test_read_table_truncated_csv_raises_bars_error_or_adds_note(make_raw, tmp_path):
    path = tmp_path / "bars.csv"
    text = make_raw().to_csv(index=False)
    path.write_text(text[: text.rindex(",") - 8])
    with pytest.raises(BarsError, match="The last line is incomplete"):
        read_bars_table(path)
    path.write_text(text[:-1])
    assert "cut short" in read_bars_table(path).attrs["notes"][0]
    path.write_text(text + "\n" * 70_000)
    assert len(read_bars_table(path)) == len(make_raw())
    packed = gzip.compress(text.encode())
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(BarsError, match="cut short"):
        read_bars_table(path)


def test_read_table_csv_floats_are_exact(make_raw, tmp_path):
    raw = make_raw()
    raw["volume"] = raw["volume"] / 7 * 1e-3
    raw.to_csv(tmp_path / "bars.csv", index=False)
    assert (read_bars_table(tmp_path / "bars.csv")["volume"] == raw["volume"]).all()


def test_import_bars_invalid_bars_keeps_existing_raw_file(make_raw, workspace, reference):
    before = workspace.raw_bars("MES").read_bytes()
    broken = make_raw()
    broken.loc[3, "high"] = 1.0
    with pytest.raises(BarsError, match="row 3"):
        import_bars(broken, workspace, "MES")
    assert workspace.raw_bars("MES").read_bytes() == before
    assert [path.name for path in workspace.raw.iterdir()] == ["MES_1m.parquet"]


def test_import_bars_failed_write_keeps_existing_raw_file(make_raw, workspace, reference, monkeypatch):
    before = workspace.raw_bars("MES").read_bytes()

    def fail(self, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fail)
    with pytest.raises(ValueError, match=r"[Nn]o space left"):
        import_bars(make_raw(700), workspace, "MES")
    assert workspace.raw_bars("MES").read_bytes() == before
    assert not list(workspace.raw.glob(".*"))


def test_import_bars_replacing_twice_keeps_original_as_previous_file(make_raw, workspace, reference):
    import_bars(make_raw(700), workspace, "MES")
    import_bars(make_raw(700), workspace, "MES")  # once more: the bars before these are still the previous ones
    kept = workspace.raw / "MES_1m.previous.parquet"
    assert len(pd.read_parquet(kept)) == 600 and load_bars(workspace, "MES")[1].rows == 700


def test_import_bars_of_workspace_raw_file_leaves_file_unchanged(workspace, reference):
    path = workspace.raw_bars("MES")
    before = path.read_bytes()
    assert import_bars(path, workspace, "MES").fingerprint == reference and path.read_bytes() == before


@pytest.fixture
def two_contracts(make_raw) -> pd.DataFrame:
    """ESH4 and the same prices 5 % higher as ESM4, naive local times; ESM4 leads from the second day on."""
    near = make_raw(3000, "2024-03-05 00:00").assign(expiry="ESH4")
    far = near.assign(expiry="ESM4", volume=np.where(np.arange(3000) < 1320, 1.0, 999.0))
    far[["open", "high", "low", "close"]] *= 1.05
    both = pd.concat([far, near, near.iloc[:5]])  # out of order, a few rows twice
    return both.assign(timestamp=both["timestamp"].dt.tz_convert("America/Chicago").dt.tz_localize(None))


def test_import_bars_several_contracts_with_roll_spec_joins_contracts(two_contracts, workspace, tmp_path):
    two_contracts.to_csv(tmp_path / "es.csv", index=False)
    spec = RawBarSpec(zone="America/Chicago")
    with pytest.raises(BarsError, match=r"several values of 'expiry'.*--roll volume"):
        import_bars(tmp_path / "es.csv", workspace, "ES", spec)
    assert not workspace.raw_bars("ES").exists()
    report = import_bars(tmp_path / "es.csv", workspace, "ES", spec, roll=RollSpec(first="ESH4"))
    kinds = [finding.kind for finding in report.findings]
    assert kinds.count("rolled") == 2 and "unjoined_roll" not in kinds and "text_time" in kinds
    bars, again = load_bars(workspace, "ES")
    assert again.fingerprint == report.fingerprint and again.rows == 3000
    assert bars["contract"].unique().tolist() == [202403, 202406] and bars["contract"].dtype == np.int32
    near = two_contracts.iloc[3000:6000]
    traded = near["close"].to_numpy() * np.where(bars["contract"] == 202406, 1.05, 1.0)
    assert np.allclose(bars["close"], traded, rtol=1e-12)
    assert np.allclose(bars["close"] * bars["chain"], near["close"], rtol=1e-12)
    before = workspace.raw_bars("ES").read_bytes()
    import_bars(tmp_path / "es.csv", workspace, "ES", spec, roll=RollSpec(first="ESH4"))
    assert workspace.raw_bars("ES").read_bytes() == before and len(list(workspace.raw.iterdir())) == 1


def test_import_bars_impossible_roll_raises_and_writes_no_file(two_contracts, make_raw, workspace):
    spec = RawBarSpec(zone="America/Chicago")
    with pytest.raises(BarsError, match=r"name no contract.*leave --roll out"):
        import_bars(make_raw(), workspace, "ES", roll=RollSpec())
    with pytest.raises(BarsError, match=r"No bars.*0 rows"):
        import_bars(two_contracts.iloc[:0], workspace, "ES", spec, roll=RollSpec())
    with pytest.raises(BarsError, match="session that decides"):
        import_bars(
            two_contracts[two_contracts["timestamp"] < "2024-03-05 12:00"], workspace, "ES", spec, roll=RollSpec()
        )
    broken = two_contracts.reset_index(drop=True)
    broken.loc[7, "high"] = 1.0
    with pytest.raises(BarsError, match="row 7"):
        import_bars(broken, workspace, "ES", spec, roll=RollSpec())
    with pytest.raises(SettingsError, match="cme, nymex, comex"):
        import_bars(two_contracts, workspace, "ES", spec, roll=RollSpec(), calendar="cmee")
    assert not list(workspace.raw.iterdir())


def test_import_bars_contracts_without_common_minute_reports_unjoined_roll(two_contracts, workspace):
    early = two_contracts["timestamp"] < "2024-03-05 17:00"
    apart = two_contracts[early == (two_contracts["expiry"] == "ESH4")]
    report = import_bars(apart, workspace, "ES", RawBarSpec(zone="America/Chicago"), roll=RollSpec(first="ESH4"))
    reported = [finding for finding in report.findings if finding.kind == "unjoined_roll"]
    assert (
        len(reported) == 1
        and reported[0].severity == "reported"
        and "ESH4 and ESM4 never traded" in reported[0].message
    )


def test_prepare_with_mid_session_roll_ends_labels_at_roll(shared_data, tmp_path, monkeypatch):
    from ml_factory import pipeline  # here, since no other test of this file needs it and it takes a second

    table = pd.read_parquet(shared_data / "bars" / "ES_contracts_lean_1m.parquet")
    table[table["timestamp"] < "2014"].to_parquet(tmp_path / "es.parquet")
    at = pd.Timestamp("2013-12-18 15:00", tz="UTC")
    rolled = RollSpec(forced=(("ES201403", str(at)),))
    monkeypatch.setattr(custom, "_FEATURES", {})
    custom.feature(lambda bars: np.append(0.0, np.diff(np.log(bars.close))), memory=2, name="last_step")
    settings = replace(SMALL_DATA, features=replace(SMALL_DATA.features, custom=("last_step",)))
    source, place = tmp_path / "es.parquet", tmp_path / "workspace"
    pipeline.prepare(place, "ES", (20,), data=source, roll=rolled, settings=settings)
    assert pipeline.certificate(tmp_path / "workspace", "ES", 20).passed  # also of cuts before the first roll
    stored = pipeline.load_features(place, "ES")["last_step"]
    tried = pipeline.try_feature(place, "ES", "last_step")[stored.index]
    assert np.array_equal(tried.astype("float32"), stored)  # at prices without the roll's step
    labels = pipeline.load_labels(tmp_path / "workspace", "ES", 20)
    before = labels[(labels.index <= at) & (labels.index > at - pd.Timedelta("100min"))]
    assert len(before) > 15 and (before["label_end"] <= at + pd.Timedelta("5min")).all()
    with pytest.raises(SettingsError, match="nothing to roll"):
        pipeline.prepare(tmp_path / "workspace", "ES", (20,), roll=rolled)


def test_read_table_of_pipe_or_device_raises_without_reading_it(tmp_path):
    os.mkfifo(tmp_path / "bars.csv")
    (tmp_path / "zeros.csv").symlink_to("/dev/zero")
    for path in (tmp_path / "bars.csv", tmp_path / "zeros.csv", "/dev/zero", "/dev/null"):
        with pytest.raises(BarsError, match="not a regular file"):
            read_bars_table(path)


def test_read_table_of_csv_with_endless_field_raises(tmp_path):
    text = "timestamp,open,high,low,close\n2024-01-01,1,1,1,1\n" + "1" * 200_000 + ",1,1\n"
    (tmp_path / "bars.csv").write_text(text)
    with pytest.raises(BarsError, match="not a table of bars"):
        read_bars_table(tmp_path / "bars.csv", skip_bad=True)
