"""Networks that start from the clock's log shares: what they are before they learn, and what is kept of it."""

import numpy as np
import pytest
import torch
from torch import nn

from ml_factory.errors import SettingsError
from ml_factory.models.registry import available_models, build_model, build_model_from_state, find_model_spec
from ml_factory.models.session_clock import SessionClockOffset
from ml_factory.seeding import seeded_generator
from ml_factory.storage.serialization import serialize_state
from ml_factory.training.estimator import zero_output_head
from ml_factory.training.export_state_dict import NetworkWithClockOffset
from tests.interrupting_phase import InterruptingPhase

T, BARS = 8, 40
NETWORKS = [name for name in available_models() if find_model_spec(name).windowed]
SMALL = {"epochs": 2, "batch": 64, "lookback": T, "lr": 0.01, "device": "cpu", "threads": 1}
MORE = {"patchtst": {"patch": 4, "stride": 4}}
CLOCK = {"offset_column": 1, "offset_bars": 4}


def windows(sessions: int = 20, seed: int = 0):
    """x (N, T, 3) whose column 1 is the session's progress, scaled, and labels that the progress alone decides."""
    rng = seeded_generator(seed, "networks")
    progress = np.tile(np.arange(1, BARS + 1) / BARS, sessions)
    x = rng.normal(size=(len(progress), T, 3)).astype(np.float32)
    x[:, :, 1] = 3 * (progress[:, None] - np.arange(T)[::-1] / BARS) - 1
    neutral = np.where(progress > 0.9, 0.95, 0.2 + 0.3 * (progress > 0.5))
    y = np.where(rng.random(len(progress)) < neutral, 0, rng.choice([-1, 1], len(progress)))
    return x, y


def make(name: str, **settings):
    return build_model(name, **{**SMALL, **MORE.get(name, {}), **CLOCK, **settings})


def clock_of(x, y):
    return SessionClockOffset.fit(x[:, -1, 1], y + 1, column=1, ending=4)


def fit_on_a_lie(name: str, **settings):
    """A network whose training rows give the label away, while its validation rows name another class."""
    x, y = windows()
    reported, lie = x.copy(), x.copy()
    reported[:, :, 0], lie[:, :, 0] = 4.0 * y[:, None], 4.0 * ((y + 2) % 3 - 1)[:, None]
    model = make(name, lr=0.1, **settings)
    return model, model.fit(reported, y, validation=(lie, y)), lie, y


@pytest.mark.parametrize("name", NETWORKS)
def test_network_with_offset_and_no_better_epoch_predicts_clock(name):
    model, result, lie, y = fit_on_a_lie(name)
    assert result.best_epoch == 0 and len(result.history) == 2
    np.testing.assert_allclose(
        model.predict_proba(lie), np.exp(clock_of(lie, y).log_class_shares(lie[:, -1, 1])), rtol=1e-9
    )
    again = build_model_from_state(model.get_state())
    np.testing.assert_array_equal(again.predict_proba(lie), model.predict_proba(lie))
    assert serialize_state(again.get_state()) == serialize_state(model.get_state())


def test_network_with_offset_patience_counts_from_untrained_network():
    _, result, _, _ = fit_on_a_lie("gru", epochs=9, patience=3)
    assert result.best_epoch == 0 and len(result.history) == 3 and result.stopped_early


@pytest.mark.parametrize("settings", [{}, {"class_weight": "balanced"}])
def test_network_with_offset_and_informative_feature_beats_clock(settings):
    x, y = windows()
    x[:, -1, 0] += y
    model = make("gru", epochs=8, **settings)
    result = model.fit(x[:400], y[:400], validation=(x[400:], y[400:]))
    p, clock = model.predict_proba(x[400:]), clock_of(x[:400], y[:400]).log_class_shares(x[400:, -1, 1])
    loss = -np.log(p[np.arange(400), y[400:] + 1]).mean()
    assert result.best_epoch > 0 and loss < -clock[np.arange(400), y[400:] + 1].mean() - 0.1
    if "class_weight" not in settings:  # equal weights: what stopped the training is the loss of what it predicts
        assert loss == pytest.approx(result.history[result.best_epoch - 1]["val_loss"], abs=1e-5)


def test_network_offset_ignores_rows_with_zero_weight():
    x, y = windows()
    weight = np.r_[np.ones(400), np.zeros(len(y) - 400)]
    model = make("gru")
    model.fit(x, np.r_[y[:400], np.ones(len(y) - 400, int)], weight)
    np.testing.assert_array_equal(model.offset.clock.shares_C3, clock_of(x[:400], y[:400]).clock.shares_C3)


