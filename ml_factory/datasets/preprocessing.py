"""Preprocessing steps between stored features and a model's input, fitted for one fold and saved as JSON.

steps = ({"step": "pca", "share": 0.95}, "robust")
fitted = fit_preprocessing_steps(steps, TransformFitSample(x_NF, names, train_rows))
x = fitted.transform(x_NF)
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ml_factory.datasets.fitted_transforms import PcaTransform, TransformFitSample
from ml_factory.datasets.scaling import SCALERS, LinearScaler
from ml_factory.errors import FactoryError, SettingsError, did_you_mean

STEPS = {**SCALERS, PcaTransform.kind: PcaTransform}


class FittedStep(Protocol):
    """A fitted scaler or transform, or several in order."""

    kind: str

    def to_dict(self) -> dict: ...


@dataclass(frozen=True)
class Preprocessor:
    """Fitted steps, applied in order."""

    steps: tuple[FittedStep, ...]

    kind = "preprocessor"

    def transform(self, x_NF: np.ndarray) -> np.ndarray:
        """Return float32 (N, K)."""
        for step in self.steps:
            x_NF = step.transform(x_NF)
        return x_NF

    def names_out(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the output columns for these input columns."""
        for step in self.steps:
            names = step_feature_names_out(step, names)
        return tuple(names)

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
        known = [
            word for word in inspect.signature(STEPS[name].fit).parameters if word not in ("x_NF", "rows", "sample")
        ]
        for word in settings:
            if word not in known:
                hint = did_you_mean(str(word), known) or f"its settings: {', '.join(known)}"
                raise SettingsError(f"{name} has no such setting", where="preprocess", got=repr(word), next_step=hint)
        checked.append({"step": name, **settings} if settings else name)
    if not any(_name_and_settings(step)[0] in SCALERS for step in checked[-1:]):
        step = "end with 'robust', 'standard' or 'quantile'"
        raise SettingsError("The last step must scale", where="preprocess", got=checked, next_step=step)
    return tuple(checked)


def fit_preprocessing_steps(steps: Sequence[str | Mapping], sample: TransformFitSample) -> FittedStep:
    """Fit each step on the training rows of the previous steps' output; a single step is returned directly."""
    fitted: list[FittedStep] = []
    for place, step in enumerate(steps):
        name, settings = _name_and_settings(step)
        if name in SCALERS:
            fitted.append(SCALERS[name].fit(sample.x_NF, sample.rows, **settings))
        else:
            fitted.append(STEPS[name].fit(sample, **settings))
        if place + 1 < len(steps):
            x_NF = fitted[-1].transform(sample.x_NF)
            sample = replace(sample, x_NF=x_NF, names=step_feature_names_out(fitted[-1], sample.names))
    return fitted[0] if len(fitted) == 1 else Preprocessor(tuple(fitted))


def step_feature_names_out(step: FittedStep, names: Sequence[str]) -> tuple[str, ...]:
    """Return the output columns of a fitted step."""
    return tuple(names) if step.kind in SCALERS else step.names_out(tuple(names))


def column_changing_steps(steps: Sequence[str | Mapping]) -> list[str]:
    """Return the names of steps that mix columns: all but scalers."""
    return [name for name, _ in map(_name_and_settings, steps) if name not in SCALERS]


def is_preprocessing_linear(steps: Sequence[str | Mapping]) -> bool:
    """Return whether equal differences in a column stay equal: every scaler among these steps is linear."""
    return all(issubclass(SCALERS[name], LinearScaler) for name, _ in map(_name_and_settings, steps) if name in SCALERS)


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
