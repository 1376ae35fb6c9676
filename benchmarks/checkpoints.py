"""A checkpoint of weights with Adam's moments: how long training stands still, and until it is written.

    python -m benchmarks.checkpoints [--mb 600] [--repeats 5] [--folder /tmp]

Compared with a bare copy of the state into fresh pages, a bare write + fsync, torch.save, safetensors and torch's
asynchronous distributed checkpoint (DCP), each side once a round. Then steps a second of a small network on all cores,
with a save under way and without, window by window; and what a save every 30 minutes costs.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchmarks.measure import digits, print_json
from ml_factory.checkpoints.manager import CheckpointManager

CADENCE = 30 * 60.0
LIMITS = {"blocking": 1.5, "written": 1.5}


def make_state(megabytes: int) -> dict:
    """float32 weights and two moments each, in 20 layers."""
    count = megabytes * 1_000_000 // 4 // 3 // 20
    generator = torch.Generator().manual_seed(0)
    layers = {f"layer.{i}.weight": torch.randn(count, generator=generator) for i in range(20)}
    moments = {name: {"exp_avg": w * 0.1, "exp_avg_sq": w * w} for name, w in layers.items()}
    return {"step": 1000, "network": layers, "optimizer": moments}


def flat(state: dict) -> dict[str, torch.Tensor]:
    found = dict(state["network"])
    for name, moments in state["optimizer"].items():
        found |= {f"{name}.{key}": value for key, value in moments.items()}
    return found


class Round:
    """Every side once: name -> {"blocking", "written"} in seconds, as far as the side has them."""

    def __init__(self, state: dict, folder: Path, manager: CheckpointManager):
        self.state, self.tensors, self.folder, self.manager = state, flat(state), folder, manager
        self.bytes = memoryview(bytearray(b"x") * sum(value.nbytes for value in self.tensors.values()))

    def sides(self) -> dict[str, Callable[[], dict[str, float]]]:
        found = {
            "memory copy": self.memory_copy, "write + fsync": self.raw_write, "ours": self.ours,
            "torch.save": self.torch_save, "safetensors": self.safetensors,
        }  # fmt: skip
        return found | ({"DCP async": self.dcp} if torch.distributed.is_available() else {})

    def memory_copy(self) -> dict[str, float]:
        """On one core, as ours: one core is as fast as the memory, and threads would wait for one another."""
        began = time.perf_counter()
        copies = [value.numpy().copy() for value in self.tensors.values()]
        taken = time.perf_counter() - began
        copies.clear()
        return {"blocking": taken}

    def raw_write(self) -> dict[str, float]:
        """Over the same file each time."""
        began = time.perf_counter()
        descriptor = os.open(self.folder / "raw", os.O_WRONLY | os.O_CREAT)
        left = self.bytes
        while left:
            left = left[os.write(descriptor, left[: 1 << 22]) :]
        os.fsync(descriptor)
        taken = time.perf_counter() - began
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # both begin with a file that is not in memory
        os.close(descriptor)
        return {"written": taken}

    def ours(self) -> dict[str, float]:
        began = time.perf_counter()
        self.manager.save_checkpoint("train", self.state, force=True)
        blocking = time.perf_counter() - began
        self.manager.wait()
        return {"blocking": blocking, "written": time.perf_counter() - began}

    def torch_save(self) -> dict[str, float]:
        return self._whole(lambda path: torch.save(self.state, path))

    def safetensors(self) -> dict[str, float]:
        return self._whole(lambda path: save_file(self.tensors, path))

    def _whole(self, save: Callable[[Path], object]) -> dict[str, float]:
        """A peer that blocks until it has written; it does not read back."""
        path = self.folder / "peer"
        began = time.perf_counter()
        save(path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        taken = time.perf_counter() - began
        return {"blocking": taken, "written": taken}

    def dcp(self) -> dict[str, float]:
        began = time.perf_counter()
        written = dcp.async_save(self.tensors, checkpoint_id=str(self.folder / "dcp"))
        blocking = time.perf_counter() - began
        written.result()
        return {"blocking": blocking, "written": time.perf_counter() - began}


def compare(rounds: Round, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Best and median over rounds, after one in which everybody makes his files and pages; a JSON line a side."""
    sides = rounds.sides()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, call in sides.items():
            taken = call()
            if turn:
                runs[name].append(taken)
            elif name == "ours":
                print_json(bench="checkpoints", what="first save, its pages new", side=name, **_short(taken))
    found = {}
    for name, taken in runs.items():
        found[name] = {
            kind: {key: of(one[key] for one in taken) for key in taken[0]}
            for kind, of in (("best", min), ("median", statistics.median))
        }
        print_json(
            bench="checkpoints", side=name, rounds=repeats, **_short(found[name]["best"]),
            median=_short(found[name]["median"]),
        )  # fmt: skip
    return found


