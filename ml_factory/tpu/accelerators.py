"""Accelerator types of Cloud TPU, v2 to v6e: chips, workers and the runtime version of each.

Sources: cloud.google.com/tpu/docs/v2, v3, v4, v5p, v5e, v6e (chips and virtual machines of a slice) and
cloud.google.com/tpu/docs/runtimes (runtime versions). Prices change by region and contract, so none stands here.
"""

import re
from dataclasses import dataclass

from ml_factory.errors import SettingsError

_OLD_RUNTIME = "tpu-ubuntu2204-base"


@dataclass(frozen=True)
class Generation:
    """Facts of a TPU generation.

    cores_per_chip : what the number in the type counts: 2 where it counts TensorCores, 1 where it counts chips.
    chips_alone : most chips of a slice with one worker; larger slices have 4 chips a worker.
    most : largest number in a type.
    """

    cores_per_chip: int
    chips_alone: int
    most: int
    runtime: str


# name in the accelerator type -> facts
GENERATIONS = {
    "v2": Generation(2, 4, 512, _OLD_RUNTIME),
    "v3": Generation(2, 4, 2048, _OLD_RUNTIME),
    "v4": Generation(2, 4, 8192, _OLD_RUNTIME),
    "v5p": Generation(2, 4, 12288, "v2-alpha-tpuv5"),
    "v5litepod": Generation(1, 8, 256, "v2-alpha-tpuv5-lite"),
    "v6e": Generation(1, 8, 256, "v2-alpha-tpuv6e"),
}


@dataclass(frozen=True)
class Accelerator:
    """One accelerator type, such as v4-32: 16 chips (the number counts TensorCores) on 4 workers."""

    kind: str
    chips: int
    workers: int
    runtime: str

    def describe(self, price_per_chip_hour: float | None) -> str:
        """Return chips, workers and, where a price was given, the price of an hour."""
        text = f"{self.kind}: {self.chips} chips on {self.workers} workers"
        if price_per_chip_hour is None:
            return f"{text}; price unknown: give PRICE_PER_CHIP_HOUR (cloud.google.com/tpu/pricing)"
        return f"{text}; {self.chips * price_per_chip_hour:.2f} an hour at {price_per_chip_hour:g} a chip and hour"


def parse_accelerator(text: str) -> Accelerator:
    """Return the facts of an accelerator type; v5e-N is v5litepod-N in gcloud. Raises SettingsError."""
    found = re.fullmatch(r"([a-z0-9]{2,12})-([1-9][0-9]{0,4})", text)
    name = {"v5e": "v5litepod"}.get(found[1], found[1]) if found else ""
    if not found or name not in GENERATIONS:
        raise SettingsError(
            "Unknown accelerator type",
            where="ACCELERATOR_TYPE",
            got=repr(text),
            wanted=", ".join(f"{known}-N" for known in GENERATIONS),
            next_step="for example v4-32 or v6e-8",
        )
    facts, number = GENERATIONS[name], int(found[2])
    chips = number // facts.cores_per_chip
    legal = number <= facts.most and (
        number % 8 == 0 if facts.cores_per_chip == 2 else number in (1, 4) or not number % 8
    )
    if not legal:
        wanted = "a multiple of 8 TensorCores" if facts.cores_per_chip == 2 else "1, 4 or a multiple of 8 chips"
        raise SettingsError(
            "There is no slice of this size",
            where="ACCELERATOR_TYPE",
            got=text,
            wanted=f"{wanted}, up to {facts.most}",
            next_step="see cloud.google.com/tpu/docs",
        )
    workers = 1 if chips <= facts.chips_alone else chips // 4
    return Accelerator(f"{name}-{number}", chips, workers, facts.runtime)
