"""Options that the verbs of a run share: seed, limits, which attempt, tracking, status lines."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import TypedDict

from ml_factory.argument_checks import check_artifact_source, check_seed
from ml_factory.errors import SettingsError, did_you_mean

StatusCallback = Callable[[str], None]


class RunOptionFields(TypedDict, total=False):
    """Names and types of the keyword arguments that become `RunOptions`."""

    seed: int
    quick: bool
    fresh: bool
    run: str
    source: str
    mirror: str
    uncertified: bool
    on_status: StatusCallback


@dataclass(frozen=True)
class RunOptions:
    """Options of one run; keyword arguments of `train`, `cross_validate` and `stack`.

    seed : seed of everything random in the run.
    quick : limit the training (never data checks, features, labels or splits).
    fresh : open a new run; the one that is there stays.
    run : id of the run to resume; refused when its settings, data or code differ.
    source : "wandb" loads finished models from W&B, "registry" asks there only for what the workspace lacks.
    mirror : Weights & Biases: "auto", "online", "offline" or "off".
    uncertified : accept data that has no certificate.
    on_status : called with one line before the work: what was found, and what is done now.
    """

    seed: int = 0
    quick: bool = False
    fresh: bool = False
    run: str = ""
    source: str = "registry"
    mirror: str = "auto"
    uncertified: bool = False
    on_status: StatusCallback = logging.getLogger("ml_factory").info

    def __post_init__(self):
        check_seed(self.seed)
        check_artifact_source(self.source)


def build_run_options(given: Mapping, unused: Collection[str] = ()) -> RunOptions:
    """Build the options from the keyword arguments of a verb.

    unused : options that mean nothing to this verb. Raises SettingsError for one of them, and for unknown names.
    """
    known = [field.name for field in fields(RunOptions) if field.name not in unused]
    for name in given:
        if name not in known:
            raise SettingsError(
                "There is no such argument", where="options of a run", got=name, wanted=", ".join(known),
                next_step=did_you_mean(name, known),
            )  # fmt: skip
    return RunOptions(**given)
