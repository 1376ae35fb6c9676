"""Predictions of every row by a model that has not seen it: what a stack may learn from."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from ml_factory.errors import FactoryError, SettingsError
from ml_factory.evaluation.calibration import Temperature, log_probabilities
from ml_factory.evaluation.metrics import CLASSES, among
from ml_factory.targets.weights import training_weights

Fold = tuple[np.ndarray, np.ndarray]
Inputs = Callable[[np.ndarray], Callable[[np.ndarray], object]]


def inner_validation(labels: pd.DataFrame, train: np.ndarray, share: float) -> Fold:
    """Training positions split once more in time, for early stopping inside a fold: (fit, validation).

    Validation is the last `share` of the positions; a row is fitted on only when its label had ended before the
    first validation row was known. Twelve rows, labels of two bars, share 0.25 (f: fit, v: validation)::

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
            "A fold has too few training rows to keep some for early stopping",
            got=f"{len(train)} rows, {share:.0%} of them for validation",
            wanted="rows left on both sides",
            next_step="use fewer folds, or bring more bars",
        )
    return fit, validation


def out_of_fold(
    make_model: Callable[[int], object], inputs: Inputs, labels: pd.DataFrame, folds: Sequence[Fold], **how
) -> np.ndarray:
    """Train one model per fold and predict the fold's test rows; arguments as of `fold_forecasts`.

    Returns
    -------
    float64 (N, 3), NaN in rows that no fold predicts.

    Raises
    ------
    SettingsError when two folds predict the same row, and those of `fold_forecasts`.
    """
    _check_once(folds, len(labels))
    return together(len(labels), folds, fold_forecasts(make_model, inputs, labels, folds, **how)[0])


def together(n: int, folds: Sequence[Fold], forecasts: Sequence[np.ndarray]) -> np.ndarray:
    """float64 (n, 3): each fold's forecasts at the rows it tests, NaN elsewhere; the folds test different rows."""
    p_N3 = np.full((n, 3), np.nan)
    for (_, test), p in zip(folds, forecasts, strict=True):
        p_N3[test] = p
    return p_N3


def fold_forecasts(
    make_model: Callable[[int], object],
    inputs: Inputs,
    labels: pd.DataFrame,
    folds: Sequence[Fold],
    *,
    usable: np.ndarray | None = None,
    weigh: Callable[[np.ndarray], np.ndarray] | None = None,
    validation_share: float = 0.15,
    fit_options: Callable[[int], dict] = lambda fold: {},
    checkpoints=None,
    on_fold: Callable[[int, object], None] = lambda fold, result: None,
    classes: Sequence[int] = CLASSES,
) -> tuple[list[np.ndarray], list[float]]:
    """Train one model per fold and predict the fold's test rows, which other folds may predict, too.

    Parameters
    ----------
    make_model : fold number → a fresh estimator (derive its seed from the fold).
    inputs : training positions → (positions → model input); whatever is fitted there, is fitted on those only.
    labels : (N rows) index known_at; label, label_end and what `training_weights` reads.
    folds : (train, test) positions into `labels`, already purged and embargoed, as from `targets.splits`.
    usable : bool (N,), rows the model can be given at all (a window may be cut short); None: all.
    weigh : positions fitted on → their weights, from these rows alone; None: `training_weights` as it is.
    fit_options : fold number → more keyword arguments of `fit` (callbacks, checkpoints, limits).
    checkpoints : a phase of a CheckpointManager; each finished fold is saved, and found again after a kill.
    on_fold : called with the fold number and what `fit` returned.
    classes : the labels there can be; others are given no probability.

    Returns
    -------
    For each fold float64 (test rows, 3), as the model says it: NaN in rows that are not usable, and in all of them
    where the rows to fit on are of one class: there is nothing to tell apart, and the other folds go on. And for each
    fold the temperature that calibrates it, fitted on the rows that it stopped early on; 1 without such rows.

    Raises
    ------
    SettingsError when a fold trains on a row it predicts.
    """
    _check_apart(folds, len(labels))
    usable = np.ones(len(labels), dtype=bool) if usable is None else np.asarray(usable, dtype=bool)
    y, forecasts, temperatures = labels["label"].to_numpy(), [], []
    if checkpoints is not None and (found := checkpoints.load()) is not None:
        forecasts = [np.array(p, dtype=np.float64) for p in found["state"]["p"]]
        temperatures = [float(temperature) for temperature in found["state"]["temperatures"]]
    for number in range(len(forecasts), len(folds)):
        train, test = folds[number]
        train, said = train[usable[train]], usable[test]
        forecasts.append(np.full((len(test), 3), np.nan))
        temperatures.append(1.0)
        fit, validation = inner_validation(labels, train, validation_share)
        w_fit = weigh(fit) if weigh else training_weights(labels.iloc[fit])  # of the fold's own rows alone
        fit, w_fit = fit[w_fit > 0], w_fit[w_fit > 0]
        if len(np.unique(y[fit])) > 1:
            take, held_out = inputs(fit), None
            if len(validation):
                held_out = (take(validation), y[validation], training_weights(labels.iloc[validation]))
            model = make_model(number)
            result = model.fit(take(fit), y[fit], w_fit, validation=held_out, **fit_options(number))
            if held_out is not None:
                known = log_probabilities(among(model.predict_proba(held_out[0]), classes))
                temperatures[number] = Temperature.fit(known, *held_out[1:]).temperature
            if said.any():
                forecasts[number][said] = among(model.predict_proba(take(test[said])), classes)
            del model, take, held_out  # one fold's memory at a time
            on_fold(number, result)
        if checkpoints is not None:
            state = {"finished": number + 1, "p": forecasts, "temperatures": temperatures}
            checkpoints.save(state, metrics={"finished": number + 1}, force=True)
    return forecasts, temperatures


def _check_apart(folds: Sequence[Fold], n: int) -> None:
    """No fold predicts a row it is trained on."""
    for number, (train, test) in enumerate(folds):
        taught = np.zeros(n, dtype=bool)
        taught[train] = True
        if taught[test].any():
            raise SettingsError("A fold trains on rows it predicts", where=f"fold {number}")


def _check_once(folds: Sequence[Fold], n: int) -> None:
    """Each row predicted at most once."""
    predicted = np.zeros(n, dtype=np.int64)
    for _, test in folds:
        predicted[test] += 1
    if (predicted > 1).any():
        raise SettingsError(
            "Two folds predict the same row", where=f"row {int(predicted.argmax())}", wanted="test blocks apart"
        )
