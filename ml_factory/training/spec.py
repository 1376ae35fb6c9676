"""Settings of the training loop."""

from dataclasses import dataclass
from typing import ClassVar

from ml_factory.argument_checks import check_settings
from ml_factory.models.base import EstimatorSpec

DEVICES = ("auto", "cpu", "cuda", "xla")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class TrainSpec(EstimatorSpec):
    """Settings of a network's training.

    epochs : at most; early stopping ends sooner.
    batch : rows a step, always full.
    accumulate : number of micro-batches of a step; halves memory where it doubles.
    lr : learning rate.
    weight_decay : of matrices.
    warmup : share of all steps over which the rate climbs; it then falls on a cosine to 0.
    clip : largest norm of the whole gradient.
    eval_batch : rows a batch of evaluation; PatchTST is 3 times slower at 1,024, beyond a processor's cache.
    device : auto, cpu, cuda or xla.
    precision : of the steps; auto for the hardware's fast format.
    recompute : gradient checkpointing, less memory for more time.
    save_seconds : least seconds between two saves where the second is in mid-epoch.
    log_steps : least steps between two progress lines, and between two checks for non-finite numbers.
    """

    SEARCH: ClassVar = {"lr": (1e-4, 5e-3, "log"), "weight_decay": (1e-3, 0.3, "log")}
    epochs: int = 20
    batch: int = 256
    accumulate: int = 1
    lr: float = 5e-4
    weight_decay: float = 0.01
    warmup: float = 0.1
    patience: int = 5
    clip: float = 1.0
    eval_batch: int = 256
    device: str = "auto"
    precision: str = "auto"
    recompute: bool = False
    save_seconds: float = 60.0
    log_steps: int = 50

    def __post_init__(self):
        super().__post_init__()
        some, any_ = "[1, inf)", "[0, inf)"
        check_settings(
            self, epochs=some, batch=some, accumulate=some, eval_batch=some, log_steps=some, weight_decay=any_,
            save_seconds=any_, lr="(0, inf)", clip="(0, inf)", warmup="[0, 1)", device=DEVICES, precision=PRECISIONS,
        )  # fmt: skip


@dataclass(frozen=True)
class NetworkSpec(TrainSpec):
    """Settings of a network that reads windows. lookback : rows of a window."""

    lookback: int = 32

    def __post_init__(self):
        super().__post_init__()
        check_settings(self, lookback="[2, inf)")  # one row is no window
