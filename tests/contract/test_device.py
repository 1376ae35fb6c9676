import os

import pytest
import torch

from ml_factory.errors import SettingsError
from tests.contract.doors import Device, TrainSpec, deterministic_device, pick_device, pick_prediction_device


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as torch would describe it; the dict may be changed."""
    facts = {"there": True, "bf16": True, "capability": (8, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: facts["there"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    # A T4 says yes where it may emulate.
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: facts["bf16"] or including_emulation
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: facts["capability"])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back as it was
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    return facts


def test_pick_auto_uses_cuda_if_present_else_cpu(gpu):
    assert pick_device(TrainSpec(threads=1)).kind == "cuda" and pick_device(TrainSpec(device="cpu")).kind == "cpu"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    gpu["there"] = False
    assert pick_device(TrainSpec(threads=3, precision="fp32")) == Device("cpu", 3)
    assert pick_device(TrainSpec()).threads >= 1
    for kind in ("cuda", "xla"):
        with pytest.raises(SettingsError, match=f"No {kind.upper()} device found"):
            pick_device(TrainSpec(device=kind))


def test_pick_precision_follows_hardware_support(gpu, monkeypatch):
    def chosen(**spec):
        return pick_device(TrainSpec(**spec)).precision

    assert chosen() == "bf16"
    gpu.update(bf16=False, capability=(7, 5))
    assert chosen() == "fp16" and chosen(precision="fp32") == "fp32"
    gpu.update(capability=(6, 1))
    assert chosen() == "fp32"
    for there in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda there=there: there)
        assert chosen(device="cpu") == ("bf16" if there else "fp32")


def test_pick_prediction_device_that_is_absent_is_what_auto_picks(gpu):
    assert pick_prediction_device(TrainSpec(device="cuda", threads=1)).kind == "cuda"
    gpu["there"] = False
    for kind in ("cuda", "xla"):
        assert pick_prediction_device(TrainSpec(device=kind, threads=1, precision="fp32")) == Device("cpu", 1)


def test_device_out_of_memory_recognises_memory_errors_only():
    device = Device("cpu", 1)
    texts = "CUDA out of memory", "DefaultCPUAllocator: can't allocate memory: 8 bytes", "RESOURCE_EXHAUSTED: Ran out"
    assert all(device.is_out_of_memory_error(RuntimeError(text)) for text in texts)
    assert device.is_out_of_memory_error(torch.OutOfMemoryError("")) and device.is_out_of_memory_error(MemoryError())
    assert not device.is_out_of_memory_error(RuntimeError("shapes do not match"))
    assert not device.is_out_of_memory_error(ValueError("out of memory"))


def test_pinned_restores_threads_and_rng_state_after_error():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), deterministic_device(Device("cpu", threads + 1)):
        assert torch.get_num_threads() == threads + 1
        torch.rand(1)
        raise ZeroDivisionError
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_device_facts_are_plain_values_and_differ_by_threads_and_instructions(monkeypatch):
    one, two = Device("cpu", 1).environment_facts(), Device("cpu", 2).environment_facts()
    assert {name for name in one if one[name] != two[name]} == {"threads"}
    assert all(type(value) in (str, int) for value in one.values())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "none")
    other = Device("cpu", 1).environment_facts()
    assert {name for name in one if one[name] != other[name]} == {"processor"}
