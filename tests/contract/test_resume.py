"""Interrupted = uninterrupted: killed anywhere after a checkpoint, a fit goes on and ends with the same bits."""

from pathlib import Path

import numpy as np
import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import CheckpointError
from ml_factory.models.registry import available_models, build_model
from tests.contract.doors import find_model_spec, serialize_state

T, F, TRAIN = 8, 6, 250
OF_EACH_FAMILY = ("xgboost", "linear", "lstm")
SETTINGS = {
    "tabular": {"rounds": 40, "block": 10, "depth": 4, "threads": 1, "patience": 0},
    "linear": {"rounds": 40, "block": 10, "threads": 1, "patience": 0},
    "network": {"epochs": 4, "batch": 64, "lookback": T, "device": "cpu", "threads": 1, "dropout": 0.3},
    "patchtst": {"patch": 4, "stride": 4, "width": 8, "inner": 8, "layers": 1},
    "lstm": {"hidden": 8},
}
CLOCK = {"offset_column": 1, "offset_bars": 3}
SETTINGS |= {name: SETTINGS.get(name, {}) | CLOCK for name in ("xgboost", "catboost", "gru", "patchtst")}


class Killed(BaseException):
    """Not an Exception: nothing on the way may catch it."""


def make(name: str, **settings):
    family = "network" if find_model_spec(name).windowed else "linear" if name == "linear" else "tabular"
    return build_model(name, **{**SETTINGS[family], **SETTINGS.get(name, {}), **settings})


class DyingPhase:
    """A phase of checkpoints whose process dies right after a save."""

    def __init__(self, phase, saves: int):
        self.phase, self.saves = phase, saves

    def __getattr__(self, name):
        return getattr(self.phase, name)

    def save(self, *given, **more):
        self.phase.save(*given, **more)
        self.saves -= 1
        if not self.saves:
            raise Killed


def fit(name: str, folder: Path | None, *callbacks, model=None, phase=None, die_after=0, scale=1.0, **settings):
    """The model and its result; unequal weights, some 0, rows and columns sampled, dropout on.

    folder, phase : of a checkpoint manager, or a phase itself. die_after : saves before the process dies.
    scale : of the features.
    """
    rng = np.random.default_rng(0)
    x_NTF = scale * rng.normal(size=(330, T, F)).astype(np.float32)
    y = np.digitize(x_NTF[:, -1, 0] + x_NTF[:, -2, 1] + rng.normal(size=330), [-0.7, 0.7]) - 1
    w = rng.uniform(0, 2, 330)
    w[::9] = 0
    x = x_NTF if find_model_spec(name).windowed else x_NTF.reshape(330, -1)
    model = model or make(name, **settings)
    manager = CheckpointManager(folder, auto_save_minutes=0) if folder else None
    phase = manager.phase(f"train_{name}") if manager else phase
    try:
        result = model.fit(
            x[:TRAIN],
            y[:TRAIN],
            w[:TRAIN],
            validation=(x[TRAIN:], y[TRAIN:], w[TRAIN:]),
            callbacks=callbacks,
            checkpoints=DyingPhase(phase, die_after) if die_after else phase,
        )
    finally:
        if manager:
            manager.close()
    return model, result, model.predict_proba(x)


class Curve(list):
    """A callback that keeps the epochs before it, and then each."""

    def remember(self, history):
        self.append([row["epoch"] for row in history])

    def __call__(self, epoch, metrics):
        self.append(epoch)


def kill_after(epoch: int, kill=None):
    def callback(finished, metrics):
        if finished == epoch:
            if kill:
                kill()
            raise Killed

    return callback


def losses(result) -> list:
    return [(row["epoch"], row["train_loss"], row["val_loss"]) for row in result.history]


@pytest.fixture(scope="module", params=available_models())
def whole(request):
    """name, and the model, result and predictions of the run that nobody interrupted or saved."""
    return request.param, fit(request.param, None)


