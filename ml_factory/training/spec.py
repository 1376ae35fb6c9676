"""Settings of the one loop."""

from dataclasses import dataclass

from ml_factory.errors import SettingsError, did_you_mean

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class TrainSpec:
    """How a network is trained.

    epochs : at most; early stopping ends sooner. batch : rows a step, always full. warmup : share of all steps over
    which the rate climbs; it then falls on a cosine to 0. patience : epochs without a better validation loss before
    stopping, 0 for never. clip : largest norm of the whole gradient. threads : CPU threads, 0 for every core; pinned,
    since another number gives other last bits. save_seconds : a save in mid-epoch is considered this long after the
    last one.
    """

    epochs: int = 20
    batch: int = 256
    lr: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.1
    patience: int = 5
    clip: float = 1.0
    eval_batch: int = 1024
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    save_seconds: float = 60.0

    def __post_init__(self):
        for name, low in (("epochs", 1), ("batch", 1), ("eval_batch", 1), ("patience", 0), ("threads", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise _refused(name, value, f"an integer >= {low}")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise _refused(name, getattr(self, name), "a positive number")
        for name in ("weight_decay", "save_seconds"):
            if not getattr(self, name) >= 0:
                raise _refused(name, getattr(self, name), ">= 0")
        if not 0 <= self.warmup < 1:
            raise _refused("warmup", self.warmup, "in [0, 1): a share of all steps")
        if self.device not in DEVICES:
            raise SettingsError(
                "Unknown device", where="device", got=repr(self.device), next_step=did_you_mean(self.device, DEVICES)
            )


def _refused(name: str, value: object, wanted: str) -> SettingsError:
    return SettingsError("Cannot train with this", where=name, got=repr(value), wanted=wanted)
