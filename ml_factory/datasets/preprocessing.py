"""The steps between stored features and a model's input, in order, fitted for one fold and saved as JSON.

steps = ("two_state_hmm", "variance", {"step": "clusters", "most": 0.95}, "robust")
fitted = fit_steps(steps, Sample(x_NF, names, train_rows, close, labels_of_the_train_rows))
x = fitted.transform(x_NF, close)
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ml_factory.datasets.feature_selection import SELECTIONS, Selection
from ml_factory.datasets.scaling import SCALERS, LinearScaler, Scaler, unreadable
from ml_factory.datasets.transforms import FractionalDifference, Pca, Sample, TwoStateHmm
from ml_factory.errors import SettingsError, did_you_mean

TRANSFORMS = {step.kind: step for step in (Pca, FractionalDifference, TwoStateHmm)}
STEPS = (*SCALERS, *TRANSFORMS, *SELECTIONS)


class Fitted(Protocol):
    """A scaler, a transformer, a selection, or several of them in order."""

    kind: str

    def to_dict(self) -> dict: ...


@dataclass(frozen=True)
class Preprocessor:
    """Fitted steps, one after the other."""

    steps: tuple[Fitted, ...]

    kind = "preprocessor"

    def transform(self, x_NF: np.ndarray, close: np.ndarray | None = None) -> np.ndarray:
        """float32 (N, K); close : float64 (N,), where a step follows the price."""
        for step in self.steps:
            x_NF = transform(step, x_NF, close)
        return x_NF

    def names_out(self, names: Sequence[str]) -> tuple[str, ...]:
        """The columns that come out, for the columns that go in."""
        for step in self.steps:
            names = names_out(step, names)
        return tuple(names)

    def to_dict(self) -> dict:
        return {"kind": self.kind, "steps": [step.to_dict() for step in self.steps]}


def check_steps(steps: Sequence[str | Mapping]) -> tuple[str | dict, ...]:
    """The steps as JSON can hold them. Raises SettingsError for a name or setting that is not known."""
    checked = []
    for step in steps:
        name, settings = _told(step)
        if name not in STEPS:
            hint = did_you_mean(str(name), STEPS)
            raise SettingsError("There is no such step", where="preprocess", got=repr(name), next_step=hint)
        known = [word for word in inspect.signature(_fit_of(name)).parameters if word not in ("x_NF", "rows", "sample")]
        for word in settings:
            if word not in known:
                hint = did_you_mean(str(word), known) or f"its settings: {', '.join(known)}"
                raise SettingsError(f"{name} has no such setting", where="preprocess", got=repr(word), next_step=hint)
        checked.append({"step": name, **settings} if settings else name)
    if not any(_told(step)[0] in SCALERS for step in checked[-1:]):
        step = "end with 'robust', 'standard' or 'quantile'"
        raise SettingsError("The last step must scale", where="preprocess", got=checked, next_step=step)
    return tuple(checked)


def fit_steps(steps: Sequence[str | Mapping], sample: Sample) -> Fitted:
    """Fit each step on the training rows of what the steps before it make; a single step comes back as itself.

    While fitting, a price outside the training rows stands as the last training row's: a column that follows the price
    tells a later step nothing of other rows.
    """
    fitted: list[Fitted] = []
    sample = replace(sample, close=_own_path(sample))
    for place, step in enumerate(steps):
        name, settings = _told(step)
        if name in SCALERS:
            fitted.append(SCALERS[name].fit(sample.x_NF, sample.rows, **settings))
        else:
            fitted.append(_fit_of(name)(sample, **settings))
        if place + 1 < len(steps):
            x_NF = transform(fitted[-1], sample.x_NF, sample.close)
            sample = replace(sample, x_NF=x_NF, names=names_out(fitted[-1], sample.names))
    return fitted[0] if len(fitted) == 1 else Preprocessor(tuple(fitted))


def transform(step: Fitted | Scaler, x_NF: np.ndarray, close: np.ndarray | None = None) -> np.ndarray:
    """What a fitted step makes of the rows, float32."""
    return step.transform(x_NF) if step.kind in SCALERS else step.transform(x_NF, close)


def names_out(step: Fitted | Scaler, names: Sequence[str]) -> tuple[str, ...]:
    """The columns that come out of a fitted step."""
    return tuple(names) if step.kind in SCALERS else step.names_out(tuple(names))


def changing_columns(steps: Sequence[str | Mapping]) -> list[str]:
    """The steps' names after which columns are others than before: all but scalers drop, mix or add some."""
    return [name for name, _ in map(_told, steps) if name not in SCALERS]


def evenly_scaled(steps: Sequence[str | Mapping]) -> bool:
    """Whether equal steps of a column stay equal steps: every scaler among these steps is linear."""
    return all(issubclass(SCALERS[name], LinearScaler) for name, _ in map(_told, steps) if name in SCALERS)


def from_dict(stored: dict) -> Fitted:
    """What `to_dict` gave, as a fitted step again. Raises FactoryError."""
    kind = stored.get("kind") if isinstance(stored, dict) else None
    try:
        if kind == Preprocessor.kind:
            return Preprocessor(tuple(from_dict(step) for step in stored["steps"]))
        if kind in SELECTIONS:
            return Selection.from_dict(stored)
        if kind in STEPS:
            return (SCALERS | TRANSFORMS)[kind].from_dict(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(stored, f"the numbers of {kind!r}") from error
    raise unreadable(stored, f"kind: one of {', '.join((*STEPS, Preprocessor.kind))}")


def _told(step: str | Mapping) -> tuple[object, dict]:
    if not isinstance(step, Mapping):
        return step, {}
    return step.get("step"), {name: value for name, value in step.items() if name != "step"}


def _fit_of(name: str) -> Callable:
    return SELECTIONS[name] if name in SELECTIONS else (SCALERS | TRANSFORMS)[name].fit


def _own_path(sample: Sample) -> np.ndarray | None:
    """Closes that only training rows decide: between them the last one stands."""
    if sample.close is None:
        return None
    last = np.searchsorted(sample.rows, np.arange(len(sample.close)), side="right") - 1
    return sample.close[sample.rows[np.maximum(last, 0)]]
