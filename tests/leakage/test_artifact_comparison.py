"""Stored and used values beside their references: what is the same passes, what is not is named."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.datasets.scaling import RobustScaler
from ml_factory.leakage.artifact_comparison import (
    apply_tamper,
    compare_artifact_frames,
    compare_artifact_positions,
    compare_artifact_states,
)
from ml_factory.leakage.cut_points import choose_cut_points
from tests.leakage.catalogue import bars_with_events

INDEX = pd.date_range("2024-01-02", periods=6, freq="5min", tz="UTC", name="known_at")


@pytest.fixture
def frame():
    values = np.array([[1.5, np.nan], [2.5, 0.25], [3.5, -1.0], [0.0, 7.0], [9.0, 8.0], [4.0, 2.0]], np.float32)
    return pd.DataFrame(values, index=INDEX, columns=["a", "b"])


def test_compare_frames_same_values_returns_no_difference(frame):
    """Copies, other memory orders, a wider type with the same values and another unit of time are no difference."""
    text = frame.assign(side=pd.Categorical(["u", "l", "u", "v", "v", "u"]))
    same = [frame.copy(), frame.astype(np.float64), frame.set_axis(INDEX.as_unit("us")), frame.iloc[:, [0, 1]]]
    assert [compare_artifact_frames("p", one, frame, "it") for one in same] == [[]] * len(same)
    assert compare_artifact_frames("p", text.copy(), text, "it") == []


@pytest.mark.parametrize(
    ("change", "column", "rows", "first"),
    [
        (lambda x: x.assign(b=np.nextafter(x["b"], np.float32(99))), "b", 5, 1),
        (lambda x: x.assign(a=np.where(x["a"] == 0, np.float32(-0.0), x["a"])), "a", 1, 3),
        (lambda x: x.shift(-1), "a", 6, 0),
        (lambda x: x.drop(index=INDEX[2]), "(rows)", 1, 2),
        (lambda x: x[::-1], "(rows)", 1, 5),
        (lambda x: x[["b", "a"]], "(columns) b", 6, 0),
        (lambda x: x[["b"]], "(columns) a", 6, 0),
    ],
)
def test_compare_frames_changed_values_returns_column_rows_and_first_time(frame, change, column, rows, first):
    found = compare_artifact_frames("features", change(frame), frame, "the stored ones")[0]
    assert (found.column, found.rows, pd.Timestamp(found.first_row)) == (column, rows, INDEX[first])
    assert found.sentence().startswith(f"features: {column} differs from the stored ones in {rows} place")


def test_compare_frames_value_of_other_type_names_type(frame):
    assert "list" in compare_artifact_frames("features", [1], frame, "it")[0].sentence()


def test_compare_positions_changed_split_names_part(frame):
    splits = {"train": np.arange(4), "test": np.arange(5, 9)}
    assert compare_artifact_positions("s", {"train": [0, 1, 2, 3], "test": np.arange(5, 9)}, splits, "the rule") == []
    (more,) = compare_artifact_positions("s", {**splits, "train": np.arange(6)}, splits, "the rule")
    assert (more.column, more.rows) == ("train", 2)
    (mixed,) = compare_artifact_positions("s", {**splits, "test": np.array([6, 5, 7, 8])}, splits, "the rule")
    assert mixed.column == "test"
    assert compare_artifact_positions("s", {"train": splits["train"]}, splits, "the rule")


def test_compare_states_changed_scaler_counts_differing_numbers():
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    fitted = RobustScaler.fit(x)
    assert compare_artifact_states("s", "scaler", fitted, RobustScaler.fit(x.copy()), "it") == []
    (found,) = compare_artifact_states("s", "scaler", RobustScaler.fit(x * [1, 1, 2, 1]), fitted, "it")
    assert (found.column, found.rows) == ("scaler['center']", 1)


def test_apply_tamper_returning_none_uses_value_changed_in_place():
    value = {"a": 1}
    assert apply_tamper(lambda stage, value: value.update(a=2), "fold", value) == {"a": 2}
    assert apply_tamper(None, "fold", value) is value


def test_choose_cuts_random_cuts_spread_over_hours_of_week():
    bars = bars_with_events()
    cuts = [cut for cut in choose_cut_points(bars, "cme", 400) if cut.why == "hour of the week"]
    hours = [pd.Timestamp(cut.quiet).weekday() * 24 + pd.Timestamp(cut.quiet).hour for cut in cuts]
    counts = pd.Series(hours).value_counts()
    open_hours = len({(moment.weekday(), moment.hour) for moment in bars.index})
    assert len(cuts) >= 20 and counts.max() <= -(-len(cuts) // open_hours) + 1
