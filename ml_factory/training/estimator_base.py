"""Base of the estimators of networks: split settings, build a network from its seed, run the loop, order covariates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.models.base import ModelFitResult
from ml_factory.models.heads import Task
from ml_factory.models.registry import available_models, find_model_spec, resolve_registry_entry
from ml_factory.seeding import derive_seed
from ml_factory.training.batches import BatchLoader, Part
from ml_factory.training.device import Device
from ml_factory.training.evaluate import evaluate_mean_loss
from ml_factory.training.loop import Validation, run_training_loop
from ml_factory.training.spec import TrainSpec


def split_neural_settings(name: str, network: type[nn.Module], lookback: int, given: Mapping) -> tuple[TrainSpec, Any]:
    """Split settings into (those of the training, those of the network), each checked.

    Raises SettingsError for an unknown one, with the nearest spelling.
    """
    own, theirs = ({item.name for item in fields(spec)} for spec in (TrainSpec, network.Spec))
    for unknown in set(given) - own - theirs:
        known = own | theirs | {"frames", "lookback"}
        step, there = _models_with(unknown) or did_you_mean(unknown, known), ", ".join(sorted(known))
        raise SettingsError("Unknown setting", where=name, got=repr(unknown), wanted=f"one of {there}", next_step=step)
    if isinstance(lookback, bool) or not isinstance(lookback, int) or lookback < 2:
        raise SettingsError("Cannot build windows", where="lookback", got=repr(lookback), wanted="an integer >= 2")
    training = TrainSpec(**{key: value for key, value in given.items() if key in own})
    return training, network.Spec(**{key: value for key, value in given.items() if key in theirs})


def _models_with(setting: str) -> str:
    """Return the next step for a setting that only other networks have; "" where none has it."""
    networks = {
        name: resolve_registry_entry(find_model_spec(name).network)
        for name in available_models()
        if find_model_spec(name).windowed
    }
    theirs = [name for name, kind in networks.items() if setting in getattr(kind.Spec, "__dataclass_fields__", ())]
    return f"leave it out, or take a model that has it: {', '.join(theirs)}" if theirs else ""


def network_covariate_shapes(spec: Any, steps: int) -> dict[str, tuple[int, ...]]:
    """Return the covariates of a network of this spec: argument -> shape of a row. steps : number of steps ahead."""
    known, static = (getattr(spec, name, ()) for name in ("known", "static"))
    shapes = {"known_BSK": (known, (steps,)), "static_BV": (static, ())}
    # A user's network may use these names for other settings.
    there = {name: (*before, len(names)) for name, (names, before) in shapes.items() if isinstance(names, tuple)}
    return {name: shape for name, shape in there.items() if shape[-1]}


def init_network_from_seed(
    name: str, network: type[nn.Module], features: int, lookback: int, task: Task, spec: Any, seed: int
):
    """Build a network whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, name, "init"))
        return network(features, lookback, task, spec)


class _WithoutMemory(TorchFunctionMode):
    """While active, the constructors of weights and buffers give tensors without memory.

    most : number of such tensors beyond which it raises ValueError.
    """

    _CONSTRUCTORS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = dict(kwargs or {})
        if func not in self._CONSTRUCTORS:
            return func(*args, **given)
        self.most -= 1
        if self.most < 0:
            raise ValueError("settings of a network of many more weights than are stored")
        return func(*args, **given | {"device": "meta"})


def check_stored_weight_shapes(build: Callable[[], nn.Module], weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless these are the weights of the network, before any memory is taken for it.

    build : returns the network; called without memory for its weights.
    """
    with _WithoutMemory(3 * len(weights) + 100):
        wanted = {name: tuple(value.shape) for name, value in build().state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    other = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if other:
        name = other[0]
        raise ValueError(f"weights {name} of shape {found.get(name)}, not {wanted.get(name)} as the settings say")


class NeuralEstimatorBase:
    """Base of the estimators of networks; a subclass defines `_loss`.

    network : None until it is fitted or loaded.
    covariates : covariates of the network, as of `network_covariate_shapes`.
    """

    name: str
    network: nn.Module | None
    covariates: dict[str, tuple[int, ...]]

    def _learn(
        self, parts: Sequence[Part], held: Sequence[Part] | None, spec: TrainSpec, device: Device, *,
        settings: Mapping, data: Mapping, callbacks: Sequence[Callable], checkpoints: Any,
        offset: Mapping | None = None,
    ) -> ModelFitResult:  # fmt: skip
        """Run the training loop on these parts; the best epoch is chosen on the `held` out parts, if any.

        settings, data : identity that a checkpoint must match to be resumed.
        offset : clock offset of the network, stored with it; the untrained network may then be the best one.
        """
        feed, held_feed = BatchLoader(device, parts), BatchLoader(device, held) if held else None

        identity = {"model": self.name, "settings": settings, "data": data} | ({"offset": offset} if offset else {})

        def validate() -> float:
            return evaluate_mean_loss(self.network, held_feed, self._loss, device, spec.eval_batch)

        return run_training_loop(
            self.network, len(feed), feed, self._loss, spec, device,
            identity=identity, validation=Validation(validate, from_start=offset is not None) if held else None,
            callbacks=callbacks, checkpoints=checkpoints,
        )  # fmt: skip

    def _loss(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        """Return (sum of w * loss, sum of w) of a batch, whose last part is the weights (B,)."""
        raise NotImplementedError

    def _forward(self, network: nn.Module, batch: tuple) -> Tensor:
        """Run the network on (x_BTF, its covariates in order, ...)."""
        return network(batch[0], **dict(zip(self.covariates, batch[1:], strict=False)))

    def _in_order(self, given: Mapping, wanted: Mapping[str, tuple[int, ...]], next_step: str) -> list[np.ndarray]:
        """Return the arrays as float32, in the order of `covariates`. FactoryError where their last axes are not
        `wanted`.
        """
        got = {name: np.shape(part)[-len(wanted.get(name, (0,))) :] for name, part in given.items()}
        if got != wanted:
            raise FactoryError(
                "Windows with other covariates", where=self.name, got=got or "none", wanted=wanted or "none",
                next_step=next_step,
            )  # fmt: skip
        return [np.ascontiguousarray(given[name], dtype=np.float32) for name in self.covariates]
