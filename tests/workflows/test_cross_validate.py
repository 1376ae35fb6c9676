"""Cross-validation of labels whose barriers were searched."""

import pytest

from ml_factory import pipeline
from ml_factory.errors import SettingsError
from ml_factory.targets.barrier_search import BarrierSearchSpec
from tests.small_data import SMALL_DATA

SPEC = BarrierSearchSpec(neutral=(0.02, 0.7), lean=0.5)
SMALL = {"rounds": 5, "depth": 2, "threads": 1}


def folds(place):
    return pipeline.cross_validate(place, "DEMO", 5, "xgboost", folds=3, model_settings=SMALL)


def test_cross_validate_with_barriers_searched_on_tested_rows_raises(prepared):
    """A search on the training rows has seen rows that the folds test."""
    pipeline.search_barriers(prepared, "DEMO", 5, SPEC)
    pipeline.prepare(prepared, "DEMO", (5,), searched="h5-v1", settings=SMALL_DATA)
    with pytest.raises(SettingsError, match=r"searched on rows that the folds test.*saw [\d,]+ rows.*--search"):
        folds(prepared)
    assert not list(prepared.results.rglob("folds.parquet"))  # and nothing was fitted
    pipeline.prepare(prepared, "DEMO", (5,), settings=SMALL_DATA)
    assert len(folds(prepared).fold_table) == 3
