"""Compute devices behind one interface: CPU, CUDA, XLA (a TPU or its CPU client); gradients of all processes by DDP.

torch_xla ends with 2.9; a successor for TPUs is one more class with the same interface.
"""

import importlib
import importlib.util
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ml_factory.errors import SettingsError
from ml_factory.models.base import processor_name
from ml_factory.numba_cache import private_folder
from ml_factory.seeding import derive_seed
from ml_factory.training.distributed import ProcessGroup, join_process_group
from ml_factory.training.spec import TrainSpec

# What is between two calls of `mark_step`: a step, a part of one, a batch.
PROGRAMS = ("train", "accumulate", "evaluate")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_log = logging.getLogger("ml_factory.training")
# A host out of memory raises a plain RuntimeError.
_NO_MEMORY = ("can't allocate memory", "out of memory", "RESOURCE_EXHAUSTED")


@dataclass(frozen=True)
class Device:
    """A CPU, and the interface of every other kind.

    kind : cpu, cuda or xla.
    threads : of the host's arithmetic.
    precision : fp32, bf16 or fp16, of training steps.
    processes : processes that share the training.
    chips : number of chips of this process; the rows of a batch are sharded over them.
    compiles : program -> number of compilations by a lazy device; twice at most, since its first call has new arrays.
    """

    kind: str
    threads: int
    precision: str = "fp32"
    processes: ProcessGroup = field(default_factory=ProcessGroup)
    chips: int = 1
    compiles: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def torch_device(self) -> str:
        """Device name in torch."""
        return self.kind

    @property
    def batch_share_count(self) -> int:
        """Number of pieces that the rows of every batch must divide into."""
        return self.processes.world * self.chips

    def to_device(self, value):
        """Move a tensor or module to this device."""
        return value.to(self.torch_device)

    def padded_row_count(self, rows: int) -> int:
        """Return the number of rows that a data set of so many rows is padded to."""
        return rows

    def shard(self, batch):
        """Shard the rows of a batch over the chips."""
        return batch

    def seed_step(self, seed: int) -> None:
        """Seed the random numbers drawn on the device."""
        torch.default_generator.manual_seed(seed)

    def autocast(self):
        """Return the context of a training step's forward pass: its precision."""
        dtype = DTYPES[self.precision]
        return nullcontext() if dtype is torch.float32 else torch.autocast(self.kind, dtype=dtype)

    def wrap_network(self, network: nn.Module) -> nn.Module:
        """Wrap the network as a step calls it: gradients averaged over several processes."""
        if self.processes.world == 1:
            return network
        own = [self.processes.local] if self.kind == "cuda" else None
        return nn.parallel.DistributedDataParallel(network, device_ids=own)

    def recompute(self, function: Callable, *args: Any) -> Any:
        """Compute function(*args) with gradient checkpointing: inner results are computed again in the backward
        pass.
        """
        return checkpoint(function, *args, use_reentrant=False)

    def mark_step(self, program: str) -> None:
        """End a program: a lazy device compiles and starts the operations since the last call."""

    def free_bytes(self) -> int:
        """Return the device memory available for arrays; unlimited here, since the host's arrays are there already."""
        return 1 << 62

    def peak_memory_bytes(self) -> int | None:
        """Return the peak memory of this process; of a GPU or TPU the peak there. None where it is not reported."""
        status = Path("/proc/self/status")  # of Linux
        found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
        return 1024 * int(found[1]) if found else None

    def is_out_of_memory_error(self, error: BaseException) -> bool:
        """Return True where this error means that memory ran out."""
        return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
            isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
        )

    def environment_facts(self) -> dict:
        """Return the facts that the bits of a run depend on apart from data and settings."""
        return {
            "device": self.kind, "processor": self.processor_name(), "threads": self.threads,
            "precision": self.precision, "shares": self.batch_share_count, "torch": str(torch.__version__),
        }  # fmt: skip

    def processor_name(self) -> str:
        """Return the name of the processor that computes; of a CPU with the instructions that torch uses on it."""
        return f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"