def assert_same(one, other):
    np.testing.assert_array_equal(one[2], other[2])
    assert serialize_state(one[0].get_state()) == serialize_state(other[0].get_state())
    assert losses(one[1]) == losses(other[1])
    assert one[1].best_epoch == other[1].best_epoch


def test_fit_killed_twice_resumes_bit_exact(whole, tmp_path):
    name, expected = whole
    for at in (1, 3):
        with pytest.raises(Killed):
            fit(name, tmp_path, kill_after(at))
    curve = Curve()
    again = fit(name, tmp_path, curve)
    assert again[1].resumed_from == 3 and not again[1].nondeterminism and curve == [[1, 2, 3], 4]
    assert_same(again, expected)


def test_fit_of_finished_checkpoint_is_loaded_without_training(whole, tmp_path):
    name, expected = whole
    fit(name, tmp_path)
    again = fit(name, tmp_path, kill_after(1))  # would raise if anything were trained
    assert again[1].resumed_from == 4
    assert_same(again, expected)


def test_fit_killed_after_last_epoch_before_final_save_is_bit_exact(whole, tmp_path):
    name, expected = whole
    with pytest.raises(Killed):
        fit(name, tmp_path, kill_after(4))
    again = fit(name, tmp_path, kill_after(4))
    assert again[1].resumed_from == 4
    assert_same(again, expected)


@pytest.mark.parametrize("name", OF_EACH_FAMILY)
def test_fit_killed_before_early_stop_keeps_patience_count(name, tmp_path):
    hot = {"lr": 0.2} if find_model_spec(name).windowed else {} if name == "linear" else {"learning_rate": 0.9}
    more = {"epochs": 30} if find_model_spec(name).windowed else {"rounds": 300}
    expected = fit(name, None, **hot, **more | {"patience": 3})
    assert expected[1].stopped_early
    at = max(len(expected[1].history) - 1, 1)
    with pytest.raises(Killed):
        fit(name, tmp_path, kill_after(at), **hot, **more | {"patience": 3})
    again = fit(name, tmp_path, **hot, **more | {"patience": 3})
    assert again[1].resumed_from == at and again[1].stopped_early
    assert_same(again, expected)


@pytest.mark.parametrize("name", ["lstm", "patchtst"])
@pytest.mark.parametrize(("saves", "step"), [(6, 5), (10, 8)])
def test_fit_killed_in_mid_epoch_resumes_at_saved_step_bit_exact(name, tmp_path, saves, step):
    """250 rows in batches of 64: epochs end at steps 3, 7, 11 and 15."""
    expected = fit(name, None, save_seconds=0.0)
    with pytest.raises(Killed):
        fit(name, tmp_path, die_after=saves, save_seconds=0.0)
    again = fit(name, tmp_path, save_seconds=0.0)
    assert again[1].resumed_step == step and again[1].resumed_from == {5: 1, 8: 2}[step]
    assert_same(again, expected)


@pytest.mark.parametrize("name", OF_EACH_FAMILY)
def test_fit_with_other_seed_on_existing_checkpoint_raises(name, tmp_path):
    with pytest.raises(Killed):
        fit(name, tmp_path, kill_after(2))
    with pytest.raises(CheckpointError, match=r"another run \[settings\]"):
        fit(name, tmp_path, seed=1)
    with pytest.raises(CheckpointError, match=r"another run \[data\]"):
        fit(name, tmp_path, scale=2.0)


@pytest.mark.parametrize("name", OF_EACH_FAMILY)
def test_fit_resumed_with_other_thread_count_stays_marked_inexact(name, tmp_path):
    with pytest.raises(Killed):
        fit(name, tmp_path, kill_after(1))
    with pytest.raises(Killed):
        fit(name, tmp_path, kill_after(2), threads=2)
    result = fit(name, tmp_path)[1]
    assert result.nondeterminism == ("threads: began with 1, now 2", "threads: began with 2, now 1")
