"""Kill plans, drawn from a printed seed, so that any of them can be repeated."""

from collections.abc import Iterator

import numpy as np

from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.seeding import seeded_generator
from tests.chaos.chain import Plan
from tests.chaos.hooks import Kill

# place -> (unit, event, smallest and largest n of each kill of a chain)
_PLACES = {
    "prepare": ("prepare", "part", ((1, 4), (1, 2), (1, 2))),
    "fold boundary": ("folds", "fold", ((1, 1), (2, 2))),
    "folds of a network": ("folds of a network", "step", ((3, 9), (10, 16), (8, 14))),
    "trial": ("search", "trial", ((1, 4), (2, 4), (2, 4))),
    "stack": ("stack", "stack", ((1, 5), (1, 4), (1, 3))),
}
_BLOCKS = ((1, 3), (2, 3), (2, 2))
_STEPS = ((3, 9), (3, 9), (3, 9))
WITHIN = {"booster": "block", "network": "step"}


def places() -> dict[str, tuple]:
    """All of them: every model has one of its own, a network that stops early, one whose loss is scaled and one inside
    its folds, and the evaluation of one."""
    models = {
        model: (model, "step", _STEPS) if find_model_spec(model).windowed else (model, "block", _BLOCKS)
        for model in available_models()
    }
    others = {name: (name, "step", _STEPS) for name in ("early stopping", "half precision")}
    return {**_PLACES, **models, **others, "evaluation": ("xgboost", "judge", ((1, 5), (1, 4), (1, 3)))}


def campaign(seed: int, *, kills: int = 5, saves: int = 10, resumes: int = 5, doubles: int = 5) -> Iterator[Plan]:
    """At least `kills` at each place, and the kills inside a save, during a resume and twice in a row.

    Every other chain loses the local disk with each kill.
    """
    for name, (unit, event, ranges) in places().items():
        for number in range(-(-kills // len(ranges))):
            luck = seeded_generator("chaos", seed, name, number)
            chosen = tuple((name, Kill(event, _draw(luck, *span))) for span in ranges)
            yield Plan(unit, chosen, _seed(luck), lossy=number % 2 == 1)
    units = [*available_models(), "search", "folds"]
    yield from _others(seed, "in a save", units, saves, lambda luck: (Kill("chunk", _draw(luck, 2, 5)),))
    yield from _others(seed, "during a resume", units, resumes, lambda luck: (None, Kill("load", 1)))
    yield from _others(seed, "twice in a row", units, doubles, lambda luck: (None, "again"))


def _others(seed: int, name: str, units: list[str], count: int, kinds) -> Iterator[Plan]:
    """`count` kills of one kind, over the units in turn."""
    for number in range(count):
        luck = seeded_generator("chaos", seed, name, number)
        unit = units[number % len(units)]
        event, low, high = _usual(unit)
        chosen = []
        for kill in kinds(luck):
            if kill is None:  # a plain kill first: there must be something to resume
                chosen.append((unit if unit in places() else "", Kill(event, _draw(luck, low, high))))
            elif kill == "again":  # as soon as the resumed process works again
                chosen.append((name, Kill(event, 1)))
            else:
                chosen.append((name, kill))
        yield Plan(unit, tuple(chosen), _seed(luck), lossy=number % 2 == 1)


def _usual(unit: str) -> tuple[str, int, int]:
    """The event of this unit's work, and how many of them a first life takes."""
    if unit in available_models():
        return ("step", 4, 9) if find_model_spec(unit).windowed else ("block", 2, 4)
    return {"search": ("trial", 3, 6), "folds": ("fold", 1, 1)}[unit]


def _draw(luck: np.random.Generator, low: int, high: int) -> int:
    return int(luck.integers(low, high + 1))


def _seed(luck: np.random.Generator) -> int:
    return int(luck.integers(1, 10_000))


def few() -> list[Plan]:
    """The fixed few of `make test`: one kill of each kind of unit, half of them with the disk lost; two breaks."""
    kills = (
        ("xgboost", "xgboost", Kill("block", 2), True), ("lstm", "lstm", Kill("step", 7), False),
        ("prepare", "prepare", Kill("part", 2), True),
        ("folds", "fold boundary", Kill("fold", 1), True), ("search", "trial", Kill("trial", 4), False),
        ("stack", "stack", Kill("stack", 3), False), ("lightgbm", "in a save", Kill("chunk", 3), True),
    )  # fmt: skip
    return [Plan(unit, ((name, kill),), 1, lossy) for unit, name, kill, lossy in kills]
