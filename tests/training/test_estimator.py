import numpy as np
import pytest
import torch

from ml_factory.datasets.windows import Windows
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.models.registry import build_model

SMALL = {"epochs": 2, "batch": 32, "lookback": 8, "hidden": 8, "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def market():
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(200, 5)).astype(np.float32)
    rows = np.arange(7, 200)
    return x_NF, rows, rng.integers(-1, 2, len(rows))


def test_estimator_fit_on_windows_equals_fit_on_arrays(market):
    x_NF, rows, y = market
    windows = Windows(x_NF, rows, 8)
    p = []
    for x in (windows, windows[:]):
        model = build_model("lstm", **SMALL)
        model.fit(x, y)
        p.append(model.predict_proba(x))
    np.testing.assert_array_equal(p[0], p[1])


def test_estimator_predict_proba_last_short_batch_is_padded_and_cut(market):
    x_NF, rows, y = market
    model = build_model("lstm", **SMALL, eval_batch=64)
    model.fit(Windows(x_NF, rows, 8), y, validation=(Windows(x_NF, rows, 8), y))
    p = model.predict_proba(Windows(x_NF, rows, 8))
    with torch.no_grad():
        logits = model.network(Windows(x_NF, rows, 8).gather(np.arange(len(rows))))
    np.testing.assert_allclose(p, logits.double().softmax(1).numpy(), atol=1e-6)


def test_estimator_validation_loss_equals_weighted_log_loss(market):
    x_NF, rows, y = market
    windows, w = Windows(x_NF, rows, 8), np.random.default_rng(1).uniform(0, 2, len(rows))
    model = build_model("lstm", **SMALL | {"epochs": 1})
    result = model.fit(windows, y, validation=(windows, y, w))
    p = model.predict_proba(windows)
    expected = -np.average(np.log(p[np.arange(len(y)), y + 1]), weights=w)
    assert result.history[0]["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_estimator_refit_on_other_feature_count_succeeds(market):
    x_NF, rows, y = market
    model = build_model("lstm", **SMALL)
    model.fit(Windows(x_NF, rows, 8), y)
    model.fit(Windows(np.ascontiguousarray(x_NF[:, :3]), rows, 8), y)
    assert model.get_state()["n_features"] == 3


def test_build_model_settings_go_to_network_or_training_spec():
    model = build_model("patchtst", width=8, epochs=4, lookback=24)
    assert model.network_spec.width == 8 and model.settings.epochs == 4 and model.lookback == 24
    with pytest.raises(SettingsError, match="did you mean 'hidden'"):
        build_model("lstm", hiden=3)
    with pytest.raises(SettingsError, match=r"\[dropout\]\. got 'abc', wanted a number"):
        build_model("lstm", dropout="abc")
    for lookback in (0, 1):  # networks read windows, and one row is none
        with pytest.raises(SettingsError, match=r"\[lookback\]"):
            build_model("lstm", lookback=lookback)


def test_estimator_fit_on_other_window_shape_raises_error(market):
    x_NF, rows, y = market
    model = build_model("lstm", **SMALL)
    with pytest.raises(FactoryError, match="got T=4, F=5, wanted T=8, F=any"):
        model.fit(Windows(x_NF, rows, 4), y)
    with pytest.raises(FactoryError, match=r"wanted \(N, T, F\)"):
        model.fit(x_NF, y)


def test_estimator_initial_weights_depend_on_seed_only():
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(states))
        model = build_model("lstm", **SMALL, seed=seed)
        model.n_features = 5
        model._build()
        states.append(model.get_state()["weights"]["rnn.weight_ih_l0"])
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_estimator_fit_result_reports_device_parameters_and_memory(market):
    x_NF, rows, y = market
    reported = build_model("lstm", **SMALL, precision="fp32").fit(Windows(x_NF, rows, 8), y).machine
    # Four gates of 8 units over 5 features and 8 states, two biases each, and a head of 3 classes.
    assert reported["parameters"] == 4 * 8 * (5 + 8) + 2 * 4 * 8 + 3 * 8 + 3
    assert (reported["device"], reported["threads"], reported["precision"]) == ("cpu", 1, "fp32")
    # torch alone holds tens of megabytes; in a wrong unit it would be a thousand times off.
    assert 3e7 < reported["peak_bytes"] < 3e10 and reported["rows_per_second"] > 0
