"""Settings of the one loop."""

from dataclasses import asdict, dataclass

from ml_factory.errors import SettingsError
from ml_factory.models.tabular_data import check_class_weight

DEVICES = ("auto", "cpu", "cuda", "xla")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
# Where and how often, not what: a run may go on with others of these, and is then at most "not bit-exact".
_ELSEWHERE = ("device", "threads", "accumulate", "save_seconds", "log_steps")


@dataclass(frozen=True)
class TrainSpec:
    """How a network is trained.

    epochs : at most; early stopping ends sooner. batch : rows a step, always full. accumulate : parts in which a step
    takes its batch, one after the other; halves memory where it doubles. warmup : share of all steps over which the
    rate climbs; it then falls on a cosine to 0. patience : epochs without a better validation loss before stopping,
    0 for never. clip : largest norm of the whole gradient. ema : decay of the averaged weights that are evaluated and
    kept, 0 for none. device : auto, cpu, cuda or xla. precision : of the steps, auto for what the hardware multiplies
    fast. recompute : gradient checkpointing, less memory for more time. compile : torch.compile, where a long run pays
    its minutes back. threads : CPU threads, 0 for every core; pinned, since another number gives other last bits.
    save_seconds : a save in mid-epoch is considered this long after the last one. log_steps : the progress line, and a
    look for numbers that are not finite, come at most this often. class_weight : none, or balanced: each class that the
    training rows hold gets the same share of their weight, as boosters do it.
    """

    epochs: int = 20
    batch: int = 256
    accumulate: int = 1
    lr: float = 5e-4
    weight_decay: float = 0.01
    warmup: float = 0.1
    patience: int = 5
    clip: float = 1.0
    ema: float = 0.0
    eval_batch: int = 1024
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
        check_class_weight(self.class_weight)
        counts = ("epochs", 1), ("batch", 1), ("accumulate", 1), ("eval_batch", 1), ("log_steps", 1)
        for name, low in (*counts, ("patience", 0), ("threads", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise _refused(name, value, f"an integer >= {low}")
        for name in ("lr", "clip"):
            if not _number(getattr(self, name)) or not 0 < getattr(self, name) < float("inf"):
                raise _refused(name, getattr(self, name), "a positive number")
        for name in ("weight_decay", "save_seconds"):
            if not _number(getattr(self, name)) or not getattr(self, name) >= 0:
                raise _refused(name, getattr(self, name), "a number >= 0")
        for name, what in (("warmup", "a share of all steps"), ("ema", "a decay")):
            if not _number(getattr(self, name)) or not 0 <= getattr(self, name) < 1:
                raise _refused(name, getattr(self, name), f"a number in [0, 1): {what}")
        for name, known in (("device", DEVICES), ("precision", PRECISIONS)):
            value = getattr(self, name)
            if value not in known:  # all of them are named: by its letters a "gpu" is nearest to the CPU
                raise SettingsError(f"Unknown {name}", where=name, got=repr(value), wanted=", ".join(known))

    def identity(self) -> dict:
        """The settings that make it another run when they change."""
        return {name: value for name, value in asdict(self).items() if name not in _ELSEWHERE}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(name: str, value: object, wanted: str) -> SettingsError:
    return SettingsError("Cannot train with this", where=name, got=repr(value), wanted=wanted)
