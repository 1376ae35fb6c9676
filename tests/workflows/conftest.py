"""Prepared data that several files read, each its own: some add runs to it."""

import pytest

from ml_factory import pipeline
from ml_factory.data.io import import_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import backtest
from ml_factory.workflows.prepared_dataset import PreparedDataset, load_dataset
from tests.small_data import SMALL_DATA


@pytest.fixture(scope="package", autouse=True)
def few_shifts():
    """A backtest of every report trades 5 shifts of the forecasts, not 20."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backtest, "SHIFTS", 5)
        yield


@pytest.fixture(scope="module")
def sixteen_days(tmp_path_factory) -> tuple[Workspace, PreparedDataset]:
    """A market with an edge, prepared for labels of ten bars."""
    workspace = Workspace(tmp_path_factory.mktemp("sixteen"))
    import_bars(synthetic_bars(days=16, kind="planted", seed=2).reset_index(), workspace, "MES")
    pipeline.prepare(workspace, "MES", (10,), settings=SMALL_DATA)
    return workspace, load_dataset(workspace, "MES", 10)
