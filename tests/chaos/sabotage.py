"""Deliberate faults: a resumed life that deviates in one small thing. Each must show as a mismatch.

None of them changes a life that starts from scratch, so that the first life and the reference are sound.
"""

from collections.abc import Callable, Iterator

from tests.chaos.chain import Plan
from tests.chaos.hooks import Kill, wrap_everywhere, wrap_method
from tests.chaos.work import UNITS


class Resumed:
    """True in a process that resumed from a checkpoint; `change` may alter the loaded state."""

    def __init__(self, change: Callable[[dict], None] = lambda state: None):
        from ml_factory.checkpoints.phase import PhaseCheckpoints

        self.yes = False

        def around(load):
            def wrapped(phase):
                found = load(phase)
                if found is not None:
                    self.yes = True
                    change(found["state"])
                return found

            return wrapped

        wrap_method(PhaseCheckpoints, "load", around)


def sampler_position() -> None:
    """The order goes on one batch too late."""
    from ml_factory.training.sampler import BatchSampler

    resumed = Resumed()
    wrap_method(BatchSampler, "positions", lambda take: lambda self, step: take(self, step + resumed.yes))


def schedule() -> None:
    """The learning rate goes on one step behind, as when a checkpoint is taken before the scheduler's step."""
    resumed = Resumed()
    wrap_everywhere(
        "ml_factory.training.optim", "warmup_cosine_learning_rate",
        lambda rate: lambda step, *rest: rate(max(step - resumed.yes, 0), *rest),
    )  # fmt: skip


def device_seed() -> None:
    """The random numbers of the device go on one step ahead."""
    from ml_factory.training.device import Device

    resumed = Resumed()
    wrap_method(Device, "seed_step", lambda seed: lambda self, *parts: seed(self, parts[0] + resumed.yes, *parts[1:]))


def moments() -> None:
    """The optimizer's second moments start again from nothing."""
    Resumed(lambda state: [moment.zero_() for name, moment in _tensors(state["optimizer"]) if "sq" in name])


def patience() -> None:
    """Early stopping counts again from here."""
    Resumed(lambda state: state["memory"].update(best_epoch=len(state["memory"]["history"])))


def best_weights() -> None:
    """The best weights so far are those of this moment."""
    Resumed(lambda state: state["memory"].update(best_weights=dict(state["network"])))


def loss_scale() -> None:
    """Reset the loss scale to too large a value: the first step is skipped, as GradScaler's first ones often are."""
    Resumed(lambda state: state["scale"]["scale"].fill_(2.0**40))


def _tensors(tree: dict, above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _tensors(value, f"{above}{name}/")
        elif hasattr(value, "zero_"):
            yield f"{above}{name}", value


def block_seed() -> None:
    """A resumed block draws with the seed of the next one."""
    _other_seed("block")


def fold_seed() -> None:
    """A resumed fold's model has the seed of the next fold."""
    _other_seed("fold")


def trial_seed() -> None:
    """A resumed search proposes with the seed of the next trial."""
    _other_seed("barriers")


def _other_seed(part: str) -> None:
    resumed = Resumed()

    def around(derive):
        def wrapped(*parts, **how):
            if resumed.yes and part in parts:
                parts = (*parts[:-1], parts[-1] + 1)
            return derive(*parts, **how)

        return wrapped

    wrap_everywhere("ml_factory.seeding", "derive_seed", around)


# name -> (how, unit, event, n)
SABOTAGE = {
    "sampler position": (sampler_position, "lstm", "step", 6),
    "schedule": (schedule, "lstm", "step", 6),
    "device's random numbers": (device_seed, "lstm", "step", 6),
    "optimizer's moments": (moments, "patchtst", "step", 6),
    "early stopping": (patience, "early stopping", "step", 17),
    "the best weights": (best_weights, "early stopping", "step", 17),
    "the loss scale": (loss_scale, "half precision", "step", 6),
    "a block's seed": (block_seed, "xgboost", "block", 2),
    "a block's seed, lightgbm": (block_seed, "lightgbm", "block", 2),
    "a fold's seed": (fold_seed, "folds", "fold", 1),
    "a trial's seed": (trial_seed, "search", "trial", 3),
}


FEW = ("sampler position", "a block's seed")


def sabotages(seed: int, *, names: tuple[str, ...] = tuple(SABOTAGE)) -> Iterator[Plan]:
    """One kill each, taken up by a broken life."""
    for name in names:
        _, unit, event, n = SABOTAGE[name]
        if unit in UNITS:
            yield Plan(unit, (("sabotage", Kill(event, n)),), seed, lossy=False, broken=name)
