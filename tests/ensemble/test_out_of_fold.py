"""No row is predicted by a model, a scaler or an early stop that has seen its future."""

from copy import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.ensemble.out_of_fold import (
    OutOfFoldFit,
    inner_validation_split,
    merge_out_of_fold_forecasts,
    out_of_fold_forecasts,
)
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.evaluation.calibration import Calibration, floored_log_probabilities
from ml_factory.targets.splits import purged_kfold
from ml_factory.targets.weights import training_weights


def labels_of(n: int, bars: int = 2) -> pd.DataFrame:
    known_at = pd.date_range("2025-01-06 00:05", periods=n, freq="5min", tz="UTC").as_unit("ns")
    end = known_at + pd.Timedelta(minutes=5 * bars)
    rows = np.arange(n)
    return pd.DataFrame(
        {
            "label": rows % 3 - 1,
            "label_end": end,
            "barrier": "upper",
            "entry_bar": rows,
            "exit_bar": rows + bars,
        },
        index=known_at,
    )


class Witness:
    """A model that remembers the rows it was shown; its feature is the row's number."""

    def fit(self, x, y, sample_weight=None, *, validation=None, **options):
        self.fitted, self.weights = x[:, 0], sample_weight
        self.validated = validation[0][:, 0] if validation else x[:0, 0]
        self.options = options
        return "done"

    def predict_proba(self, x):
        self.predicted = x[:, 0]
        return np.tile([0.2, 0.3, 0.5], (len(x), 1)) + 1e-6 * x[:, :1] * [1, 0, -1]


def row_numbers(train):
    """Nothing is fitted: a row's input is its number."""
    return lambda rows: rows.astype(np.float64)[:, None]


def out_of_fold(make, labels, cuts, inputs=row_numbers, checkpoints=None, **how) -> np.ndarray:
    """float64 (N, 3), NaN in rows that no fold predicts."""
    forecasts, _ = out_of_fold_forecasts(OutOfFoldFit(labels, make, inputs, **how), cuts, checkpoints)
    return merge_out_of_fold_forecasts(len(labels), cuts, forecasts)


def run(n=120, folds=4, **more):
    labels, models = labels_of(n), []

    def make(fold):
        models.append(Witness())
        return models[-1]

    cuts = purged_kfold(labels, folds, 3)
    p = out_of_fold(make, labels, cuts, **more)
    return p, models, labels, cuts


def test_out_of_fold_predicts_each_row_by_model_not_fitted_on_row():
    p, models, labels, cuts = run()
    assert np.isfinite(p).all()
    end = labels["label_end"].to_numpy()
    for model, (_, test) in zip(models, cuts, strict=True):
        np.testing.assert_array_equal(model.predicted, test)
        fitted, validated = model.fitted.astype(int), model.validated.astype(int)
        assert not set(fitted) & set(test) and not set(validated) & set(test) and not set(fitted) & set(validated)
        known = labels.index.to_numpy()
        before = np.r_[fitted, validated][np.r_[fitted, validated] < test[0]]
        assert (end[before] < known[test[0]]).all()
        assert (end[fitted] < known[validated[0]]).all()
        np.testing.assert_allclose(p[test, 0], 0.2 + 1e-6 * test)


def test_inner_validation_of_twelve_rows_matches_docstring():
    fit, validation = inner_validation_split(labels_of(12), np.arange(12), 0.25)
    assert fit.tolist() == [0, 1, 2, 3, 4, 5, 6] and validation.tolist() == [9, 10, 11]


def test_out_of_fold_inputs_are_fitted_on_training_rows_only():
    seen = []

    def spy(train):
        seen.append(train)
        return row_numbers(train)

    _, models, _, cuts = run(inputs=spy)
    for train, model, (_, test) in zip(seen, models, cuts, strict=True):
        np.testing.assert_array_equal(train, model.fitted)
        assert not set(train) & set(test)


def test_out_of_fold_rows_unusable_or_outside_folds_are_nan():
    labels = labels_of(120)
    usable = np.ones(120, bool)
    usable[::7] = False
    p, models, _, _ = run(usable=usable)
    assert (np.isnan(p).all(axis=1) == ~usable).all()
    assert all(usable[m.fitted.astype(int)].all() and usable[m.validated.astype(int)].all() for m in models)
    cuts = purged_kfold(labels, 4, 3)[1:2]
    p = out_of_fold(lambda fold: Witness(), labels, cuts)
    assert np.isfinite(p[30:60]).all() and np.isnan(p[:30]).all() and np.isnan(p[60:]).all()


