"""The clock offset: which column of prepared data it reads, and where there is none."""

from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import SettingsError
from ml_factory.features.build import FeatureSpec
from ml_factory.workflows.prepared_dataset import PreparedDataset, resolve_dataset_settings


def reading(columns: list[str], *steps: str | dict) -> PreparedDataset:
    """A data set of these columns and steps, without rows."""
    nothing, settings = np.empty(0), {"features": asdict(FeatureSpec()), "preprocess": list(steps)}
    features = pd.DataFrame(columns=columns)
    return PreparedDataset("DEMO", 5, "", features, nothing, nothing, pd.DataFrame(), {}, None, {"data": settings})


@pytest.mark.parametrize(
    ("steps", "given", "wanted"),
    [
        (["robust"], {}, {"offset_column": 1, "offset_bars": 5}),
        ([{"step": "standard"}], {"offset": "clock"}, {"offset_column": 1, "offset_bars": 5}),
        (["robust"], {"offset": "none", "rounds": 3}, {"rounds": 3}),
        (["robust"], {"offset_column": 0}, {"offset_column": 0}),
        (["quantile"], {}, {}),  # equal steps of the clock are no longer equal
        (["pca", "robust"], {}, {}),
    ],
)
def test_resolve_data_settings_clock_offset_needs_evenly_scaled_column(steps, given, wanted):
    assert resolve_dataset_settings(reading(["rsi_14", "session_progress"], *steps), given) == wanted


def test_resolve_data_settings_unavailable_offset_raises():
    with pytest.raises(SettingsError, match=r"\[offset\]"):
        resolve_dataset_settings(reading(["session_progress"], "robust"), {"offset": "hour"})
    for columns, steps in ((["rsi_14"], ["robust"]), (["session_progress"], ["quantile"])):
        with pytest.raises(SettingsError, match=r"\[offset\].*leave offset out"):
            resolve_dataset_settings(reading(columns, *steps), {"offset": "clock"})
