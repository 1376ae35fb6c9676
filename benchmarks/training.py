"""Trainings of networks measured: windows, the loop's own share, compilers.

    make bench BENCH=training                        # less than eight minutes
    python -m benchmarks.training --only windows loop

One JSON line a measurement, with what was wanted. Scans are compared where XLA is (.venv-xla), in a process of its own;
an absent environment is reported with its build command. Sides take turns, and ratios are medians of rounds.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import digits, in_turns, median_ratio, median_wall, print_json, seconds
from ml_factory.datasets.windows import Windows
from ml_factory.models.registry import find_model_spec, resolve_registry_entry
from ml_factory.training.batches import BatchLoader, weighted_cross_entropy
from ml_factory.training.device import Device, deterministic_device, pick_device
from ml_factory.training.loop import run_training_loop
from ml_factory.training.spec import TrainSpec

ROOT = Path(__file__).resolve().parents[1]
T, F, BATCH, EPOCH_ROWS = 96, 32, 256, 500_000
ROUND = 8  # batches of a turn, where windows are gathered
IDENTITY = {"model": "bench", "settings": {}, "data": {}}


# ---- windows -------------------------------------------------------------------------------------------------------


class Sliced(Dataset):
    """Windows, classes and weights as they are usually written for a DataLoader."""

    def __init__(self, x_NF: Tensor, rows: np.ndarray, lookback: int, y: np.ndarray, w: np.ndarray):
        self.x_NF, self.rows, self.lookback, self.y, self.w = x_NF, rows, lookback, y, w

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple:
        last = self.rows[place]
        return self.x_NF[last - self.lookback + 1 : last + 1], self.y[place], self.w[place]


class Turns:
    """A sampler: each time it is asked, the places of one more round."""

    def __init__(self, order_RGB: np.ndarray):
        self.rounds = iter(order_RGB)

    def __iter__(self) -> Iterator[int]:
        return iter(next(self.rounds).ravel().tolist())


def windows(repeats: int) -> None:
    """On one core, and on all: where others work too, the second waits for the first at every batch."""
    usual = torch.get_num_threads()
    for threads in sorted({1, usual}):
        torch.set_num_threads(threads)
        gathering(repeats)
    torch.set_num_threads(usual)


def gathering(repeats: int, rows: int = 200_000, lookback: int = 60, features: int = 100, batch: int = 1024) -> None:
    """Time batches at random positions of 80 MB: windows, classes and weights against a DataLoader, in this process
    and in two workers; windows alone against a contiguous copy of as many bytes."""
    sides = ways_to_gather(repeats + 1, rows, lookback, features, batch)
    in_turns(sides, 1)
    runs = in_turns(sides, repeats)
    for name, taken in runs.items():
        print_json(
            bench="training", part="windows", side=name, lookback=lookback, features=features, batch=batch,
            threads=torch.get_num_threads(), windows_per_s=round(batch * ROUND / median_wall(taken)),
            **seconds(taken),
        )  # fmt: skip
    better = min((taken for name, taken in runs.items() if name.startswith("DataLoader")), key=median_wall)
    print_json(
        bench="training", part="windows", side="ratio", threads=torch.get_num_threads(),
        times_dataloader=digits(median_ratio(better, runs["feed"]), 3),
        times_dataloader_cpu=digits(median_ratio(runs["DataLoader, 0 workers"], runs["feed"], "cpu"), 3),
        share_of_memcpy=digits(median_ratio(runs["memcpy"], runs["windows alone"]), 3),
        share_of_memcpy_cpu=digits(median_ratio(runs["memcpy"], runs["windows alone"], "cpu"), 3),
        wanted=">= 3 and >= 0.85",
    )  # fmt: skip


def ways_to_gather(turns: int, rows: int, lookback: int, features: int, batch: int) -> dict[str, Callable[[], None]]:
    """Side -> one turn of it, ROUND batches; each can be asked `turns` times, the first of which starts its workers."""
    rng = np.random.default_rng(0)
    x_NF, last = torch.randn(rows, features), np.arange(lookback - 1, rows)
    ours, out, flat = Windows(x_NF, last, lookback), torch.empty(batch, lookback, features), x_NF.view(-1)
    every_STF = x_NF.as_strided((len(last), lookback, features), (features, features, 1))
    y, w = rng.integers(0, 3, len(last)), rng.uniform(0.5, 2, len(last)).astype("f")
    order_RGB = rng.permutation(len(last))[: batch * ROUND * turns].reshape(-1, ROUND, batch)
    feed = BatchLoader(pick_device(TrainSpec(device="cpu")), [ours, y, w])
    places = iter(rng.integers(0, len(flat) - out.numel(), 10_000))
    fed_RGB, gathered_RGB = iter(order_RGB), iter(order_RGB)

    def fed() -> None:
        for positions in next(fed_RGB):
            feed(positions)

    def gathered() -> None:
        for positions in next(gathered_RGB):
            torch.index_select(every_STF, 0, torch.from_numpy(positions), out=out)

    def loading(workers: int) -> Callable[[], None]:
        sliced, ours = Sliced(x_NF, last, lookback, y, w), {"num_workers": workers, "persistent_workers": workers > 0}
        loader = DataLoader(sliced, batch_size=batch, sampler=Turns(order_RGB), **ours)

        def loaded() -> None:
            for _ in loader:
                pass

        return loaded

    def copied() -> None:
        for _ in range(ROUND):
            place = next(places)
            out.view(-1).copy_(flat[place : place + out.numel()])

    loaders = {f"DataLoader, {workers} workers": loading(workers) for workers in (0, 2)}
    return {"feed": fed, **loaders, "windows alone": gathered, "memcpy": copied}


# ---- the loop ------------------------------------------------------------------------------------------------------


def loss(network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
    x_BTF, y_B, w_B = batch
    return weighted_cross_entropy(network(x_BTF), y_B, w_B)


class TimedFeed:
    """A feed whose seconds are counted."""

    def __init__(self, feed: BatchLoader):
        self.feed, self.seconds = feed, 0.0

    def __call__(self, positions: np.ndarray) -> tuple:
        began = time.perf_counter()
        batch = self.feed(positions)
        self.seconds += time.perf_counter() - began
        return batch


def loops(kind: type[nn.Module], timed: TimedFeed, ready: list[tuple], spec: TrainSpec, device: Device) -> dict:
    """Side -> a training of one epoch: fit() by the timed feed, the bare loop on the batches that lie ready."""
    bare_network = kind(F, T, 3, kind.Spec()).train()
    optimizer = torch.optim.AdamW(bare_network.parameters(), lr=5e-4)

    def bare() -> None:
        with deterministic_device(device):
            for batch in ready:
                with device.autocast():
                    total, weight = loss(bare_network, batch)
                (total / weight).backward()
                nn.utils.clip_grad_norm_(bare_network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    def whole(rows: int = BATCH * len(ready)) -> None:
        run_training_loop(kind(F, T, 3, kind.Spec()), rows, timed, loss, spec, device, identity=IDENTITY)

    return {"fit": whole, "bare": bare, "one step": lambda: whole(BATCH)}


def loop(repeats: int, steps: int = 12) -> None:
    """Time fit() against its minimum in the same precision: forward, backward, clipping, AdamW on prepared batches."""
    spec = TrainSpec(epochs=1, batch=BATCH, device="cpu")
    device, rows = pick_device(spec), BATCH * steps
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(rows + T, F)).astype("f")
    y, w = rng.integers(0, 3, rows), rng.uniform(0.5, 2, rows).astype("f")
    feed = BatchLoader(device, [Windows(x_NF, np.arange(T - 1, rows + T - 1), T), y, w])
    ready = [feed(np.arange(number * BATCH, (number + 1) * BATCH)) for number in range(steps)]
    for name in ("lstm", "tcn", "itransformer"):
        timed = TimedFeed(feed)
        sides = loops(resolve_registry_entry(find_model_spec(name).network), timed, ready, spec, device)
        torch.set_num_threads(device.threads)
        in_turns(sides, 1)
        timed.seconds = 0.0
        runs = in_turns(sides, repeats)
        whole_s, first_s = median_wall(runs["fit"]), median_wall(runs["one step"])
        step_s = (whole_s - first_s) / (steps - 1)
        fed = timed.seconds / sum(run.wall for run in (*runs["fit"], *runs["one step"]))
        print_json(
            bench="training", part="loop", network=name, lookback=T, channels=F, batch=BATCH, steps=steps,
            threads=device.threads, samples_per_s=round(BATCH / step_s), overhead=digits(
                1 - median_ratio(runs["bare"], runs["fit"]), 3
            ), input_share=digits(fed, 3), wanted="overhead < 0.05, input < 0.03",
        )  # fmt: skip
        share = (first_s - step_s) / (step_s * EPOCH_ROWS / BATCH)
        print_json(
            bench="training", part="warm-up", device="cpu", network=name, lookback=T, share_of_epoch=digits(share, 3),
            epoch_rows=EPOCH_ROWS, wanted="< 0.05",
        )  # fmt: skip


# ---- all of it -----------------------------------------------------------------------------------------------------

HERE = {"windows": windows, "loop": loop}
# part -> (its module, its environment, what builds that)
ELSEWHERE = {"scan": ("benchmarks.training_scan", ".venv-xla", "make test-xla")}


def elsewhere(part: str) -> int:
    """Measure it with the interpreter of its environment; the exit code."""
    module, environment, made_by = ELSEWHERE[part]
    python = ROOT / environment / "bin" / "python"
    if not python.is_file():
        print_json(bench="training", part=part, not_run=f"{environment} is not there; next: {made_by}")
        return 0
    return subprocess.run(
        [python, "-m", module], cwd=ROOT, env={**os.environ, "PJRT_DEVICE": "CPU"}, check=False
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*HERE, *ELSEWHERE], default=[*HERE, *ELSEWHERE])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    code = 0
    for part in args.only:
        if part in HERE:
            HERE[part](args.repeats)
        else:
            code = elsewhere(part) or code
    return code


if __name__ == "__main__":
    sys.exit(main())