@pytest.mark.parametrize("until", [1, 3, 14])  # in the first epoch, later in it, in the second one
def test_network_with_offset_resumed_fit_equals_uninterrupted_fit_bitwise(until):
    x, y = windows()
    x[:, -1, 0] += y
    parts, often = ((x[:400], y[:400]), (x[400:], y[400:])), {"save_seconds": 0.0, "epochs": 4, "batch": 32}
    whole, box = make("gru", **often), InterruptingPhase(until)
    result = whole.fit(*parts[0], validation=parts[1])
    with pytest.raises(KeyboardInterrupt):
        make("gru", **often).fit(*parts[0], validation=parts[1], checkpoints=box)
    again, held = make("gru", **often), make("gru").state_from_checkpoint(box.state)
    assert (
        again.fit(*parts[0], validation=parts[1], checkpoints=box).history[-1]["val_loss"]
        == (result.history[-1]["val_loss"])
    )
    np.testing.assert_array_equal(again.predict_proba(x), whole.predict_proba(x))
    np.testing.assert_array_equal(build_model_from_state(held).offset.clock.shares_C3, whole.offset.clock.shares_C3)


def test_network_with_offset_resumed_fit_keeps_untrained_network_as_best():
    model, _, lie, _ = fit_on_a_lie("gru", save_seconds=0.0)
    x, y = windows()
    reported = x.copy()
    reported[:, :, 0] = 4.0 * y[:, None]
    box, often = InterruptingPhase(5), {"save_seconds": 0.0, "lr": 0.1}
    with pytest.raises(KeyboardInterrupt):
        make("gru", **often).fit(reported, y, validation=(lie, y), checkpoints=box)
    again = make("gru", **often)
    assert again.fit(reported, y, validation=(lie, y), checkpoints=box).best_epoch == 0
    np.testing.assert_array_equal(again.predict_proba(lie), model.predict_proba(lie))


def test_load_model_network_state_without_offset_predicts_same():
    x, y = windows(6)
    model = make("gru", offset_column=-1)
    model.fit(x, y)
    state = model.get_state()
    assert state["offset"] is None
    np.testing.assert_array_equal(build_model_from_state(state).predict_proba(x), model.predict_proba(x))


def test_network_state_with_offset_from_first_column_predicts_same():
    x, y = windows(6)
    x = x[:, :, [1, 0, 2]]
    model = make("gru", offset_column=0)
    model.fit(x, y)
    np.testing.assert_array_equal(build_model_from_state(model.get_state()).predict_proba(x), model.predict_proba(x))


def test_network_invalid_offset_settings_raise_settings_error():
    x, y = windows(4)
    with pytest.raises(SettingsError, match="no such input"):
        make("gru", offset_column=3).fit(x, y)
    for name in ("offset_column", "offset_bars"):
        with pytest.raises(SettingsError, match=name):
            make("gru", **{name: 1.5})


def test_zero_output_layer_zeroes_only_last_layer_of_output_size():
    layers = [nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 5)]
    network = nn.Sequential(*layers)
    zero_output_head(network, 3)
    assert [bool(layer.weight.any()) for layer in layers] == [True, False, True] and not layers[1].bias.any()
    zero_output_head(nn.ReLU(), 3)  # one of a user's own may have no such layer


@pytest.mark.parametrize("step", [True, False])
def test_clock_offset_network_cells_equal_clock_offset(step):
    rng = seeded_generator(3, "networks")
    column = np.tile(np.float32(3) * np.arange(1, BARS + 1, dtype=np.float32) / BARS - 1, 6)
    column = column if step else -np.sort(column)[::-1].copy()[:1].repeat(len(column))
    offset = SessionClockOffset.fit(column, rng.integers(0, 3, len(column)), column=0, ending=4)
    asked = np.r_[column, rng.uniform(-3, 3, 4000), np.nan, -9, 9].astype(np.float32)
    x_BTF = torch.zeros(len(asked), 2, 1)
    x_BTF[:, -1, 0] = torch.from_numpy(asked)

    class Silent(nn.Module):
        def forward(self, x_BTF):
            return torch.zeros(len(x_BTF), 3, dtype=torch.float64)

    module = NetworkWithClockOffset(Silent(), 0, 4)
    module.load_state_dict(NetworkWithClockOffset(Silent(), 0, 4, offset).state_dict())
    np.testing.assert_array_equal(module(x_BTF).numpy(), offset.log_class_shares(asked))
