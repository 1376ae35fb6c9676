"""The interval of a mean gain: its parts against loops and statsmodels, its behaviour on null series, its refusals."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from benchmarks.intervals import HORIZON, null_gains, times_of
from tests.contract import doors

EVENTS = pd.date_range("2024-01-01", periods=400, freq="5h", tz="UTC")


def newey_west_by_loops(v, w, lags):
    mean = sum(w * v) / sum(w)
    u = w * (v - mean) / (sum(w) / len(w))
    total = sum(u * u)
    for lag in range(1, lags + 1):
        total += 2 * (1 - lag / (lags + 1)) * sum(u[lag:] * u[:-lag])
    return np.sqrt(total) / len(u)


# ---- the parts -------------------------------------------------------------------------------------------------


def test_newey_west_equals_loops_and_fixed_b_factor():
    rng = np.random.default_rng(0)
    v, w = np.convolve(rng.normal(size=210), np.ones(11), "valid"), rng.uniform(0.5, 2, 200)
    influence = w * (v - w @ v / w.sum()) / w.mean()
    error, factor, freedom = doors.newey_west_standard_error(influence, 15)
    assert error == pytest.approx(newey_west_by_loops(v, w, 30), rel=1e-9)  # 2 x 15 > 1.3 sqrt(200)
    assert factor == pytest.approx(1.96 + 2.9694 * 0.15 + 0.4160 * 0.15**2 - 0.5324 * 0.15**3)
    assert freedom == pytest.approx(10)
    assert doors.newey_west_standard_error(influence, 2)[0] == pytest.approx(newey_west_by_loops(v, w, 19), rel=1e-9)


def test_newey_west_equals_statsmodels():
    api = pytest.importorskip("statsmodels.api")
    v = np.convolve(np.random.default_rng(1).normal(size=520), np.ones(21), "valid")
    fit = api.OLS(v, np.ones(500)).fit(cov_type="HAC", cov_kwds={"maxlags": 40, "use_correction": False})
    assert doors.newey_west_standard_error(v - v.mean(), 20)[0] == pytest.approx(fit.bse[0], rel=1e-9)


def test_week_clusters_error_equals_statsmodels():
    api = pytest.importorskip("statsmodels.api")
    v, weeks = np.random.default_rng(2).normal(size=400), doors.interval_week_numbers(EVENTS)
    fit = api.OLS(v, np.ones(400)).fit(cov_type="cluster", cov_kwds={"groups": weeks, "use_correction": True})
    error, count = doors.week_clustered_standard_error(v - v.mean(), weeks)
    # statsmodels corrects by K / (K - 1) · (N - 1) / (N - 1), of which the second is 1 with one regressor.
    assert (error, count) == (pytest.approx(fit.bse[0], rel=1e-9), len(set(weeks)))


@pytest.mark.parametrize("n", [50, 97])
def test_cosine_squares_equal_direct_sums_and_total_the_variance(n):
    x = np.random.default_rng(3).normal(size=n)
    x -= x.mean()
    squares = doors.squared_cosine_weights(x)
    for j in (1, 2, n - 1):
        cosine = np.sqrt(2) * np.cos(np.pi * j * (np.arange(n) + 0.5) / n)
        assert squares[j - 1] == pytest.approx((cosine @ x / n) ** 2, rel=1e-9)
    assert squares.sum() == pytest.approx(x.var(), rel=1e-9)  # Parseval


def test_cosine_blocks_of_ar1_series_equal_long_run_variance():
    """AR(1) of φ .9: the variance of the mean is (1 + φ) / (1 - φ) = 19 times that of independent rows."""
    rng, n, found = np.random.default_rng(4), 8000, []
    for _ in range(40):
        x, e = np.empty(n), rng.normal(size=n) * np.sqrt(1 - 0.81)
        x[0] = rng.normal()
        for t in range(1, n):
            x[t] = 0.9 * x[t - 1] + e[t]
        found.append(
            (
                doors.cosine_standard_error(doors.squared_cosine_weights(x - x.mean()), 19, n)[0] ** 2 * n,
                doors.autocorrelation_length(x),
            )
        )
    # 128 and 8 degrees of freedom, 40 series: standard errors of .02 and .08 of the value.
    assert np.mean(found, axis=0) == pytest.approx([19, 19], rel=0.3)
    assert np.mean(found, axis=0)[0] == pytest.approx(19, rel=0.1)


def test_cosine_blocks_with_longer_memory_use_fewer_cosines():
    squares = np.random.default_rng(5).random(999)
    for memory, count in ((1, 128), (20, 36), (300, 8)):
        assert doors.cosine_standard_error(squares, memory, 1000)[0] == pytest.approx(np.sqrt(squares[:count].mean()))
    assert doors.cosine_standard_error(squares, 300, 1000)[1] == pytest.approx(2.306004)  # t, 8 degrees of freedom


def test_memory_of_constant_is_1_and_of_slow_column_is_long():
    assert doors.autocorrelation_length(np.full(100, 0.3)) == doors.autocorrelation_length(np.zeros((100, 3))) == 1
    slow, fast = np.cos(np.pi * (np.arange(1000) + 0.5) / 1000), np.random.default_rng(6).normal(size=1000)
    assert doors.autocorrelation_length(slow) == pytest.approx(
        1000 / 8, rel=1e-3
    )  # all of it in the first of eight cosines
    assert doors.autocorrelation_length(np.column_stack([slow + 7, slow - 7])) == pytest.approx(1000 / 8, rel=1e-3)
    assert doors.autocorrelation_length(fast) < 4


def test_week_numbers_begin_on_saturday_utc():
    days = pd.to_datetime(["2024-03-08 23:59", "2024-03-09 00:00", "2024-03-15 21:00", "2024-03-16 00:00"], utc=True)
    first, *others = doors.interval_week_numbers(days)
    assert others == [first + 1, first + 1, first + 2]


def test_weeks_spanned_counts_short_weeks_by_their_share():
    assert doors.count_interval_weeks(np.repeat([1, 2, 3, 5], [5, 10, 10, 12])) == pytest.approx(3.5)


# ---- the interval ----------------------------------------------------------------------------------------------


def test_gain_interval_ignores_rows_with_zero_weight():
    rng = np.random.default_rng(7)
    v, w, outcomes = rng.normal(size=400), np.ones(400), rng.normal(size=(400, 3))
    w[::4], v[::4], outcomes[::4] = 0, 1e6, 1e6
    kept = w > 0
    found = doors.gain_interval(v, w, times_N=EVENTS, by_outcome_NK=outcomes)
    assert found == doors.gain_interval(v[kept], w[kept], times_N=EVENTS[kept], by_outcome_NK=outcomes[kept])
    assert found.rows == 300 and found.enough and found.low < found.mean < found.high


def test_gain_interval_with_different_weeks_is_at_least_week_cluster_error():
    v = np.random.default_rng(8).normal(size=400) / 10
    weeks = doors.interval_week_numbers(EVENTS)
    shifted = v + np.where(weeks % 2, 1.0, -1.0)
    found = doors.gain_interval(shifted, times_N=EVENTS)
    assert found.standard_error >= doors.week_clustered_standard_error(shifted - shifted.mean(), weeks)[0] * 0.999


def test_gain_interval_of_constant_has_zero_width():
    found = doors.gain_interval(np.full(400, 0.25), times_N=EVENTS)
    assert (found.mean, found.low, found.high, found.memory) == (0.25, 0.25, 0.25, 1.0)


@pytest.mark.parametrize("n", [0, 5, 7])
def test_gain_interval_below_eight_rows_is_not_enough(n):
    found = doors.gain_interval(np.arange(float(n)), times_N=EVENTS[:n])
    assert np.isnan([found.low, found.high, found.standard_error]).all()
    assert not found.enough and f"{n} rows" in found.reason


def test_gain_interval_at_eight_rows_has_finite_bounds():
    found = doors.gain_interval(np.array([1.0, 2, 0, 1, 3, 1, 0, 2]), times_N=EVENTS[:8])
    assert np.isfinite([found.low, found.high]).all() and not found.enough


def test_gain_interval_not_enough_reason_names_missing_times_weeks_or_memories():
    v = np.random.default_rng(9).normal(size=400)
    slow = np.column_stack([np.linspace(-1, 1, 400)] * 3)
    assert "times of the rows are not given" in doors.gain_interval(v).reason
    assert doors.gain_interval(v[:200], times_N=EVENTS[:200]).reason == "6.0 weeks of rows, wanted at least 8"
    lacking = doors.gain_interval(v, times_N=EVENTS, by_outcome_NK=slow).reason
    assert "400 rows are 8.0 memories (autocorrelation lengths) of 50 rows, wanted at least 22" in lacking


def test_gain_interval_after_a_hole_counts_weeks_with_rows_only():
    times = EVENTS.append(EVENTS[-1:] + pd.Timedelta(days=300))
    v = np.random.default_rng(10).normal(size=401)
    assert doors.gain_interval(v[:201], times_N=times[200:]).reason.startswith("6.")


# ---- held to null series ---------------------------------------------------------------------------------------


def null_intervals(forecast: int, regime: int, series: int, rows: int, seed: int) -> list[doors.ConfidenceInterval]:
    rng, times, found = np.random.default_rng(seed), times_of("6.5 h", rows), []
    for _ in range(series // 20):
        for v, o in zip(*null_gains(rng, forecast, regime, 20, rows), strict=True):
            found.append(doors.gain_interval(v, horizon=HORIZON, times_N=times, by_outcome_NK=o))
    return found


def test_gain_interval_of_slow_forecasts_on_short_data_is_not_enough():
    """Half-lives of 3,000 rows: of 6,000 rows no verdict, where the old interval found a gain in one series of five."""
    given = sum(one.enough for one in null_intervals(3000, 3000, 60, 6000, 11))
    assert given <= 5  # under 1 % in 4,000 series: above 5 of 60 with a chance of 1e-5


def test_gain_interval_of_null_series_rarely_excludes_zero():
    """The worst cell with verdicts, half-lives 200 and 1,000: at most 3.3 %, and power at three standard errors."""
    found = null_intervals(200, 1000, 120, 15000, 12)
    given, gain = [one for one in found if one.enough], 3 * np.std([one.mean for one in found])
    assert len(given) > 75
    # Bounds that correct code misses with a chance of 1e-5: at most .033 in each tail, a power of .8 at least.
    assert sum(one.low > 0 or one.high < 0 for one in given) <= binom.isf(1e-5, len(given), 0.066)
    assert sum(one.low + gain > 0 for one in given) >= binom.ppf(1e-5, len(given), 0.8)


# ---- folds -----------------------------------------------------------------------------------------------------


def test_fold_interval_equals_corrected_resampled_t_interval():
    found = doors.fold_gain_interval([0.01, 0.03, -0.01, 0.02, 0.05])
    error = np.sqrt(0.002 / 4 * (1 / 5 + 1 / 4))
    assert found.standard_error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx((0.02 - 2.776445 * error, 0.02 + 2.776445 * error), abs=1e-7)


def test_fold_interval_of_one_block_is_not_enough():
    found = doors.fold_gain_interval([0.1])
    assert found.mean == 0.1 and np.isnan(found.low) and not found.enough
