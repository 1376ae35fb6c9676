"""The store: whole or not there, found again by fingerprint, damage never trusted."""

import json
import mmap
import os
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import NotPreparedError, SettingsError, WorkspaceError
from tests.contract import doors

PRINT = doors.fingerprint_json({"bars": 1})
OTHER = doors.fingerprint_json({"bars": 2})


@pytest.fixture(scope="module")
def base():
    return doors.resample_bars(
        synthetic_bars(days=5, kind="null", seed=0), doors.MarketSpec("MES", "cme", 0.25, True), 5
    )


@pytest.fixture(scope="module")
def matrix(base):
    values = np.random.default_rng(0).standard_normal((len(base), 6)).astype(np.float32)
    values[3, 2] = np.nan
    names = ["rsi_14", "rsi_14@60m", "atr", "roc", "hour_sin", "amihud"]
    facts = {name: getattr(base, name) for name in ("known_at", "segment", "close")}
    return SimpleNamespace(values=values, names=names, **facts)


def labels_of(base, horizon: int) -> pd.DataFrame:
    return doors.triple_barrier_labels(
        base, None, doors.LabelSpec(horizon=horizon), doors.MarketSpec("MES", "cme", 0.25, True)
    )


def built(matrix):
    """A build of these features in one piece."""
    return lambda keep: keep(matrix.values, len(matrix.values)) or matrix


def add_horizon(store: doors.DatasetStore, base, horizon: int) -> None:
    labels = labels_of(base, horizon)
    splits = doors.chronological_split(labels, doors.SplitSpec())
    store.write_horizon(horizon, labels, splits, doors.RobustScaler.fit(np.eye(6, dtype=np.float32)))
    store.commit({"horizons": {horizon: {"rows": len(labels)}}})
    store.make_current()


@pytest.fixture
def processed(tmp_path, base, matrix):
    folder = tmp_path / "processed" / "MES"
    store = doors.DatasetStore.begin(folder, PRINT)
    store.write_features(built(matrix))
    add_horizon(store, base, 10)
    return folder


def test_store_load_returns_written_features_rows_labels_and_splits(processed, base, matrix):
    store = doors.DatasetStore.current(processed)
    features = store.load_features()
    assert list(features) == matrix.names == store.feature_names
    np.testing.assert_array_equal(features.to_numpy(), matrix.values)
    assert features.index.name == "known_at" and str(features.index.dtype) == "datetime64[ns, UTC]"
    assert features.index.asi8.tolist() == base.known_at.tolist() and (features.dtypes == np.float32).all()
    rows = store.load_row_facts()
    assert rows["segment"].dtype == np.int32 and (rows["segment"] == base.segment).all()
    assert (rows["close"].to_numpy() == base.close).all()
    labels = labels_of(base, 10)
    pd.testing.assert_frame_equal(store.load_labels(10), labels, check_exact=True, check_freq=False)
    wanted = doors.chronological_split(labels, doors.SplitSpec())
    splits = store.load_splits(10)
    assert list(splits) == list(wanted) and all((splits[name] == wanted[name]).all() for name in wanted)
    assert store.load_scaler(10).to_dict() == doors.RobustScaler.fit(np.eye(6, dtype=np.float32)).to_dict()
    assert store.horizons == (10,) and store.facts["horizons"]["10"]["rows"] == len(labels)


def test_store_features_are_memory_mapped_without_copy(processed, matrix):
    path = processed / PRINT[:12] / "features.npy"
    np.testing.assert_array_equal(np.load(path, allow_pickle=False), matrix.values)
    store = doors.DatasetStore.current(processed)
    values, features = store.values, store.load_features()
    assert values.flags.c_contiguous and not values.flags.writeable and values.dtype == np.float32
    assert isinstance(values.base, mmap.mmap | np.memmap)
    whole = features.to_numpy()
    assert np.shares_memory(whole, features.iloc[10:].to_numpy()) and not whole.flags.owndata
    assert np.shares_memory(whole, features["atr"].to_numpy())
    windows = doors.Windows(whole, np.array([20, 50]), 8)
    assert np.shares_memory(windows.x_NF.numpy(), whole)


