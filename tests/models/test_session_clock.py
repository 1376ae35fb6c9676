"""The clock's offset: counted by hand, and the models that start from it."""

import numpy as np
import pytest

from ml_factory.errors import SettingsError
from ml_factory.models.registry import build_model, build_model_from_state
from ml_factory.models.session_clock import SessionClockOffset
from ml_factory.seeding import seeded_generator
from tests.interrupting_phase import InterruptingPhase

MODELS = ("xgboost", "lightgbm", "catboost", "linear")
SMALL = {"rounds": 30, "block": 5, "threads": 1}


def sessions(count: int = 40, bars: int = 96, seed: int = 0):
    """x (N, 4) whose column 1 is the session's progress, scaled, and labels that the progress alone decides."""
    rng = seeded_generator(seed, "offset")
    progress = np.tile(np.arange(1, bars + 1) / bars, count)
    x = rng.normal(size=(len(progress), 4)).astype(np.float32)
    x[:, 1] = 3 * progress - 1
    neutral = np.where(progress > 0.9, 0.95, 0.2 + 0.3 * (progress > 0.5))
    y = np.where(rng.random(len(progress)) < neutral, 0, rng.choice([-1, 1], len(progress)))
    return x, y


def test_clock_offset_scores_equal_hand_counted_shares():
    x, y = sessions(count=5)
    offset = SessionClockOffset.fit(x[:, 1], y + 1, column=1, ending=4)
    prior, k = np.bincount(y + 1, minlength=3) / len(y), offset.clock.pseudo_count
    last = y.reshape(5, 96)[:, -1]  # a cell of its own, since it is among the last 4
    wanted = (np.bincount(last + 1, minlength=3) + k * prior) / (5 + k)
    np.testing.assert_allclose(np.exp(offset.log_class_shares(x[95:96, 1])[0]), wanted, rtol=1e-12)
    # 95 steps between first and last bar, 48 cells: the first holds the steps 0 and 1.
    first = y.reshape(5, 96)[:, :2].ravel()
    wanted = (np.bincount(first + 1, minlength=3) + k * prior) / (10 + k)
    np.testing.assert_allclose(np.exp(offset.log_class_shares(x[:2, 1])), [wanted, wanted], rtol=1e-12)
    assert offset.log_class_shares(np.array([np.nan, -1e9, 1e9])).shape == (3, 3)


@pytest.mark.parametrize("name", MODELS)
def test_model_with_offset_and_noise_features_is_no_worse_than_clock(name):
    x, y = sessions(24)
    noise = seeded_generator(1, "offset").normal(size=x.shape).astype(np.float32)
    noise[:, 1] = x[:, 1]
    cut = len(x) // 2
    model = build_model(name, offset_column=1, offset_bars=4, **SMALL)
    parts = (noise[:cut], y[:cut]), (noise[cut:], y[cut:])
    model.fit(*parts[0], validation=parts[1])
    clock = SessionClockOffset.fit(noise[:cut, 1], y[:cut] + 1, column=1, ending=4).log_class_shares(noise[:, 1])

    def loss(p):
        return -np.log(p[np.arange(cut, len(y)), y[cut:] + 1]).mean()

    assert loss(model.predict_proba(noise)) <= loss(np.exp(clock)) + 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_model_with_offset_and_worse_first_round_predicts_clock(name):
    x, y = sessions()
    signal = x.copy()
    signal[:, 0] = y  # training rows give the label away, validation rows name another class
    lie = x.copy()
    lie[:, 0] = (y + 2) % 3 - 1
    model = build_model(name, offset_column=1, offset_bars=4, **SMALL)
    result = model.fit(signal, y, validation=(lie, y))
    assert result.best_round == result.best_epoch == 0
    clock = SessionClockOffset.fit(x[:, 1], y + 1, column=1, ending=4)
    np.testing.assert_allclose(model.predict_proba(lie), np.exp(clock.log_class_shares(x[:, 1])), rtol=1e-9)
    again = build_model_from_state(model.get_state())
    np.testing.assert_array_equal(again.predict_proba(lie), model.predict_proba(lie))
    assert model.importances().sum() == 0


@pytest.mark.parametrize("name", MODELS)
def test_model_with_offset_and_informative_feature_beats_clock(name):
    x, y = sessions()
    x[:, 0] += y
    cut = len(x) // 2
    model = build_model(name, offset_column=1, offset_bars=4, **SMALL)
    model.fit(x[:cut], y[:cut], validation=(x[cut:], y[cut:]))
    assert model.best_round > 1
    loss = -np.log(model.predict_proba(x[cut:])[np.arange(cut), y[cut:] + 1]).mean()
    clock = SessionClockOffset.fit(x[:cut, 1], y[:cut] + 1, column=1, ending=4).log_class_shares(x[cut:, 1])
    assert loss < -clock[np.arange(cut), y[cut:] + 1].mean() - 0.1


@pytest.mark.parametrize("name", MODELS)
def test_model_with_offset_resumed_fit_equals_uninterrupted_fit_bitwise(name):
    x, y = sessions()
    x[:, 0] += y
    cut = len(x) // 2
    parts = (x[:cut], y[:cut]), (x[cut:], y[cut:])

    def make():
        return build_model(name, offset_column=1, offset_bars=4, **SMALL)

    whole, box = make(), InterruptingPhase(2)
    whole.fit(*parts[0], validation=parts[1])
    with pytest.raises(KeyboardInterrupt):
        make().fit(*parts[0], validation=parts[1], checkpoints=box)
    again = make()
    assert again.fit(*parts[0], validation=parts[1], checkpoints=box).resumed_from == 2
    np.testing.assert_array_equal(again.predict_proba(x), whole.predict_proba(x))


def test_model_with_offset_column_out_of_range_raises_settings_error():
    x, y = sessions(5)
    with pytest.raises(SettingsError, match="no such input"):
        build_model("linear", offset_column=4, **SMALL).fit(x, y)


@pytest.mark.parametrize("name", MODELS)
def test_model_with_offset_best_round_loss_equals_loss_of_predictions(name):
    x, y = sessions()
    x[:, 0] += y
    cut = len(x) // 2
    model = build_model(name, offset_column=1, offset_bars=4, **{**SMALL, "rounds": 6, "block": 1})
    result = model.fit(x[:cut], y[:cut], validation=(x[cut:], y[cut:]))
    loss = -np.log(model.predict_proba(x[cut:])[np.arange(cut), y[cut:] + 1]).mean()
    assert loss == pytest.approx(result.history[model.best_round - 1]["val_loss"], abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_model_with_offset_and_absent_class_predicts_low_probability_for_class(name):
    x, y = sessions(10)
    model = build_model(name, offset_column=1, offset_bars=4, **SMALL)
    model.fit(x, np.abs(y), validation=(x, y))
    p = model.predict_proba(x)
    assert np.isfinite(p).all() and p[:, 0].max() < 0.1
    assert model.get_state()["offset"] is not None
