"""Settings of the training loop."""

from dataclasses import asdict, dataclass

from ml_factory.models.base import check_settings
from ml_factory.models.tabular_data import CLASS_WEIGHTS

DEVICES = ("auto", "cpu", "cuda", "xla")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
# Settings of the machine: a run may resume with others, and is then at most "not bit-exact".
_ELSEWHERE = ("device", "threads", "accumulate", "save_seconds", "log_steps")


@dataclass(frozen=True)
class TrainSpec:
    """Settings of a network's training.

    epochs : at most; early stopping ends sooner.
    batch : rows a step, always full.
    accumulate : number of micro-batches of a step; halves memory where it doubles.
    lr : learning rate.
    weight_decay : of matrices.
    warmup : share of all steps over which the rate climbs; it then falls on a cosine to 0.
    patience : epochs without a better validation loss before stopping, 0 for never.
    clip : largest norm of the whole gradient.
    eval_batch : rows a batch of evaluation; PatchTST is 3 times slower at 1,024, beyond a processor's cache.
    device : auto, cpu, cuda or xla.
    precision : of the steps; auto for the hardware's fast format.
    recompute : gradient checkpointing, less memory for more time.
    compile : torch.compile, worth its minutes in a long run.
    threads : CPU threads, 0 for every core; pinned, since another number gives other last bits.
    save_seconds : a mid-epoch save is considered this long after the last one.
    log_steps : least steps between two progress lines, and between two checks for non-finite numbers.
    class_weight : none, or balanced: each class of the training rows gets the same share of their weight, as in
        boosters.
    """

    epochs: int = 20
    batch: int = 256
    accumulate: int = 1
    lr: float = 5e-4
    weight_decay: float = 0.01
    warmup: float = 0.1
    patience: int = 5
    clip: float = 1.0
    eval_batch: int = 256
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    recompute: bool = False
    compile: bool = False
    threads: int = 0
    save_seconds: float = 60.0
    log_steps: int = 50
    class_weight: str = "none"

    def __post_init__(self):
        some, any_ = "[1, inf)", "[0, inf)"
        check_settings(
            self, epochs=some, batch=some, accumulate=some, eval_batch=some, log_steps=some, patience=any_,
            threads=any_, weight_decay=any_, save_seconds=any_, lr="(0, inf)", clip="(0, inf)", warmup="[0, 1)",
            device=DEVICES, precision=PRECISIONS, class_weight=CLASS_WEIGHTS,
        )  # fmt: skip

    def identity(self) -> dict:
        """Return the settings that make another run when they change."""
        return {name: value for name, value in asdict(self).items() if name not in _ELSEWHERE}
