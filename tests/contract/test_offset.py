"""Models that start from the clock's log shares: counted by hand, what they predict before and after they learn."""

import numpy as np
import pytest
import torch
from torch import nn

from ml_factory.errors import SettingsError
from ml_factory.models.registry import available_models, build_model
from tests.contract import doors
from tests.interrupting_phase import InterruptingPhase

T, BARS = 8, 40
CLOCK = {"offset_column": 1, "offset_bars": 4, "threads": 1}
TABULAR = {"rounds": 30, "block": 5}
WHOLE = {"column_sample": 1.0}
NETWORK = {"epochs": 2, "batch": 64, "lookback": T, "lr": 0.01, "device": "cpu"}
SOME = ("xgboost", "lightgbm", "catboost", "linear", "gru")  # networks have the offset from one loss


def make(name: str, **settings):
    kind = NETWORK if doors.find_model_spec(name).windowed else TABULAR
    more = {"patch": 4, "stride": 4} if name == "patchtst" else {}
    return build_model(name, **{**kind, **more, **CLOCK, **settings})


def sessions(name: str, count: int = 20, seed: int = 0):
    """x whose column 1 is the session's progress, scaled, and labels that the progress alone decides."""
    rng = doors.seeded_generator(seed, "offset")
    progress = np.tile(np.arange(1, BARS + 1) / BARS, count)
    x_NTF = rng.normal(size=(len(progress), T, 3)).astype(np.float32)
    x_NTF[:, :, 1] = 3 * (progress[:, None] - np.arange(T)[::-1] / BARS) - 1
    neutral = np.where(progress > 0.9, 0.95, 0.2 + 0.3 * (progress > 0.5))
    y = np.where(rng.random(len(progress)) < neutral, 0, rng.choice([-1, 1], len(progress)))
    return (x_NTF if doors.find_model_spec(name).windowed else x_NTF[:, -1]), y


def clock_of(x, y) -> doors.SessionClockOffset:
    return doors.SessionClockOffset.fit(column(x), y + 1, column=1, ending=4)


def column(x) -> np.ndarray:
    return x[..., -1, 1] if x.ndim == 3 else x[:, 1]


def with_first(x, values):
    """The rows with other values in the first column."""
    x = x.copy()
    x[..., 0] = values if x.ndim == 2 else values[:, None]
    return x


def test_clock_offset_scores_equal_hand_counted_shares():
    x, y = sessions("linear", count=5)
    offset = clock_of(x, y)
    prior, k = np.bincount(y + 1, minlength=3) / len(y), offset.clock.pseudo_count
    last = y.reshape(5, BARS)[:, -1]  # a cell of its own, since it is among the last 4
    wanted = (np.bincount(last + 1, minlength=3) + k * prior) / (5 + k)
    np.testing.assert_allclose(np.exp(offset.log_class_shares(x[BARS - 1 : BARS, 1])[0]), wanted, rtol=1e-12)
    # 39 steps between first and last bar, 48 cells: the first holds the first bar alone.
    wanted = (np.bincount(y[::BARS] + 1, minlength=3) + k * prior) / (5 + k)
    np.testing.assert_allclose(np.exp(offset.log_class_shares(x[:1, 1]))[0], wanted, rtol=1e-12)
    assert offset.log_class_shares(np.array([np.nan, -1e9, 1e9])).shape == (3, 3)


@pytest.mark.parametrize("name", available_models())
def test_model_with_offset_that_learns_a_lie_predicts_clock(name):
    """Training rows give the label away, while the validation rows name another class."""
    x, y = sessions(name)
    lie = with_first(x, 4.0 * ((y + 2) % 3 - 1))
    model = make(name, **{"lr": 0.1} if doors.find_model_spec(name).windowed else WHOLE if name != "linear" else {})
    result = model.fit(with_first(x, 4.0 * y), y, validation=(lie, y))
    assert result.best_epoch == 0 and len(result.history) >= 2
    expected = np.exp(clock_of(x, y).log_class_shares(column(x)))
    np.testing.assert_allclose(model.predict_proba(lie), expected, rtol=1e-9)
    again = doors.build_model_from_state(model.get_state())
    np.testing.assert_array_equal(again.predict_proba(lie), model.predict_proba(lie))
    assert doors.serialize_state(again.get_state()) == doors.serialize_state(model.get_state())
    assert doors.find_model_spec(name).windowed or model.importances().sum() == 0


