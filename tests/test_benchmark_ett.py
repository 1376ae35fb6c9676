"""The forecasting benchmark keeps the papers' protocol: few rows here, and the published table where the data is."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks import ett
from benchmarks.forecaster import NeuralForecaster
from ml_factory.models.heads import ForecastTask

BLOCKS = {"TRAIN": 120, "VALIDATION": 170, "TEST": 230}
TINY = {"batch": 16, "epochs": 2, "device": "cpu", "threads": 1}


@pytest.fixture
def series(tmp_path, monkeypatch):
    """A random walk of three columns with rows after the test block, cut into short blocks."""
    for name, end in BLOCKS.items():
        monkeypatch.setattr(ett, name, end)
    return written(tmp_path / "walk.parquet", walk())


def walk() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(260, 3)).cumsum(axis=0)


def written(path, x_NF):
    dates = pd.date_range("2016-07-01", periods=len(x_NF), freq="h")
    pd.DataFrame(x_NF, columns=["a", "b", "c"]).assign(date=dates).to_parquet(path)
    return ett.Series(path)


def test_ett_repeat_last_matches_loops_over_windows_steps_and_columns(series):
    x = walk()
    x = (x - x[:120].mean(axis=0)) / x[:120].std(axis=0)
    apart = [
        x[last + ahead, column] - x[last, column]
        for last in range(169, 225)  # targets 170..174 first, 225..229 last
        for ahead in range(1, 6)
        for column in range(3)
    ]
    found = ett.repeat_last(series, 5)
    assert found["windows"] == 56
    assert found["mse"] == pytest.approx(np.square(apart).mean(), rel=1e-3)
    assert found["mae"] == pytest.approx(np.abs(apart).mean(), rel=1e-3)
    assert ett.repeat_last(series, 5, batch=32)["windows"] == 32


def test_ett_judge_reads_test_block_once_after_all_seeds_are_trained(series, monkeypatch, capsys):
    events, read, fit, predict = [], ett.Series.until, NeuralForecaster.fit, NeuralForecaster.predict

    def spied(kind, call, *given, **named):
        events.append((kind, len(given[1]) if kind != "read" else given[1]))
        return call(*given, **named)

    monkeypatch.setattr(ett.Series, "until", lambda *given: spied("read", read, *given))
    monkeypatch.setattr(NeuralForecaster, "fit", lambda *given, **named: spied("fit", fit, *given, **named))
    monkeypatch.setattr(NeuralForecaster, "predict", lambda *given: spied("predict", predict, *given))
    monkeypatch.setitem(ett.RECIPES, "dlinear", ett.Recipe(ett.DLinear, 20, {"lr": 0.01}))
    ett.judge("dlinear", series, 5, [0, 1], **TINY)
    assert events == [("read", 170), ("fit", 170)] * 2 + [("read", 230)] + [("predict", 230)] * 2
    *each, mean = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["seed"] for line in each] == [0, 1] and mean["windows"] == 56
    assert mean["mse"] == pytest.approx(np.mean([line["mse"] for line in each]), rel=1e-3)


def test_ett_trained_with_changed_test_block_has_same_weights_and_validation_loss(series, tmp_path):
    disturbed = walk()
    disturbed[170:] = 99.0
    recipe = ett.Recipe(ett.DLinear, 20, {"lr": 0.01})
    found = [
        ett.trained("dlinear", recipe, source, 5, seed=0, **TINY)
        for source in (series, written(tmp_path / "other.parquet", disturbed))
    ]
    weights = [model.network.state_dict() for model, _ in found]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert found[0][1]["validation_mse"] == found[1][1]["validation_mse"]


def test_ett_dlinear_forward_matches_numpy_trend_and_remainder_decomposition():
    x = np.random.default_rng(0).normal(size=(2, 30, 3)).astype(np.float32)
    network = ett.DLinear(3, 30, ForecastTask(4), ett.DLinearSpec())
    padded = np.concatenate([np.repeat(x[:, :1], 12, axis=1), x, np.repeat(x[:, -1:], 12, axis=1)], axis=1)
    trend = np.stack([padded[:, step : step + 25].mean(axis=1) for step in range(30)], axis=1)
    weights = [(part.weight.detach().numpy(), part.bias.detach().numpy()) for part in (network.trend, network.rest)]
    wanted = sum(
        np.einsum("btf,st->bsf", part, weight) + bias[:, None]
        for part, (weight, bias) in zip((trend, x - trend), weights, strict=True)
    )
    np.testing.assert_allclose(network(torch.from_numpy(x)).detach().numpy(), wanted, atol=1e-5)


def test_ett_main_without_data_file_prints_skipped_with_path(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ett", "--data", str(tmp_path)])
    ett.main()
    assert "no " + str(tmp_path / "ETTh1.parquet") in json.loads(capsys.readouterr().out)["skipped"]


def test_ett_repeat_last_on_etth1_reproduces_published_table(shared_data, capsys):
    ett.reproduce(ett.Series(shared_data / "ett" / "ETTh1.parquet"))
    assert len(capsys.readouterr().out.splitlines()) == len(ett.REPEAT_LAST)
