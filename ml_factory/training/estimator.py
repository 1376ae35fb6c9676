"""A network, windows and the loop as one estimator. B batch, T time steps, F features, C = 3 classes."""

from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from torch import nn

from ml_factory.datasets.windows import Windows
from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.models.contract import (
    CLASSES,
    Estimator,
    FitResult,
    apply_limits,
    check_rows,
    data_signature,
)
from ml_factory.seeding import derive_seed
from ml_factory.training.device import Device, pick, pinned
from ml_factory.training.loop import fit
from ml_factory.training.losses import weighted_cross_entropy
from ml_factory.training.spec import TrainSpec


class NeuralClassifier(Estimator):
    """Any network of `models` behind the common contract.

    network : a module class with a `Spec`, built as network(features, lookback, classes, spec).
    settings : fields of that Spec and of TrainSpec, by name, and lookback (T of its windows).
    x : `Windows`, or a float array (N, T, F). Not a number is not allowed: scale and fill before.
    """

    def __init__(self, name: str, network: type[nn.Module], *, lookback: int = 32, **settings: Any):
        self.name, self.kind, self.lookback = name, network, lookback
        mine, theirs = ({item.name for item in fields(spec)} for spec in (TrainSpec, network.Spec))
        for unknown in set(settings) - mine - theirs:
            known = mine | theirs | {"lookback"}
            raise SettingsError(
                "Unknown setting", where=name, got=repr(unknown), next_step=did_you_mean(unknown, known)
            )
        if isinstance(lookback, bool) or not isinstance(lookback, int) or lookback < 1:
            raise SettingsError("Cannot build windows", where="lookback", got=repr(lookback), wanted="an integer >= 1")
        self.settings = TrainSpec(**{key: value for key, value in settings.items() if key in mine})
        self.network_spec = network.Spec(**{key: value for key, value in settings.items() if key in theirs})
        self.features = 0
        self.network: nn.Module | None = None

    def fit(
        self, x, y, sample_weight=None, *, validation=None, callbacks=(), checkpoints=None, limits=None
    ) -> FitResult:
        spec, limited = apply_limits(self.settings, limits)
        device, self.features = pick(spec), 0
        windows = self._windows(x)
        target, weight = check_rows(len(windows), y, sample_weight, where="training")
        arrays, validate = [*_bits(windows), target, weight], None
        self._build(windows.shape[2])
        if validation is not None:
            x_val, y_val, w_val = (*validation, None)[:3]
            x_val = self._windows(x_val)
            target_val, weight_val = check_rows(len(x_val), y_val, w_val, where="validation")
            arrays += [*_bits(x_val), target_val, weight_val]
            validate = self._validator(device.place(x_val), target_val, weight_val, device, spec.eval_batch)
        result = fit(
            self.network,
            len(windows),
            _batches(device.place(windows), target, weight, device),
            _loss,
            spec,
            device,
            identity={
                "model": self.name,
                "settings": {**_bit_settings(spec), **asdict(self.network_spec), "lookback": self.lookback},
                "data": data_signature(windows.shape[2], *arrays),
            },
            validate=validate,
            callbacks=callbacks,
            checkpoints=checkpoints,
        )
        result.limited = limited
        return result

    def predict_proba(self, x) -> np.ndarray:
        if self.network is None:
            raise FactoryError("The model is not fitted", where=self.name, next_step="call fit or load first")
        windows = self._windows(x)
        device = pick(self.settings)
        with pinned(device):
            logits_NC = self._logits(device.place(windows), device, self.settings.eval_batch)
            return torch.softmax(logits_NC.double(), dim=1).cpu().numpy()

    def get_state(self) -> dict:
        weights = {} if self.network is None else self.network.state_dict()
        return {
            "model": self.name,
            "settings": {"lookback": self.lookback, **asdict(self.settings), **asdict(self.network_spec)},
            "n_features": self.features,
            "torch": str(torch.__version__),
            "weights": {name: value.detach().cpu().clone() for name, value in weights.items()},
        }

    def load_state(self, state):
        state = self._own(state)
        self.__init__(self.name, self.kind, **state["settings"])
        if state["weights"]:
            self._build(int(state["n_features"]))
            self.network.load_state_dict(dict(state["weights"]))
            self.network.eval()
        return self

    def _build(self, features: int) -> None:
        """A fresh network whose weights depend on the seed alone."""
        self.features = features
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.settings.seed, self.name, "init"))
            self.network = self.kind(features, self.lookback, len(CLASSES), self.network_spec)

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

    @torch.no_grad()
    def _logits(self, windows: Windows, device: Device, size: int) -> torch.Tensor:
        """logits_NC on the device, in batches of one shape: the last one is filled up and the filling cut off."""
        network = device.place(self.network).eval()
        size = max(min(size, len(windows)), 1)
        parts = []
        for start in range(0, len(windows), size):
            positions = np.minimum(np.arange(start, start + size), len(windows) - 1)
            parts.append(network(windows.gather(positions))[: len(windows) - start])
        return torch.cat(parts) if parts else torch.empty(0, len(CLASSES))

    def _validator(self, windows: Windows, target: np.ndarray, weight: np.ndarray, device: Device, size: int):
        target_N, weight_N = (device.place(torch.from_numpy(array)) for array in (target, weight))

        def validate() -> float:
            total, weights = weighted_cross_entropy(self._logits(windows, device, size).double(), target_N, weight_N)
            return float(total / weights)

        return validate


def _bits(windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """What a checkpoint's data must agree in."""
    return windows.x_NF.cpu().numpy(), windows.rows


def _batches(windows: Windows, target: np.ndarray, weight: np.ndarray, device: Device):
    """positions -> (x_BTF, target_B, weight_B) on the device."""
    target_N = device.place(torch.from_numpy(target))
    weight_N = device.place(torch.from_numpy(weight.astype(np.float32)))

    def batch(positions: np.ndarray) -> tuple:
        index_B = device.place(torch.from_numpy(positions))
        return windows.gather(index_B), target_N.index_select(0, index_B), weight_N.index_select(0, index_B)

    return batch


def _loss(network: nn.Module, batch: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    x_BTF, target_B, weight_B = batch
    return weighted_cross_entropy(network(x_BTF), target_B, weight_B)


def _bit_settings(spec: TrainSpec) -> dict:
    """Settings that make it another run; device and threads only make it inexact, saving times not even that."""
    return {key: value for key, value in asdict(spec).items() if key not in ("device", "threads", "save_seconds")}
