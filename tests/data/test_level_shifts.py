"""Level shifts: which bars count as traded, and what the finding says."""

import numpy as np
import pytest

from ml_factory.data.level_shifts import LevelShifts, _traded, level_shift_findings

EMPTY = np.empty(0, np.int64)


@pytest.mark.parametrize(("flat", "traded"), [(9, True), (10, False), (11, False)])
def test_traded_counts_twenty_bars_around_row_and_no_other(flat, traded):
    high, low = np.ones(60), np.zeros(60)
    high[:20] = high[40:] = 0.0  # flat bars outside the twenty count nowhere
    high[30 : 30 + flat] = 0.0
    if flat > 10:
        high[30:40], high[29] = 0.0, 0.0
    assert _traded({"high": high, "low": low}, np.array([30])).tolist() == [traded]


@pytest.mark.parametrize(("count", "shown"), [(1, "(by 2)"), (3, "(by 2, 2, 2)"), (4, "(by 2, 2, 2, ...)")])
def test_level_shift_finding_shows_first_three_ratios(count, shown):
    rows = np.arange(1, 2 * count, 2)
    close = np.zeros(2 * count)
    log = {"open": np.where(np.arange(2 * count) % 2, np.log(2.0), 0.0), "close": close}
    (finding,) = level_shift_findings(LevelShifts(np.zeros(2 * count, np.int64), rows, EMPTY), log)
    assert shown in finding.message and "a split" in finding.message
