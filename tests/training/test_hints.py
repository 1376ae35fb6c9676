"""The line that a training logs where its loss stays flat."""

import numpy as np
import pytest

from ml_factory.models.registry import build_model

RNG = np.random.default_rng(8)
Y = RNG.integers(-1, 2, 96)
X = RNG.normal(size=(96, 4, 2)).astype(np.float32) + Y[:, None, None]
FLAT = "flat from the first epoch on"


def printed(caplog, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize(("rate", "lines"), [(1e-9, 1), (0.05, 0)])
def test_network_fit_with_flat_loss_logs_learning_rate_hint_once(caplog, rate, lines):
    build_model("gru", hidden=4, lookback=4, threads=1, learning_rate=rate, num_epochs=5, dropout=0.0).fit(X, Y)
    assert len(printed(caplog, FLAT)) == lines
    assert all("1e-09" in line and "learning_rate" in line for line in printed(caplog, FLAT))


@pytest.mark.parametrize(("rate", "lines"), [(1e-7, 1), (0.3, 0)])
def test_booster_fit_with_flat_loss_logs_learning_rate_hint(caplog, rate, lines):
    build_model("xgboost", learning_rate=rate, num_epochs=4, threads=1, min_leaf=1.0).fit(X[:, 0], Y)
    assert len(printed(caplog, FLAT)) == lines