class CudaDevice(Device):
    """One NVIDIA GPU a process."""

    @property
    def torch_device(self) -> str:
        return f"cuda:{self.processes.local}"

    def seed_step(self, seed: int) -> None:
        super().seed_step(seed)
        torch.cuda.manual_seed_all(seed)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.processes.local)[0]

    def peak_memory_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.processes.local)

    def processor_name(self) -> str:
        return torch.cuda.get_device_name(self.processes.local)


class XlaDevice(Device):
    """The XLA devices of this process: one chip, or several with equal weights that share each batch's rows (SPMD).

    Operations are recorded, and executed at `mark_step`.
    """

    def to_device(self, value):
        if not isinstance(value, nn.Module):
            return super().to_device(value)
        # A move to XLA copies a weight once for each of its names; one that layers share must stay one.
        first: dict[int, str] = {}
        names = {name: first.setdefault(id(one), name) for name, one in value.named_parameters(remove_duplicate=False)}
        moved = super().to_device(value)
        for name, shared in names.items():
            module, _, own = name.rpartition(".")
            setattr(moved.get_submodule(module), own, moved.get_parameter(shared))
        return moved

    def shard(self, batch):
        if self.chips == 1:
            return batch
        if isinstance(batch, tuple):
            return tuple(self.shard(part) for part in batch)
        spmd = _xla("distributed.spmd")
        mesh = spmd.Mesh(np.arange(self.chips), (self.chips,), ("rows",))
        spmd.mark_sharding(batch, mesh, ("rows", *[None] * (batch.ndim - 1)))
        return batch

    def padded_row_count(self, rows: int) -> int:
        # A length is part of the program. Eight lengths per power of two, so that folds and growing data share some.
        step = 1 << max(rows.bit_length() - 4, 0)
        return -(-rows // step) * step

    def seed_step(self, seed: int) -> None:
        super().seed_step(seed)
        _xla().manual_seed(seed)

    def recompute(self, function: Callable, *args: Any) -> Any:
        # XLA would drop the second computation as equal to the first: torch_xla's checkpoint has a barrier. It gives
        # closed-over tensors a gradient only where an argument requires one too, and rows of data do not.
        wanting = args[0].new_ones(1).requires_grad_()
        return _xla("utils.checkpoint").checkpoint(lambda _, *args: function(*args), wanting, *args, use_reentrant=True)

    def mark_step(self, program: str) -> None:
        before = self._compiled()
        if program in PROGRAMS and program not in self.compiles:
            _log.warning(
                "XLA compiles the program %s now; its first steps take minutes, the later ones do not", program
            )
        _xla().sync()
        self.compiles[program] += self._compiled() - before

    def free_bytes(self) -> int:
        try:
            memory = _xla("core.xla_model").get_memory_info(_xla().device())
        except RuntimeError:  # not reported for several chips or the CPU client; no TPU has less
            return 4 << 30
        return memory["bytes_limit"] - memory["bytes_used"]

    def peak_memory_bytes(self) -> int | None:
        try:
            return _xla("core.xla_model").get_memory_info(_xla().device()).get("peak_bytes_used")
        except RuntimeError:
            return None

    def processor_name(self) -> str:
        return str(_xla("runtime").device_type())

    def _compiled(self) -> int:
        return _xla("debug.metrics").counter_value("UncachedCompile") or 0


def native_precision(kind: str) -> str:
    """Return the fast format: bf16 (XLA devices, CUDA from Ampere on, CPUs with AMX), fp16 (older CUDA with tensor
    cores), else fp32. Emulated formats do not count.
    """
    if kind == "xla":
        return "bf16"
    if kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        return "fp16" if torch.cuda.get_device_capability() >= (7, 0) else "fp32"
    return "bf16" if torch.cpu._is_amx_tile_supported() else "fp32"


def pick_prediction_device(spec: TrainSpec) -> Device:
    """Return the device of the spec; "auto" instead of one that this machine lacks, on which a model was trained."""
    try:
        return pick_device(spec)
    except SettingsError:
        if spec.device not in ("cuda", "xla"):
            raise
        return pick_device(replace(spec, device="auto"))


def pick_device(spec: TrainSpec) -> Device:
    """Return the device of the spec; "auto" prefers CUDA, then a TPU."""
    on_tpu = _touch_xla(wanted=spec.device == "xla") == "TPU"
    cuda = torch.cuda.is_available()
    if spec.device in ("cuda", "xla") and not {"cuda": cuda, "xla": _has_xla()}[spec.device]:
        raise SettingsError(
            "No XLA device found" if spec.device == "xla" else "No CUDA device found",
            where="device",
            got=spec.device,
            wanted="cpu or auto",
            next_step=f"choose a {'TPU' if spec.device == 'xla' else 'GPU'} runtime, or device='auto'",
        )
    kind = spec.device if spec.device != "auto" else "cuda" if cuda else "xla" if on_tpu else "cpu"
    if kind == "xla" and spec.precision == "fp16":
        raise SettingsError(
            "A TPU has no fp16", where="precision", got="fp16", wanted="auto, bf16 or fp32",
            next_step="precision='auto' takes what each device multiplies fast, also in a run that changes devices",
        )  # fmt: skip
    processes = ProcessGroup() if kind == "xla" else join_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        # Read when cuBLAS starts: without it matrix products may add in another order each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(processes.local)
    device: Any = {"cpu": Device, "cuda": CudaDevice, "xla": XlaDevice}[kind](
        kind,
        spec.thread_count,
        native_precision(kind) if spec.precision == "auto" else spec.precision,
        processes,
        _xla("runtime").global_runtime_device_count() if kind == "xla" else 1,
    )
    # Compiled programs are cached for later processes of this machine. The CPU client writes files that it cannot read
    # back; a cache that is open stays.
    if kind == "xla" and on_tpu and not _xla()._XLAC._xla_computation_cache_is_initialized():
        _xla("runtime").initialize_cache(str(private_folder("programs") / "xla"))
    return device


@contextmanager
def deterministic_device(device: Device) -> Iterator[None]:
    """Run with the device's thread count and deterministic kernels; restore the caller's settings and random state."""
    threads, states = torch.get_num_threads(), torch.get_rng_state()
    strictness = torch.get_deterministic_debug_mode()
    cuda_states = torch.cuda.get_rng_state_all() if device.kind == "cuda" else []
    torch.set_num_threads(device.threads)
    if device.kind == "cuda":
        # A kernel that has no deterministic form warns, by name, and runs.
        # Not use_deterministic_algorithms: that imports torch's whole compiler, 2 s of a process.
        torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(strictness)
        torch.set_rng_state(states)
        for index, state in enumerate(cuda_states):
            torch.cuda.set_rng_state(state, index)


@contextmanager
def drawn_from(seed: int, name: str) -> Iterator[None]:
    """Draw the random numbers of the block from the seed and a name; restore the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, Path(name).name, "init"))
        yield


def _has_xla() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def _xla(part: str = ""):
    """Import torch_xla or a module of it."""
    return importlib.import_module(f"torch_xla.{part}" if part else "torch_xla")


def _touch_xla(wanted: bool) -> str:
    """Start XLA's client before anything is differentiated, and say its hardware; "" where there is none.

    A backward pass on the CPU that comes first breaks all later ones on XLA devices.
    """
    if not _has_xla():
        return ""
    runtime = _xla("runtime")
    try:
        if not runtime.is_spmd() and runtime.global_runtime_device_count() > 1:
            runtime.use_spmd()
        _xla().device()
    except RuntimeError:  # another process holds the chip: only a problem where it was requested
        if wanted:
            raise
        return ""
    return str(runtime.device_type())
