"""Result of a proof that nothing looks ahead."""

from collections.abc import Mapping
from dataclasses import dataclass

from ml_factory.leakage.cut_points import CutPoint
from ml_factory.leakage.timed_tables import Leak


@dataclass(frozen=True)
class Proof:
    """Result of a proof.

    form : "full" or "quick"
    cuts : the moments tested
    disturbances : the perturbations tested
    compared : part -> rows compared, over all cuts and perturbations
    leaks : empty when none was found
    builds : number of runs of the pipeline
    seconds : elapsed time
    """

    form: str
    cuts: tuple[CutPoint, ...]
    disturbances: tuple[str, ...]
    compared: Mapping[str, int]
    leaks: tuple[Leak, ...]
    builds: int
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.leaks
