"""Out-of-fold predictions: each row predicted by a model that was not trained on it, as input of a stack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.errors import FactoryError, SettingsError
from ml_factory.evaluation.calibration import Calibration, condition_on_classes, floored_log_probabilities
from ml_factory.evaluation.metrics import CLASSES
from ml_factory.targets.weights import training_weights

Fold = tuple[np.ndarray, np.ndarray]
Inputs = Callable[[np.ndarray], Callable[[np.ndarray], object]]


def inner_validation_split(labels: pd.DataFrame, train: np.ndarray, share: float) -> Fold:
    """Split training positions once more in time, for early stopping inside a fold: (fit, validation).

    Validation is the last `share` of the positions; a row is fitted on only when its label had ended before the first
    validation row was known. Twelve rows, labels of two bars, share 0.25 (f: fit, v: validation)::

        row   0 1 2 3 4 5 6 7 8 9 10 11
              f f f f f f f . . v  v  v     (rows 7 and 8 end at or after row 9 is known)

    Raises
    ------
    FactoryError when nothing is left to fit or to validate on.
    """
    train = np.sort(train)
    first = len(train) - round(share * len(train))
    fit, validation = train[:first], train[first:]
    if len(validation):
        fit = fit[labels["label_end"].to_numpy()[fit] < labels.index.to_numpy()[validation[0]]]
    if not len(fit) or (share > 0 and not len(validation)):
        raise FactoryError(
            "A fold has too few training rows for early stopping",
            got=f"{len(train)} rows, {share:.0%} of them for validation",
            wanted="rows left on both sides",
            next_step="use fewer folds, or more bars",
        )
    return fit, validation


@dataclass(frozen=True)
class OutOfFoldFit:
    """Fit of a model on a fold; everything is fitted on that fold's own training rows.

    Parameters
    ----------
    labels : (N rows) index known_at; label, label_end and the columns that `training_weights` reads.
    make_model : fold number → an untrained estimator (derive its seed from the fold).
    inputs : training positions → (positions → model input).
    usable : bool (N,), rows the model can read (a window may be cut short); None: all.
    weigh : positions fitted on → their weights, from these rows alone; None: `training_weights`.
    validation_share : last part of a fold's training rows, for early stopping and calibration.
    fit_options : fold number → more keyword arguments of `fit` (callbacks, checkpoints, limits).
    on_fold : called with the fold number and the result of `fit`.
    classes : possible labels; others get no probability.
    horizon : rows over which one label reaches.
    """

    labels: pd.DataFrame
    make_model: Callable[[int], object]
    inputs: Inputs
    usable: np.ndarray | None = None
    weigh: Callable[[np.ndarray], np.ndarray] | None = None
    validation_share: float = 0.15
    fit_options: Callable[[int], dict] = lambda fold: {}
    on_fold: Callable[[int, object], None] = lambda fold, result: None
    classes: Sequence[int] = CLASSES
    horizon: int = 1

    def forecast(self, number: int, fold: Fold) -> tuple[np.ndarray, Calibration]:
        """Return (float64 (test rows, 3), the calibration) of the fold of this number.

        NaN in rows that are not usable, and in all rows where the training rows hold one class. The calibration is
        fitted on the early-stopping rows, each unambiguous one with equal weight; without such rows it is the identity.
        """
        usable = np.ones(len(self.labels), dtype=bool) if self.usable is None else np.asarray(self.usable, dtype=bool)
        (train, test), y = fold, self.labels["label"].to_numpy()
        train, readable = train[usable[train]], usable[test]
        p, calibration = np.full((len(test), 3), np.nan), Calibration()
        fit, validation = inner_validation_split(self.labels, train, self.validation_share)
        w_fit = self.weigh(fit) if self.weigh else training_weights(self.labels.iloc[fit])
        fit, w_fit = fit[w_fit > 0], w_fit[w_fit > 0]
        if len(np.unique(y[fit])) < 2:
            return p, calibration
        take, held_out = self.inputs(fit), None
        if len(validation):
            held_out = (take(validation), y[validation], training_weights(self.labels.iloc[validation]))
        model = self.make_model(number)
        result = model.fit(take(fit), y[fit], w_fit, validation=held_out, **self.fit_options(number))
        if held_out is not None:
            known = floored_log_probabilities(condition_on_classes(model.predict_proba(held_out[0]), self.classes))
            clear = (held_out[2] > 0).astype(np.float64)
            calibration = Calibration.fit(known, held_out[1], clear, horizon=self.horizon)
        if readable.any():
            p[readable] = condition_on_classes(model.predict_proba(take(test[readable])), self.classes)
        self.on_fold(number, result)
        return p, calibration


def out_of_fold_forecasts(
    fold_fit: OutOfFoldFit, folds: Sequence[Fold], checkpoints=None
) -> tuple[list[np.ndarray], list[Calibration]]:
    """Fit one model per fold and predict the fold's test rows, which other folds may predict too.

    Parameters
    ----------
    folds : (train, test) positions into `fold_fit.labels`, purged and embargoed, as from `targets.splits`.
    checkpoints : a phase of a CheckpointManager; each finished fold is saved, and found again after a kill.

    Returns
    -------
    For each fold its uncalibrated forecasts, float64 (test rows, 3), and its calibration: see `FoldFit.forecast`.

    Raises
    ------
    SettingsError when a fold trains on a row it predicts; FactoryError when one has too few training rows.
    """
    _check_apart(folds, len(fold_fit.labels))
    forecasts, calibrations = [], []
    if checkpoints is not None and (found := checkpoints.load()) is not None:
        forecasts = [np.array(p, dtype=np.float64) for p in found["state"]["p"]]
        calibrations = [Calibration.from_dict(one) for one in found["state"]["calibrations"]]
    for number in range(len(forecasts), len(folds)):
        p, calibration = fold_fit.forecast(number, folds[number])
        forecasts.append(p)
        calibrations.append(calibration)
        if checkpoints is not None:
            state = {"finished": number + 1, "p": forecasts, "calibrations": [one.to_dict() for one in calibrations]}
            checkpoints.save(state, metrics={"finished": number + 1}, force=True)
    return forecasts, calibrations


def merge_out_of_fold_forecasts(n: int, folds: Sequence[Fold], forecasts: Sequence[np.ndarray]) -> np.ndarray:
    """Merge the forecasts of folds: float64 (n, 3), each fold's at the rows it tests, NaN elsewhere.

    Raises SettingsError when two folds predict the same row.
    """
    _check_once(folds, n)
    p_N3 = np.full((n, 3), np.nan)
    for (_, test), p in zip(folds, forecasts, strict=True):
        p_N3[test] = p
    return p_N3


def _check_apart(folds: Sequence[Fold], n: int) -> None:
    """Raise SettingsError where a fold predicts a row it is trained on."""
    for number, (train, test) in enumerate(folds):
        trained_on = np.zeros(n, dtype=bool)
        trained_on[train] = True
        if trained_on[test].any():
            raise SettingsError("A fold trains on rows it predicts", where=f"fold {number}")


def _check_once(folds: Sequence[Fold], n: int) -> None:
    """Raise SettingsError where a row is predicted twice."""
    predicted = np.zeros(n, dtype=np.int64)
    for _, test in folds:
        predicted[test] += 1
    if (predicted > 1).any():
        raise SettingsError(
            "Two folds predict the same row", where=f"row {int(predicted.argmax())}", wanted="test blocks apart"
        )
