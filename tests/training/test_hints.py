"""Lines that a training logs: a loss that stays flat, and a lazy device that compiles."""

import logging

import numpy as np
import pytest

from ml_factory.models.base import hint_when_flat
from ml_factory.models.registry import build_model
from ml_factory.training.recompiles import RecompileMonitor

RNG = np.random.default_rng(8)
Y = RNG.integers(-1, 2, 96)
X = RNG.normal(size=(96, 4, 2)).astype(np.float32) + Y[:, None, None]
FLAT = "flat from the first epoch on"


def said(caplog, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize(("rate", "lines"), [(1e-9, 1), (0.05, 0)])
def test_a_network_whose_loss_stays_flat_is_told_to_check_the_learning_rate_once(caplog, rate, lines):
    build_model("gru", hidden=4, lookback=4, threads=1, learning_rate=rate, num_epochs=5, dropout=0.0).fit(X, Y)
    assert len(said(caplog, FLAT)) == lines
    assert all("1e-09" in line and "learning_rate" in line for line in said(caplog, FLAT))


@pytest.mark.parametrize(("rate", "lines"), [(1e-7, 1), (0.3, 0)])
def test_a_booster_whose_loss_stays_flat_is_told_so_too(caplog, rate, lines):
    build_model("xgboost", learning_rate=rate, num_epochs=4, threads=1, min_leaf=1.0).fit(X[:, 0], Y)
    assert len(said(caplog, FLAT)) == lines


def test_a_loss_that_moved_once_is_not_flat(caplog):
    hint_when_flat([{"train_loss": loss} for loss in (1.0, 0.99, 1.0)], 0.1)
    hint_when_flat([{"train_loss": loss} for loss in (1.0, 1.0)], 0.1)
    assert not said(caplog, FLAT)


def test_compiling_is_told_once_for_each_program_before_its_first_step(caplog):
    watchdog = RecompileMonitor()
    with caplog.at_level(logging.WARNING, "ml_factory.training"):
        for program in ("start", "train", "train", "evaluate", "train"):
            watchdog.announce(program)
    told = said(caplog, "XLA compiles the program")
    assert len(told) == 2 and "program train now" in told[0] and "program evaluate now" in told[1]
