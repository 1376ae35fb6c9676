"""Statistics of luck: published examples, brute force, calibration without skill."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata

from ml_factory.errors import SettingsError
from ml_factory.evaluation.luck import (
    deflated_sharpe,
    describe_lacking_sessions,
    expected_best_sharpe,
    min_track_record,
    pbo,
    probabilistic_sharpe,
    sharpe_moments,
)


def test_probabilistic_sharpe_equals_paper():
    """Bailey and López de Prado (2012), numerical example: 24 months, ratio .458 a month."""
    assert probabilistic_sharpe(0.458, 24) == pytest.approx(0.982, abs=5e-4)
    assert probabilistic_sharpe(0.458, 24, -2.448, 10.164) == pytest.approx(0.913, abs=5e-4)
    assert math.isnan(probabilistic_sharpe(0.458, 1))


@pytest.mark.parametrize(("a_year", "years"), [(250, 2.73), (52, 2.83), (12, 3.24)])
def test_min_track_record_of_annual_ratio_2_over_1_equals_paper(a_year, years):
    """Bailey and López de Prado (2012): daily, weekly, monthly normal returns at 95 %."""
    found = min_track_record(2 / a_year**0.5, benchmark=1 / a_year**0.5)
    assert found / a_year == pytest.approx(years, abs=5e-3)
    at = probabilistic_sharpe(2 / a_year**0.5, found, benchmark=1 / a_year**0.5)
    assert at == pytest.approx(0.95)
    assert min_track_record(0.1, benchmark=0.1) == math.inf


@pytest.mark.parametrize(("trials", "probability"), [(100, 0.9004), (46, 0.9505)])
def test_deflated_sharpe_equals_paper(trials, probability):
    """Bailey and López de Prado (2014), numerical example: annual ratio 2.5 of five years of 250 days."""
    deviation = math.sqrt(0.5 / 250)
    assert expected_best_sharpe(100, deviation) == pytest.approx(0.1132, abs=5e-5)
    found = deflated_sharpe(2.5 / math.sqrt(250), 1250, trials, deviation, -3, 10)
    assert found == pytest.approx(probability, abs=5e-5)


def test_deflated_sharpe_of_one_trial_equals_probabilistic_sharpe():
    assert deflated_sharpe(0.1, 500, 1, skewness=-1, kurtosis=5) == probabilistic_sharpe(0.1, 500, -1, 5)
    with pytest.raises(SettingsError, match="trials"):
        deflated_sharpe(0.1, 500, 0)


def test_sharpe_moments_equal_hand_worked_numbers():
    ratio, skewness, kurtosis, count = sharpe_moments(np.array([1.0, 3.0] * 8))
    assert ratio == pytest.approx(2 / np.sqrt(16 / 15)) and (skewness, count) == (0.0, 16)
    assert kurtosis == pytest.approx(1.0) and math.isnan(sharpe_moments(np.ones(9))[0])


@pytest.mark.parametrize(
    ("days", "every", "lacking"),
    [(45, 1, ""), (45, 2, ""), (45, 3, "15 sessions with a trade, wanted at least 22"), (2, 1, "wanted at least 8"),
     (38, 1, "7.6 weeks of rows")],
)  # fmt: skip
def test_describe_lacking_sessions_wants_weeks_of_rows_and_sessions_with_a_trade(days, every, lacking):
    opens = pd.bdate_range("2024-01-01", periods=days, tz="UTC") + pd.Timedelta(hours=15)
    known = opens.repeat(2) + pd.to_timedelta([5, 10] * days, unit="min")
    equity = pd.DataFrame({"equity": 0.0, "session": np.repeat(range(days), 2)}, index=known)
    entered = opens[::every] + pd.Timedelta(minutes=5)
    found = describe_lacking_sessions(equity, pd.DataFrame({"entry_time": entered}))
    assert lacking in found and bool(lacking) == bool(found)


def plain_pbo(returns: np.ndarray, blocks: int) -> float:
    """CSCV written out: logits of the relative rank of the chosen strategy, ties at half."""
    parts = np.split(returns, blocks)
    logits = []
    for chosen in itertools.combinations(range(blocks), blocks // 2):
        fitted = np.concatenate([parts[k] for k in chosen])
        other = np.concatenate([parts[k] for k in range(blocks) if k not in chosen])
        best = np.argmax(fitted.mean(axis=0) / fitted.std(axis=0))
        share = rankdata(other.mean(axis=0) / other.std(axis=0))[best] / (returns.shape[1] + 1)
        logits.append(math.log(share / (1 - share)))
    return float(np.mean([1.0 if one < 0 else 0.5 if one == 0 else 0.0 for one in logits]))


@pytest.mark.parametrize("seed", range(5))
def test_pbo_equals_written_out_cross_validation(seed):
    rng = np.random.default_rng(seed)
    returns = rng.standard_t(4, (96, 7)) + rng.normal(0, 0.1, 7)
    assert pbo(returns, 8) == pytest.approx(plain_pbo(returns, 8))


def test_pbo_of_one_strategy_with_skill_is_near_0_and_of_reversed_halves_near_1():
    rng = np.random.default_rng(0)
    returns = rng.normal(size=(800, 20))
    returns[:, 3] += 0.4
    assert pbo(returns, 10) < 0.01
    turned = np.where(np.arange(800)[:, None] < 400, 1, -1) * np.linspace(-1, 1, 20) + rng.normal(size=(800, 20))
    assert pbo(turned, 2) == 1.0


def test_pbo_of_impossible_cut_is_refused():
    with pytest.raises(SettingsError, match="cannot be cut"):
        pbo(np.zeros((10, 3)), 7)


def test_deflated_sharpe_of_noise_is_rarely_above_95_percent():
    """The best of 50 strategies without skill, 300 times; the plain probability is fooled, the deflated one is not."""
    rng = np.random.default_rng(9)
    plain, deflated = [], []
    for _ in range(300):
        returns = rng.standard_t(5, (250, 50))
        best = returns[:, np.argmax(returns.mean(axis=0) / returns.std(axis=0))]
        ratio, skewness, kurtosis, count = sharpe_moments(best)
        plain.append(probabilistic_sharpe(ratio, count, skewness, kurtosis))
        deflated.append(deflated_sharpe(ratio, count, 50, skewness=skewness, kurtosis=kurtosis))
    assert np.mean(np.array(plain) > 0.95) > 0.8 and np.mean(np.array(deflated) > 0.95) <= 0.02


@pytest.mark.soak
def test_pbo_of_noise_is_one_half():
    rng = np.random.default_rng(11)
    found = [pbo(rng.normal(size=(320, 20)), 10) for _ in range(200)]
    assert np.mean(found) == pytest.approx(0.5, abs=0.05)


@pytest.mark.soak
def test_deflated_sharpe_of_2000_sets_of_200_noise_strategies_and_power():
    rng = np.random.default_rng(12)
    false = power = 0
    for _ in range(2_000):
        returns = rng.normal(size=(504, 200))
        ratios = returns.mean(axis=0) / returns.std(axis=0, ddof=1)
        false += deflated_sharpe(float(ratios.max()), 504, 200) > 0.95
        true = rng.normal(5.5 / math.sqrt(504), 1, 504)  # true ratio times sqrt(years) is 5.5
        power += deflated_sharpe(sharpe_moments(true)[0], 504, 200) > 0.95
    assert false <= 10 and power >= 1_600, (false, power)
