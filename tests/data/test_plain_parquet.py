"""The file of columns, held against what other readers make of it."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from ml_factory.data import plain_parquet
from ml_factory.data.plain_parquet import ALIGNED, ColumnBlocks, ColumnWriter
from ml_factory.errors import FactoryError, SettingsError

ROWS = [4096, 4096, 1, 777]
NAMES = [f"column_{k}@15m" for k in range(300)] + ["größe"]  # more than one call to the system takes


@pytest.fixture(scope="module")
def blocks() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    wide = [rng.standard_normal((len(NAMES), rows + 5)).astype(np.float32) for rows in ROWS]
    wide[1][3, :4] = [np.nan, np.inf, -np.inf, -0.0]
    return [block[:, 2 : 2 + rows] for block, rows in zip(wide, ROWS, strict=True)]


@pytest.fixture(scope="module")
def file(blocks, tmp_path_factory):
    path = tmp_path_factory.mktemp("columns") / "columns.parquet"
    with ColumnWriter(path, NAMES) as writer:
        for block in blocks:
            writer.write(block)
    return path


def bits(values) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.int32)


def test_a_parquet_reader_gets_every_bit(file, blocks):
    stored = pq.ParquetFile(file)
    table = stored.read()
    assert table.column_names == NAMES
    got = np.stack([table[name].to_numpy() for name in NAMES])
    np.testing.assert_array_equal(bits(got), bits(np.concatenate(blocks, axis=1)))
    metadata = stored.metadata
    assert [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)] == ROWS
    chunk = metadata.row_group(1).column(7)
    assert (chunk.compression, chunk.has_dictionary_page, chunk.physical_type) == ("UNCOMPRESSED", False, "FLOAT")
    assert chunk.total_compressed_size < 4 * ROWS[1] + 64  # one page
    assert not stored.schema_arrow.field(0).nullable
    np.testing.assert_array_equal(stored.read_row_group(3, ["größe"])["größe"].to_numpy(), blocks[3][-1])


def test_blocks_are_mapped_where_they_lie(file, blocks):
    mapped = ColumnBlocks(file, len(NAMES), ROWS)
    assert len(mapped) == len(ROWS)
    for got, want in zip(mapped, blocks, strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))
        assert not got.flags.writeable
    assert mapped[0].ctypes.data % ALIGNED == 0
    assert mapped[0].strides[0] % ALIGNED == 0


@pytest.mark.parametrize("stop", [1, 4096, 4097, 8192, 8193, 8500, 10**9])
def test_rows_before_one(file, blocks, stop):
    cut = list(ColumnBlocks(file, len(NAMES), ROWS).before(stop))
    assert all(block.shape[1] for block in cut)
    want = np.concatenate(blocks, axis=1)[:, :stop]
    np.testing.assert_array_equal(bits(np.concatenate(cut, axis=1)), bits(want))


def test_places_of_pages_are_written_as_one_by_one():
    numbers = [0, 1, 63, 64, 8191, 8192, 2**31, 2**40 + 5, 2**55]
    assert plain_parquet._wholes(np.array(numbers, np.uint64)) == [plain_parquet._whole(n) for n in numbers]


@pytest.mark.parametrize(("part", "stop"), [(slice(0, 301), 10**9), (slice(7, 20), 4097), (slice(300, 301), 8500)])
def test_columns_are_read_a_few_at_a_time(file, blocks, part, stop):
    read = [some.copy() for some in ColumnBlocks(file, len(NAMES), ROWS).before(stop).columns(part)]
    want = np.concatenate(blocks, axis=1)[part, :stop]
    np.testing.assert_array_equal(bits(np.concatenate(read, axis=1)), bits(want))


def test_columns_of_a_file_that_was_cut(file, tmp_path):
    short = tmp_path / "short.parquet"
    short.write_bytes(file.read_bytes()[:100_000])
    with pytest.raises(FactoryError, match="cut short"):
        list(ColumnBlocks(short, len(NAMES), ROWS).columns(slice(0, 301)))


@pytest.mark.parametrize(
    "block", [np.zeros((2, 3)), np.zeros((3, 3), np.float32), np.zeros((3, 2), np.float32).T, np.zeros((2, 0), "f4")]
)
def test_a_block_of_another_form_is_refused(block, tmp_path):
    with (
        ColumnWriter(tmp_path / "x.parquet", ["a", "b"]) as writer,
        pytest.raises(SettingsError, match=r"float32 \(2, n\)"),
    ):
        writer.write(block)
