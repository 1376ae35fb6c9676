"""Rows that a training takes from prepared data."""

from functools import partial

import numpy as np
import pytest

from ml_factory.workflows import prepared_dataset
from ml_factory.workflows.prepared_dataset import limit_quick_training_rows


@pytest.mark.parametrize(
    ("quick", "count", "kept"), [(False, 300, 300), (True, 100, 100), (True, 101, 100), (True, 300, 100)]
)
def test_limit_quick_training_rows_limits_quick_runs_alone(monkeypatch, quick, count, kept):
    monkeypatch.setattr(prepared_dataset, "QuickLimits", partial(prepared_dataset.QuickLimits, train_rows=100))
    rows = np.arange(count) * 2
    found, described = limit_quick_training_rows(rows, quick)
    assert len(found) == kept and np.isin(found, rows).all()
    assert described == ({} if kept == count else {"training rows": f"{kept:,} of {count:,}"})
