"""Settings of the training loop."""

from dataclasses import asdict, dataclass

from ml_factory.argument_checks import check_field_types
from ml_factory.errors import SettingsError
from ml_factory.models.tabular_data import check_tabular_class_weight

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
        check_field_types(self)
        check_tabular_class_weight(self.class_weight)
        counts = ("epochs", 1), ("batch", 1), ("accumulate", 1), ("eval_batch", 1), ("log_steps", 1)
        for name, low in (*counts, ("patience", 0), ("threads", 0)):
            value = getattr(self, name)
            if value < low:
                raise _refused(name, value, f"an integer >= {low}")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise _refused(name, getattr(self, name), "a positive number")
        for name in ("weight_decay", "save_seconds"):
            if not getattr(self, name) >= 0:
                raise _refused(name, getattr(self, name), "a number >= 0")
        if not 0 <= self.warmup < 1:
            raise _refused("warmup", self.warmup, "a number in [0, 1): a share of all steps")
        for name, known in (("device", DEVICES), ("precision", PRECISIONS)):
            value = getattr(self, name)
            if value not in known:  # all are listed: the nearest spelling of "gpu" would be "cpu"
                raise SettingsError(f"Unknown {name}", where=name, got=repr(value), wanted=", ".join(known))

    def identity(self) -> dict:
        """Return the settings that make another run when they change."""
        return {name: value for name, value in asdict(self).items() if name not in _ELSEWHERE}


def _refused(name: str, value: object, wanted: str) -> SettingsError:
    return SettingsError("Cannot train with this", where=name, got=repr(value), wanted=wanted)
