"""The file of features is the matrix, and its scaler the matrix's."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from ml_factory.data.plain_parquet import sample_rows
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.errors import BarsError
from ml_factory.features import custom, export
from ml_factory.features.build import FeatureSpec, build_features
from ml_factory.features.export import export_features

SPEC = FeatureSpec(base_minutes=5, frames=(15, 60), families=("momentum", "volume", "calendar"))
ALONE = FeatureSpec(base_minutes=5, frames=(), families=SPEC.families)  # two engines share the base frame's families


def close_over_open(bars):
    return bars.close / bars.open - 1.0


def stored(path, names) -> np.ndarray:
    table = pq.read_table(path)
    assert table.column_names == names
    return np.column_stack([table[name].to_numpy() for name in names])


@pytest.mark.parametrize(
    ("spec", "block", "threads"),
    [(SPEC, export.BLOCK_ROWS, 2), (SPEC, 1000, 2), (SPEC, 4097, 1), (SPEC, 257, 3), (ALONE, 1000, 2)],
)
def test_the_file_holds_the_bits_of_the_matrix(real_bars, tmp_path, monkeypatch, spec, block, threads):
    monkeypatch.setattr(export, "BLOCK_ROWS", block)
    bars, market = real_bars("XAUUSD")
    assert len(export._groups(market, spec)) == (2 if spec is ALONE else 1)
    matrix = build_features(bars, market, spec)
    made = export_features(bars, market, tmp_path / "x.parquet", spec, threads=threads)
    got = stored(tmp_path / "x.parquet", matrix.names)
    np.testing.assert_array_equal(got.view(np.int32), matrix.values.view(np.int32))
    assert (made.names, made.first, len(made)) == (matrix.names, matrix.first, len(matrix))
    np.testing.assert_array_equal(made.known_at, matrix.known_at)
    assert {*made.cpu_s} == {"frames", "columns", "file", *(["joins"] if spec.frames else [])}
    chosen, sample = made.blocks.sample
    assert len(chosen) >= sample_rows(len(matrix))
    np.testing.assert_array_equal(sample.T, matrix.values[chosen])
    train = 2 * len(matrix) // 3
    of_file, of_matrix = RobustScaler.fit_blocks(made.blocks.before(train)), RobustScaler.fit(matrix.values[:train])
    assert of_file.to_dict() == of_matrix.to_dict()


def test_a_feature_of_the_users_is_a_column_too(real_bars, tmp_path, monkeypatch):
    monkeypatch.setattr(custom, "_FEATURES", {})
    custom.feature(close_over_open, memory=1)
    spec = FeatureSpec(base_minutes=5, frames=(30,), families=("momentum",), custom=("close_over_open",))
    bars, market = real_bars("ES")
    matrix = build_features(bars, market, spec)
    export_features(bars, market, tmp_path / "x.parquet", spec)
    np.testing.assert_array_equal(stored(tmp_path / "x.parquet", matrix.names), matrix.values)


def test_work_that_fails_leaves_the_old_file(real_bars, tmp_path, monkeypatch):
    bars, market = real_bars("XAUUSD")
    path = tmp_path / "x.parquet"
    path.write_bytes(b"old")
    count = []

    def fail(*_):
        count.append(1)
        if len(count) > 3:
            raise RuntimeError("torn out")

    monkeypatch.setattr(export, "BLOCK_ROWS", 1000)
    monkeypatch.setattr(export, "_take", fail)
    with pytest.raises(RuntimeError, match="torn out"):
        export_features(bars, market, path, SPEC)
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["x.parquet"]
    with pytest.raises(BarsError, match="Too few bars"):
        export_features(bars[:400], market, path, SPEC)
