"""Which questions are refused: counts by hand, and the exchanges' published hours."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.errors import FactoryError
from ml_factory.targets.label_sufficiency import check_classes, check_horizon_fits, longest_session

SIDES, BETS = {"short": -1, "neutral": 0, "long": 1}, {"pass": 0, "act": 1}


def question(y, ambiguous=()):
    barrier = np.full(len(y), "upper", dtype=object)
    barrier[list(ambiguous)] = "ambiguous"
    return pd.DataFrame({"label": y, "barrier": barrier})


SPLITS = {"train": np.arange(4), "validation": np.arange(4, 6), "test": np.arange(6, 8)}


def test_every_class_in_training_and_two_in_each_other_part_pass():
    check_classes(question([-1, 0, 1, 1, 0, 1, -1, 0]), SPLITS, SIDES)
    check_classes(question([0, 1, 1, 1, 0, 1, 1, 0]), SPLITS, BETS)


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
def test_absent_classes_are_refused_by_part(labels, classes, words):
    with pytest.raises(FactoryError, match=f"(?s){words}"):
        check_classes(labels, SPLITS, classes)


@pytest.mark.parametrize(
    ("calendar", "minutes", "bars"), [("cme", 5, 276), ("us_equity", 5, 78), ("24h", 1, 1440), ("fx", 5, 288)]
)
def test_longest_session_is_the_exchange_s_day(calendar, minutes, bars):
    start = pd.DatetimeIndex(["2024-03-04 15:00", "2024-03-04 16:00"]).as_unit("ns").asi8
    assert longest_session(start, calendar, minutes) == bars


def test_horizon_of_all_bars_of_a_session_is_refused_and_one_less_passes():
    check_horizon_fits(77, "session", 78)
    check_horizon_fits(5000, "span", 78)
    for session_end in ("session", "drop"):
        with pytest.raises(FactoryError, match="longest session has 78"):
            check_horizon_fits(78, session_end, 78)
