"""Where the arithmetic happens: cpu or cuda. Nothing outside this file knows which.

An XLA device has its place here: `pick`, `place`, `seed_step`, `facts` are all a new kind must answer.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ml_factory.errors import SettingsError
from ml_factory.models.contract import cores, environment
from ml_factory.training.spec import TrainSpec


@dataclass(frozen=True)
class Device:
    """The chosen device. kind : cpu or cuda."""

    kind: str
    threads: int

    def place(self, value):
        """A tensor, module or Windows on this device."""
        return value.to(self.kind)

    def seed_step(self, seed: int) -> None:
        """Random numbers drawn on the device from here on depend on this seed alone."""
        torch.default_generator.manual_seed(seed)
        if self.kind == "cuda":
            torch.cuda.manual_seed_all(seed)

    def facts(self) -> dict:
        """What the bits of a run depend on besides data and settings."""
        name = torch.cuda.get_device_name() if self.kind == "cuda" else torch.backends.cpu.get_cpu_capability()
        return environment(device=self.kind, capability=name, threads=self.threads, torch=str(torch.__version__))


def pick(spec: TrainSpec) -> Device:
    """The device the spec asks for; "auto" takes CUDA where there is one."""
    there = torch.cuda.is_available()
    if spec.device == "cuda" and not there:
        raise SettingsError(
            "No CUDA device here",
            where="device",
            got="cuda",
            wanted="cpu or auto",
            next_step="choose a GPU runtime, or device='auto'",
        )
    if there:
        # Read when cuBLAS starts: without it matrix products may add in another order each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return Device("cuda" if there and spec.device != "cpu" else "cpu", spec.threads or cores())


@contextmanager
def pinned(device: Device) -> Iterator[None]:
    """Run with the device's thread count and deterministic kernels; the caller's settings and random state return."""
    threads, states = torch.get_num_threads(), torch.get_rng_state()
    strict, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cuda_states = torch.cuda.get_rng_state_all() if device.kind == "cuda" else []
    torch.set_num_threads(device.threads)
    if device.kind == "cuda":
        # A kernel that has no deterministic form warns, by name, and runs.
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=warn)
        torch.set_rng_state(states)
        for index, state in enumerate(cuda_states):
            torch.cuda.set_rng_state(state, index)
