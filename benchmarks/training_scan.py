"""The LSTM as a scan on XLA's own CPU client compared with the unrolled one: seconds to compile, and of a step then.

    PJRT_DEVICE=CPU .venv-xla/bin/python -m benchmarks.training_scan     # make test-xla builds the environment

Both are the same network by the same weights, trained by the same step. Then, of the scan: how many programs are
compiled for more epochs, more rows and another fold.
"""

import argparse
import importlib
import os
import time

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import digits, print_json
from ml_factory.models.registry import build_model
from ml_factory.models.sequence import LSTM, RecurrentSpec, kernels
from ml_factory.training.batches import weighted_cross_entropy
from ml_factory.training.device import pick_device
from ml_factory.training.loop import take_training_step
from ml_factory.training.spec import TrainSpec
from ml_factory.training.state import TrainingState

F, HIDDEN, BATCH, EPOCH_ROWS = 32, 64, 256, 500_000


class Unrolled(LSTM):
    """The same network; its recurrence is torch's own, which a lazy device sees step by step."""

    def forward(self, x_BTF: Tensor) -> Tensor:
        hidden_BTH, _ = kernels.LSTM.forward(self.rnn, x_BTF)
        return self.head(self.drop(hidden_BTH[:, -1]))


def loss(network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
    x_BTF, y_B, w_B = batch
    return weighted_cross_entropy(network(x_BTF), y_B, w_B)


def compile_seconds() -> float:
    """Of all programs of this process so far."""
    reported = importlib.import_module("torch_xla.debug.metrics").metric_data("CompileTime")
    return sum(nanoseconds for _, nanoseconds in reported[2]) * 1e-9 if reported else 0.0


def trained(kind: type[nn.Module], lookback: int, layers: int, steps: int) -> dict:
    """Seconds of the compiler, to the end of step 2, and of a step after; the mean loss of the two, to compare."""
    device = pick_device(TrainSpec(device="xla", precision="fp32"))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, lookback, F)).astype("f")
    batch = tuple(map(device.to_device, (torch.from_numpy(x), torch.arange(BATCH) % 3, torch.ones(BATCH))))
    torch.manual_seed(0)
    network = kind(F, lookback, 3, RecurrentSpec(hidden=HIDDEN, layers=layers, dropout=0.0))
    compiled, began = compile_seconds(), time.perf_counter()
    run = TrainingState(
        device.to_device(network).train(), BATCH, TrainSpec(batch=BATCH, lr=1e-3), device, {"model": "lstm"}
    )
    clock, sums = [], []
    for _ in range(2 + steps):
        take_training_step(run, lambda rows: batch, loss)
        sums.append(float(run.totals[0]))  # read, so the step has been carried out
        clock.append(time.perf_counter() - began)
    return {
        "compile_s": compile_seconds() - compiled, "second_step_s": clock[1],
        "step_s": float(np.median(np.diff(clock[1:]))), "loss": sums[1] / (2 * BATCH),
    }  # fmt: skip


def compare_scan_with_unrolled(lookback: int, layers: int) -> None:
    sides = {"scan": trained(LSTM, lookback, layers, 8), "unrolled": trained(Unrolled, lookback, layers, 4)}
    for name, reported in sides.items():
        print_json(
            bench="training", part="scan", side=name, lookback=lookback, layers=layers, hidden=HIDDEN, batch=BATCH,
            channels=F, **{fact: digits(value) for fact, value in reported.items()},
        )  # fmt: skip
    scan, unrolled = sides.values()
    print_json(
        bench="training", part="scan", side="ratio", lookback=lookback, layers=layers,
        compile_times_less=digits(unrolled["compile_s"] / scan["compile_s"], 3),
        steps_per_s_times=digits(unrolled["step_s"] / scan["step_s"], 3), wanted=">= 50 and >= 5",
    )  # fmt: skip
    epoch = scan["step_s"] * EPOCH_ROWS / BATCH
    print_json(
        bench="training", part="warm-up", device="xla", network="lstm", lookback=lookback,
        share_of_epoch=digits(scan["second_step_s"] / epoch, 3), epoch_rows=EPOCH_ROWS, wanted="< 0.05",
    )  # fmt: skip


def compiles() -> None:
    """Programs compiled by whole fits, validation included; the last is another, shorter fold, in the same process."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(160, 16, 6)).astype("f"), rng.integers(-1, 2, 160)
    settings = {"lookback": 16, "hidden": 8, "batch": 16, "eval_batch": 16, "device": "xla", "precision": "fp32"}
    fits = {"one epoch": (1, 64), "six epochs": (6, 64), "twice the rows": (1, 128), "another fold": (1, 61)}
    for name, (epochs, rows) in fits.items():
        fold = slice(rows) if name != "another fold" else slice(64, 64 + rows)
        model = build_model("lstm", **settings, epochs=epochs)
        reported = model.fit(x[fold], y[fold], validation=(x[128:], y[128:])).compiles
        programs = {program: reported.get(program, 0) for program in ("train", "evaluate")}
        print_json(
            bench="training", part="compiles", fit=name, epochs=epochs, rows=rows, **programs, wanted="<= 2 each"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lookback", type=int, default=96)
    parser.add_argument("--layers", type=int, default=1)
    args = parser.parse_args()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    compiles()
    compare_scan_with_unrolled(args.lookback, args.layers)


if __name__ == "__main__":
    main()
