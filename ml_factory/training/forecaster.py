"""A network that forecasts the next steps of a series, and the loop, as one estimator.

B windows, T = lookback steps back, S steps ahead, F features, C channels forecast, Q quantiles, N rows of the series.
"""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from ml_factory.datasets.windows import Windows
from ml_factory.errors import FactoryError
from ml_factory.models.contract import FitResult, data_signature
from ml_factory.models.heads import Forecast
from ml_factory.training.device import pick, pinned
from ml_factory.training.feed import Feed
from ml_factory.training.judging import mean_loss, outputs
from ml_factory.training.loop import fit
from ml_factory.training.losses import weighted_mse, weighted_pinball
from ml_factory.training.neural import fresh, split_settings


class NeuralForecaster:
    """network : a class of `models` with a `Spec`. forecast : steps, channels and quantiles.

    settings : fields of that Spec and of TrainSpec, by name. Learns the mean (squared error), or the quantiles
    (pinball loss). A series is float32 (N, F), finite; a window is named by its last row, known then, and its target is
    the S rows after it.
    """

    def __init__(self, name: str, network: type[nn.Module], forecast: Forecast, *, lookback: int, **settings: Any):
        self.name, self.kind, self.forecast, self.lookback = name, network, forecast, lookback
        self.settings, self.network_spec = split_settings(name, network, lookback, settings)
        self.network: nn.Module | None = None

    def fit(
        self, x_NF: np.ndarray, rows: np.ndarray, *, validation: np.ndarray, callbacks=(), checkpoints=None
    ) -> FitResult:
        """Learn from the windows that end at `rows`; the epoch is chosen on those that end at `validation`."""
        device, spec, features = pick(self.settings), self.settings, x_NF.shape[1]
        self.network = fresh(self.name, self.kind, features, self.lookback, self.forecast, self.network_spec, spec.seed)
        feed, held = (Feed(device, self._parts(x_NF, part)) for part in (rows, validation))
        about = {**spec.identity(), **asdict(self.network_spec), **asdict(self.forecast), "lookback": self.lookback}
        return fit(
            self.network,
            len(feed),
            feed,
            self._loss,
            spec,
            device,
            identity={"model": self.name, "settings": about, "data": data_signature(features, x_NF, rows, validation)},
            validate=lambda: mean_loss(self.network, held, self._loss, device, spec.eval_batch),
            callbacks=callbacks,
            checkpoints=checkpoints,
        )

    def predict(self, x_NF: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """float32 y_BSC (y_BSCQ with quantiles) after the windows that end at `rows`."""
        if self.network is None:
            raise FactoryError("The model is not fitted", where=self.name, next_step="call fit first")
        device = pick(self.settings)
        with pinned(device):
            feed = Feed(device, [Windows(x_NF, rows, self.lookback)])
            return outputs(self.network, feed, device, self.settings.eval_batch).numpy()

    def _parts(self, x_NF: np.ndarray, rows: np.ndarray) -> tuple[Windows, Windows, np.ndarray]:
        """What a window reads, what follows it, and its weight."""
        steps = self.forecast.steps
        ones = np.ones(len(rows), dtype=np.float32)
        return Windows(x_NF, rows, self.lookback), Windows(x_NF, np.asarray(rows) + steps, steps), ones

    def _loss(self, network: nn.Module, batch: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        x_BTF, after_BSF, weight_B = batch
        y, target_BSC = network(x_BTF), after_BSF[:, :, : self.forecast.count(after_BSF.shape[2])]
        if self.forecast.quantiles:
            return weighted_pinball(y, target_BSC, weight_B, self.forecast.quantiles)
        return weighted_mse(y, target_BSC, weight_B)
