"""Preprocessing of a live feed: rows pushed singly or in chunks give the rows of the batch, bit for bit."""

from collections.abc import Mapping

import numpy as np

from ml_factory.datasets.fitted_transforms import FractionalDifferenceTransform, TwoStateHmmTransform
from ml_factory.datasets.preprocessing import FittedStep, Preprocessor, apply_preprocessing_step


class PreprocessingStream:
    """Fitted steps applied to rows as they come; two kinds of step remember closes of earlier rows."""

    def __init__(self, fitted: FittedStep):
        self._steps = fitted.steps if isinstance(fitted, Preprocessor) else (fitted,)
        self._closes = np.empty(0)
        self._priors = {
            place: step.initial_prior()
            for place, step in enumerate(self._steps)
            if isinstance(step, TwoStateHmmTransform)
        }
        windows = [step.window for step in self._steps if isinstance(step, FractionalDifferenceTransform)]
        self._kept = max([0, *(window - 1 for window in windows), *(1 for _ in self._priors)])

    def push(self, x_NF: np.ndarray, close: np.ndarray) -> np.ndarray:
        """Return the next rows as the model reads them, float32 (N, K).

        x_NF : float32, unscaled features of the next rows.
        close : float64 (N,).
        """
        if not len(x_NF):
            close = close[:0]
        closes = np.concatenate([self._closes, close])
        for place, step in enumerate(self._steps):
            if isinstance(step, FractionalDifferenceTransform):
                column = step.difference_closes(closes)[len(self._closes) :]
                x_NF = np.column_stack([x_NF, column.astype(np.float32)])
            elif isinstance(step, TwoStateHmmTransform):
                returns = np.diff(np.log(closes[max(len(self._closes) - 1, 0) :]), prepend=np.nan)
                returns = returns[len(returns) - len(close) :]
                column = step.filter_returns(returns, self._priors[place])
                x_NF = np.column_stack([x_NF, column.astype(np.float32)])
            else:
                x_NF = apply_preprocessing_step(step, x_NF)
        self._closes = closes[len(closes) - min(self._kept, len(closes)) :]
        return np.ascontiguousarray(x_NF, np.float32)

    def get_state(self) -> dict:
        """Return plain arrays, from which an equal stream continues to the bit."""
        return {
            "closes": self._closes.copy(),
            "priors": {str(place): prior.copy() for place, prior in self._priors.items()},
        }

    def load_state(self, state: Mapping) -> None:
        """Restore a state of `get_state`."""
        self._closes = np.array(state["closes"], dtype=np.float64)
        self._priors = {place: np.array(state["priors"][str(place)], dtype=np.float64) for place in self._priors}
