"""Multinomial logistic regression by L-BFGS: the linear baseline model.

N rows, F features, K classes; the last row of w_PK (P = F + 1) is the bias. A round is one step of SciPy's L-BFGS-B.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ml_factory.argument_checks import check_settings
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import mean_log_loss, processor_name, softmax
from ml_factory.models.rows import TrainingRows
from ml_factory.models.tabular import TabularModel, TabularSpec, early_stopping_round

optimize, preprocessing = LazyModule("scipy.optimize"), LazyModule("sklearn.preprocessing")
threadpoolctl = LazyModule("threadpoolctl")  # only a fit reads these three

K = 3


@dataclass(frozen=True)
class _LogisticRegressionSpec(TabularSpec):
    """Settings of the linear model.

    l2 : penalty l2 / 2 · ‖w‖² added to the summed weighted loss of rows whose weights have mean 1; the bias is free.
        The training loss counts it.
    clip : scaled features are clipped at so many standard deviations.
    """

    SEARCH: ClassVar = {"l2": (0.01, 10_000.0, "log"), "clip": (2.0, 16.0, "log")}
    rounds: int = 200
    clip: float = 8.0

    def __post_init__(self):
        super().__post_init__()
        check_settings(self, clip="[0, inf)")


class LogisticRegression(TabularModel):
    """Linear model, scaled by the training rows' own mean and deviation; a missing value counts as the mean."""

    Spec = _LogisticRegressionSpec
    name = "linear"
    library = "numpy"

    def _environment(self, spec):
        return super()._environment(spec) | {"processor": processor_name()}

    def _trainer(self, spec, train, valid):
        return _Trainer(spec, [train, *([] if valid is None else [valid])])

    def _read(self, fitted):
        return {name: np.asarray(fitted[name], dtype=np.float64) for name in ("mean", "deviation", "weights")}

    def _margins(self, x):
        fitted = self._predictor
        return _scaled(x, fitted["mean"], fitted["deviation"], self.settings.clip) @ fitted["weights"]

    def _gain(self):
        """Mean size of a feature's weights against the classes' mean, a deviation of the feature each."""
        w_FK = self._predictor["weights"][:-1]
        return np.abs(w_FK - w_FK.mean(axis=1, keepdims=True)).mean(axis=1)


def _scaled(x_NF: np.ndarray, mean_F: np.ndarray, deviation_F: np.ndarray, clip: float) -> np.ndarray:
    """(N, P): scaled, clipped, missing at 0, and a last column of ones."""
    scaled_NF = np.clip(np.nan_to_num((x_NF - mean_F) / deviation_F, nan=0.0), -clip, clip)
    return np.concatenate([scaled_NF, np.ones((len(x_NF), 1))], axis=1)


class _Trainer:
    """L-BFGS from weights of 0. It takes seconds and draws nothing: all rounds are run at once, of which the blocks
    report their own, and a run that goes on starts again.

    path : weights after each round, from which the best are taken.
    """

    def __init__(self, spec: _LogisticRegressionSpec, parts: list[TrainingRows]):
        self.spec, self.parts, train = spec, parts, parts[0]
        # A column may have no value.
        with threadpoolctl.threadpool_limits(spec.thread_count), np.errstate(invalid="ignore"):
            scale = preprocessing.StandardScaler().fit(train.x[train.weight > 0])
            self.scale = {"mean": np.nan_to_num(scale.mean_), "deviation": np.nan_to_num(scale.scale_, nan=1.0)}
            self.x_NP = [_scaled(part.x, *self.scale.values(), spec.clip).astype(np.float32) for part in parts]
        self.penalty_P1 = np.full((self.x_NP[0].shape[1], 1), spec.l2 / max((train.weight > 0).sum(), 1))
        self.penalty_P1[-1] = 0
        self.path: list[np.ndarray] = []
        self.losses: list[list[float]] = [[], []]
        with threadpoolctl.threadpool_limits(spec.thread_count):
            self._run()

    def grow(self, first, until, seed):
        return [losses[first:until] for losses in self.losses[: len(self.parts)]] + [[]] * (2 - len(self.parts))

    def fitted(self, rounds):
        return {**self.scale, "weights": self.path[rounds - 1]}

    def restore(self, fitted):
        """All rounds were run again."""

    def _run(self) -> None:
        start = np.zeros(self.penalty_P1.size * K)
        # Steps until no better one is found, or patience ends.
        options = {"maxiter": self.spec.rounds, "maxfun": 10**9, "ftol": 0.0, "gtol": 1e-9}
        optimize.minimize(self._objective, start, jac=True, method="L-BFGS-B", callback=self._record, options=options)
        if not self.path:  # nothing to learn: no step from the start is better
            self._record(start)
        for values in (self.path, *filter(None, self.losses)):  # the last step stands for all later rounds
            values += values[-1:] * (self.spec.rounds - len(values))

    def _objective(self, w: np.ndarray) -> tuple[float, np.ndarray]:
        """Mean loss of the training rows with the penalty, and its gradient."""
        w_PK, train = w.reshape(-1, K), self.parts[0]
        z_NK, weight_N = self._scores(0, w_PK), train.weight / train.weight.sum()
        residual_NK = softmax(z_NK)
        residual_NK[np.arange(len(z_NK)), train.target] -= 1
        slope_PK = self.x_NP[0].T @ (residual_NK * weight_N[:, None]).astype(np.float32)
        loss = mean_log_loss(z_NK, train.target, train.weight) + self._penalty(w_PK)
        return loss, (slope_PK + self.penalty_P1 * w_PK).ravel()

    def _record(self, w: np.ndarray) -> None:
        self.path.append(w.reshape(-1, K).copy())
        for number, part in enumerate(self.parts):
            z_NK = self._scores(number, self.path[-1])
            penalty = 0.0 if number else self._penalty(self.path[-1])
            self.losses[number].append(mean_log_loss(z_NK, part.target, part.weight) + penalty)
        if early_stopping_round(self.losses[1], self.spec.patience) is not None:
            raise StopIteration

    def _penalty(self, w_PK: np.ndarray) -> float:
        return 0.5 * float((self.penalty_P1 * w_PK**2).sum())

    def _scores(self, part: int, w_PK: np.ndarray) -> np.ndarray:
        """Return float64 scores (N, K) of a part at these weights."""
        z_NK = (self.x_NP[part] @ w_PK.astype(np.float32)).astype(np.float64)
        offset = self.parts[part].offset
        return z_NK if offset is None else z_NK + offset
