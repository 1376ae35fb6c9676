from dataclasses import dataclass

import numpy as np
import pytest

from ml_factory.errors import CheckpointError, FactoryError
from ml_factory.models import base


@dataclass(frozen=True)
class Settings:
    epochs: int = 10
    rate: float = 0.5


def test_labels_become_columns():
    np.testing.assert_array_equal(base.class_index(np.array([1, -1, 0], np.int8)), [2, 0, 1])
    with pytest.raises(FactoryError, match=r"y, row 2"):
        base.class_index([0, 1, 0.5])
    with pytest.raises(FactoryError, match="one column"):
        base.class_index([[0, 1]])


def test_limits_only_lower_and_only_what_is_there():
    settings, lowered = base.apply_limits(Settings(), {"epochs": 3, "rate": 0.9, "rounds": 4})
    assert settings == Settings(epochs=3) and lowered == {"epochs": {"wanted": 10, "used": 3}}
    assert base.apply_limits(Settings(), None) == (Settings(), {})


def test_weightless_rows_do_not_count_as_a_class():
    base.check_rows(2, [0, 1], [1, 1], where="training")
    with pytest.raises(FactoryError, match="fewer than two classes"):
        base.check_rows(2, [0, 1], [1, 0], where="training")
    base.check_rows(2, [1, 1], None, where="validation")
    with pytest.raises(FactoryError, match="No row has weight"):
        base.check_rows(2, [1, 1], [0, 0], where="validation")


def test_another_run_is_refused_by_its_differing_part():
    run = {"model": "lstm", "settings": {"epochs": 3}, "data": base.data_signature(4, np.arange(3))}
    base.check_same_run(run, dict(run))
    for part, other in (("settings", {"epochs": 4}), ("data", base.data_signature(4, np.arange(1, 4)))):
        with pytest.raises(CheckpointError, match=rf"another run \[{part}\]"):
            base.check_same_run({**run, part: other}, run)


def test_each_difference_of_machines_is_a_sentence():
    here = base.environment(threads=1, torch="2.13")
    assert base.describe_differences(here, dict(here)) == ()
    assert base.describe_differences({**here, "threads": 2}, here) == ("threads: began with 2, now 1",)
    assert base.union(["a"], ["b", "a"]) == ["a", "b"]
