"""Preprocessing steps between stored features and a model's input, fitted for one fold and saved as JSON.

steps = ({"step": "pca", "share": 0.95}, "robust")
fitted = fit_preprocessing_steps(steps, x_NF, train_rows)
x = fitted.transform(x_NF)
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numba import njit

from ml_factory.datasets.scaling import SCALERS, FittedStep, LinearScaler
from ml_factory.errors import FactoryError, SettingsError, did_you_mean

MOST_ROWS = 200_000  # of the training rows, to estimate a few hundred numbers


@dataclass(frozen=True)
class PcaTransform(FittedStep):
    """The leading principal components instead of the columns; missing values count as the mean.

    center, scale : float64[F]
    loadings : float64 (F, K), the largest of each component positive
    """

    center: np.ndarray
    scale: np.ndarray
    loadings: np.ndarray

    kind = "pca"

    @classmethod
    def fit(cls, x_NF: np.ndarray, rows: np.ndarray, share: float = 0.95) -> "PcaTransform":
        """Fit on these rows as many components as hold `share` of the variance of the standardised columns, at most
        1,000.
        """
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise SettingsError("Not a share", where="pca share", got=repr(share), wanted="above 0, at most 1")
        spread = np.linspace(0, len(rows) - 1, min(MOST_ROWS, len(rows))).astype(np.int64)
        x = x_NF[rows[spread]].astype(np.float64)
        x[~np.isfinite(x)] = np.nan
        present = ~np.isnan(x).all(axis=0)
        center, scale = np.zeros(x.shape[1]), np.ones(x.shape[1])
        center[present], scale[present] = np.nanmean(x[:, present], axis=0), np.nanstd(x[:, present], axis=0)
        scale[~(scale > 1e-12 * np.maximum(1.0, np.abs(center)))] = 1.0
        z = np.nan_to_num((x - center) / scale)
        values, vectors = np.linalg.eigh(z.T @ z / len(z))
        values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
        count = 1 + int(np.searchsorted(np.cumsum(values), share * values.sum()))
        loadings = vectors[:, : max(1, min(count, 1000, len(values)))]
        largest = loadings[np.abs(loadings).argmax(axis=0), np.arange(loadings.shape[1])]
        return cls(center, scale, np.ascontiguousarray(loadings * np.where(largest < 0, -1.0, 1.0)))

    def transform(self, x_NF: np.ndarray) -> np.ndarray:
        """Return float32 (N, K)."""
        return _project(np.ascontiguousarray(x_NF, np.float32), self.center, self.scale, self.loadings)


@njit(cache=True, nogil=True)
def _project(x_NF, center, scale, loadings):
    """Project row by row in one order of addition, so that a row's bits do not depend on other rows."""
    out = np.empty((len(x_NF), loadings.shape[1]), np.float32)
    total = np.empty(loadings.shape[1])
    for i in range(len(x_NF)):
        total[:] = 0.0
        for f in range(len(center)):
            z = (x_NF[i, f] - center[f]) / scale[f]
            if np.isfinite(z):
                for k in range(len(total)):
                    total[k] += z * loadings[f, k]
        out[i] = total
    return out


STEPS = {**SCALERS, PcaTransform.kind: PcaTransform}


@dataclass(frozen=True)
class Preprocessor(FittedStep):
    """Fitted steps, applied in order."""

    steps: tuple[FittedStep, ...]

    kind = "preprocessor"

    def transform(self, x_NF: np.ndarray) -> np.ndarray:
        """Return float32 (N, K)."""
        for step in self.steps:
            x_NF = step.transform(x_NF)
        return x_NF

    def to_dict(self) -> dict:
        return {"kind": self.kind, "steps": [step.to_dict() for step in self.steps]}


def check_preprocessing_steps(steps: Sequence[str | Mapping]) -> tuple[str | dict, ...]:
    """Return the steps as JSON can hold them; raise SettingsError for an unknown name or setting."""
    checked = []
    for step in steps:
        name, settings = _name_and_settings(step)
        if name not in STEPS:
            hint = did_you_mean(str(name), STEPS)
            raise SettingsError("There is no such step", where="preprocess", got=repr(name), next_step=hint)
        known = [word for word in inspect.signature(STEPS[name].fit).parameters if word not in ("x_NF", "rows")]
        for word in settings:
            if word not in known:
                hint = did_you_mean(str(word), known) or f"its settings: {', '.join(known)}"
                raise SettingsError(f"{name} has no such setting", where="preprocess", got=repr(word), next_step=hint)
        checked.append({"step": name, **settings} if settings else name)
    if not any(_name_and_settings(step)[0] in SCALERS for step in checked[-1:]):
        step = "end with 'robust', 'standard' or 'quantile'"
        raise SettingsError("The last step must scale", where="preprocess", got=checked, next_step=step)
    return tuple(checked)


def fit_preprocessing_steps(steps: Sequence[str | Mapping], x_NF: np.ndarray, rows: np.ndarray) -> FittedStep:
    """Fit each step on the training rows of the previous steps' output; a single step is returned directly.

    x_NF : float32, all rows
    rows : int64 positions of the training rows, increasing
    """
    fitted: list[FittedStep] = []
    for name, settings in map(_name_and_settings, steps):
        if fitted:
            x_NF = fitted[-1].transform(x_NF)
        fitted.append(STEPS[name].fit(x_NF, rows, **settings))
    return fitted[0] if len(fitted) == 1 else Preprocessor(tuple(fitted))


def is_preprocessing_linear(steps: Sequence[str | Mapping]) -> bool:
    """Return whether columns stay apart, and equal differences in one stay equal: every step is a linear scaler."""
    return all(issubclass(STEPS[name], LinearScaler) for name, _ in map(_name_and_settings, steps))


def preprocessing_from_dict(stored: dict) -> FittedStep:
    """Restore a fitted step from `to_dict`. Raises FactoryError."""
    kind = stored.get("kind") if isinstance(stored, dict) else None
    with suppress(KeyError, TypeError, ValueError):
        if kind == Preprocessor.kind:
            return Preprocessor(tuple(preprocessing_from_dict(step) for step in stored["steps"]))
        if kind in STEPS:
            return STEPS[kind].from_dict(stored)
    raise FactoryError(
        "A stored scaler cannot be read", where="scaler",
        got=sorted(map(str, stored)) if isinstance(stored, dict) else type(stored).__name__,
        wanted=f"the numbers of a step: {', '.join((*STEPS, Preprocessor.kind))}", next_step="run prepare again",
    )  # fmt: skip


def _name_and_settings(step: str | Mapping) -> tuple[object, dict]:
    if not isinstance(step, Mapping):
        return step, {}
    return step.get("step"), {name: value for name, value in step.items() if name != "step"}
