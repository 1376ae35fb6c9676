"""The estimator of networks: network, windows and loop, in smaller parts where memory runs out; export of weights.

B batch, T time steps, F features, C = 3 classes.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.datasets.windows import Windows
from ml_factory.errors import FactoryError
from ml_factory.models.base import ModelBase, build_model_settings
from ml_factory.models.rows import CLASSES, TrainingRows
from ml_factory.models.session_clock import PROGRESS_BINS, SessionClockOffset, session_end_cells
from ml_factory.training.batches import (
    BatchLoader,
    evaluate_mean_loss,
    evaluate_network_outputs,
    weighted_cross_entropy,
)
from ml_factory.training.device import Device, deterministic_device, drawn_from, pick_device, pick_prediction_device
from ml_factory.training.loop import OutOfMemoryError, Validation, run_training_loop
from ml_factory.training.spec import NetworkSpec

_log = logging.getLogger("ml_factory.training")


def zero_output_head(network: nn.Module, outputs: int) -> None:
    """Set the last linear layer with so many outputs to 0, so that an untrained network gives logits of 0.

    A network without such a layer, which may be a user's, keeps its initial weights.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear) and layer.out_features == outputs]
    for parameter in layers[-1].parameters() if layers else ():
        nn.init.zeros_(parameter)


class NeuralClassifier(ModelBase):
    """Estimator of any network of `models`.

    With a clock offset, whose scores are added to the logits, an untrained network gives logits of 0 and may be the
    best one.

    network : a module class with a `Spec`, built as network(features, lookback, classes, spec).
    settings : fields of that Spec and of NetworkSpec, by name.
    x : `Windows`, or a float array (N, T, F) without NaN: scale and fill before.
    """

    def __init__(self, name: str, network: type[nn.Module], **settings: Any):
        self.name, self.kind = name, network
        self.set_settings(settings)
        self.network: nn.Module | None = None

    def set_settings(self, given):
        self.settings, self.network_spec = build_model_settings(given, NetworkSpec, self.kind.Spec, where=self.name)

    def _settings_dict(self, training):
        return {**training, **asdict(self.network_spec)}

    @property
    def lookback(self) -> int:
        return self.settings.lookback

    def _inputs(self, x, where, features):
        if not isinstance(x, Windows):
            x = np.ascontiguousarray(x, dtype=np.float32)
            if x.ndim != 3:
                raise FactoryError("Networks read windows", where=where, got=f"shape {x.shape}", wanted="(N, T, F)")
            n, steps, width = x.shape
            x = Windows(x.reshape(n * steps, width), np.arange(n) * steps + steps - 1, steps)
        if x.shape[1] != self.lookback or (features and x.shape[2] != features):
            raise FactoryError(
                "Windows of another shape",
                where=self.name,
                got=f"T={x.shape[1]}, F={x.shape[2]}",
                wanted=f"T={self.lookback}, F={features or 'any'}",
                next_step="build the windows with the model's own lookback and features",
            )
        return x

    def _column(self, x, column):
        return x.x_NF.numpy()[x.rows, column]

    def _arrays(self, x):
        return x.x_NF.numpy(), x.rows

    def _build(self) -> None:
        """Build an untrained network from the seed; with a clock offset its initial logits are 0."""
        spec = self.settings
        with drawn_from(spec.seed, self.name):
            self.network = self.kind(self.n_features, spec.lookback, len(CLASSES), self.network_spec)
        if spec.offset_column >= 0:
            zero_output_head(self.network, len(CLASSES))

    def _learn(self, spec, train, valid, identity, callbacks, checkpoints):
        device = pick_device(spec)
        feed, validation = _batches(device, train), None
        if valid is not None:
            held = _batches(device, valid)
            validation = Validation(
                lambda: evaluate_mean_loss(self.network, held, _loss, device, spec.eval_batch),
                from_start=self.offset is not None,
            )
        while True:
            self._build()
            try:
                return run_training_loop(
                    self.network, len(feed), feed, _loss, spec, device, identity=identity, validation=validation,
                    callbacks=callbacks, checkpoints=checkpoints,
                )  # fmt: skip
            except OutOfMemoryError as error:
                if not error.divisible:
                    raise
                _log.warning("%s, %s: it starts again from its last checkpoint with half", error.what, error.where)
            spec = replace(spec, accumulate=2 * spec.accumulate)

    def _scores(self, x):
        network, device = self._fitted(self.network), pick_prediction_device(self.settings)
        with deterministic_device(device):
            feed = BatchLoader(device, [x])
            return evaluate_network_outputs(network, feed, device, self.settings.eval_batch).double().numpy()

    def _parts(self):
        return self._stored({} if self.network is None else self.network.state_dict())

    def _parts_of_checkpoint(self, saved):
        best = saved["memory"]["best_weights"] if saved["done"] else None
        return self._stored(saved["network"] if best is None else best)

    def _stored(self, weights: Mapping[str, Tensor]) -> dict:
        copied = {name: value.detach().cpu().clone() for name, value in weights.items()}
        return {"torch": str(torch.__version__), "weights": copied}

    def _load_parts(self, state):
        self.network = None
        if state["weights"]:
            self._build()
            self.network.load_state_dict(dict(state["weights"]))
            self.network.eval()