def verdict(runs: dict[str, dict[str, dict[str, float]]]) -> float:
    """Compare the two ratios of best and median times with their limits; return the median seconds of blocking."""
    for name, base, key in (
        ("blocking", "memory copy", "blocking"), ("written", "write + fsync", "written"),
    ):  # fmt: skip
        best, median = (runs["ours"][kind][name] / runs[base][kind][key] for kind in ("best", "median"))
        print_json(
            bench="checkpoints", ratio=name, times=digits(best, 3), times_median=digits(median, 3),
            limit=LIMITS[name],
        )  # fmt: skip
    return runs["ours"]["median"]["blocking"]


def during_training(state: dict, manager: CheckpointManager, windows: int, blocking: float) -> None:
    """Steps a second while a save is being written, and in windows of the same length without one."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    optimizer, x = torch.optim.AdamW(net.parameters()), torch.randn(512, 256)

    def steps(until: Callable[[float], bool]) -> tuple[int, float]:
        began, count = time.perf_counter(), 0
        while count == 0 or not until(time.perf_counter() - began):
            (net(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
        return count, time.perf_counter() - began

    steps(lambda seconds: seconds > 1)
    with_save, without, lengths = [], [], []
    for _ in range(windows):
        saved = manager.save_checkpoint("train", state, force=True)
        count, seconds = steps(lambda _, saved=saved: "hash" in saved)
        with_save.append(count / seconds)
        lengths.append(seconds)
        count, seconds = steps(lambda now, length=seconds: now > length)
        without.append(count / seconds)
    share = statistics.median(one / other for one, other in zip(with_save, without, strict=True))
    print_json(
        bench="checkpoints", what="steps a second while a save is written", cores=os.cpu_count(),
        with_save=digits(statistics.median(with_save)), without=digits(statistics.median(without)),
        share=digits(share, 3), at_least=0.85, seconds_until_written=digits(statistics.median(lengths)),
    )  # fmt: skip
    lost = blocking + max(0.0, 1 - share) * statistics.median(lengths)
    print_json(
        bench="checkpoints", what="overhead of a save every 30 minutes",
        blocking_percent=digits(100 * blocking / CADENCE),
        with_slower_steps_percent=digits(100 * lost / CADENCE), limit_percent=0.05,
    )  # fmt: skip


def _short(taken: dict[str, float]) -> dict[str, float]:
    return {f"{name}_s": digits(value) for name, value in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    if torch.distributed.is_available():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    state = make_state(given.mb)
    with (
        tempfile.TemporaryDirectory(dir=given.folder) as place,
        CheckpointManager(Path(place) / "checkpoints", run="bench") as manager,
    ):
        blocking = verdict(compare(Round(state, Path(place), manager), given.repeats))
        found = manager.load_latest_checkpoint("train")["state"]
        same = all(np.array_equal(one, flat(found)[name]) for name, one in flat(state).items())
        print_json(bench="checkpoints", what="loaded as it was saved", same=same)
        during_training(state, manager, given.repeats, blocking)
    if torch.distributed.is_available():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
