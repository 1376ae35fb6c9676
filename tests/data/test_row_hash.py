"""The hash of rows tells rows apart that exports confuse: absent values, zeros, values of the other column."""

import itertools

import pyarrow
import pytest

from ml_factory.data.databases.columns import Column
from ml_factory.data.databases.row_hash import hash_rows

TYPES = {
    "float": (pyarrow.float64(), (None, 0.0, 1.0)), "integer": (pyarrow.int64(), (None, 0, 1)),
    "text": (pyarrow.string(), (None, "", "0")),
}  # fmt: skip


def hash_of(kind: str, *rows: tuple) -> int:
    columns = [Column(f"c{number}", kind) for number in range(len(rows[0]))]
    arrays = [pyarrow.array(values, TYPES[kind][0]) for values in zip(*rows, strict=True)]
    return hash_rows(pyarrow.RecordBatch.from_arrays(arrays, [column.name for column in columns]), columns)


@pytest.mark.parametrize("kind", TYPES)
def test_hash_rows_of_absent_values_zeros_and_ones_in_four_columns_is_distinct(kind):
    rows = list(itertools.product(TYPES[kind][1], repeat=4))
    assert len({hash_of(kind, row) for row in rows}) == len(rows)


def test_hash_rows_of_rows_in_other_order_is_equal_and_of_doubled_row_is_not():
    rows = [(1.0, None), (2.0, 0.0), (None, 3.0)]
    assert hash_of("float", *rows) == hash_of("float", *rows[::-1])
    assert hash_of("float", *rows) != hash_of("float", *rows, rows[0])
    assert hash_of("float", (1.0, 2.0), (3.0, 4.0)) != hash_of("float", (3.0, 2.0), (1.0, 4.0))