def _batches(device: Device, rows: TrainingRows) -> BatchLoader:
    """Return the loader of batches: windows, scores of the offset if any, classes, weights."""
    scores = [] if rows.offset is None else [rows.offset.astype(np.float32)]
    return BatchLoader(device, [rows.x, *scores, rows.target, rows.weight.astype(np.float32)])


def _loss(network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
    """Return (sum of w * loss, sum of w) of a batch of `_batches`."""
    x_BTF, *scores, target_B, weight_B = batch
    logits_BC = network(x_BTF)
    if scores:
        logits_BC = logits_BC.float() + scores[0]
    return weighted_cross_entropy(logits_BC, target_B, weight_B)


# ---- export for other programs: tensors alone, as of `torch.save`, and the Python that builds the module -------------


class NetworkWithClockOffset(nn.Module):
    """A network and the `SessionClockOffset` added to its logits, as one module for export.

    column, horizon : those of the offset and its clock. Its tables are buffers, so that a state dict holds all.
    """

    def __init__(self, network: nn.Module, column: int, horizon: int, offset: SessionClockOffset | None = None):
        super().__init__()
        self.network, self.column, self.horizon, self.ending = network, column, horizon, session_end_cells(horizon)
        bounds_3, shares_C3 = torch.zeros(3).double(), torch.zeros(PROGRESS_BINS + self.ending, 3).double()
        if offset is not None:
            bounds_3 = torch.tensor([offset.low, offset.high, offset.step], dtype=torch.float64)
            shares_C3 = torch.from_numpy(offset.clock.shares_C3).log()
        self.register_buffer("low_high_step_3", bounds_3)
        self.register_buffer("log_shares_C3", shares_C3)

    def forward(self, x_BTF: Tensor) -> Tensor:
        logits_BC = self.network(x_BTF)
        return logits_BC + self.log_shares_C3[self._cells(x_BTF[:, -1, self.column].double())].to(logits_BC.dtype)

    def _cells(self, value_B: Tensor) -> Tensor:
        """int64 (B,), as of `SessionClockOffset`."""
        low, high, step = self.low_high_step_3.unbind()
        value_B = torch.minimum(torch.maximum(torch.where(value_B.isnan(), low, value_B), low), high)
        span, one = high - low, torch.ones_like(low)
        share_B = (value_B - low) / torch.where(span > 0, span, one)
        progress_B = (share_B * PROGRESS_BINS).long().clamp(max=PROGRESS_BINS - 1)
        left_B = ((high - value_B) / torch.where(step > 0, step, one)).round().clamp(max=self.horizon).long()
        ending_B = PROGRESS_BINS + left_B * self.ending // max(self.horizon, 1)
        return torch.where((step > 0) & (left_B < self.horizon), ending_B, progress_B)


def export_state_dict_bytes(model: NeuralClassifier) -> bytes:
    """Return the state dict of a fitted model, tensors on the CPU, as bytes."""
    buffer, network, offset = BytesIO(), model.network, model.offset
    if offset is not None:
        network = NetworkWithClockOffset(network, offset.column, offset.clock.horizon, offset)
    torch.save({name: value.detach().cpu().clone() for name, value in network.state_dict().items()}, buffer)
    return buffer.getvalue()


def state_dict_module_source(model: NeuralClassifier) -> str:
    """Return Python that builds the `nn.Module` of the state dict; C = 3 logits of short, neutral, long."""
    kind, spec = model.kind, model.network_spec
    settings = ", ".join(
        f"{name}={value!r}" for name, value in asdict(spec).items() if value != getattr(kind.Spec(), name)
    )
    made, imports = kind.__name__, [f"from {kind.__module__} import {kind.__name__}"]
    made = f"{made}({model.n_features}, {model.lookback}, 3, {kind.__name__}.Spec({settings}))"
    if model.offset is not None:
        imports.append("from ml_factory.training.estimator import NetworkWithClockOffset")
        made = f"NetworkWithClockOffset({made}, {model.offset.column}, {model.offset.clock.horizon})"
    return "; ".join([*imports, f"module = {made}"])
