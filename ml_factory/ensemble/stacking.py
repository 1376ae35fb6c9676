"""Stacking: a logarithmic pool whose weights are fitted on out-of-fold predictions.

Stacking after Wolpert (1992), on probabilities with weights of at least zero after Breiman (1996) and Ting and Witten
(1999, §4). The form is the logarithmic opinion pool (Genest and Zidek 1986, §3.2) with a bias per class,

    p ∝ π · exp(b + Σ_m a_m · (log p_m − log π)),        π the class prior, a_m ≥ 0,

a multinomial logistic regression on log-probabilities in which the three classes share each model's weight. Three
models take 6 numbers instead of the 30 of the free regression: where the edge is some thousandths of a nat and labels
overlap, 30 numbers overfit. All a_m = 0 is the prior, one a_m = 1 that model unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.evaluation.calibration import floored_log_probabilities
from ml_factory.evaluation.metrics import check_metric_rows
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import softmax
from ml_factory.models.session_clock import class_shares

optimize, threadpoolctl = LazyModule("scipy.optimize"), LazyModule("threadpoolctl")  # only a fit reads them


@dataclass(frozen=True)
class Stack:
    """Fitted weights of a pool; numbers and names only.

    names : the models, in order.
    pool : weight of each.
    bias : of short, neutral, long.
    prior : π.
    note : why the weights are equal, where they could not be fitted; otherwise "".
    rows : number of out-of-fold rows of the fit.
    """

    names: tuple[str, ...]
    pool: tuple[float, ...]
    bias: tuple[float, float, float] = (0.0, 0.0, 0.0)
    prior: tuple[float, float, float] = (1 / 3, 1 / 3, 1 / 3)
    note: str = ""
    rows: int = 0

    @classmethod
    def fit(
        cls,
        oof: Mapping[str, np.ndarray],
        y,
        w=None,
        *,
        ridge: float = 1.0,
        horizon: int = 1,
        least_rows: int = 100,
    ) -> "Stack":
        """Fit the weights that minimise the weighted log loss of the pooled out-of-fold predictions.

        Parameters
        ----------
        oof : model → (N, 3) out-of-fold probabilities; rows where one of them is NaN are left out.
        ridge : pull towards equal weights and no bias, in rows' worth of evidence.
        horizon : rows over which one label reaches. Overlapping rows are not independent: the evidence against the
            ridge counts as (Σw)²/Σw²/horizon rows.
        least_rows : with fewer such rows the weights stay equal, and `note` states it.
        """
        if not oof:
            raise SettingsError("Nothing to stack", got="no predictions", wanted="at least one model's")
        names, M = tuple(oof), len(oof)
        p_MN3 = np.stack([np.asarray(oof[name], dtype=np.float64) for name in names])
        y = np.asarray(y)
        w = np.ones(len(y)) if w is None else np.asarray(w, dtype=np.float64)
        keep = np.isfinite(p_MN3).all(axis=(0, 2)) & (w > 0)
        p_MN3, y, w = p_MN3[:, keep], y[keep], w[keep]
        independent_rows = w.sum() ** 2 / (w**2).sum() / max(1, horizon) if len(w) else 0.0
        equal = (1 / M,) * M
        if independent_rows < least_rows:
            note = f"equal weights: {independent_rows:.0f} separate rows with all predictions, {least_rows} are needed"
            shares = {"prior": tuple(class_shares(y, w).tolist())} if len(y) else {}
            return cls(names, equal, note=note, rows=len(w), **shares)
        for name, p_N3 in zip(names, p_MN3, strict=True):
            try:
                check_metric_rows(y, p_N3)
            except ValueError as error:
                raise SettingsError(f"The predictions of {name} cannot be stacked: {error}") from error
        prior = class_shares(y, w)
        pool, bias = _least_log_loss(
            floored_log_probabilities(p_MN3) - np.log(prior), y, w / w.sum() * independent_rows, prior, ridge
        )
        return cls(names, tuple(pool.tolist()), tuple(bias.tolist()), tuple(prior.tolist()), "", len(w))

    def predict_proba(self, predictions: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return pooled probabilities, float64 (N, 3); NaN in rows where a model has none.

        Raises
        ------
        SettingsError naming the model whose predictions are missing.
        """
        for name in self.names:
            if name not in predictions:
                raise SettingsError(
                    "The stack needs every model it was fitted with", got=", ".join(predictions), wanted=name,
                    next_step=did_you_mean(name, predictions or self.names),
                )  # fmt: skip
        evidence = [floored_log_probabilities(predictions[name]) - np.log(self.prior) for name in self.names]
        pooled = sum(a * z_N3 for a, z_N3 in zip(self.pool, evidence, strict=True))
        return softmax(np.log(self.prior) + np.asarray(self.bias) + pooled)

    def weights(self) -> pd.DataFrame:
        """Return one row per model: its weight, and its share of all weight."""
        pool = np.asarray(self.pool)
        share = pool / pool.sum() if pool.sum() > 0 else pool
        return pd.DataFrame({"weight": pool, "share": share}, index=pd.Index(self.names, name="model"))

    def to_dict(self) -> dict:
        """Return names and numbers as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, facts: Mapping) -> "Stack":
        numbers = {key: tuple(float(v) for v in facts[key]) for key in ("pool", "bias", "prior")}
        return cls(tuple(facts["names"]), **numbers, note=str(facts["note"]), rows=int(facts["rows"]))


def equal_weight_probabilities(predictions: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the plain mean of the models' probabilities, (N, 3): the reference of a stack."""
    return np.mean([np.asarray(p_N3, dtype=np.float64) for p_N3 in predictions.values()], axis=0)


def _least_log_loss(z_MN3, y, w, prior, ridge) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (M,) and biases (3,) of least loss. Convex, from a fixed start: the same on every run.

    Loss: Σ w · −log p of the outcome, plus ridge/2 · (Σ (a − 1/M)² + Σ b²); w sums to the number of independent rows.
    """
    M, code = len(z_MN3), np.asarray(y, dtype=np.int64) + 1
    hit_N3 = np.eye(3)[code]

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        a, b = theta[:M], theta[M:]
        score_N3 = np.log(prior) + b + np.tensordot(a, z_MN3, 1)
        p_N3 = softmax(score_N3)
        top = score_N3.max(axis=1)
        log_total = top + np.log(np.exp(score_N3 - top[:, None]).sum(axis=1))
        value = w @ (log_total - score_N3[np.arange(len(code)), code])
        miss_N3 = w[:, None] * (p_N3 - hit_N3)
        slope = np.concatenate([np.tensordot(z_MN3, miss_N3, 2), miss_N3.sum(axis=0)])
        away = np.concatenate([a - 1 / M, b])
        return value + ridge / 2 * away @ away, slope + ridge * away

    start = np.concatenate([np.full(M, 1 / M), np.zeros(3)])
    bounds = [(0, None)] * M + [(None, None)] * 3
    with threadpoolctl.threadpool_limits(1):  # as where a calibration is fitted
        found = optimize.minimize(
            loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 500, "ftol": 1e-14}
        )
    return found.x[:M], found.x[M:]
