"""What a checkpoint file holds."""

import math

import numpy as np
import pytest
from safetensors import safe_open

from ml_factory.checkpoints.checkpoint_file import (
    read_checkpoint,
    read_checkpoint_info,
    verify_checkpoint,
    write_checkpoint,
)
from ml_factory.storage.serialization import pack_state

STATE = {"value": 3, "weights": np.arange(40.0), "names": ["a", "b"], "whole": np.arange(-2, 3, dtype=np.int8)}
INFO = {
    "run": "r", "phase": "p", "sequence": 7, "saved_at": "2026-01-01T00:00:00+00:00",
    "metrics": {"val_loss": 0.5, "unknown": math.nan}, "lease": {"session": "s", "fence": 2},
}  # fmt: skip


@pytest.fixture
def path(tmp_path):
    write_checkpoint(tmp_path / "p.0.ckpt", INFO, *pack_state(STATE))
    return tmp_path / "p.0.ckpt"


def test_checkpoint_file_returns_state_and_description_and_is_safetensors(path):
    info, state = read_checkpoint(path)
    np.testing.assert_equal(state, STATE)
    np.testing.assert_equal({name: info[name] for name in INFO}, INFO)
    assert info["bytes"] == path.stat().st_size and info["path"] == str(path)
    assert read_checkpoint_info(path)["hash"] == verify_checkpoint(path)["hash"] == info["hash"]
    with safe_open(path, "np") as file:
        assert "checkpoint" in file.metadata()
        for name in ("weights", "whole"):
            np.testing.assert_array_equal(file.get_tensor(f"['{name}']"), STATE[name])
    state["weights"][:] = 0  # a loaded state belongs to its reader
