"""The comparisons of test_resume.py can fail: a life that goes on and is wrong in one small thing ends differently.

Each sabotage breaks the life after a kill alone: what is saved, or, patched on purpose, what the library computes.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from ml_factory import pipeline
from tests.contract import doors
from tests.contract.test_resume import fit, losses
from tests.interrupting_phase import InterruptingPhase


class BrokenPhase(InterruptingPhase):
    """A phase of checkpoints that gives back something else than was saved."""

    def __init__(self, until: int, change: Callable[[dict], None], best_epoch: int):
        super().__init__(until)
        self.change, self.best_epoch = change, best_epoch

    def save(self, state, metrics=None, force=False):
        if self.until < 0 and len(state["memory"]["history"]) > self.best_epoch:
            self.until = 1
        super().save(state, metrics, force)

    def load(self):
        if self.state is not None:
            self.change(self.state)
        return super().load()


def tensors(tree: dict, above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from tensors(value, f"{above}{name}/")
        else:
            yield f"{above}{name}", value


def moments(state: dict) -> None:
    """The optimizer's second moments start again from nothing."""
    for name, moment in tensors(state["optimizer"]):
        if name.endswith("sq"):
            moment.zero_()


def patience(state: dict) -> None:
    """Early stopping counts again from here."""
    state["memory"]["best_epoch"] = len(state["memory"]["history"])


def best_weights(state: dict) -> None:
    """The best weights so far are those of this moment."""
    state["memory"]["best_weights"] = dict(state["network"])


def loss_scale(state: dict) -> None:
    """The loss scale is too large: the next step is skipped, as GradScaler's first ones often are."""
    state["scale"]["scale"].fill_(2.0**40)


def loss_so_far(state: dict) -> None:
    """The losses of the epoch's steps before the kill are forgotten."""
    state["totals"].zero_()


SHORT = {"save_seconds": 0.0}
STOPPING = SHORT | {"epochs": 30, "lr": 0.2, "patience": 3}
STATES = {  # change -> model, saves before the kill, settings
    moments: ("patchtst", 6, SHORT),
    patience: ("lstm", -1, STOPPING),  # killed after the best epoch
    best_weights: ("lstm", -1, STOPPING),
    loss_scale: ("patchtst", 6, SHORT | {"precision": "fp16"}),
    loss_so_far: ("lstm", 6, SHORT),
}
# what is computed wrongly -> model, saves before the kill, settings
COMPUTED = {
    "position of the sampler": ("lstm", 6, SHORT),
    "learning rate": ("lstm", 6, SHORT),
    "random numbers of the device": ("lstm", 6, SHORT),
    "seed of a block": ("xgboost", 2, {}),
    "seed of a block, lightgbm": ("lightgbm", 2, {}),
}


def interrupted(model: str, phase: InterruptingPhase, settings: dict):
    with pytest.raises(KeyboardInterrupt):
        fit(model, None, phase=phase, **settings)
    phase.until = 10**6  # from now on it only keeps


def differ(one, other) -> bool:
    """Whether weights, predictions or history differ."""
    return (
        doors.serialize_state(one[0].get_state()) != doors.serialize_state(other[0].get_state())
        or not np.array_equal(one[2], other[2])
        or losses(one[1]) != losses(other[1])
    )


@pytest.mark.parametrize("change", STATES, ids=lambda change: change.__name__)
def test_state_that_is_changed_between_kill_and_resume_shows(change):
    model, until, settings = STATES[change]
    whole = fit(model, None, **settings)
    for broken in (lambda state: None, change):
        phase = BrokenPhase(until, broken, whole[1].best_epoch)
        interrupted(model, phase, settings)
        assert differ(fit(model, None, phase=phase, **settings), whole) == (broken is change)


@pytest.mark.parametrize("what", COMPUTED)
def test_computation_that_is_wrong_after_resume_shows(what):
    model, until, settings = COMPUTED[what]
    whole = fit(model, None, **settings)
    phase = InterruptingPhase(until)
    interrupted(model, phase, settings)
    with doors.sabotage(what):
        assert differ(fit(model, None, phase=phase, **settings), whole)


def test_seed_of_a_fold_that_is_wrong_after_resume_shows(tmp_path, monkeypatch):
    """Killed between two folds; the folds after that have the seed of the next one."""
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    doors.ensure_synthetic_demo_market(doors.Workspace(tmp_path), "DEMO", days=10)
    pipeline.prepare(tmp_path, "DEMO", (6,), settings=doors.SMALL_DATA)

    def folds(fresh: bool = True):
        given = {"rounds": 8, "block": 4, "threads": 1}
        made = pipeline.cross_validate(
            tmp_path, "DEMO", 6, "xgboost", folds=3, model_settings=given, mirror="off", fresh=fresh
        )
        return made.folds["log_loss"].tolist()

    whole = folds()
    for broken in (False, True):
        with doors.sabotage("death before the second fold"), pytest.raises(KeyboardInterrupt):
            folds()
        with doors.sabotage("seed of a fold") if broken else nullcontext():
            again = folds(fresh=False)
        assert again[0] == whole[0] and (again != whole) == broken