def test_store_load_features_by_column_and_time_returns_selected_part(processed, base, matrix):
    store = doors.DatasetStore.current(processed)
    first, last = (pd.Timestamp(int(base.known_at[i]), tz="UTC") for i in (20, 40))
    part = store.load_features(["roc", "rsi_14"], first, last)
    np.testing.assert_array_equal(part.to_numpy(), matrix.values[20:41][:, [3, 0]])
    naive = store.load_features(["roc"], str(first.tz_localize(None)), last.tz_convert("America/Chicago"))
    np.testing.assert_array_equal(naive.to_numpy(), matrix.values[20:41][:, [3]])
    assert len(store.load_features(start=last, end=first)) == 0
    assert len(store.load_features(start=last)) == len(base) - 40
    with pytest.raises(SettingsError, match="did you mean 'rsi_14'"):
        store.load_features(["rsi14"])
    with pytest.raises(SettingsError, match="Not a moment in time"):
        store.load_features(start="soon")


def test_store_added_horizon_keeps_existing_files(processed, base):
    before = {
        name: (processed / PRINT[:12] / name).stat().st_mtime_ns for name in doors.DatasetStore.current(processed).files
    }
    store = doors.DatasetStore.find(processed, PRINT)
    assert store.committed
    add_horizon(store, base, 20)
    again = doors.DatasetStore.find(processed, PRINT)
    assert again.horizons == (10, 20) and set(again.facts["horizons"]) == {"10", "20"}
    for name, moment in before.items():
        assert (again.folder / name).stat().st_mtime_ns == moment  # files never change
    assert len(again.load_labels(10)) and len(again.load_labels(20))
    with pytest.raises(NotPreparedError, match=r"Horizon 5 is not prepared.*horizons 10, 20"):
        again.load_labels(5)


def test_store_two_writers_add_horizons_and_both_are_kept(processed, base):
    one, two = doors.DatasetStore.find(processed, PRINT), doors.DatasetStore.find(processed, PRINT)
    add_horizon(one, base, 5)
    add_horizon(two, base, 15)
    assert doors.DatasetStore.find(processed, PRINT).horizons == (5, 10, 15)


def damage_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_silently(path):
    """Other content, the same size and the same times."""
    facts = path.stat()
    damage_byte(path)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def file_of(processed, part: str):
    (path,) = (processed / PRINT[:12]).glob(f"{part}.*")
    return path


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("features", damage_silently),
        ("rows", os.unlink),
        ("labels_h10", cut),
        ("splits_h10", damage_silently),
        ("scaler_h10", os.unlink),
        ("manifest", cut),
    ],
)
def test_store_damaged_file_is_detected_and_rebuilt(processed, base, matrix, part, damage):
    doors.DatasetStore.current(processed).load_features()
    damage(file_of(processed, part))
    assert (
        doors.DatasetStore.find(processed, PRINT) is None is doors.DatasetStore.find(processed, PRINT[:12] + OTHER[12:])
    )
    store = doors.DatasetStore.begin(processed, PRINT)
    assert not store.committed and store.horizons == ()
    store.write_features(built(matrix))
    add_horizon(store, base, 20)
    whole = doors.DatasetStore.find(processed, PRINT)
    assert whole.verify() == [] and whole.horizons == ((10, 20) if part in ("features", "rows") else (20,))
    np.testing.assert_array_equal(doors.DatasetStore.current(processed).load_features(), matrix.values)


def test_store_load_labels_damaged_file_raises_workspace_error(processed):
    store = doors.DatasetStore.current(processed)
    store.load_labels(10)
    damage_byte(processed / PRINT[:12] / "labels_h10.parquet")
    with pytest.raises(WorkspaceError, match=r"labels_h10.parquet: its content has changed.*run prepare again"):
        store.load_labels(10)
    assert len(store.load_features()) and len(store.verify()) == 1