def test_out_of_fold_excludes_zero_weight_rows_from_training():
    labels = labels_of(120)
    labels.loc[labels.index[::5], "barrier"] = "ambiguous"
    models = []

    def make(fold):
        models.append(Witness())
        return models[-1]

    out_of_fold(make, labels, purged_kfold(labels, 4, 3))
    for model in models:
        assert (model.fitted % 5 != 0).all() and (model.weights > 0).all()
        # The weights come from the fold's own rows: their mean is 1 over all of them, the ambiguous ones at 0.
        assert model.weights.mean() > 1


class Box:
    """Stands in for a phase of a CheckpointManager."""

    def __init__(self):
        self.state = None

    def load(self):
        return None if self.state is None else {"state": self.state}

    def save(self, state, metrics=None, force=False):
        self.state = {name: copy(value) for name, value in state.items()}


def test_out_of_fold_after_kill_resumes_at_unfinished_fold():
    whole, *_ = run()
    box, made = Box(), []

    def stop(fold, result):
        made.append(fold)
        if fold == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(checkpoints=box, on_fold=stop)
    again, models, *_ = run(checkpoints=box)
    assert made == [0, 1, 2] and len(models) == 2
    np.testing.assert_array_equal(again, whole)


class Boaster(Witness):
    """Sure of the label in five rows of six, wrong in the sixth: it stops early on the rows it is calibrated on."""

    def predict_proba(self, x):
        self.asked = [*getattr(self, "asked", ()), x[:, 0].astype(int)]
        printed = (x[:, 0].astype(int) + (x[:, 0] % 6 == 0)) % 3
        return np.where(np.arange(3) == printed[:, None], 0.998, 0.001)


def test_fold_forecasts_calibrate_on_held_out_training_rows_of_fold():
    labels, models, box = labels_of(240), [], Box()
    cuts = purged_kfold(labels, 4, 3)

    def make(fold):
        models.append(Boaster())
        return models[-1]

    how = OutOfFoldFit(labels, make, row_numbers)
    forecasts, calibrations = out_of_fold_forecasts(how, cuts, box)
    for model, (train, test), p, calibration in zip(models, cuts, forecasts, calibrations, strict=True):
        calibrated_on, assessed = model.asked
        assert set(calibrated_on) < set(train) - set(model.fitted.astype(int))
        np.testing.assert_array_equal(assessed, test)
        rows = labels.iloc[calibrated_on]
        printed = floored_log_probabilities(Boaster().predict_proba(calibrated_on[:, None].astype(float)))
        clear = (training_weights(rows) > 0).astype(float)
        assert calibration == Calibration.fit(printed, rows["label"], clear) and calibration.temperature > 1.2
        assert p.max() == 0.998  # as the model says it
    # A run that goes on finds them with the forecasts.
    assert out_of_fold_forecasts(how, cuts, box)[1] == calibrations and len(models) == 4
    # Without rows to stop early on there is nothing to calibrate on.
    assert out_of_fold_forecasts(replace(how, validation_share=0.0), cuts[:1])[1] == [Calibration()]


def test_out_of_fold_passes_fit_options_per_fold():
    _, models, *_ = run(fit_options=lambda fold: {"limits": {"rounds": fold}})
    assert [m.options["limits"]["rounds"] for m in models] == [0, 1, 2, 3]


def test_out_of_fold_with_overlapping_folds_raises():
    labels, rows = labels_of(40), np.arange(40)
    with pytest.raises(SettingsError, match="trains on rows it predicts"):
        out_of_fold(lambda fold: Witness(), labels, [(rows, rows[:5])])
    with pytest.raises(SettingsError, match="same row"):
        out_of_fold(lambda fold: Witness(), labels, [(rows[20:], rows[:5]), (rows[20:], rows[4:9])])
    with pytest.raises(FactoryError, match="too few training rows"):
        inner_validation_split(labels, rows[:2], 0.15)
