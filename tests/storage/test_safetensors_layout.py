"""States copied to their place: the safetensors format to the byte, and never a weight that is not finite."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import NonFiniteError
from ml_factory.storage.safetensors_layout import SafetensorsLayout, TensorEntry
from ml_factory.storage.serialization import deserialize_state, plan_state_layout, serialize_state

NAN, INF = float("nan"), float("inf")


def copied(layout: SafetensorsLayout) -> bytes:
    data = bytearray(layout.size)
    layout.fill(memoryview(data))
    return bytes(data)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("bBhHiIqQefd?"), st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_encode_state_is_read_by_safetensors_library(kinds):
    state = {str(i): np.arange(np.prod(shape, dtype=int)).astype(kind).reshape(shape)
             for i, (kind, shape) in enumerate(kinds)}  # fmt: skip
    read = load(serialize_state(state))
    del read["tree"]
    assert sorted(read) == sorted(f"[{name!r}]" for name in state)
    for name, array in state.items():
        observed = read[f"[{name!r}]"]
        assert observed.dtype == array.dtype and observed.shape == array.shape
        np.testing.assert_array_equal(observed, array)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 131_071, 131_072, 299_999])
def test_copy_of_non_finite_tensor_raises_with_name(bad, dtype, at):
    weights = torch.linspace(-3, 3, 300_000).to(dtype)
    state = {"step": 3, "network": {"good": torch.ones(3), "w": weights}}
    copied(plan_state_layout(state, finite=True))
    weights[at] = bad
    with pytest.raises(NonFiniteError, match=r"\['network'\]\['w'\]"):
        copied(plan_state_layout(state, finite=True))
    deserialize_state(serialize_state(state))  # a finished artifact is not asked


def test_copy_accepts_finite_values_with_overflowing_squares():
    huge = {"network": torch.full((1000,), 3e38), "optimizer": {"v": np.full(10, 1e300)}}
    copied(plan_state_layout(huge, finite=True))


@pytest.mark.parametrize("name", ["weights", "optimizer", "ema"])
def test_copy_of_non_finite_training_array_raises(name):
    with pytest.raises(NonFiniteError, match=name):
        copied(plan_state_layout({name: [{"m": np.array([1.0, NAN])}]}, finite=True))


def test_checkpoint_manager_keeps_nan_and_infinity_outside_weights(tmp_path):
    state = {
        "memory": {"best_loss": INF, "history": [{"val_loss": NAN}]},
        "p": [np.array([[NAN, 0.5], [INF, 1]])],
        "network": {"attention_mask": torch.tensor([0.0, -INF])},
    }
    with CheckpointManager(tmp_path, run="r") as manager:
        manager.save_checkpoint("p", state, force=True)
        found = manager.load_latest_checkpoint("p")["state"]
    assert found["memory"]["best_loss"] == INF and np.isnan(found["memory"]["history"][0]["val_loss"])
    np.testing.assert_array_equal(found["p"][0], state["p"][0])
    assert torch.equal(found["network"]["attention_mask"], state["network"]["attention_mask"])


def test_checkpoint_manager_refusing_non_finite_state_keeps_last_checkpoint(tmp_path):
    with CheckpointManager(tmp_path, run="r") as manager:
        manager.save_checkpoint("p", {"network": torch.ones(3)}, force=True)
        with pytest.raises(NonFiniteError, match="1 of"):
            manager.save_checkpoint("p", {"network": torch.tensor([1, NAN, 2])}, force=True)
        assert torch.equal(manager.load_latest_checkpoint("p")["state"]["network"], torch.ones(3))


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "uint8"])
def test_tensors_of_a_device_give_the_bytes_of_tensors_in_memory(monkeypatch, dtype):
    """A torch tensor stands for one on a device: it is copied by torch, into the buffer's own pages."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    given = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    floats = dtype if dtype == "float32" else ""
    layouts = [
        SafetensorsLayout({"['w']": TensorEntry(data, dtype, (2, 3), floats)})
        for data in (given.reshape(-1), given.numpy())
    ]
    files = [bytearray(layout.size) for layout in layouts]
    for layout, file in zip(layouts, files, strict=True):
        layout.fill(memoryview(file))
    assert files[0] == files[1] and np.array_equal(load(bytes(files[0]))["['w']"], given.numpy())
    assert layouts[0].is_on_device and not layouts[1].is_on_device


def test_a_tensor_of_a_device_that_is_not_finite_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    layout = SafetensorsLayout({"['w']": TensorEntry(torch.tensor([1.0, INF]), "float32", (2,), "float32")})
    with pytest.raises(NonFiniteError, match=r"state\['w'\]"):
        layout.fill(memoryview(bytearray(layout.size)))