@pytest.mark.parametrize("stop_after", [0, 3, 5, 6])
def test_store_writer_interrupted_at_any_write_keeps_previous_data_set(
    processed, base, matrix, monkeypatch, stop_after
):
    """The power fails after so many files: the new data set is not there, the old one still is; then it is made."""
    real, count = doors.files.replace, iter(range(100))

    def failing(*args, **kwargs):
        if next(count) >= stop_after:
            raise KeyboardInterrupt
        real(*args, **kwargs)

    monkeypatch.setattr(doors.files, "replace", failing)
    store = doors.DatasetStore.begin(processed, OTHER)
    with pytest.raises(KeyboardInterrupt):
        store.write_features(built(matrix))
        add_horizon(store, base, 20)
    monkeypatch.undo()
    whole = doors.DatasetStore.find(processed, OTHER)
    assert (whole is not None) == (stop_after == 6)  # the manifest is the sixth; the pointer comes after it
    assert doors.DatasetStore.current(processed).fingerprint == PRINT
    if whole is None:
        store = doors.DatasetStore.begin(processed, OTHER)
        assert not store.committed
        store.write_features(built(matrix))
        add_horizon(store, base, 20)
    else:
        whole.make_current()
    assert doors.DatasetStore.current(processed).fingerprint == OTHER and doors.DatasetStore.current(
        processed
    ).horizons == (20,)


def test_store_load_splits_returns_empty_and_scattered_positions(processed, base):
    store = doors.DatasetStore.find(processed, PRINT)
    splits = {"train": np.array([0, 1, 5, 7, 8, 9]), "validation": np.array([], int), "test": np.array([3])}
    store.write_horizon(33, labels_of(base, 10), splits, doors.RobustScaler.fit(np.eye(6, dtype=np.float32)))
    store.commit({"rows": {5: 1, 10: 2}})  # numbers become text in JSON, and sort differently there
    assert doors.DatasetStore.find(processed, PRINT).facts["rows"] == {"5": 1, "10": 2}
    found = store.load_splits(33)
    assert all(found[name].tolist() == splits[name].tolist() and found[name].dtype == np.int64 for name in splits)


def test_store_manifest_that_was_edited_or_leads_outside_counts_as_absent(processed):
    store = doors.DatasetStore.current(processed)
    path = store.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "facts": {}}))
    assert doors.DatasetStore.find(processed, store.fingerprint) is None
    del manifest["hash"]
    manifest["files"]["../../outside.npy"] = {"hash": "0" * 64, "bytes": 1}
    path.write_text(json.dumps({**manifest, "hash": doors.fingerprint_json(manifest)}))
    assert doors.DatasetStore.find(processed, store.fingerprint) is None
    with pytest.raises(NotPreparedError, match="not complete"):
        doors.DatasetStore.current(processed)
    (processed / "current.json").write_text('{"fingerprint": "../../etc"}')
    with pytest.raises(NotPreparedError, match="pointer"):
        doors.DatasetStore.current(processed)


def test_kept_piece_of_features_stays_until_next_one_is_taken_where_pieces_end_without_a_row():
    bars, market = synthetic_bars(days=8, kind="null", seed=0), doors.MarketSpec("MES", "cme", 0.25, True)
    spec, pieces = doors.FeatureSpec(base_minutes=10, frames=(30,), families=("momentum",)), []

    def keep(values, left):
        if pieces:
            np.testing.assert_array_equal(pieces[-1][0], pieces[-1][1])
        pieces.append((values, values.copy(), left))

    cuts = range(len(bars) - 40, len(bars))  # each bar by itself: nine of ten complete no row
    made = doors.build_features(bars, market, spec, states={cut: {} for cut in cuts}, keep=keep)
    wanted = doors.build_features(bars, market, spec)
    np.testing.assert_array_equal(np.concatenate([kept for _, kept, _ in pieces]), wanted.values)
    assert pieces[0][2] == len(wanted) == len(made) and 4 <= len(pieces) < 8 and not len(made.values)
