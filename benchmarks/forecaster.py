"""A network that forecasts the next steps of a series, and the loop, as one estimator.

B windows, T = lookback steps back, S steps ahead, F features, C channels forecast, Q quantiles, N rows of the series.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.datasets.windows import Windows
from ml_factory.errors import FactoryError
from ml_factory.models.base import ModelFitResult
from ml_factory.models.heads import ForecastTask
from ml_factory.models.tabular_data import training_data_checksum
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import deterministic_device, pick_device
from ml_factory.training.estimator_base import (
    NeuralEstimatorBase,
    init_network_from_seed,
    network_covariate_shapes,
    split_neural_settings,
)
from ml_factory.training.evaluate import evaluate_network_outputs


class NeuralForecaster(NeuralEstimatorBase):
    """network : a class of `models` with a `Spec`. forecast : steps, channels and quantiles.

    settings : fields of that Spec and of TrainSpec, by name. Learns the mean (squared error), or the quantiles
    (pinball loss). A series is float32 (N, F), finite; a window is named by its last row, known then, and its target is
    the S rows after it.
    """

    def __init__(self, name: str, network: type[nn.Module], forecast: ForecastTask, *, lookback: int, **settings: Any):
        self.name, self.kind, self.forecast, self.lookback = name, network, forecast, lookback
        self.settings, self.network_spec = split_neural_settings(name, network, lookback, settings)
        self.covariates = network_covariate_shapes(self.network_spec, forecast.steps)
        self.network: nn.Module | None = None

    def fit(
        self, x_NF: np.ndarray, rows: np.ndarray, *, validation: np.ndarray, known_NK: np.ndarray | None = None,
        static_V: np.ndarray | None = None, callbacks=(), checkpoints=None,
    ) -> ModelFitResult:  # fmt: skip
        """Learn from the windows that end at `rows`; the epoch is chosen on those that end at `validation`.

        known_NK : float32, known-future covariates of every row, and of S rows past the last window, for a network with
        the setting `known`.
        static_V : static covariates of the series, for one with `static`.
        """
        device, spec, features = pick_device(self.settings), self.settings, x_NF.shape[1]
        self.network = init_network_from_seed(
            self.name, self.kind, features, self.lookback, self.forecast, self.network_spec, spec.seed
        )
        covariates = self._covariates(known_NK, static_V)
        parts, held = (self._parts(x_NF, part, *covariates) for part in (rows, validation))
        about = {**spec.identity(), **asdict(self.network_spec), **asdict(self.forecast), "lookback": self.lookback}
        return self._learn(
            parts, held, spec, device, settings=about,
            data=training_data_checksum(features, x_NF, rows, validation, *covariates),
            callbacks=callbacks, checkpoints=checkpoints,
        )  # fmt: skip

    def predict(
        self, x_NF: np.ndarray, rows: np.ndarray, *, known_NK: np.ndarray | None = None,
        static_V: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """float32 y_BSC (y_BSCQ with quantiles) after the windows that end at `rows`; the others as of `fit`."""
        if self.network is None:
            raise FactoryError("The model is not fitted", where=self.name, next_step="call fit first")
        device = pick_device(self.settings)
        with deterministic_device(device):
            feed = BatchLoader(device, self._read(x_NF, rows, *self._covariates(known_NK, static_V)))
            return evaluate_network_outputs(self.network, feed, device, self.settings.eval_batch, self._forward).numpy()

    def _covariates(self, known_NK: np.ndarray | None, static_V: np.ndarray | None) -> list[np.ndarray]:
        """Return the covariates of a window in the order of `covariates`, as wide as the settings of the network."""
        given = {"known_BSK": known_NK, "static_BV": static_V}
        wanted = {name: shape[-1:] for name, shape in self.covariates.items()}
        next_step = "give known_NK and static_V what the settings name, and no more"
        return self._in_order({name: part for name, part in given.items() if part is not None}, wanted, next_step)

    def _read(self, x_NF: np.ndarray, rows: np.ndarray, *covariates: np.ndarray) -> list[Windows | np.ndarray]:
        """Return the inputs of the network for each window."""
        steps, ahead = self.forecast.steps, {"known_BSK": lambda part: Windows(part, np.asarray(rows) + steps, steps)}
        static = lambda part: np.broadcast_to(part, (len(rows), len(part))).copy()  # noqa: E731
        covariates = [ahead.get(name, static)(part) for name, part in zip(self.covariates, covariates, strict=True)]
        return [Windows(x_NF, rows, self.lookback), *covariates]

    def _parts(self, x_NF: np.ndarray, rows: np.ndarray, *covariates: np.ndarray) -> list[Windows | np.ndarray]:
        """Return the inputs of each window, the steps after it, and its weight."""
        steps = self.forecast.steps
        ones = np.ones(len(rows), dtype=np.float32)
        return [*self._read(x_NF, rows, *covariates), Windows(x_NF, np.asarray(rows) + steps, steps), ones]

    def _loss(self, network: nn.Module, batch: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        *inputs, after_BSF, weight_B = batch
        y, channels = self._forward(network, inputs), self.forecast.channel_count(after_BSF.shape[2])
        target_BSC = after_BSF[:, :, :channels]
        if self.forecast.quantiles:
            return weighted_pinball(y, target_BSC, weight_B, self.forecast.quantiles)
        return weighted_mse(y, target_BSC, weight_B)


def weighted_mse(y_BSC: Tensor, target_BSC: Tensor, weight_B: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of w * mean squared error of a row, sum of w); steps S and channels C of a row have equal weight."""
    loss_B = (y_BSC.float() - target_BSC).square().mean(dim=(1, 2))
    return (weight_B * loss_B).sum(), weight_B.sum()


def weighted_pinball(
    y_BSCQ: Tensor, target_BSC: Tensor, weight_B: Tensor, quantiles: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """(sum of w * mean quantile loss of a row, sum of w): max(q e, (q - 1) e) with e = target - forecast (Koenker and
    Bassett 1978), the mean over steps, channels and quantiles. Half the absolute error for the median alone.
    """
    level_Q = torch.tensor(tuple(quantiles), dtype=torch.float32).to(y_BSCQ.device)
    error_BSCQ = target_BSC.unsqueeze(-1) - y_BSCQ.float()
    loss_B = torch.maximum(level_Q * error_BSCQ, (level_Q - 1) * error_BSCQ).mean(dim=(1, 2, 3))
    return (weight_B * loss_B).sum(), weight_B.sum()
