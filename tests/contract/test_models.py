"""One contract for every model that `available_models()` lists."""

import numpy as np
import pytest

from ml_factory.errors import CheckpointError, FactoryError, SettingsError
from ml_factory.models.registry import available_models, build_model
from tests.contract.doors import build_model_from_state, find_model_spec, serialize_state

T, F = 8, 6
LIVELY = {"batch": 16, "dropout": 0.1, "lr": 0.02}  # in three epochs of few large steps it learns too little
SMALL = {
    "tabular": {"rounds": 24, "block": 8, "depth": 3, "learning_rate": 0.2, "threads": 1},
    "linear": {"rounds": 24, "block": 8, "threads": 1},
    "network": {"epochs": 3, "batch": 64, "lookback": T, "lr": 0.01, "device": "cpu", "threads": 1},
    "patchtst": {"patch": 4, "stride": 4, "width": 8, "inner": 8, "layers": 1, **LIVELY},
}


def make(name: str, **settings):
    family = "network" if find_model_spec(name).windowed else "linear" if name == "linear" else "tabular"
    return build_model(name, **{**SMALL[family], **SMALL.get(name, {}), **settings})


def short(name: str) -> dict:
    return {"epochs": 1} if find_model_spec(name).windowed else {"rounds": 8}


def rows(name: str, n: int = 320, seed: int = 0):
    """x, y, w; the last step's first feature tells the label, roughly."""
    rng = np.random.default_rng(seed)
    x_NTF = rng.normal(size=(n, T, F)).astype(np.float32)
    signal = 2 * x_NTF[:, -1, 0] + 0.5 * rng.normal(size=n)
    y = np.digitize(signal, [-0.8, 0.8]) - 1
    return (x_NTF if find_model_spec(name).windowed else x_NTF[:, -1]), y.astype(np.int8), rng.uniform(0.2, 2, n)


@pytest.fixture(scope="module", params=available_models())
def fitted(request):
    """name, model, its FitResult and what it was called with."""
    name, received = request.param, []
    x, y, w = rows(name)
    model = make(name)
    result = model.fit(
        x[:240],
        y[:240],
        w[:240],
        validation=(x[240:], y[240:], w[240:]),
        callbacks=[lambda *call: received.append(call)],
    )
    return name, model, result, received


def test_model_predict_proba_returns_normalised_short_neutral_long_columns(fitted):
    name, model, _, _ = fitted
    x, y, _ = rows(name)
    p = model.predict_proba(x)
    assert p.shape == (len(x), 3) and p.dtype == np.float64
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-6)
    assert (p >= 0).all()
    up, down = p[y == 1].mean(axis=0), p[y == -1].mean(axis=0)
    assert up[2] > down[2] + 0.05 and down[0] > up[0] + 0.05
    assert model.predict_proba(x[:0]).shape == (0, 3)


def test_model_fit_calls_callbacks_once_per_epoch_or_block(fitted):
    _, _, result, received = fitted
    assert [epoch for epoch, _ in received] == [1, 2, 3] == [row["epoch"] for row in result.history]
    assert all(set(metrics) == {"train_loss", "val_loss", "seconds"} for _, metrics in received)
    assert result.resumed_from is None and not result.nondeterminism
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def test_model_restored_from_state_file_or_registry_predicts_equal(fitted, tmp_path):
    name, model, _, _ = fitted
    x, _, _ = rows(name, seed=1)
    p, state = model.predict_proba(x), model.get_state()
    model.save(tmp_path / "model")
    for other in (
        build_model(name).load_state(state),
        build_model_from_state(state),
        build_model(name).load(tmp_path / "model"),
    ):
        np.testing.assert_array_equal(other.predict_proba(x), p)
        assert serialize_state(other.get_state()) == serialize_state(state)
        assert other.settings == model.settings and other.lookback == model.lookback


def test_model_state_of_earlier_version_is_refused_with_command_that_trains_again(fitted):
    name, model, _, _ = fitted
    old = {key: value for key, value in model.get_state().items() if key not in ("format", "offset", "n_features")}
    for load in (build_model(name).load_state, build_model_from_state):
        with pytest.raises(
            CheckpointError, match=f"Another version .*python -m ml_factory train --model {name} --fresh"
        ):
            load(old)


def test_model_state_stays_unchanged_after_further_training(fitted):
    name, _, _, _ = fitted
    x, y, w = rows(name)
    model = make(name, seed=5, **short(name))
    model.fit(x, y, w)
    state = model.get_state()
    before = serialize_state(state)
    model.fit(x, -y, w)
    assert serialize_state(state) == before


def test_model_predict_proba_of_single_row_equals_row_in_batch(fitted):
    name, model, _, _ = fitted
    x, _, _ = rows(name, seed=2)
    p = model.predict_proba(x)
    for row in (0, 17, len(x) - 1):
        np.testing.assert_allclose(model.predict_proba(x[row : row + 1])[0], p[row], atol=1e-6)
    order = np.random.default_rng(0).permutation(len(x))
    np.testing.assert_allclose(model.predict_proba(x[order]), p[order], atol=1e-6)


