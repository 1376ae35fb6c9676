"""The estimator of networks: a network, windows and the training loop.

B batch, T time steps, F features, C = 3 classes.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from ml_factory.datasets.windows import Windows
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.models.base import CLASSES, ModelBase, ModelFitResult, apply_fit_limits, bind_model_to_callbacks
from ml_factory.models.heads import zero_output_head
from ml_factory.models.multi_timeframe_network import Strides, multi_timeframe_network_class, parse_timeframe_strides
from ml_factory.models.registry import registered_source_hash
from ml_factory.models.session_clock_offset import SessionClockOffset, check_clock_offset_settings
from ml_factory.models.tabular_data import balanced_class_factors, check_training_rows, training_data_checksum
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import deterministic_device, pick_device, pick_prediction_device
from ml_factory.training.estimator_base import (
    NeuralEstimatorBase,
    check_stored_weight_shapes,
    init_network_from_seed,
    network_covariate_shapes,
    split_neural_settings,
)
from ml_factory.training.evaluate import evaluate_network_outputs
from ml_factory.training.losses import weighted_cross_entropy


class NeuralClassifier(NeuralEstimatorBase, ModelBase):
    """Estimator of any network of `models`.

    network : a module class with a `Spec`, built as network(features, lookback, classes, spec).
    settings : fields of that Spec and of TrainSpec, by name, and lookback (T of its windows).
    frames : ((stride, columns), ...) where columns are read at their own strides (see `models.multi_scale`).
    offset_column : input that grows evenly through the session, whose `ClockOffset` at a window's last step is added to
        the logits; -1 for none.
    offset_bars : bars before the session's end with cells of their own in the offset.
    covariates : known-future and static inputs of the network (TFT): argument -> shape of a row.
    x : `Windows` with these covariates, or a float array (N, T, F) without NaN: scale and fill before.
    """

    def __init__(
        self, name: str, network: type[nn.Module], *, lookback: int = 32, frames: Strides | None = None,
        offset_column: int = -1, offset_bars: int = 0, **settings: Any,
    ):  # fmt: skip
        check_clock_offset_settings(offset_column, offset_bars)
        self.offset_column, self.offset_bars = offset_column, offset_bars if offset_column >= 0 else 0
        self.offset: SessionClockOffset | None = None
        self.frames = parse_timeframe_strides(frames) if frames else None
        self.name, self.network_kind, self.lookback = name, network, lookback
        self.kind = multi_timeframe_network_class(network, self.frames) if self.frames else network
        self.settings, self.network_spec = split_neural_settings(name, network, lookback, settings)
        self.covariates = network_covariate_shapes(self.network_spec, getattr(self.network_spec, "ahead", 0))
        if self.frames and self.covariates:
            raise SettingsError(
                "Frames cannot be combined with these inputs", where="frames",
                got=f"frames with {', '.join(self.covariates)}", wanted="frames or these inputs",
            )  # fmt: skip
        self.features = 0
        self.network: nn.Module | None = None

    def fit(
        self, x, y, sample_weight=None, *, validation=None, callbacks=(), checkpoints=None, limits=None
    ) -> ModelFitResult:
        spec, limited = apply_fit_limits(self.settings, limits)
        device, self.features = pick_device(spec), 0
        parts = self._parts(x, y, sample_weight, "training")
        held = validation and self._parts(*(*validation, None)[:3], "validation")
        parts, held = self._with_offset_scores(*_with_class_weights(parts, held, spec.class_weight))
        self._build(parts[0].shape[2])
        result = self._learn(
            parts, held, spec, device,
            settings={**spec.identity(), **asdict(self.network_spec), **self._shape()},
            data=training_data_checksum(self.features, *_checksum_arrays(*parts),
            *(_checksum_arrays(*held) if held else ())),
            callbacks=bind_model_to_callbacks(callbacks, self), checkpoints=checkpoints,
            offset=self.offset and self.offset.to_dict(),
        )  # fmt: skip
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
            feed = BatchLoader(device, [windows, *self._covariates_of(windows)])
            logits_NC = evaluate_network_outputs(self.network, feed, device, self.settings.eval_batch, self._forward)
            if self.offset is not None:
                logits_NC = logits_NC.double() + torch.from_numpy(self.offset.log_class_shares(self._clock(windows)))
            return torch.softmax(logits_NC.double(), dim=1).numpy()

    def get_state(self) -> dict:
        weights, offset = {} if self.network is None else self.network.state_dict(), self.offset
        return self._state(weights, self.features, offset and offset.to_dict())

    def state_from_checkpoint(self, saved):
        weights = saved["network"]
        if saved["done"] and saved["memory"]["best_weights"] is not None:
            weights = saved["memory"]["best_weights"]
        return self._state(weights, int(saved["data"]["features"]), saved.get("offset"))

    def _state(self, weights: Mapping[str, torch.Tensor], features: int, offset: Mapping | None) -> dict:
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
        self.__init__(self.name, self.network_kind, **state["settings"])
        if state["weights"]:
            features = int(state["n_features"])
            if not registered_source_hash(self.name):  # a network of the user's own may read its initial weights
                check_stored_weight_shapes(
                    lambda: self.kind(features, self.lookback, len(CLASSES), self.network_spec), state["weights"]
                )
            self._build(features)
            self.network.load_state_dict(dict(state["weights"]))
            self.network.eval()
        if (offset := state.get("offset")) is not None:  # networks of before 2026-11-23 have none
            self.offset = SessionClockOffset.from_dict(offset)
        return self

    def _shape(self) -> dict:
        """Return lookback, frames and offset as settings."""
        frames = {"frames": [list(pair) for pair in self.frames]} if self.frames else {}
        start = {"offset_column": self.offset_column, "offset_bars": self.offset_bars}
        return {"lookback": self.lookback} | frames | (start if self.offset_column >= 0 else {})

    def _build(self, features: int) -> None:
        """Build an untrained network from the seed; with a clock offset its initial logits are 0."""
        self.features = features
        self.network = init_network_from_seed(
            self.name, self.kind, features, self.lookback, len(CLASSES), self.network_spec, self.settings.seed
        )
        if self.offset_column >= 0:
            zero_output_head(self.network, len(CLASSES))

    def _loss(self, network: nn.Module, batch: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        *inputs, target_B, weight_B = batch
        logits_BC = self._forward(network, inputs)
        if self.offset is not None:
            logits_BC = logits_BC.float() + inputs[-1]
        return weighted_cross_entropy(logits_BC, target_B, weight_B)

    def _with_offset_scores(self, parts: tuple, held: tuple | None) -> tuple[tuple, tuple | None]:
        """Insert the offset scores (N, 3) of the rows before the classes of both parts, fitted on training rows."""
        self.offset = None
        if self.offset_column < 0:
            return parts, held
        windows, *_, target, weight = parts
        check_clock_offset_settings(self.offset_column, self.offset_bars, windows.shape[2])
        given = {"column": self.offset_column, "ending": self.offset_bars}
        self.offset = SessionClockOffset.fit_rows_with_weight(self._clock(windows), target, weight, **given)

        def with_scores(part: tuple) -> tuple:
            scores = self.offset.log_class_shares(self._clock(part[0])).astype(np.float32)
            return *part[:-2], scores, *part[-2:]

        return with_scores(parts), held and with_scores(held)

    def _clock(self, windows: Windows) -> np.ndarray:
        """Return the offset's input at the last step of each window, float32 (N,)."""
        return windows.x_NF[:, self.offset_column].cpu().numpy()[windows.rows]

    def _parts(self, x, y, weight, where: str) -> tuple[Windows | np.ndarray, ...]:
        """Return windows, covariates, classes int64 (N,) and weights float32 (N,), checked."""
        windows = self._windows(x)
        target, weight = check_training_rows(len(windows), y, weight, where=where)
        return windows, *self._covariates_of(windows), target, weight.astype(np.float32)

    def _covariates_of(self, windows: Windows) -> list[np.ndarray]:
        """Return arrays (N, ...) in the order of `covariates`."""
        wanted = {name: (len(windows), *shape) for name, shape in self.covariates.items()}
        next_step = "pass the inputs of the settings `known` and `static` as Windows(..., covariates=...)"
        return self._in_order(windows.covariates, wanted, next_step)

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


def _with_class_weights(parts: tuple, held: tuple | None, class_weight: str) -> tuple[tuple, tuple | None]:
    """Return both parts with class-balanced weights, as of `tabular_data.apply_tabular_class_weights`."""
    if class_weight == "none":
        return parts, held
    factor = balanced_class_factors(parts[-2], parts[-1].astype(np.float64))

    def times(part: tuple) -> tuple:
        *others, target, weight = part
        return *others, target, (weight * factor[target]).astype(np.float32)

    return times(parts), held and times(held)


def _checksum_arrays(windows: Windows, *columns: np.ndarray) -> list[np.ndarray]:
    """Return the arrays that identify a checkpoint's data."""
    return [windows.x_NF.cpu().numpy(), windows.rows, *columns]
