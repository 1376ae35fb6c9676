"""What the estimators of networks share: their settings, told apart, and a fresh network from its seed."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.models.heads import Task
from ml_factory.seeding import derive_seed
from ml_factory.training.spec import TrainSpec


def split_settings(name: str, network: type[nn.Module], lookback: int, given: Mapping) -> tuple[TrainSpec, Any]:
    """(those of the training, those of the network), each checked; an unknown one is refused with a suggestion."""
    mine, theirs = ({item.name for item in fields(spec)} for spec in (TrainSpec, network.Spec))
    for unknown in set(given) - mine - theirs:
        known = mine | theirs | {"lookback"}
        raise SettingsError("Unknown setting", where=name, got=repr(unknown), next_step=did_you_mean(unknown, known))
    if isinstance(lookback, bool) or not isinstance(lookback, int) or lookback < 2:
        raise SettingsError("Cannot build windows", where="lookback", got=repr(lookback), wanted="an integer >= 2")
    training = TrainSpec(**{key: value for key, value in given.items() if key in mine})
    return training, network.Spec(**{key: value for key, value in given.items() if key in theirs})


def beside_of(spec: Any, steps: int) -> dict[str, tuple[int, ...]]:
    """What a network of this spec reads beside a window: argument -> shape of a row. steps : S that are looked at."""
    known, static = (getattr(spec, name, ()) for name in ("known", "static"))
    shapes = {"known_BSK": (known, (steps,)), "static_BV": (static, ())}
    # A network of one's own may call something else by these names.
    there = {name: (*before, len(names)) for name, (names, before) in shapes.items() if isinstance(names, tuple)}
    return {name: shape for name, shape in there.items() if shape[-1]}


def fresh(name: str, network: type[nn.Module], features: int, lookback: int, task: Task, spec: Any, seed: int):
    """A network whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, name, "init"))
        return network(features, lookback, task, spec)