def test_model_fit_same_seed_is_bit_exact_other_seed_differs_and_global_state_stays(fitted):
    torch = pytest.importorskip("torch")
    name, model, _, _ = fitted
    x, y, w = rows(name)
    np.random.seed(3)
    torch.manual_seed(3)
    state, threads, p = (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()), torch.get_num_threads(), []
    for seed in (0, 1):
        again = make(name, seed=seed)
        again.fit(x[:240], y[:240], w[:240], validation=(x[240:], y[240:], w[240:]))
        p.append(again.predict_proba(x))
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == state
    assert torch.get_num_threads() == threads
    np.testing.assert_array_equal(p[0], model.predict_proba(x))
    if name == "linear":  # nothing is drawn: the one model that no seed changes
        np.testing.assert_array_equal(p[1], p[0])
    else:
        assert np.abs(p[1] - p[0]).max() > 1e-4


@pytest.mark.parametrize("absent", [-1, 0, 1])
@pytest.mark.parametrize("name", available_models())
def test_model_fit_without_one_class_predicts_low_probability_for_class(name, absent):
    x, y, w = rows(name)
    keep = y != absent
    model = make(name)
    model.fit(x[keep], y[keep], w[keep], validation=(x, y, w))
    p = model.predict_proba(x)
    assert p.shape == (len(x), 3) and np.isfinite(p).all()
    others = [column for column in range(3) if column != absent + 1]
    assert p[:, absent + 1].mean() < p[:, others].mean(axis=0).min()


@pytest.mark.parametrize("name", available_models())
def test_model_fit_zero_weight_rows_do_not_change_predictions(name):
    """Ambiguous rows weigh 0: their labels may say anything, and not a bit changes."""
    x, y, w = rows(name)
    w[::7] = 0
    disturbed = y.copy()
    disturbed[::7] = -1
    p = []
    for labels in (y, disturbed):
        model = make(name, **short(name))
        model.fit(x[:240], labels[:240], w[:240], validation=(x[240:], labels[240:], w[240:]))
        p.append(model.predict_proba(x))
    np.testing.assert_array_equal(p[0], p[1])


@pytest.mark.parametrize("name", available_models())
def test_model_fit_with_larger_class_weight_raises_class_probability(name):
    x, y, w = rows(name)
    p = []
    for weight in (w, np.where(y == 1, w * 8, w)):
        model = make(name)
        model.fit(x, y, weight)
        p.append(model.predict_proba(x)[:, 2].mean())
    assert p[1] > p[0] + 0.02


@pytest.mark.parametrize("name", available_models())
def test_model_fit_on_noise_stops_early_and_keeps_best_epoch(name):
    x, y, _ = rows(name)
    noise = np.random.default_rng(5).permutation(y)  # nothing to learn: validation can only get worse
    model = make(
        name, patience=2, **({"epochs": 30} if find_model_spec(name).windowed else {"rounds": 240, "block": 4})
    )
    result = model.fit(x[:240], noise[:240], validation=(x[240:], noise[240:]))
    assert result.stopped_early
    losses = [row["val_loss"] for row in result.history]
    p = model.predict_proba(x[240:])
    reached = -np.log(p[np.arange(80), noise[240:] + 1]).mean()
    if find_model_spec(name).windowed:
        assert result.best_epoch == int(np.argmin(losses)) + 1 == len(losses) - 2
        np.testing.assert_allclose(reached, min(losses), rtol=1e-5)
    else:
        assert len(losses) * 4 - model.best_round in range(2, 6)
        assert reached <= min(losses) + 1e-6


@pytest.mark.parametrize("name", available_models())
def test_model_invalid_input_raises_clear_errors(name):
    x, y, w = rows(name)
    model = make(name)
    with pytest.raises(FactoryError, match="not fitted"):
        model.predict_proba(x)
    with pytest.raises(SettingsError, match="did you mean 'patience'"):
        build_model(name, pacience=3)
    with pytest.raises(FactoryError, match=r"Unknown label \[training y, row 1\]"):
        model.fit(x, np.r_[0, 2, y[2:]], w)
    with pytest.raises(FactoryError, match="Rows do not match"):
        model.fit(x, y[:-1], w[:-1])
    with pytest.raises(FactoryError, match="fewer than two classes"):
        model.fit(x, np.ones_like(y), w)
    with pytest.raises(FactoryError, match="finite and not negative"):
        model.fit(x, y, -w)
    with pytest.raises(FactoryError, match="fewer than two classes"):
        model.fit(x, y, w * (y == 1))
    with pytest.raises(FactoryError, match=r"No row has weight \[validation\]"):
        model.fit(x, y, w, validation=(x, y, 0 * w))
    with pytest.raises(FactoryError, match="one column"):
        model.fit(x, y[:, None], w)
    with pytest.raises(CheckpointError, match="Not a state of this model"):
        model.load_state({"model": "other"})
    bad = x.copy()
    bad[3] = np.inf
    with pytest.raises(FactoryError, match="finite"):
        model.fit(bad, y, w)
    model.fit(x, y, w)
    with pytest.raises(FactoryError, match=r"features|shape"):
        model.predict_proba(x[..., :-1])
