import os

import pytest
import torch

from ml_factory.errors import SettingsError
from ml_factory.run_folder import Run, open_checkpoints
from ml_factory.storage import compile_cache
from ml_factory.training.device import Cuda, Device, Xla, pick, pinned
from ml_factory.training.spec import TrainSpec


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


def test_auto_takes_what_is_there(gpu):
    assert pick(TrainSpec(threads=1)).kind == "cuda" and pick(TrainSpec(device="cpu")).kind == "cpu"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    gpu["there"] = False
    assert pick(TrainSpec(threads=3, precision="fp32")) == Device("cpu", 3)
    assert pick(TrainSpec()).threads >= 1
    for kind in ("cuda", "xla"):
        with pytest.raises(SettingsError, match=f"No {kind.upper()} device found"):
            pick(TrainSpec(device=kind))


def test_the_precision_is_the_hardwares_own(gpu, monkeypatch):
    def chosen(**spec):
        return pick(TrainSpec(**spec)).precision

    assert chosen() == "bf16"
    gpu.update(bf16=False, capability=(7, 5))
    assert chosen() == "fp16" and chosen(precision="fp32") == "fp32"
    gpu.update(capability=(6, 1))
    assert chosen() == "fp32"
    for there in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda there=there: there)
        assert chosen(device="cpu") == ("bf16" if there else "fp32")


def test_autocast_is_the_precision_and_evaluation_knows_none():
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with Device("cpu", 1, precision).autocast():
            assert layer(x).dtype is dtype


def test_out_of_memory_is_told_from_other_errors():
    device = Device("cpu", 1)
    texts = "CUDA out of memory", "DefaultCPUAllocator: can't allocate memory: 8 bytes", "RESOURCE_EXHAUSTED: Ran out"
    assert all(device.out_of_memory(RuntimeError(text)) for text in texts)
    assert device.out_of_memory(torch.OutOfMemoryError("")) and device.out_of_memory(MemoryError())
    assert not device.out_of_memory(RuntimeError("shapes do not match"))
    assert not device.out_of_memory(ValueError("out of memory"))


def test_compiled_programs_of_a_gpu_are_kept_where_we_say(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    Cuda("cuda", 1).keep_programs(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_compiled_programs_are_brought_for_a_network_on_a_gpu_alone(tmp_path, gpu, monkeypatch):
    """The workspace's may lie on a mount, and are many."""
    brought = []
    monkeypatch.setattr(compile_cache, "_downloaded", lambda there, process: brought.append(there) or tmp_path / "here")
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path / "drive"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("ML_FACTORY_PROGRAMS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with open_checkpoints(tmp_path / "drive" / "checkpoints", Run("run", tmp_path / "drive" / "run")):
        pick(TrainSpec(device="cpu"))
    assert brought == []
    assert pick(TrainSpec(device="cuda")).kind == "cuda"
    assert brought == [tmp_path / "drive" / "compiled"]
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "here" / "triton")


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


def test_xla_needs_no_other_compiler(monkeypatch):
    """`compile=True` in a run that goes on on a TPU: torch.compile would fail on its tensors."""
    monkeypatch.setattr(torch, "compile", lambda network: "compiled")
    network = torch.nn.Linear(2, 1)
    assert Xla("xla", 1).wrap(network, compiled=True) is network is Device("cpu", 1).wrap(network)
    assert Device("cpu", 1).wrap(network, compiled=True) == "compiled"
