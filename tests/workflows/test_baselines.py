"""The baselines a model is held against: counted as they are judged, measured as the picture they stand in."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ml_factory.evaluation.baselines import session_time
from ml_factory.models.session_clock import SessionClock
from ml_factory.targets.labels import KINDS, label_classes
from ml_factory.targets.weights import training_weights
from ml_factory.workflows.evaluation import (
    dataset_weighted_prior_loss,
    prepared_dataset_baselines,
    prepared_dataset_metrics,
)

LIFE = 6  # bars a neutral label lives; the others live one
N = 900


@pytest.fixture
def data():
    """Neutral stretches, whose labels live long and overlap and so weigh little; every ninth row is ambiguous."""
    label = np.tile(np.repeat([0, -1, 1], [40, 20, 30]), N // 90).astype(np.int8)
    entry = np.arange(N, dtype=np.int64)
    barrier = np.where(label > 0, "upper", np.where(label < 0, "lower", "vertical")).astype("U9")
    barrier[::9] = "ambiguous"
    label[::9] = 0
    exit_bar = entry + np.where(label == 0, LIFE, 1)
    labels = pd.DataFrame({"label": label, "barrier": barrier, "entry_bar": entry, "exit_bar": exit_bar})
    labels.index = pd.date_range("2024-01-01 00:05", periods=N, freq="5min", tz="UTC")
    return SimpleNamespace(
        labels=labels, y=label, row=entry, unambiguous_mask=barrier != "ambiguous", horizon=LIFE,
        last_move=np.sin(entry), clock=session_time(labels.index.as_unit("ns").asi8, "24h"),
        volatility=np.cos(entry), classes=label_classes(KINDS[0]),
    )  # fmt: skip


def metrics_with_baselines(data, train, rows, forecasts):
    return prepared_dataset_metrics(data, rows, forecasts | prepared_dataset_baselines(data, train, rows), "prior")


def test_prior_baseline_counts_each_clear_training_row_once(data):
    train, test = np.arange(600), np.arange(600, N)
    table = metrics_with_baselines(data, train, test, {})
    clear, assessed = train[data.unambiguous_mask[train]], test[data.unambiguous_mask[test]]
    share = np.array([np.mean(data.y[clear] == side) for side in (-1, 0, 1)])
    by_hand = -np.log(share[data.y[assessed] + 1]).mean()
    assert table.loc["prior", "log_loss"] == pytest.approx(by_hand, rel=1e-12)


def test_weighted_prior_loss_uses_training_weights(data):
    train, validation = np.arange(600), np.arange(600, N)
    taught, assessed = training_weights(data.labels.iloc[train]), training_weights(data.labels.iloc[validation])
    share = np.array([taught[data.y[train] == side].sum() for side in (-1, 0, 1)]) / taught.sum()
    by_hand = assessed @ -np.log(share[data.y[validation] + 1]) / assessed.sum()
    assert dataset_weighted_prior_loss(data, train, validation) == pytest.approx(by_hand, rel=1e-12)
    assert abs(metrics_with_baselines(data, train, validation, {}).loc["prior", "log_loss"] - by_hand) > 0.01


def test_clock_baseline_counts_clear_training_rows_by_bars_left(data):
    """With ambiguous rows counted as neutral, or bars of ten minutes, the shares would be others."""
    train = np.arange(0, 600, 2)  # every other bar
    clear = train[data.unambiguous_mask[train]]
    one_bar_left = clear[np.rint(data.clock.minutes_left[clear] / 5) == 1]
    share = np.array([np.mean(data.y[clear] == side) for side in (-1, 0, 1)])
    counts = np.array([np.sum(data.y[one_bar_left] == side) for side in (-1, 0, 1)])
    lives = {"horizon": LIFE, "bar_minutes": 5.0, "volatility": data.volatility[clear]}
    pseudo_count = SessionClock.fit(data.clock.take(clear), data.y[clear], **lives).pseudo_count
    wanted = (counts + pseudo_count * share) / (counts.sum() + pseudo_count)
    assert counts.sum() and prepared_dataset_baselines(data, train, one_bar_left)["clock"] == pytest.approx(
        np.tile(wanted, (counts.sum(), 1)), rel=1e-12
    )
