"""Which questions are refused: counts by hand, and the exchanges' published hours."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import FactoryError
from tests.contract.doors import check_class_sufficiency, check_horizon_fits_session, longest_session_bars

SIDES, BETS = {"short": -1, "neutral": 0, "long": 1}, {"pass": 0, "act": 1}


def question(y, ambiguous=()):
    barrier = np.full(len(y), "upper", dtype=object)
    barrier[list(ambiguous)] = "ambiguous"
    return pd.DataFrame({"label": y, "barrier": barrier})


SPLITS = {"train": np.arange(4), "validation": np.arange(4, 6), "test": np.arange(6, 8)}


def test_check_classes_all_in_training_and_two_in_other_parts_pass():
    check_class_sufficiency(question([-1, 0, 1, 1, 0, 1, -1, 0]), SPLITS, SIDES)
    check_class_sufficiency(question([0, 1, 1, 1, 0, 1, 1, 0]), SPLITS, BETS)


@pytest.mark.parametrize(
    ("labels", "classes", "words"),
    [
        (question([-1, 0, 0, -1, 0, 1, -1, 0]), SIDES, "train rows.*short 2, neutral 2, long 0.*every class"),
        (question([-1, 0, 1, 1, 0, 0, -1, 0]), SIDES, "validation rows.*short 0, neutral 2, long 0.*two classes"),
        (question([-1, 0, 1, 1, 0, 1, 0, 0]), SIDES, "test rows.*short 0, neutral 2, long 0"),
        (question([-1, 0, 1, 0, 0, 1, -1, 0], ambiguous=[2]), SIDES, "train rows.*long 0"),
        (question([0, 1, 1, 1, 0, 1, 1, 1]), BETS, "test rows.*pass 0, act 2"),
    ],
)
def test_check_classes_absent_class_error_names_part(labels, classes, words):
    with pytest.raises(FactoryError, match=f"(?s){words}"):
        check_class_sufficiency(labels, SPLITS, classes)


@pytest.mark.parametrize(
    ("calendar", "minutes", "bars"), [("cme", 5, 276), ("us_equity", 5, 78), ("24h", 1, 1440), ("fx", 5, 288)]
)
def test_longest_session_equals_exchange_trading_day(calendar, minutes, bars):
    start = pd.DatetimeIndex(["2024-03-04 15:00", "2024-03-04 16:00"]).as_unit("ns").asi8
    assert longest_session_bars(start, calendar, minutes) == bars


def test_check_horizon_fits_horizon_of_full_session_raises_error():
    check_horizon_fits_session(77, "session", 78)
    check_horizon_fits_session(5000, "span", 78)
    for session_end in ("session", "drop"):
        with pytest.raises(FactoryError, match="longest session has 78"):
            check_horizon_fits_session(78, session_end, 78)
