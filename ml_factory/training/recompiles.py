"""Count the compilations of each program of a run by a lazy device or `torch.compile`.

A program is the work between two calls of `mark_step`: "train" (a whole step), "accumulate" (an earlier part of one)
and "evaluate". Each may be compiled twice: the first call has new arrays.
"""

import logging
from collections import Counter

PROGRAMS = ("train", "accumulate", "evaluate")
_log = logging.getLogger("ml_factory.training")


class RecompileMonitor:
    """Compile counts.

    counts : compiles by program.
    """

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self._built: int | None = None
        self._announced: set[str] = set()

    def announce_compilation(self, program: str) -> None:
        """Log once for each program that a lazy device is about to compile it: minutes pass before its first step."""
        if program in PROGRAMS and program not in self._announced:
            self._announced.add(program)
            _log.warning(
                "XLA compiles the program %s now; its first steps take minutes, the later ones do not", program
            )

    def has_new_graphs(self, built: int) -> bool:
        """Return True where more graphs exist in this process than at the last call; False at the first call."""
        before, self._built = self._built, built
        return before is not None and built > before

    def record_compilations(self, program: str, compiled: int) -> None:
        """Record that this call of `program` built `compiled` programs."""
        self.counts[program] += compiled
