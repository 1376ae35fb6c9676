"""States in a file: the safetensors format, and never a weight that is not finite."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import NonFiniteError
from ml_factory.storage.serialization import deserialize_state, pack_state, serialize_state

NAN, INF = float("nan"), float("inf")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("bBhHiIqQefd?"), st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_state_is_read_by_safetensors_library(kinds):
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
def test_non_finite_tensor_raises_with_name(bad, dtype, at):
    weights = torch.linspace(-3, 3, 300_000).to(dtype)
    state = {"step": 3, "network": {"good": torch.ones(3), "w": weights}}
    pack_state(state, finite=True)
    weights[at] = bad
    with pytest.raises(NonFiniteError, match=r"\['network'\]\['w'\]"):
        pack_state(state, finite=True)
    deserialize_state(serialize_state(state))  # a finished artifact is not asked


def test_non_finite_arrays_of_training_alone_are_refused_and_keep_the_last_checkpoint(tmp_path):
    kept = {
        "memory": {"best_loss": INF, "history": [{"val_loss": NAN}]},
        "p": [np.array([[NAN, 0.5], [INF, 1]])],
        "network": {"attention_mask": torch.tensor([0.0, -INF]), "large": torch.full((1000,), 3e38)},
        "optimizer": {"v": np.full(10, 1e300)},  # finite, and its square is not
    }
    with CheckpointManager(tmp_path, run="r") as manager:
        manager.save_checkpoint("p", kept, force=True)
        for name in ("weights", "optimizer", "ema"):
            with pytest.raises(NonFiniteError, match=rf"\['{name}'\].*1 of"):
                manager.save_checkpoint("p", {name: [{"m": np.array([1.0, NAN])}]}, force=True)
        found = manager.load_latest_checkpoint("p")["state"]
    np.testing.assert_equal([found[name] for name in ("memory", "p")], [kept[name] for name in ("memory", "p")])
    assert all(torch.equal(found["network"][name], value) for name, value in kept["network"].items())
