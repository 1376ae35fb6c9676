"""Multinomial logistic regression by L-BFGS: the linear baseline model.

N rows, F features, K classes. A round is one step of L-BFGS (Nocedal 1980; Nocedal and Wright 2006, algorithm 7.4); the
last row of w_PK (P = F + 1) is the bias. All state is arrays, so a checkpoint holds the fit as numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from ml_factory.models.base import fit_environment, softmax
from ml_factory.models.tabular import TabularBlockTrainer, TabularModel
from ml_factory.models.tabular_data import TabularRows
from ml_factory.models.tabular_spec import TabularSpec

K = 3
_MEMORY = 10  # pairs of steps and changes of the gradient
_SUFFICIENT, _HALVINGS = 1e-4, 20  # Armijo's condition, and how often a step is halved before none is taken


@dataclass(frozen=True)
class _LogisticRegressionSpec(TabularSpec):
    """Settings of the linear model.

    l2 : penalty l2 / 2 · ‖w‖² added to the summed weighted loss of rows whose weights have mean 1; the bias is free.
    clip : scaled features are clipped at so many standard deviations.
    """

    rounds: int = 200
    clip: float = 8.0

    def __post_init__(self):
        super().__post_init__()
        self._number("clip")


class LogisticRegression(TabularModel):
    """Linear model, scaled by the training rows' own mean and deviation; a missing value counts as the mean."""

    Spec = _LogisticRegressionSpec
    name = "linear"
    library = "numpy"

    def _environment(self, spec):
        return fit_environment(**super()._environment(spec))

    def _bin(self, spec, train, valid):
        with threadpool_limits(spec.thread_count):
            scale = LogisticRegressionScaler.fit_rows(train.x[train.weight > 0])
        return scale

    def _open(self, spec, train, valid, bins):
        return _Trainer(spec, bins, [train, *([] if valid is None else [valid])])

    def _read(self, fitted):
        arrays = {name: np.asarray(fitted[name], dtype=np.float64) for name in ("mean", "deviation", "weights")}
        shapes = {"mean": (self.n_features,), "deviation": (self.n_features,), "weights": (self.n_features + 1, 3)}
        if {name: array.shape for name, array in arrays.items()} != shapes:
            raise ValueError(f"weights of the shape {arrays['weights'].shape} for {self.n_features} features")
        return arrays

    def _scaled(self, x):
        return LogisticRegressionScaler(self._predictor["mean"], self._predictor["deviation"]).apply(
            x, self.settings.clip, np.float64
        )

    def _scores(self, x):
        return self._scaled(x) @ self._predictor["weights"]

    def _gain(self):
        """Mean size of a feature's weights against the classes' mean, a deviation of the feature each."""
        w_FK = self._predictor["weights"][:-1]
        return np.abs(w_FK - w_FK.mean(axis=1, keepdims=True)).mean(axis=1)


@dataclass(frozen=True)
class LogisticRegressionScaler:
    """Mean and deviation of each feature, missing values left out; 0 and 1 where there is nothing to scale."""

    mean_F: np.ndarray
    deviation_F: np.ndarray

    @classmethod
    def fit_rows(cls, x_NF: np.ndarray) -> "LogisticRegressionScaler":
        known = ~np.isnan(x_NF)
        count_F = np.maximum(known.sum(axis=0), 1)
        mean_F = np.where(known, x_NF, 0).sum(axis=0, dtype=np.float64) / count_F
        square_F = np.square(np.where(known, x_NF - mean_F, 0)).sum(axis=0) / count_F
        deviation_F = np.sqrt(square_F)
        return cls(mean_F, np.where(deviation_F > 0, deviation_F, 1.0))

    def apply(self, x_NF: np.ndarray, clip: float, dtype: type) -> np.ndarray:
        """(N, P): scaled, clipped, missing at 0, and a last column of ones."""
        scaled_NF = np.clip(np.nan_to_num((x_NF - self.mean_F) / self.deviation_F, nan=0.0), -clip, clip)
        return np.concatenate([scaled_NF, np.ones((len(x_NF), 1))], axis=1).astype(dtype)


class _Part:
    """One part's scaled rows, and their loss at given scores."""

    def __init__(self, rows: TabularRows, scale: LogisticRegressionScaler, clip: float):
        self.x_NP = scale.apply(rows.x, clip, np.float32)
        self.target, self.weight = rows.target, rows.weight / rows.weight.sum()
        self.offset_NK = np.zeros((len(rows.x), K)) if rows.offset is None else rows.offset
        self.z_NK = self.offset_NK

    def move_to(self, w_PK: np.ndarray) -> None:
        self.z_NK = self.offset_NK + self.toward(w_PK)

    def toward(self, d_PK: np.ndarray) -> np.ndarray:
        """Scores (N, K) of these weights, float64."""
        return (self.x_NP @ d_PK.astype(np.float32)).astype(np.float64)

    def loss(self, z_NK: np.ndarray) -> float:
        """Weighted mean log loss."""
        top_N = z_NK.max(axis=1)
        log_N = np.log(np.exp(z_NK - top_N[:, None]).sum(axis=1)) + top_N
        return float(self.weight @ (log_N - z_NK[np.arange(len(z_NK)), self.target]))

    def gradient(self) -> np.ndarray:
        residual_NK = softmax(self.z_NK)
        residual_NK[np.arange(len(residual_NK)), self.target] -= 1
        return (self.x_NP.T @ (residual_NK * self.weight[:, None]).astype(np.float32)).astype(np.float64)


