from dataclasses import dataclass

import numpy as np
import pytest

from ml_factory.errors import CheckpointError, FactoryError
from ml_factory.models import base, rows


@dataclass(frozen=True)
class Settings:
    epochs: int = 10
    rate: float = 0.5


def test_class_index_maps_labels_to_columns_and_rejects_others():
    np.testing.assert_array_equal(rows.labels_to_class_index(np.array([1, -1, 0], np.int8)), [2, 0, 1])
    with pytest.raises(FactoryError, match=r"y, row 2"):
        rows.labels_to_class_index([0, 1, 0.5])
    with pytest.raises(FactoryError, match="one column"):
        rows.labels_to_class_index([[0, 1]])


def test_apply_limits_lowers_only_existing_larger_settings():
    settings, lowered = base.apply_fit_limits(Settings(), {"epochs": 3, "rate": 0.9, "rounds": 4})
    assert settings == Settings(epochs=3) and lowered == {"epochs": {"wanted": 10, "used": 3}}
    assert base.apply_fit_limits(Settings(), None) == (Settings(), {})
    assert base.apply_fit_limits(Settings(), {"epochs": 10}) == (Settings(), {})


def test_check_rows_ignores_rows_with_zero_weight():
    rows.check_training_rows(2, [0, 1], [1, 1], where="training")
    with pytest.raises(FactoryError, match="fewer than two classes"):
        rows.check_training_rows(2, [0, 1], [1, 0], where="training")
    rows.check_training_rows(2, [1, 1], None, where="validation")
    with pytest.raises(FactoryError, match="No row has weight"):
        rows.check_training_rows(2, [1, 1], [0, 0], where="validation")


def test_check_same_run_different_settings_or_data_raises_checkpoint_error():
    run = {"model": "lstm", "settings": {"epochs": 3}, "data": rows.training_data_checksum(4, np.arange(3))}
    base.check_checkpoint_of_same_fit(run, dict(run))
    for part, other in (("settings", {"epochs": 4}), ("data", rows.training_data_checksum(4, np.arange(1, 4)))):
        with pytest.raises(CheckpointError, match=rf"another run \[{part}\]"):
            base.check_checkpoint_of_same_fit({**run, part: other}, run)
    with pytest.raises(CheckpointError, match=r"Another version.*\[lstm\].*ml_factory train --model lstm --fresh"):
        base.check_checkpoint_of_same_fit(run, run | {"format": base.STATE_FORMAT})


def test_environment_differences_are_listed_as_sentences():
    here = {"processor": base.processor_name(), "threads": 1, "torch": "2.13"}
    assert base.describe_differences(here, dict(here)) == ()
    assert base.describe_differences({**here, "threads": 2}, here) == ("threads: began with 2, now 1",)
    assert base.merge_inexact_reasons(["a"], ["b", "a"]) == ["a", "b"]
