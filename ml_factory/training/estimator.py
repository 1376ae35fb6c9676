"""The estimator of networks: a network, windows and the training loop.

B batch, T time steps, F features, C = 3 classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.datasets.windows import Windows
from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.models.base import CLASSES, ModelBase, ModelFitResult, apply_fit_limits, bind_model_to_callbacks
from ml_factory.models.session_clock_offset import SessionClockOffset, check_clock_offset_settings
from ml_factory.models.tabular_data import balanced_class_factors, check_training_rows, training_data_checksum
from ml_factory.seeding import derive_seed
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import Device, deterministic_device, pick_device, pick_prediction_device
from ml_factory.training.evaluate import evaluate_mean_loss, evaluate_network_outputs
from ml_factory.training.loop import Validation, run_training_loop
from ml_factory.training.losses import weighted_cross_entropy
from ml_factory.training.spec import TrainSpec


def split_neural_settings(name: str, network: type[nn.Module], lookback: int, given: Mapping) -> tuple[TrainSpec, Any]:
    """Split settings into (those of the training, those of the network), each checked.

    Raises SettingsError for an unknown one, with the nearest spelling.
    """
    own, theirs = ({item.name for item in fields(spec)} for spec in (TrainSpec, network.Spec))
    for unknown in set(given) - own - theirs:
        known = own | theirs | {"lookback"}
        step, there = did_you_mean(unknown, known), ", ".join(sorted(known))
        raise SettingsError("Unknown setting", where=name, got=repr(unknown), wanted=f"one of {there}", next_step=step)
    if isinstance(lookback, bool) or not isinstance(lookback, int) or lookback < 2:
        raise SettingsError("Cannot build windows", where="lookback", got=repr(lookback), wanted="an integer >= 2")
    training = TrainSpec(**{key: value for key, value in given.items() if key in own})
    return training, network.Spec(**{key: value for key, value in given.items() if key in theirs})


def init_network_from_seed(
    name: str, network: type[nn.Module], features: int, lookback: int, classes: int, spec: Any, seed: int
):
    """Build a network whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, name, "init"))
        return network(features, lookback, classes, spec)


