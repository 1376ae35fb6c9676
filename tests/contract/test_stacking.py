"""The pool against a general optimiser, and against what made the data."""

import json

import numpy as np
import pytest
from scipy.optimize import minimize

from ml_factory.errors import SettingsError
from tests.contract.doors import Stack, class_shares, equal_weight_probabilities, row_log_loss, softmax


def market(n: int, seed: int):
    """Labels whose log-odds are those of two forecasters added up, and a third one that knows nothing."""
    rng = np.random.default_rng(seed)
    a, b, noise = (rng.normal(size=(n, 3)) * size for size in (0.8, 0.5, 0.6))
    y = (softmax(a + b).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1) - 1
    return {"a": softmax(a), "b": softmax(b), "noise": softmax(noise)}, y


def test_stack_fit_matches_general_optimiser():
    oof, y = market(600, 0)
    w = np.random.default_rng(0).uniform(0.2, 2, 600)
    stack = Stack.fit(oof, y, w, ridge=2.0, horizon=3)
    prior = class_shares(y, w)
    z = np.stack([np.log(p) - np.log(prior) for p in oof.values()])
    witnesses = w.sum() ** 2 / (w**2).sum() / 3

    def loss(theta):
        p = softmax(np.log(prior) + theta[3:] + sum(t * part for t, part in zip(theta[:3], z, strict=True)))
        fit = -np.average(np.log(p[np.arange(600), y + 1]), weights=w) * witnesses
        return fit + np.sum((theta[:3] - 1 / 3) ** 2) + np.sum(theta[3:] ** 2)  # ridge / 2 = 1

    best = minimize(loss, np.zeros(6), method="SLSQP", bounds=[(0, None)] * 3 + [(None, None)] * 3, tol=1e-12)
    np.testing.assert_allclose([*stack.pool, *stack.bias], best.x, atol=2e-4)


def test_stack_fit_weights_informative_models_and_beats_equal_pool():
    oof, y = market(30_000, 1)
    stack = Stack.fit(oof, y)
    np.testing.assert_allclose(stack.pool, [1, 1, 0], atol=0.06)
    fresh, later = market(30_000, 2)
    loss = {name: row_log_loss(later, p).mean() for name, p in fresh.items()}
    pooled = row_log_loss(later, stack.predict_proba(fresh)).mean()
    assert (
        pooled < min(loss.values()) - 0.01
        and pooled < row_log_loss(later, equal_weight_probabilities(fresh)).mean() - 0.01
    )


def test_stack_fit_of_contrary_model_gives_zero_weight():
    oof, y = market(5000, 3)
    contrary = oof["b"] ** -1.0  # log-odds of b the wrong way round
    stack = Stack.fit({"a": oof["a"], "contrary": contrary / contrary.sum(axis=1, keepdims=True)}, y)
    assert stack.pool[1] == 0 and stack.pool[0] > 0.5


def test_stack_fit_omits_rows_without_predictions():
    oof, y = market(1000, 4)
    holed = {name: p.copy() for name, p in oof.items()}
    holed["b"][::3] = np.nan
    keep = np.arange(1000) % 3 != 0
    whole = Stack.fit({name: p[keep] for name, p in oof.items()}, y[keep])
    assert Stack.fit(holed, y) == whole and whole.rows == keep.sum()
    assert np.isnan(whole.predict_proba(holed)[0]).all() and np.isfinite(whole.predict_proba(holed)[1]).all()


def test_stack_fit_on_too_few_rows_keeps_equal_weights_with_note():
    oof, y = market(1000, 5)
    stack = Stack.fit(oof, y, horizon=20)  # 50 separate rows
    assert stack.pool == (1 / 3,) * 3 and "equal weights: 50 separate rows" in stack.note
    np.testing.assert_allclose(stack.predict_proba(oof).sum(axis=1), 1)
    empty = Stack.fit({name: np.full((9, 3), np.nan) for name in oof}, y[:9])
    assert empty.pool == (1 / 3,) * 3 and empty.rows == 0


def test_stack_fit_of_single_model_keeps_forecast():
    oof, y = market(400, 6)
    stack = Stack.fit({"a": oof["a"]}, y, ridge=1e9)
    np.testing.assert_allclose(stack.predict_proba(oof), oof["a"], atol=1e-6)


def test_stack_fit_with_absent_class_gives_finite_low_probability():
    oof, y = market(800, 7)
    stack = Stack.fit(oof, np.where(y == 0, 1, y))
    p = stack.predict_proba(oof)
    assert np.isfinite(p).all() and 0 < p[:, 1].mean() < 0.05


def test_stack_json_round_trip_is_exact():
    oof, y = market(500, 8)
    stack = Stack.fit(oof, y)
    assert Stack.from_dict(json.loads(json.dumps(stack.to_dict()))) == stack
    assert Stack.fit(oof, y) == stack
    assert stack.weights()["share"].sum() == pytest.approx(1)


def test_stack_predict_with_missing_model_raises_with_name():
    oof, y = market(500, 9)
    stack = Stack.fit(oof, y)
    with pytest.raises(SettingsError, match="noise"):
        stack.predict_proba({"a": oof["a"], "b": oof["b"]})
    with pytest.raises(SettingsError, match="at least one"):
        Stack.fit({}, y)
    with pytest.raises(SettingsError, match="predictions of a cannot"):
        Stack.fit({"a": oof["a"] * 2}, y)