class _Trainer(TabularBlockTrainer):
    """L-BFGS in blocks.

    path : weights after each round, from which the best are taken. Scores are computed again with each block.
    """

    def __init__(self, spec: _LogisticRegressionSpec, scale: LogisticRegressionScaler, parts: list[TabularRows]):
        self.scale, self.threads = scale, spec.thread_count
        self.parts = [_Part(rows, scale, spec.clip) for rows in parts]
        self.penalty = np.full((len(scale.mean_F) + 1, 1), spec.l2 / max((parts[0].weight > 0).sum(), 1))
        self.penalty[-1] = 0
        self.path = [np.zeros((len(self.penalty), K))]
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []

    def grow(self, first, until, seed):
        losses: tuple[list, list] = ([], [])
        with threadpool_limits(self.threads):
            for part in self.parts:
                part.move_to(self.path[-1])
            gradient = self._gradient(self.path[-1])
            for _ in range(first, until):
                gradient = self._step(gradient)
                for part, values in zip(self.parts, losses, strict=False):
                    values.append(part.loss(part.z_NK))
        return losses

    def _gradient(self, w_PK: np.ndarray) -> np.ndarray:
        return self.parts[0].gradient() + self.penalty * w_PK

    def _objective(self, z_NK: np.ndarray, w_PK: np.ndarray) -> float:
        return self.parts[0].loss(z_NK) + 0.5 * float((self.penalty * w_PK**2).sum())

    def _step(self, gradient: np.ndarray) -> np.ndarray:
        """One step along L-BFGS's direction, halved until it is worth it; where none is, the weights stay."""
        w_PK, train = self.path[-1], self.parts[0]
        d_PK = -self._inverse_hessian_times(gradient)
        slope, now = float((gradient * d_PK).sum()), self._objective(train.z_NK, w_PK)
        along = [part.toward(d_PK) for part in self.parts]
        length = 1.0 if self.pairs else 1.0 / max(float(np.linalg.norm(gradient)), 1.0)
        for _ in range(_HALVINGS):
            if (
                self._objective(train.z_NK + length * along[0], w_PK + length * d_PK)
                <= now + _SUFFICIENT * length * slope
            ):
                break
            length /= 2
        else:
            length = 0.0
        self.path.append(w_PK + length * d_PK)
        for part, z_NK in zip(self.parts, along, strict=True):
            part.z_NK = part.z_NK + length * z_NK
        after = self._gradient(self.path[-1])
        self._remember(length * d_PK, after - gradient)
        return after

    def _remember(self, step: np.ndarray, change: np.ndarray) -> None:
        if float((step * change).sum()) > 1e-12:  # else the curvature seen is rounding
            self.pairs = [*self.pairs, (step, change)][-_MEMORY:]

    def _inverse_hessian_times(self, gradient: np.ndarray) -> np.ndarray:
        """The two-loop recursion."""
        q, shares = gradient, []
        for step, change in reversed(self.pairs):
            share = float((step * q).sum() / (step * change).sum())
            q = q - share * change
            shares.append(share)
        if self.pairs:
            step, change = self.pairs[-1]
            q = q * float((step * change).sum() / (change * change).sum())
        for (step, change), share in zip(self.pairs, reversed(shares), strict=True):
            q = q + step * (share - float((change * q).sum() / (step * change).sum()))
        return q

    def memory(self):
        empty = np.zeros((0, 2, *self.path[0].shape))
        return {"path": np.array(self.path), "pairs": np.array(self.pairs) if self.pairs else empty}

    def restore(self, part: Mapping, rounds):
        path, pairs = (np.array(part[name], dtype=np.float64) for name in ("path", "pairs"))
        shape = self.path[0].shape
        if path.shape != (rounds + 1, *shape) or pairs.shape[1:] != (2, *shape) or len(pairs) > _MEMORY:
            raise ValueError(f"weights of the shape {path.shape}, pairs of the shape {pairs.shape}")
        if not np.isfinite(path).all() or not np.isfinite(pairs).all():
            raise ValueError("weights that are not finite")
        self.path, self.pairs = list(path), [(pair[0], pair[1]) for pair in pairs]

    def fitted(self, rounds):
        return {"mean": self.scale.mean_F, "deviation": self.scale.deviation_F, "weights": self.path[rounds]}
