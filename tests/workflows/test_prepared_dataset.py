"""Rows that a training takes from prepared data."""

import numpy as np
import pytest

from ml_factory.workflows.prepared_dataset import limit_training_rows


@pytest.mark.parametrize(("limit", "count", "kept"), [(0, 300, 300), (100, 100, 100), (100, 101, 100), (100, 300, 100)])
def test_limit_training_rows_keeps_at_most_the_limit(limit, count, kept):
    rows = np.arange(count) * 2
    found, described = limit_training_rows(rows, limit)
    assert len(found) == kept and np.isin(found, rows).all()
    assert described == ({} if kept == count else {"training rows": f"{kept:,} of {count:,}"})
