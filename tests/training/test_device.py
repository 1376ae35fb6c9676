import os

import pytest
import torch

from ml_factory.errors import SettingsError
from ml_factory.training.device import Device, pick, pinned
from ml_factory.training.spec import TrainSpec


def test_auto_takes_what_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick(TrainSpec(threads=3)) == Device("cpu", 3)
    assert pick(TrainSpec()).threads >= 1
    with pytest.raises(SettingsError, match="No CUDA device here"):
        pick(TrainSpec(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back as it was
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert pick(TrainSpec(threads=1)).kind == "cuda" and pick(TrainSpec(device="cpu")).kind == "cpu"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_pinned_gives_everything_back_also_after_an_error():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), pinned(Device("cpu", threads + 1)):
        assert torch.get_num_threads() == threads + 1
        torch.rand(1)
        raise ZeroDivisionError
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_step_draws_what_its_seed_says():
    device = Device("cpu", 1)
    drawn = []
    with pinned(device):
        for seed in (1, 1, 2):
            device.seed_step(seed)
            drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def test_facts_are_plain_and_tell_threads_apart():
    one, two = Device("cpu", 1).facts(), Device("cpu", 2).facts()
    assert {name for name in one if one[name] != two[name]} == {"threads"}
    assert all(type(value) in (str, int) for value in one.values())
