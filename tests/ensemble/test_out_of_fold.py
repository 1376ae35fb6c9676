"""No row is predicted by a model, a scaler or an early stop that has seen its future."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.ensemble.out_of_fold import inner_validation, out_of_fold
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.targets.splits import purged_kfold


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
        self.fitted, self.validated, self.weights = x[:, 0], validation[0][:, 0], sample_weight
        self.options = options
        return "done"

    def predict_proba(self, x):
        self.predicted = x[:, 0]
        return np.tile([0.2, 0.3, 0.5], (len(x), 1)) + 1e-6 * x[:, :1] * [1, 0, -1]


def as_they_are(x, train):
    return lambda rows: x[rows]


def run(n=120, folds=4, **more):
    labels, models = labels_of(n), []

    def make(fold):
        models.append(Witness())
        return models[-1]

    x = np.arange(n, dtype=np.float64)[:, None]
    cuts = purged_kfold(labels, folds, 3)
    p = out_of_fold(make, x, labels, cuts, **({"inputs": as_they_are} | more))
    return p, models, labels, cuts


def test_each_row_is_predicted_once_by_a_model_that_has_not_seen_it():
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


def test_twelve_rows_of_the_docstring():
    fit, validation = inner_validation(labels_of(12), np.arange(12), 0.25)
    assert fit.tolist() == [0, 1, 2, 3, 4, 5, 6] and validation.tolist() == [9, 10, 11]


def test_the_scaler_sees_the_rows_fitted_on_alone():
    seen = []

    def spy(x, train):
        seen.append(train)
        return lambda rows: x[rows]

    _, models, _, cuts = run(inputs=spy)
    for train, model, (_, test) in zip(seen, models, cuts, strict=True):
        np.testing.assert_array_equal(train, model.fitted)
        assert not set(train) & set(test)
    # The default one, too: features far away in the test block do not move it.
    labels, x = labels_of(80), np.random.default_rng(0).normal(size=(80, 2))
    cuts, shifted = purged_kfold(labels, 4, 0)[:1], x.copy()
    shifted[cuts[0][1]] += 1e6
    models = []
    for data in (x, shifted):
        models.append(Witness())
        out_of_fold(lambda fold: models[-1], data, labels, cuts)
    np.testing.assert_array_equal(models[0].fitted, models[1].fitted)


def test_rows_in_no_fold_or_unusable_stay_empty():
    labels = labels_of(120)
    usable = np.ones(120, bool)
    usable[::7] = False
    p, models, _, _ = run(usable=usable)
    assert (np.isnan(p).all(axis=1) == ~usable).all()
    assert all(usable[m.fitted.astype(int)].all() and usable[m.validated.astype(int)].all() for m in models)
    cuts = purged_kfold(labels, 4, 3)[1:2]
    p = out_of_fold(lambda fold: Witness(), np.arange(120.0)[:, None], labels, cuts, inputs=as_they_are)
    assert np.isfinite(p[30:60]).all() and np.isnan(p[:30]).all() and np.isnan(p[60:]).all()


def test_rows_of_no_weight_are_not_trained_on():
    labels = labels_of(120)
    labels.loc[labels.index[::5], "barrier"] = "ambiguous"
    models = []

    def make(fold):
        models.append(Witness())
        return models[-1]

    out_of_fold(make, np.arange(120.0)[:, None], labels, purged_kfold(labels, 4, 3), inputs=as_they_are)
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

    def save(self, state, force=False):
        self.state = {"finished": state["finished"], "p": state["p"].copy()}


def test_a_killed_run_goes_on_at_the_fold():
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


def test_options_reach_fit():
    _, models, *_ = run(fit_options=lambda fold: {"limits": {"rounds": fold}})
    assert [m.options["limits"]["rounds"] for m in models] == [0, 1, 2, 3]


def test_folds_that_cheat_are_refused():
    labels, x = labels_of(40), np.arange(40.0)[:, None]
    rows = np.arange(40)
    with pytest.raises(SettingsError, match="trains on rows it predicts"):
        out_of_fold(lambda fold: Witness(), x, labels, [(rows, rows[:5])])
    with pytest.raises(SettingsError, match="same row"):
        out_of_fold(lambda fold: Witness(), x, labels, [(rows[20:], rows[:5]), (rows[20:], rows[4:9])])
    with pytest.raises(FactoryError, match="too few training rows"):
        inner_validation(labels, rows[:2], 0.15)
