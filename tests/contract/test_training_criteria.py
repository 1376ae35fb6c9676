"""The criteria of the TPU guide's success table, on histories whose answer is known."""

import pandas as pd
import pytest

from tests.contract.doors import training_criteria_table


def history(val: list[float], train: float = 1.0, seconds: float = 2.0) -> pd.DataFrame:
    return pd.DataFrame({"epoch": range(1, len(val) + 1), "train_loss": train, "val_loss": val, "seconds": seconds})


@pytest.mark.parametrize(
    ("val", "met"),
    [
        ([1.2, 1.1, 1.05, 1.04, 1.041, 1.042], "yes"),
        ([1.5, 1.4, 1.3, 1.2, 1.1, 1.0], "no"),
        ([1.2, 1.0, 1.1, 1.2, 1.3, 1.4], "no"),
        ([1.0, 1.0], "no"),
    ],
)
def test_training_criteria_stable_minimum_needs_a_flat_last_third(val, met):
    assert training_criteria_table(history(val), {}).loc["validation loss at a stable minimum", "met"] == met


def test_training_criteria_gap_between_validation_and_training_is_measured_at_best_epoch():
    near = "validation loss near training loss"
    assert training_criteria_table(history([3.0, 1.09, 1.2]), {}).loc[near, "met"] == "yes"
    assert training_criteria_table(history([3.0, 1.11, 1.2]), {}).loc[near, "met"] == "no"


@pytest.mark.parametrize(
    ("device", "seconds", "met"), [("cuda", 2.0, "no"), ("xla:0", 0.19, "yes"), ("cpu", 2.0, None)]
)
def test_training_criteria_speed_is_compared_on_an_accelerator_alone(device, seconds, met):
    cpu = history([1.0], seconds=2.0)
    table = training_criteria_table(history([1.0, 1.0, 1.0], seconds=seconds), {"device": device}, cpu)
    assert table.loc["time of an epoch compared with the CPU", "met"] == (met or "not measured")
    assert len(table) == 3 and not table["measured"].isna().any()
