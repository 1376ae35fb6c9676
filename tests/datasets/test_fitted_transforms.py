"""Fitted columns against libraries and against the sum over all paths; causal, and deaf to rows of others."""

from itertools import product

import numpy as np
import pytest
from sklearn.decomposition import PCA

from ml_factory.datasets import fitted_transforms
from ml_factory.datasets.fitted_transforms import (
    FractionalDifferenceTransform,
    PcaTransform,
    TransformFitSample,
    TwoStateHmmTransform,
    adf_rejects_unit_root,
)
from ml_factory.errors import SettingsError


def switching(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns of a market with a calm and a wild state, and the states."""
    rng = np.random.default_rng(seed)
    state = np.zeros(n, int)
    for i in range(1, n):
        state[i] = state[i - 1] ^ (rng.random() < (0.03 if state[i - 1] else 0.01))
    return rng.standard_normal(n) * np.where(state, 3e-3, 1e-3), state


def sample(n: int = 6000, train: int = 4000) -> TransformFitSample:
    returns, _ = switching(n)
    x = np.random.default_rng(1).standard_normal((n, 5)).astype(np.float32)
    x[:, 1] += 2 * x[:, 0]
    x[7, 2] = np.nan
    return TransformFitSample(x, tuple("abcde"), np.arange(train), 100 * np.exp(np.cumsum(returns)))


def test_pca_components_equal_scikit_learn():
    given = sample()
    x = given.x_NF[given.rows].astype(float)
    standard = np.nan_to_num((x - np.nanmean(x, axis=0)) / np.nanstd(x, axis=0))
    for share, count in ((0.9, 4), (1.0, 5), (0.2, 1)):
        wanted = PCA(share if share < 1 else None).fit(standard)
        fitted = PcaTransform.fit(given, share=share)
        assert fitted.loadings.shape == (5, count) == wanted.components_.T.shape
        np.testing.assert_allclose(np.abs(fitted.loadings), np.abs(wanted.components_.T), atol=1e-6)
        assert (fitted.loadings[np.abs(fitted.loadings).argmax(axis=0), np.arange(count)] > 0).all()
    made = fitted.transform(given.x_NF[:200])
    z = np.nan_to_num((given.x_NF[:200] - fitted.center) / fitted.scale)
    np.testing.assert_allclose(made, z @ fitted.loadings, atol=1e-5)


def test_fractional_difference_fit_picks_smallest_stationary_order():
    statsmodels = pytest.importorskip("statsmodels.tsa.stattools")
    given = sample()
    fitted = FractionalDifferenceTransform.fit(given, window=64)
    path = np.log(given.close)
    weights = [1.0]
    for k in range(1, 64):
        weights.append(-weights[-1] * (fitted.order - k + 1) / k)  # AFML, snippet 5.1
    column = fitted.transform(given.x_NF, given.close)[:, -1]
    wanted = [np.dot(weights, path[i - 63 : i + 1][::-1]) for i in range(63, len(path))]
    assert np.isnan(column[:63]).all()
    np.testing.assert_allclose(column[63:], wanted, rtol=1e-6)

    def p_value(order: float) -> float:
        series = fitted_transforms._difference(
            path[:4000] - path[0], fitted_transforms.fractional_difference_weights(order, 64)
        )[63:]
        return statsmodels.adfuller(series, maxlag=1, regression="c", autolag=None, result_object=False)[1]

    assert 0.05 < fitted.order <= 1 and p_value(fitted.order) < 0.05 <= p_value(round(fitted.order - 0.05, 10))


def test_adf_rejects_equals_statsmodels_decision():
    statsmodels = pytest.importorskip("statsmodels.tsa.stattools")
    rng = np.random.default_rng(3)
    decided = []
    for root in np.linspace(0.9, 1.0, 40):
        noise, x = rng.standard_normal(300), np.zeros(300)
        for i in range(1, 300):
            x[i] = root * x[i - 1] + noise[i]
        reported = statsmodels.adfuller(x, maxlag=1, regression="c", autolag=None, result_object=False)
        assert adf_rejects_unit_root(x) == (reported[0] < reported[4]["5%"])
        decided.append(adf_rejects_unit_root(x))
    assert 5 < sum(decided) < 35 and not adf_rejects_unit_root(np.ones(50))


def test_two_state_hmm_filtered_probabilities_equal_sum_over_all_paths():
    mean, deviation, stay = np.array([0.1, -0.3]), np.array([0.5, 2.0]), np.array([0.9, 0.7])
    returns = np.random.default_rng(0).standard_normal(9)
    found = fitted_transforms.TwoStateHmmTransform(mean, deviation, stay)
    found = found.filter_returns(returns, found.initial_prior())
    start = np.array([0.3, 0.1]) / 0.4
    move = np.array([[0.9, 0.1], [0.3, 0.7]])
    density = np.exp(-0.5 * ((returns[:, None] - mean) / deviation) ** 2) / deviation
    for t in range(9):
        chance = np.zeros(2)
        for path in product((0, 1), repeat=t + 1):
            p = start[path[0]] * density[0, path[0]]
            for i in range(1, t + 1):
                p *= move[path[i - 1], path[i]] * density[i, path[i]]
            chance[path[-1]] += p
        assert found[t] == pytest.approx(chance[1] / chance.sum(), rel=1e-12)


def test_two_state_hmm_fit_raises_likelihood_and_recovers_planted_states():
    returns, state = switching(20_000)
    close = 100 * np.exp(np.cumsum(returns))
    given = TransformFitSample(np.zeros((20_000, 1), np.float32), ("a",), np.arange(15_000), close)
    fitted = TwoStateHmmTransform.fit(given)
    np.testing.assert_allclose(fitted.deviation, [1e-3, 3e-3], rtol=0.05)
    np.testing.assert_allclose(1 - fitted.stay, [0.01, 0.03], rtol=0.35)
    assert np.corrcoef(fitted.transform(given.x_NF, close)[:, -1], state)[0, 1] > 0.85

    def likelihood(rounds: int) -> float:
        mean, deviation, stay = fitted_transforms._baum_welch(returns[:3000] / 1e-3, rounds)
        move = np.array([[stay[0], 1 - stay[0]], [1 - stay[1], stay[1]]])
        p, total = np.array([1 - stay[1], 1 - stay[0]]) / (2 - stay.sum()), 0.0
        for r in returns[:3000] / 1e-3:
            p = p * np.exp(-0.5 * ((r - mean) / deviation) ** 2) / deviation
            total += np.log(p.sum())
            p = (p / p.sum()) @ move
        return total

    climbed = [likelihood(rounds) for rounds in (1, 2, 3, 5, 10, 30)]
    assert (np.diff(climbed) > -0.5).all() and climbed[-1] > climbed[0] + 20  # the start's weight is no part of M


def test_two_state_hmm_transform_of_prefix_equals_whole():
    given = sample()
    fitted = TwoStateHmmTransform.fit(given)
    whole = fitted.transform(given.x_NF, given.close)
    np.testing.assert_array_equal(fitted.transform(given.x_NF[:3000], given.close[:3000]), whole[:3000])


@pytest.mark.parametrize("step", [PcaTransform, FractionalDifferenceTransform, TwoStateHmmTransform])
def test_fitted_transform_of_prefix_equals_whole_bitwise(step):
    given = sample()
    fitted = step.fit(given)
    again = step.from_dict(fitted.to_dict())
    whole = fitted.transform(given.x_NF, given.close)
    for stop in (1, 300, 4001):
        np.testing.assert_array_equal(again.transform(given.x_NF[:stop], given.close[:stop]), whole[:stop])
    assert whole.dtype == np.float32 and whole.shape[1] == len(fitted.names_out(given.names))


def test_sample_log_close_uses_longest_run_of_training_rows():
    rows = np.concatenate([np.arange(50), np.arange(52, 900), np.arange(1000, 1500)])
    given = TransformFitSample(np.zeros((1500, 1), np.float32), ("a",), rows, np.arange(1.0, 1501.0))
    np.testing.assert_allclose(given.log_close(), np.log(given.close[rows[:898]]))


def test_fitted_transforms_invalid_input_raises_settings_error():
    given = sample()
    bare = TransformFitSample(given.x_NF, given.names, given.rows)
    with pytest.raises(SettingsError, match="closes"):
        TwoStateHmmTransform.fit(bare)
    with pytest.raises(SettingsError, match="closes"):
        TwoStateHmmTransform.fit(given).transform(given.x_NF)
    with pytest.raises(SettingsError, match="Too few consecutive training rows"):
        FractionalDifferenceTransform.fit(given, window=2001)
    with pytest.raises(SettingsError, match="share"):
        PcaTransform.fit(given, share=1.5)
    still = TransformFitSample(given.x_NF, given.names, given.rows, np.full(len(given.close), 5.0))
    with pytest.raises(SettingsError, match="two states"):
        TwoStateHmmTransform.fit(still)