def zero_output_head(network: nn.Module, outputs: int) -> None:
    """Set the last linear layer with so many outputs to 0, so that an untrained network gives logits of 0.

    A network without such a layer, which may be a user's, keeps its initial weights.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear) and layer.out_features == outputs]
    for parameter in layers[-1].parameters() if layers else ():
        nn.init.zeros_(parameter)


class NeuralClassifier(ModelBase):
    """Estimator of any network of `models`.

    network : a module class with a `Spec`, built as network(features, lookback, classes, spec).
    settings : fields of that Spec and of TrainSpec, by name, and lookback (T of its windows).
    offset_column : input that grows evenly through the session, whose `SessionClockOffset` at a window's last step is
        added to the logits; -1 for none.
    offset_bars : bars before the session's end with cells of their own in the offset.
    x : `Windows`, or a float array (N, T, F) without NaN: scale and fill before.
    """

    def __init__(
        self, name: str, network: type[nn.Module], *, lookback: int = 32, offset_column: int = -1, offset_bars: int = 0,
        **settings: Any,
    ):  # fmt: skip
        check_clock_offset_settings(offset_column, offset_bars)
        self.offset_column, self.offset_bars = offset_column, offset_bars if offset_column >= 0 else 0
        self.offset: SessionClockOffset | None = None
        self.name, self.kind, self.lookback = name, network, lookback
        self.settings, self.network_spec = split_neural_settings(name, network, lookback, settings)
        self.features = 0
        self.network: nn.Module | None = None

    def fit(
        self, x, y, sample_weight=None, *, validation=None, callbacks=(), checkpoints=None, limits=None
    ) -> ModelFitResult:
        spec, limited = apply_fit_limits(self.settings, limits)
        device, self.features = pick_device(spec), 0
        train, held = self._parts(x, y, sample_weight, "training"), None
        if validation is not None:
            held = self._parts(*(*validation, None)[:3], "validation")
        if spec.class_weight == "balanced":  # as of `tabular_data.apply_tabular_class_weights`
            factor = balanced_class_factors(train[1], train[2].astype(np.float64))
            train, held = (
                part and (*part[:2], (part[2] * factor[part[1]]).astype(np.float32)) for part in (train, held)
            )
        self.offset = self._fit_offset(train)
        if self.offset is not None:  # its scores stand behind the windows
            train, held = (part and (part[0], self._offset_scores(part[0]), *part[1:]) for part in (train, held))
        self._build(train[0].shape[2])
        result = self._learn(train, held, spec, device, bind_model_to_callbacks(callbacks, self), checkpoints)
        result.limited = limited
        return result

    def predict_proba(self, x) -> np.ndarray:
        if self.network is None:
            raise FactoryError("The model is not fitted", where=self.name, next_step="call fit or load first")
        windows = self._windows(x)
        if not len(windows):
            return np.empty((0, len(CLASSES)))
        device = pick_prediction_device(self.settings)
        with deterministic_device(device):
            feed = BatchLoader(device, [windows])
            logits_NC = evaluate_network_outputs(self.network, feed, device, self.settings.eval_batch).double()
            if self.offset is not None:
                logits_NC += torch.from_numpy(self.offset.log_class_shares(self._clock(windows)))
            return torch.softmax(logits_NC, dim=1).numpy()

    def get_state(self) -> dict:
        weights = {} if self.network is None else self.network.state_dict()
        return self._state(weights, self.features, self.offset and self.offset.to_dict())

    def state_from_checkpoint(self, saved):
        weights = saved["network"]
        if saved["done"] and saved["memory"]["best_weights"] is not None:
            weights = saved["memory"]["best_weights"]
        return self._state(weights, int(saved["data"]["features"]), saved.get("offset"))

    def _state(self, weights: Mapping[str, Tensor], features: int, offset: Mapping | None) -> dict:
        return self._with_trained_on({
            "model": self.name,
            "settings": {**self._shape(), **asdict(self.settings), **asdict(self.network_spec)},
            "n_features": features,
            "torch": str(torch.__version__),
            "weights": {name: value.detach().cpu().clone() for name, value in weights.items()},
            **({"offset": dict(offset)} if offset else {}),
        })  # fmt: skip

    def load_state(self, state):
        state = self._checked_state(state)
        self.__init__(self.name, self.kind, **state["settings"])
        if state["weights"]:
            self._build(int(state["n_features"]))
            self.network.load_state_dict(dict(state["weights"]))
            self.network.eval()
        if "offset" in state:
            self.offset = SessionClockOffset.from_dict(state["offset"])
        return self

    def _shape(self) -> dict:
        """Return lookback and offset as settings."""
        start = {"offset_column": self.offset_column, "offset_bars": self.offset_bars}
        return {"lookback": self.lookback} | (start if self.offset_column >= 0 else {})

    def _build(self, features: int) -> None:
        """Build an untrained network from the seed; with a clock offset its initial logits are 0."""
        self.features = features
        self.network = init_network_from_seed(
            self.name, self.kind, features, self.lookback, len(CLASSES), self.network_spec, self.settings.seed
        )
        if self.offset_column >= 0:
            zero_output_head(self.network, len(CLASSES))

    def _learn(
        self, train: tuple, held: tuple | None, spec: TrainSpec, device: Device, callbacks: Sequence[Callable],
        checkpoints: Any,
    ) -> ModelFitResult:  # fmt: skip
        """Run the training loop on these parts; the best epoch is chosen on the `held` out parts, if any.

        With a clock offset, which is stored with the network, the untrained network may be the best one.
        """
        feed, held_feed = BatchLoader(device, train), BatchLoader(device, held) if held else None
        arrays = [array for part in (train, held) if part for array in (_host_rows(part[0]), part[0].rows, *part[1:])]
        identity = {  # what a checkpoint must match to be resumed
            "model": self.name, "settings": {**spec.identity(), **asdict(self.network_spec), **self._shape()},
            "data": training_data_checksum(self.features, *arrays),
        } | ({"offset": self.offset.to_dict()} if self.offset else {})  # fmt: skip

        def validate() -> float:
            return evaluate_mean_loss(self.network, held_feed, self._loss, device, spec.eval_batch)

        return run_training_loop(
            self.network, len(feed), feed, self._loss, spec, device, identity=identity,
            validation=Validation(validate, from_start=self.offset is not None) if held else None,
            callbacks=callbacks, checkpoints=checkpoints,
        )  # fmt: skip

    def _loss(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        """Return (sum of w * loss, sum of w) of a batch: windows, scores of the offset if any, classes, weights."""
        x_BTF, *scores, target_B, weight_B = batch
        logits_BC = network(x_BTF)
        if scores:
            logits_BC = logits_BC.float() + scores[0]
        return weighted_cross_entropy(logits_BC, target_B, weight_B)

    def _fit_offset(self, train: tuple) -> SessionClockOffset | None:
        if self.offset_column < 0:
            return None
        windows, target, weight = train
        check_clock_offset_settings(self.offset_column, self.offset_bars, windows.shape[2])
        given = {"column": self.offset_column, "ending": self.offset_bars}
        return SessionClockOffset.fit(self._clock(windows), target, weight, **given)

    def _offset_scores(self, windows: Windows) -> np.ndarray:
        """Return the offset's scores of the windows, float32 (N, 3)."""
        return self.offset.log_class_shares(self._clock(windows)).astype(np.float32)

    def _clock(self, windows: Windows) -> np.ndarray:
        """Return the offset's input at the last step of each window, float32 (N,)."""
        return _host_rows(windows)[windows.rows, self.offset_column]

    def _parts(self, x, y, weight, where: str) -> tuple[Windows | np.ndarray, ...]:
        """Return windows, classes int64 (N,) and weights float32 (N,), checked."""
        windows = self._windows(x)
        target, weight = check_training_rows(len(windows), y, weight, where=where)
        return windows, target, weight.astype(np.float32)

    def _windows(self, x) -> Windows:
        if not isinstance(x, Windows):
            x = np.ascontiguousarray(x, dtype=np.float32)
            if x.ndim != 3:
                raise FactoryError("Networks read windows", where=self.name, got=f"shape {x.shape}", wanted="(N, T, F)")
            n, steps, features = x.shape
            x = Windows(x.reshape(n * steps, features), np.arange(n) * steps + steps - 1, steps)
        if x.shape[1] != self.lookback or (self.features and x.shape[2] != self.features):
            raise FactoryError(
                "Windows of another shape",
                where=self.name,
                got=f"T={x.shape[1]}, F={x.shape[2]}",
                wanted=f"T={self.lookback}, F={self.features or 'any'}",
                next_step="build the windows with the model's own lookback and features",
            )
        return x


def _host_rows(windows: Windows) -> np.ndarray:
    return windows.x_NF.cpu().numpy()
