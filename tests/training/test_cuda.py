"""A training on a GPU is the CPU's: on a real one where there is one, and through the adapter's every call without one.

The stand-in computes on the CPU what it is asked to compute on a GPU. It shows that the adapter is asked rightly and
answers, not that a GPU computes rightly: that is for the real one, which runs the same tests.
"""

from inspect import getmembers, isfunction, signature

import numpy as np
import pytest
import torch

from ml_factory.datasets.windows import Windows
from ml_factory.models.registry import build_model
from ml_factory.training.device import CudaDevice, Device, XlaDevice

GPU = torch.cuda.is_available()
SETTINGS = {"epochs": 2, "batch": 32, "lookback": 16, "threads": 1, "precision": "fp32"}
NETWORKS = ("lstm", "gru", "tcn", "patchtst", "itransformer", "tft")[: None if GPU else 1]


def stand_in(monkeypatch) -> None:
    """torch.cuda as far as the adapter asks it."""
    answers = {
        "is_available": True, "set_device": None, "manual_seed_all": None, "mem_get_info": (1 << 33, 1 << 34),
        "max_memory_allocated": 1 << 20, "reset_peak_memory_stats": None, "get_device_name": "a stand-in",
        "get_rng_state_all": [], "empty_cache": None,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(CudaDevice, "torch_device", property(lambda self: "cpu"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.skipif(not GPU, reason="no GPU here"))])
def gpu(request, monkeypatch):
    """How far from the CPU's losses a training may end."""
    if request.param == "real":
        return 1e-4
    stand_in(monkeypatch)
    return 0.0


@pytest.fixture(scope="module")
def market():
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(200, 5)).astype(np.float32)
    rows = np.arange(15, 200)
    return Windows(x_NF, rows, 16), rng.integers(-1, 2, len(rows))


def losses(name: str, market: tuple, **settings) -> np.ndarray:
    windows, y = market
    result = build_model(name, **SETTINGS | settings).fit(windows, y, validation=(windows, y))
    return np.array([(epoch["train_loss"], epoch["val_loss"]) for epoch in result.history])


@pytest.mark.parametrize("name", NETWORKS)
def test_network_losses_on_cuda_equal_cpu(name, gpu, market):
    np.testing.assert_allclose(
        losses(name, market, device="cuda", dropout=0.0), losses(name, market, device="cpu", dropout=0.0), rtol=gpu
    )


def test_fit_on_cuda_without_free_memory_prefetches_batches(gpu, market, monkeypatch):
    there = losses("tcn", market, device="cuda")
    monkeypatch.setattr(CudaDevice, "free_bytes", lambda self: 0)
    np.testing.assert_array_equal(losses("tcn", market, device="cuda"), there)


@pytest.mark.parametrize("kind", [CudaDevice, XlaDevice])
def test_device_subclasses_have_same_method_signatures(kind):
    for name, of_all in getmembers(Device, isfunction):
        if not name.startswith("__"):
            assert [*signature(getattr(kind, name)).parameters] == [*signature(of_all).parameters], name
