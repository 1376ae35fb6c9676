"""L = 96, batch 256, 32 channels: programs small enough to compile within seconds, and how far a training is by then.

Seconds are printed, wall and processor, for whoever runs this on a machine without other work. What is held to a bound
is what the seconds come from and no other work changes: how many programs a training compiles, and how many
instructions the compiler is given for a step.
"""

import gc
import time

import numpy as np
import pytest
import torch

from benchmarks.training_scan import Unrolled
from ml_factory.models.registry import available_models, find_model_spec, resolve_registry_entry
from ml_factory.models.sequence import LSTM
from ml_factory.training.batches import weighted_cross_entropy
from ml_factory.training.device import XlaDevice
from ml_factory.training.loop import run_training_loop
from ml_factory.training.spec import TrainSpec
from tests.xla.side_by_side import IDENTITY, device_of

LOOKBACK, BATCH, CHANNELS = 96, 256, 32
NETWORKS = [name for name in available_models() if find_model_spec(name).windowed]
# Instructions of a whole training step, a fifth above what was counted. An LSTM whose steps are written out one by one
# has 17 times as many; splitting the moments by `Tensor.split` gave the TFT twice as many.
MOST = {"lstm": 1130, "gru": 1070, "tcn": 2360, "patchtst": 2000, "itransformer": 2060, "tft": 3810}


def compile_seconds() -> list[float]:
    """Of every program so far, in order."""
    metrics = pytest.importorskip("torch_xla.debug.metrics")
    reported = metrics.metric_data("CompileTime")
    return [nanoseconds * 1e-9 for _, nanoseconds in reported[2]] if reported else []


def instructions(*outputs: torch.Tensor) -> int:
    """Of the program that computes these, in all its computations, before the compiler has seen it."""
    text = pytest.importorskip("torch_xla")._XLAC._get_xla_tensors_hlo(list(outputs))
    return sum(" = " in line for line in text.splitlines())


@pytest.fixture
def counted(monkeypatch) -> dict[str, list[int]]:
    """Program -> its instructions at each hand-over: of all that is there and not yet computed."""
    counts, flush = {}, XlaDevice.mark_step

    def counting(device, program):
        there = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        counts.setdefault(program, []).append(instructions(*(one for one in there if one.device.type == "xla")))
        flush(device, program)

    monkeypatch.setattr(XlaDevice, "mark_step", counting)
    return counts


def rows_of(device) -> tuple[torch.Tensor, ...]:
    """x_BTF, classes and weights of one batch, on the device."""
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(BATCH, LOOKBACK, CHANNELS)).astype("f")), torch.arange(BATCH) % 3
    return tuple(map(device.to_device, (x, y, torch.ones(BATCH))))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_fit_large_network_on_xla_compiles_one_small_train_program(name, counted, record_property):
    device, kind = device_of("xla"), resolve_registry_entry(find_model_spec(name).network)
    batch = rows_of(device)
    network, before = kind(CHANNELS, LOOKBACK, 3, kind.Spec()), len(compile_seconds())
    began, busy = time.perf_counter(), time.process_time()
    spec = TrainSpec(epochs=2, batch=BATCH, precision="fp32")
    result = run_training_loop(network, BATCH, lambda positions: batch, _loss, spec, device, identity=IDENTITY)
    wall, busy, compiled = time.perf_counter() - began, time.process_time() - busy, compile_seconds()[before:]
    reported = ", ".join(f"{seconds:.1f}" for seconds in compiled if seconds > 0.1)
    most = max(counted["train"])
    record_property(
        "told",
        f"{name}: {most} instructions compiled in {reported} s, second step after {wall:.1f} s ({busy:.1f} CPU s)",
    )
    assert result.compiles["train"] <= 2 and len(result.history) == 2 == len(counted["train"])
    assert most <= MOST[name]


def test_instruction_bound_rejects_lstm_unrolled_step_by_step():
    """Traced, forward and backward, and never compiled: that takes minutes."""
    device, sizes = device_of("xla"), {}
    for kind in (LSTM, Unrolled):
        network, batch = device.to_device(kind(CHANNELS, LOOKBACK, 3, LSTM.Spec())), rows_of(device)
        _loss(network, batch)[0].backward()
        sizes[kind] = instructions(*(parameter.grad for parameter in network.parameters()))
    assert sizes[LSTM] < MOST["lstm"] < sizes[Unrolled] / 5


def _loss(network, batch):
    x, y, w = batch
    return weighted_cross_entropy(network(x), y, w)
