"""Known-future and static inputs through whole fits: learnt from, saved, asked for again, refused when they lack."""

import numpy as np
import pytest

from benchmarks.forecaster import NeuralForecaster
from ml_factory.datasets.windows import Windows
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.models.heads import ForecastTask
from ml_factory.models.registry import build_model, build_model_from_state, check_model
from ml_factory.models.tft import TFT
from ml_factory.storage.serialization import deserialize_state, serialize_state

SMALL = {"lookback": 5, "width": 8, "device": "cpu", "threads": 1, "dropout": 0.0, "batch": 32, "lr": 0.02}
NAMED = {"known": ("clock",), "static": ("symbol",), "ahead": 3}
RNG = np.random.default_rng(0)
X_NF = RNG.normal(size=(200, 3)).astype(np.float32)
ROWS = np.arange(10, 200)
KNOWN = RNG.normal(size=(190, 3, 1)).astype(np.float32)
Y = np.sign(KNOWN[:, 2, 0]).astype(int)  # told by what is known of the third step ahead, and by nothing else


def windows(rows=slice(None), known=KNOWN) -> Windows:
    covariates = {"known_BSK": known[rows], "static_BV": np.ones((len(known[rows]), 1), np.float32)}
    return Windows(X_NF, ROWS[rows], 5, covariates)


def test_tft_classifier_learns_from_covariates_and_saves_covariate_shapes():
    model, fit, held = build_model("tft", **SMALL, **NAMED, epochs=12), slice(150), slice(150, None)
    result = model.fit(windows(fit), Y[fit], validation=(windows(held), Y[held]))
    assert result.history[-1]["val_loss"] < 0.3
    p = model.predict_proba(windows(held))
    assert ((p.argmax(1) - 1) == Y[held]).mean() > 0.9
    again = build_model_from_state(deserialize_state(serialize_state(model.get_state())))
    assert again.network_spec.known == ("clock",) and again.covariates == {"known_BSK": (3, 1), "static_BV": (1,)}
    np.testing.assert_array_equal(again.predict_proba(windows(held)), p)
    # Rows taken out of the windows take what stands beside them along.
    np.testing.assert_allclose(again.predict_proba(windows(held).take([3, 1])), p[[3, 1]], atol=1e-5)


def test_tft_resumed_with_changed_known_inputs_raises_error():
    kept = []

    class Box:
        due, due_in = staticmethod(lambda: False), staticmethod(lambda: 9.0)
        load = staticmethod(lambda: {"state": kept[-1]} if kept else None)
        save = staticmethod(lambda state, metrics=None, force=False: kept.append(state))

    model = build_model("tft", **SMALL, **NAMED, epochs=1)
    model.fit(windows(), Y, checkpoints=Box())
    with pytest.raises(FactoryError, match=r"another run \[data\]"):
        build_model("tft", **SMALL, **NAMED, epochs=1).fit(windows(known=KNOWN + 1), Y, checkpoints=Box())


def test_tft_fit_with_missing_or_other_covariates_raises_error():
    model = build_model("tft", **SMALL, **NAMED, epochs=1)
    for wrong in (Windows(X_NF, ROWS, 5), windows(known=KNOWN[:, :2]), windows(known=np.repeat(KNOWN, 2, axis=2))):
        with pytest.raises(FactoryError, match="with other covariates"):
            model.fit(wrong, Y)
    with pytest.raises(FactoryError, match="with other covariates"):
        build_model("tft", **SMALL, epochs=1).fit(windows(), Y)
    with pytest.raises(SettingsError, match=r"\[frames\]"):
        build_model("tft", **SMALL, **NAMED, frames=((1, 3),))


def test_check_model_of_tft_with_covariates_passes():
    assert len(check_model("tft", **NAMED)) == 7


def test_neural_forecaster_with_known_inputs_learns_from_known_inputs():
    """The next value of the first channel is what is known of its moment: nothing else tells it."""
    known_NK = RNG.normal(size=(203, 1)).astype(np.float32)
    x_NF = np.concatenate([known_NK[:200], X_NF[:, :1]], axis=1)
    train, held = np.arange(10, 150), np.arange(150, 197)
    settings = {**SMALL, "epochs": 40, "known": ("clock",), "static": ("symbol",)}
    model, reported = NeuralForecaster("tft", TFT, ForecastTask(3, channels=1), **settings), {"known_NK": known_NK}
    with pytest.raises(FactoryError, match="with other covariates"):
        model.fit(x_NF, train, validation=held, **reported)
    reported["static_V"] = np.ones(1, np.float32)
    result = model.fit(x_NF, train, validation=held, **reported)
    assert min(epoch["val_loss"] for epoch in result.history) < 0.1 < 0.5 * x_NF[:, 0].var()
    y_BSC = model.predict(x_NF, np.array([199]), **reported)  # the steps behind the series are known, too
    assert np.abs(y_BSC[0, :, 0] - known_NK[200:, 0]).mean() < 0.6
    with pytest.raises(FactoryError, match="with other covariates"):
        model.predict(x_NF, held)
