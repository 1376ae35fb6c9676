"""Everything that is fitted sees the training rows it was given and nothing else, and survives being stored.

A preprocessing step is handed the whole table and the positions of its training rows: whatever the other rows hold, its
state is the same bytes. Calibration and baselines are handed training rows alone; that these are the right ones is for
`audit(tamper=)` to see (test_leaks.py). Each part restored from its state gives the same bits, and a row's output never
depends on the rows around it.
"""

import json

import numpy as np
import pandas as pd
import pytest

from tests.contract import doors

ROWS, COLUMNS, TRAIN = 900, 8, np.r_[0:250, 300:600]  # the rest is purged, validation or test


@pytest.fixture(scope="module")
def table() -> doors.FitTable:
    """Features with ties, gaps and heavy tails, labels that they tell a little of, and the session's clock."""
    rng = np.random.default_rng(2)
    x_NF = rng.standard_t(3, (ROWS, COLUMNS)).astype(np.float32)
    x_NF[:, 1] = x_NF[:, 0] + 0.01 * rng.normal(size=ROWS)
    x_NF[:, 2] = np.round(x_NF[:, 2])
    x_NF[rng.random((ROWS, COLUMNS)) < 0.01] = np.nan
    y = np.digitize(np.nan_to_num(x_NF[:, 0]) + rng.normal(size=ROWS), [-0.8, 0.8]) - 1
    known_at = pd.date_range("2024-03-04 14:35", periods=ROWS, freq="5min", tz="UTC").as_unit("ns").asi8
    p_N3 = rng.dirichlet((4, 5, 4), ROWS)
    return doors.FitTable(x_NF, y.astype(np.int8), rng.uniform(0.2, 2, ROWS), known_at, p_N3, rng.normal(size=ROWS))


def other_rows_disturbed(table: doors.FitTable, rows: np.ndarray) -> doors.FitTable:
    """The same training rows; everything else another market."""
    rng = np.random.default_rng(9)
    outside = np.setdiff1d(np.arange(ROWS), rows)
    x_NF, y, w, p_N3, volatility = (value.copy() for value in (table.x_NF, table.y, table.w, table.p_N3, table.move))
    x_NF[outside] = 1e4 * rng.normal(size=(len(outside), COLUMNS))
    y[outside], w[outside] = 1, 50.0
    p_N3[outside] = rng.dirichlet((1, 1, 1), len(outside))
    volatility[outside] += 7.0
    return doors.FitTable(x_NF, y, w, table.known_at, p_N3, volatility)


def bits(value: object) -> bytes:
    return value.tobytes() if isinstance(value, np.ndarray) else json.dumps(value, sort_keys=True).encode()


@pytest.mark.parametrize("name", doors.PREPROCESSING_STEPS)
def test_rows_outside_training_change_no_bit(name, table):
    part = doors.FITTED[name]
    one, other = part.fit(table, TRAIN), part.fit(other_rows_disturbed(table, TRAIN), TRAIN)
    assert bits(part.state(one)) == bits(part.state(other))
    everything = part.fit(other_rows_disturbed(table, TRAIN), np.arange(ROWS))
    assert bits(part.state(everything)) != bits(part.state(one)), "it depends on the rows it is given"


@pytest.mark.parametrize("name", doors.FITTED)
def test_state_round_trip_keeps_bits(name, table):
    part = doors.FITTED[name]
    fitted = part.fit(table, TRAIN)
    stored = json.loads(json.dumps(part.state(fitted)))
    again = part.restore(stored)
    np.testing.assert_array_equal(part.apply(again, table), part.apply(fitted, table))
    assert bits(part.state(again)) == bits(part.state(fitted))


@pytest.mark.parametrize("name", doors.FITTED)
def test_output_of_first_rows_is_that_of_the_whole(name, table):
    part = doors.FITTED[name]
    fitted = part.fit(table, TRAIN)
    whole = part.apply(fitted, table)
    assert len(whole) == ROWS
    for count in (1, 7, 640):
        np.testing.assert_array_equal(part.apply(fitted, table.first(count)), whole[:count])


def test_every_registered_part_has_a_case():
    assert set(doors.FITTED) == {*doors.PREPROCESSING_STEPS, "clock", "clock_volatility", "calibration"}