def test_network_with_offset_patience_counts_from_untrained_network():
    x, y = sessions("gru")
    model = make("gru", lr=0.1, epochs=9, patience=3)
    result = model.fit(with_first(x, 4.0 * y), y, validation=(with_first(x, 4.0 * ((y + 2) % 3 - 1)), y))
    assert result.best_epoch == 0 and len(result.history) == 3 and result.stopped_early


def test_network_with_offset_resumed_fit_keeps_untrained_network_as_best():
    x, y = sessions("gru")
    told, lie, box = with_first(x, 4.0 * y), with_first(x, 4.0 * ((y + 2) % 3 - 1)), InterruptingPhase(5)
    with pytest.raises(KeyboardInterrupt):
        make("gru", lr=0.1, save_seconds=0.0).fit(told, y, validation=(lie, y), checkpoints=box)
    again = make("gru", lr=0.1, save_seconds=0.0)
    assert again.fit(told, y, validation=(lie, y), checkpoints=box).best_epoch == 0
    np.testing.assert_allclose(again.predict_proba(lie), np.exp(clock_of(x, y).log_class_shares(column(x))), rtol=1e-9)


@pytest.mark.parametrize("name", SOME)
def test_model_with_offset_and_informative_feature_beats_clock(name):
    """What stops the training is the loss of what is predicted."""
    x, y = sessions(name)
    x = with_first(x, np.float32(x[..., 0] if x.ndim == 2 else x[:, -1, 0]) + 2 * y)
    more = {"epochs": 8} if name == "gru" else {"rounds": 20, "block": 1}
    model = make(name, **more)
    result = model.fit(x[:400], y[:400], validation=(x[400:], y[400:]))
    p, clock = model.predict_proba(x[400:]), clock_of(x[:400], y[:400]).log_class_shares(column(x[400:]))
    at = np.arange(400), y[400:] + 1
    loss = -np.log(p[at]).mean()
    assert result.best_epoch > 1 and loss < -clock[at].mean() - 0.1
    assert loss == pytest.approx(result.history[result.best_epoch - 1]["val_loss"], abs=1e-5)


@pytest.mark.parametrize("name", SOME)
def test_model_with_offset_counts_rows_of_weight_and_absent_classes(name):
    x, y = sessions(name)
    model, weight = make(name), np.r_[np.ones(400), np.zeros(400)]
    model.fit(x, np.r_[np.abs(y[:400]), np.ones(400, int)], weight, validation=(x, y))
    assert np.array_equal(model.offset.clock.shares_C3, clock_of(x[:400], np.abs(y[:400])).clock.shares_C3)
    p = model.predict_proba(x)
    assert np.isfinite(p).all() and p[:, 0].max() < 0.1


@pytest.mark.parametrize("name", ["linear", "gru"])
def test_model_with_offset_column_out_of_range_raises_settings_error(name):
    with pytest.raises(SettingsError, match="no such input"):
        make(name, offset_column=3).fit(*sessions(name, 5))


def test_zero_output_layer_zeroes_only_last_layer_of_output_size():
    layers = [nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 5)]
    doors.zero_output_head(nn.Sequential(*layers), 3)
    assert [bool(layer.weight.any()) for layer in layers] == [True, False, True] and not layers[1].bias.any()
    doors.zero_output_head(nn.ReLU(), 3)  # one of a user's own may have no such layer


@pytest.mark.parametrize("step", [True, False])
def test_clock_offset_network_cells_equal_clock_offset(step):
    rng = doors.seeded_generator(3, "networks")
    values = np.tile(np.float32(3) * np.arange(1, BARS + 1, dtype=np.float32) / BARS - 1, 6)
    values = values if step else np.full_like(values, values.max())
    offset = doors.SessionClockOffset.fit(values, rng.integers(0, 3, len(values)), column=0, ending=4)
    asked = np.r_[values, rng.uniform(-3, 3, 4000), np.nan, -9, 9].astype(np.float32)
    x_BTF = torch.zeros(len(asked), 2, 1)
    x_BTF[:, -1, 0] = torch.from_numpy(asked)

    class Silent(nn.Module):
        def forward(self, x_BTF):
            return torch.zeros(len(x_BTF), 3, dtype=torch.float64)

    module = doors.NetworkWithClockOffset(Silent(), 0, 4)
    module.load_state_dict(doors.NetworkWithClockOffset(Silent(), 0, 4, offset).state_dict())
    np.testing.assert_array_equal(module(x_BTF).numpy(), offset.log_class_shares(asked))
