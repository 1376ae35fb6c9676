import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from ml_factory.errors import FactoryError
from ml_factory.models.registry import build_model
from tests.contract.doors import (
    LSTM,
    NeuralClassifier,
    RecurrentSpec,
    Windows,
    drawn_from,
    weighted_cross_entropy,
)
from tests.training.small_run import Kept

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


def test_weighted_cross_entropy_equals_hand_computed_values():
    logits_BC = torch.tensor([[0.0, 0.0, 0.0], [math.log(2.0), 0.0, 0.0]])
    total, weight = weighted_cross_entropy(logits_BC, torch.tensor([2, 0]), torch.tensor([1.0, 4.0]))
    assert weight == 5
    torch.testing.assert_close(total, torch.tensor(math.log(3.0) + 4 * math.log(2.0)))


def test_network_initial_weights_depend_on_seed_only():
    weights = []
    for place, seed in enumerate((0, 0, 1)):
        torch.manual_seed(place)
        with drawn_from(seed, "lstm"):
            network = LSTM(5, 8, 3, RecurrentSpec(hidden=4))
        weights.append(torch.cat([value.flatten() for value in network.state_dict().values()]))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_estimator_fit_on_other_window_shape_raises_error(market):
    x_NF, rows, y = market
    model = build_model("lstm", **SMALL)
    with pytest.raises(FactoryError, match="got T=4, F=5, wanted T=8, F=any"):
        model.fit(Windows(x_NF, rows, 4), y)
    with pytest.raises(FactoryError, match=r"wanted \(N, T, F\)"):
        model.fit(x_NF, y)


def test_estimator_fit_result_reports_device_parameters_and_memory(market):
    x_NF, rows, y = market
    reported = build_model("lstm", **SMALL, precision="fp32").fit(Windows(x_NF, rows, 8), y).machine
    # Four gates of 8 units over 5 features and 8 states, two biases each, and a head of 3 classes.
    assert reported["parameters"] == 4 * 8 * (5 + 8) + 2 * 4 * 8 + 3 * 8 + 3
    assert (reported["device"], reported["threads"], reported["precision"]) == ("cpu", 1, "fp32")
    # torch alone holds tens of megabytes; in a wrong unit it would be a thousand times off.
    assert 3e7 < reported["peak_bytes"] < 3e10 and reported["rows_per_second"] > 0


class Full(nn.Module):
    """Runs out of memory in a step of more than 8 rows, from its fifth step in this process on."""

    @dataclass(frozen=True)
    class Spec:
        pass

    steps = 0

    def __init__(self, features, lookback, classes, spec):
        super().__init__()
        self.head = nn.Linear(features * lookback, classes)

    def forward(self, x_BTF):
        Full.steps += self.training
        if self.training and len(x_BTF) > 8 and Full.steps > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.head(x_BTF.flatten(1))


ROUNDING = 3e-5  # AdamW follows a gradient near 0: 6e-6 on some processors; a batch of one row more moves 3e-4


def test_fit_out_of_memory_starts_again_from_last_checkpoint_in_smaller_parts(market, caplog):
    x_NF, rows, y = market
    settings = {"epochs": 2, "batch": 32, "lookback": 8, "device": "cpu", "threads": 1, "save_seconds": 0.0}

    def fit(steps, **more):
        Full.steps, model = steps, NeuralClassifier("full", Full, **settings)
        return model, model.fit(Windows(x_NF, rows, 8), y, **more)

    whole, _ = fit(-1000)
    model, result = fit(0, checkpoints=Kept())
    assert result.resumed_step == 4 and "began with 32, now 8" in result.nondeterminism[0]
    assert all(f"step 5, {size} rows at once" in caplog.text for size in (32, 16))
    np.testing.assert_allclose(model.predict_proba(x_NF[None, :8]), whole.predict_proba(x_NF[None, :8]), atol=ROUNDING)
    model, result = fit(4)  # nothing was saved: from the start
    assert result.resumed_step is None and len(result.history) == 2
    np.testing.assert_allclose(model.predict_proba(x_NF[None, :8]), whole.predict_proba(x_NF[None, :8]), atol=ROUNDING)


HINT_RNG = np.random.default_rng(8)
HINT_Y = HINT_RNG.integers(-1, 2, 96)
HINT_X = HINT_RNG.normal(size=(96, 4, 2)).astype(np.float32) + HINT_Y[:, None, None]
FLAT = "flat from the first epoch on"


def printed(caplog, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize(("rate", "lines"), [(1e-9, 1), (0.05, 0)])
def test_network_fit_with_flat_loss_logs_learning_rate_hint_once(caplog, rate, lines):
    model = build_model("gru", hidden=4, lookback=4, threads=1, learning_rate=rate, num_epochs=5, dropout=0.0)
    model.fit(HINT_X, HINT_Y)
    assert len(printed(caplog, FLAT)) == lines
    assert all("1e-09" in line and "learning_rate" in line for line in printed(caplog, FLAT))


@pytest.mark.parametrize(("rate", "lines"), [(1e-7, 1), (0.3, 0)])
def test_booster_fit_with_flat_loss_logs_learning_rate_hint(caplog, rate, lines):
    build_model("xgboost", learning_rate=rate, num_epochs=4, threads=1, min_leaf=1.0).fit(HINT_X[:, 0], HINT_Y)
    assert len(printed(caplog, FLAT)) == lines
