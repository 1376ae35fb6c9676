import numpy as np
import pytest
import torch

from benchmarks.forecaster import NeuralForecaster, weighted_mse, weighted_pinball
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.models.heads import ForecastTask
from ml_factory.models.transformer import ITransformer

SMALL = {"lookback": 12, "width": 16, "inner": 16, "dropout": 0.0, "device": "cpu", "threads": 1, "precision": "fp32"}
ROWS, HELD = np.arange(11, 300), np.arange(311, 380)


def waves() -> np.ndarray:
    """Two sines that say the next steps exactly, and noise that says nothing."""
    t, rng = np.arange(400), np.random.default_rng(0)
    return np.stack([np.sin(t / 3), np.cos(t / 5), rng.normal(size=400)], axis=1).astype(np.float32)


def test_neural_forecaster_on_waves_forecasts_held_out_rows():
    x_NF = waves()
    model = NeuralForecaster("waves", ITransformer, ForecastTask(4, channels=2), epochs=20, batch=32, lr=0.01, **SMALL)
    result = model.fit(x_NF, ROWS, validation=HELD)
    y_BSC = model.predict(x_NF, HELD)
    after_BSC = np.stack([x_NF[row + 1 : row + 5, :2] for row in HELD])
    error = np.mean((y_BSC - after_BSC) ** 2)
    assert y_BSC.shape == after_BSC.shape and y_BSC.dtype == np.float32
    assert error == pytest.approx(min(row["val_loss"] for row in result.history), rel=1e-5)
    assert error < 0.1 * after_BSC.var()


def test_neural_forecaster_quantile_heads_cover_ordered_shares_of_targets():
    x_NF = waves()[:, ::-1].copy()
    forecast = ForecastTask(1, channels=1, quantiles=(0.1, 0.5, 0.9))
    model = NeuralForecaster("noise", ITransformer, forecast, epochs=12, batch=32, lr=0.01, **SMALL)
    model.fit(x_NF, ROWS, validation=HELD)
    y_BQ = model.predict(x_NF, HELD)[:, 0, 0]
    below = (x_NF[HELD + 1, :1] < y_BQ).mean(axis=0)
    assert (np.diff(below) > 0.15).all() and abs(below[1] - 0.5) < 0.2


def test_neural_forecaster_with_changed_rows_after_targets_gives_same_forecasts():
    x_NF, p = waves(), []
    for disturbed in (x_NF, np.r_[x_NF[:384], 9 + x_NF[384:]].astype(np.float32)):
        model = NeuralForecaster("waves", ITransformer, ForecastTask(4), epochs=1, batch=32, **SMALL)
        model.fit(disturbed, ROWS, validation=HELD)
        p.append(model.predict(disturbed, HELD))
    np.testing.assert_array_equal(*p)


def test_neural_forecaster_invalid_arguments_raise_clear_errors():
    with pytest.raises(SettingsError, match="did you mean 'width'"):
        NeuralForecaster("waves", ITransformer, ForecastTask(4), lookback=12, widht=3)
    model = NeuralForecaster("waves", ITransformer, ForecastTask(4), epochs=1, **SMALL)
    with pytest.raises(FactoryError, match="not fitted"):
        model.predict(waves(), HELD)
    with pytest.raises(SettingsError, match="reach outside the data"):
        model.fit(waves(), np.arange(11, 398), validation=HELD)


def test_squared_error_by_hand():
    """Two rows of two steps and one channel: errors 1, 3 and 0, 2; row means 5 and 2, weights 1 and 3."""
    y_BSC, target_BSC = torch.tensor([[[1.0], [3.0]], [[0.0], [2.0]]]), torch.zeros(2, 2, 1)
    total, weight = weighted_mse(y_BSC, target_BSC, torch.tensor([1.0, 3.0]))
    assert (total, weight) == (5 + 3 * 2, 4)


def test_quantile_loss_by_hand():
    """Target 1 above a forecast of 0: q; target 1 below a forecast of 3: 2 (1 - q)."""
    y_BSCQ = torch.tensor([0.0, 3.0]).view(1, 1, 1, 2)
    total, weight = weighted_pinball(y_BSCQ, torch.ones(1, 1, 1), torch.tensor([2.0]), (0.1, 0.9))
    torch.testing.assert_close(total, torch.tensor(2 * (0.1 * 1 + 0.1 * 2) / 2))
    assert weight == 2


def test_the_quantile_of_a_sample_has_the_least_quantile_loss():
    sample_B = torch.randn(999, generator=torch.Generator().manual_seed(0))
    tries = torch.linspace(-3, 3, 601)
    for level in (0.1, 0.5, 0.9):
        losses = [
            float(weighted_pinball(y.expand(999, 1, 1, 1), sample_B.view(-1, 1, 1), torch.ones(999), (level,))[0])
            for y in tries
        ]
        assert abs(tries[int(np.argmin(losses))] - sample_B.quantile(level)) <= 0.011
