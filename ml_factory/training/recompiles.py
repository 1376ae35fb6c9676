"""Count the compilations of each program of a run by a lazy device or `torch.compile`, with the cause of a recompile.

A program is the work between two calls of `mark_step`: "train" (a whole step), "accumulate" (an earlier part of one)
and "evaluate". Each may be compiled twice (the first call has new arrays), and none after the first full cycle of an
epoch, its evaluation and a save: another compile means that a shape or a Python number of the program has changed.
"""

import difflib
import logging
from collections import Counter
from collections.abc import Callable, Iterator

from torch import Tensor

PROGRAMS, ALLOWED = ("train", "accumulate", "evaluate"), 2
_log = logging.getLogger("ml_factory.training")


class RecompileMonitor:
    """Compile counts and complaints.

    counts : compiles by program.
    complaints : a sentence for each unexpected recompile.
    """

    def __init__(self):
        self.counts, self.complaints = Counter(), []
        self._built: int | None = None
        self._announced: set[str] = set()
        self.reset_programs()

    def reset_programs(self) -> None:
        """Reset after a change of the programs (another micro-batch): each may be compiled again."""
        self._seen, self._since, self._texts, self._alarmed, self.settled = {}, Counter(), {}, set(), False
        self._before = Counter(self.counts)

    def end_first_cycle(self) -> None:
        """Mark the end of the first full cycle."""
        self.settled = True

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

    def record_program_text(self, program: str, read: Callable[[], str]) -> None:
        """Keep the text of a program in its steady form, once; after an alarm log how the next one differs from it."""
        if program in self._alarmed:
            self._alarmed.discard(program)
            line = _first_difference(self._texts.get(program, ""), read())
            if line:
                self._complain(f"the program {program} now holds: {line}")
        elif program not in self._texts and self._since[program] == 0 and program in self._seen:
            self._texts[program] = read()

    def record_compilations(self, program: str, compiled: int, inputs: object = ()) -> None:
        """Record that this call of `program`, with these `inputs`, built `compiled` programs."""
        now = tuple(_signature(inputs))
        first = self._seen.setdefault(program, now)
        self.counts[program] += compiled
        self._since[program] = 0 if not compiled else self._since[program] + compiled
        again = self.settled or self.counts[program] - self._before[program] > ALLOWED
        if compiled and again and program in PROGRAMS:
            changed = [f"{old} became {new}" for old, new in zip(first, now, strict=False) if old != new]
            if len(first) != len(now):
                changed.append(f"{len(first)} inputs became {len(now)}")
            cause = "; ".join(changed) or "no shape changed, so a Python number is part of the program"
            self._complain(f"{program} was compiled again, {self.counts[program]} times in all: {cause}")
            if not changed:
                self._alarmed.add(program)

    def _complain(self, what: str) -> None:
        self.complaints.append(what)
        _log.warning("Compiled in mid-run: %s", what)


def _signature(value: object) -> Iterator[str]:
    """Yield the shape of each array and the value of each number in nested inputs."""
    if isinstance(value, Tensor):
        yield f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _signature(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _signature(item)
    else:
        yield repr(value)


def _first_difference(before: str, now: str) -> str:
    """Return the first line of `now` that `before` does not have, without the numbers of the nodes."""
    lines = difflib.ndiff(*([line.partition("=")[2].strip() for line in text.splitlines()] for text in (before, now)))
    return next((line[2:] for line in lines if line.startswith("+ ")), "")
