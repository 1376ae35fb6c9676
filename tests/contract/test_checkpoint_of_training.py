"""The guide's resume snippet, word for word: a manager without a run, a training that was killed or has ended."""

import logging
import shutil

import numpy as np
import pytest

from ml_factory import CheckpointManager, Workspace, pipeline
from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.models.registry import available_models, build_model
from tests.contract.doors import build_model_from_state, check_given_estimator

H = 5
BOOSTER = {"rounds": 30, "depth": 3}
SMALL = {
    "xgboost": BOOSTER, "lightgbm": BOOSTER, "catboost": BOOSTER, "linear": {"rounds": 30},
    "lstm": {"epochs": 2, "hidden": 4, "lookback": 8, "batch": 128},
}  # fmt: skip


class Killed(BaseException):
    """Not an Exception: nothing on the way may catch it."""


def train(workspace, model, more=None, **options):
    settings = SMALL[model] | (more or {})
    return pipeline.train(workspace, "DEMO", H, model, model_settings=settings, mirror="off", **options)


def killed_at(workspace, model, epoch=1, **options):
    def callback(number, metrics):
        if number == epoch:
            raise Killed

    with pytest.raises(Killed):
        train(workspace, model, callbacks=(callback,), **options)


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")


@pytest.mark.parametrize("name", ["xgboost", "lightgbm", "catboost", "linear", "lstm"])
def test_load_latest_checkpoint_after_killed_training_restores_model_of_saved_epoch(prepared, often, name):
    kept = {}

    def callback(epoch, metrics, model):
        kept.update(state=model.get_state())
        raise Killed

    with pytest.raises(Killed):
        train(prepared, name, callbacks=(callback,))
    ckpt_mgr, model = CheckpointManager(prepared.checkpoints), build_model(name)
    checkpoint = ckpt_mgr.load_latest_checkpoint(phase=f"train_{name}")
    if checkpoint:
        model.load_state(checkpoint["state"]["model_state"])
        start_epoch = checkpoint["state"]["epoch"]
    assert start_epoch == 1 and checkpoint["symbol"] == "DEMO" and checkpoint["horizon"] == H
    assert checkpoint["run"].startswith(f"train-{name}-h{H}-") and checkpoint["skipped"] == []
    assert checkpoint["sequence"] >= 1 and checkpoint["saved_at"]
    wanted = build_model_from_state(kept["state"])
    features = len(wanted.trained_on["features"])
    x = np.random.default_rng(0).normal(
        size=(20, features) if wanted.lookback == 1 else (20, wanted.lookback, features)
    )
    assert np.allclose(model.predict_proba(x), wanted.predict_proba(x), atol=1e-7)
    assert model.get_state().keys() == wanted.get_state().keys()


def test_load_latest_checkpoint_after_finished_training_returns_registered_model(prepared, often, caplog):
    trained = train(prepared, "xgboost")
    with caplog.at_level(logging.WARNING, "ml_factory"):
        checkpoint = CheckpointManager(prepared.checkpoints).load_latest_checkpoint(phase="train_xgboost")
    assert (checkpoint["run"], checkpoint["symbol"], checkpoint["horizon"]) == (trained.run_id, "DEMO", H)
    assert checkpoint["state"]["epoch"] == len(trained.history) == 3
    printed = [record.getMessage() for record in caplog.records if trained.run_id in record.getMessage()]
    assert len(printed) == 1 and "DEMO" in printed[0] and f"horizon {H}" in printed[0]
    model = build_model("xgboost").load_state(checkpoint["state"]["model_state"])
    np.testing.assert_equal(model.get_state(), build_model_from_state(checkpoint["state"]["model_state"]).get_state())
    shutil.rmtree(prepared.checkpoints)
    again = CheckpointManager(Workspace(prepared.root).checkpoints).load_latest_checkpoint(phase="train_xgboost")
    np.testing.assert_equal(again["state"]["model_state"], checkpoint["state"]["model_state"])


def test_callback_with_log_steps_gets_the_mean_loss_since_its_last_call(prepared):
    class Steps(list):
        def log_steps(self, epoch, step, loss):
            self.append((epoch, step, loss))

        def __call__(self, epoch, metrics, model):
            self.append((epoch, "end", metrics["train_loss"]))

    steps = Steps()
    train(prepared, "lstm", callbacks=(steps,), more={"log_steps": 1, "batch": 4096})  # one step an epoch
    first, second = steps[0][2], steps[2][2]
    assert steps == [(1, 1, first), (1, "end", first), (2, 1, second), (2, "end", second)] and first > second > 0


def test_load_latest_checkpoint_without_run_takes_newest_run_else_user_checkpoint(prepared, often):
    ckpt_mgr = CheckpointManager(prepared.checkpoints)
    mine = {"epoch": 7, "model": build_model("xgboost").get_state()}
    ckpt_mgr.save_checkpoint(phase="train_xgboost", state=mine, force=True)
    assert ckpt_mgr.load_latest_checkpoint(phase="train_xgboost")["state"] == mine
    finished = train(prepared, "xgboost")
    assert ckpt_mgr.load_latest_checkpoint(phase="train_xgboost")["run"] == finished.run_id
    killed_at(prepared, "xgboost", seed=3)  # another run, newer, under way
    found = ckpt_mgr.load_latest_checkpoint(phase="train_xgboost")
    assert "-s3-" in found["run"] and found["state"]["epoch"] == 1
    assert ckpt_mgr.load_latest_checkpoint(phase="train_lightgbm") is None


def test_open_training_returns_trained_model_and_checkpoints_of_same_run(prepared, often):
    killed_at(prepared, "xgboost", seed=3)
    asked = {"symbol": "DEMO", "horizon": H, "model": "xgboost", "model_settings": SMALL["xgboost"]}
    model, ckpt_mgr = pipeline.open_training(prepared, **asked)
    assert ckpt_mgr.load_latest_checkpoint(phase="train_xgboost") is None  # the other run's is not taken

    assert all(ckpt_mgr.save_checkpoint("mine", {"n": n}) for n in range(2))  # ML_FACTORY_SAVE_MINUTES reaches it

    class CustomCheckpoint:
        best_val_loss = float("inf")

        def __call__(self, epoch, metrics):
            if metrics["val_loss"] < self.best_val_loss:
                self.best_val_loss = metrics["val_loss"]
                ckpt_mgr.save_checkpoint(
                    phase="train_xgboost", state={"epoch": epoch, "model": model.get_state()}, force=True
                )

    with pytest.raises(Killed):
        pipeline.train(prepared, **asked, mirror="off", estimator=model, callbacks=(CustomCheckpoint(), kill_second))
    (*_, mine) = ckpt_mgr.list_checkpoints("train_xgboost")
    assert mine["run"].endswith("-user")
    found = ckpt_mgr.load_latest_checkpoint(phase="train_xgboost")
    assert found["run"] == ckpt_mgr.run and found["state"]["epoch"] == 2  # the training's own, not the callback's
    again = pipeline.train(prepared, **asked, mirror="off", estimator=model)
    assert again.resumed_from == 2 and again.exact
    assert not list(prepared.checkpoints.glob(f"{ckpt_mgr.run}/*"))  # the registry has the model
    assert ckpt_mgr.list_checkpoints("train_xgboost")[-1]["hash"] == mine["hash"]  # the user's own stay
    again = build_model_from_state(found["state"]["model_state"]).load_state(model.get_state())
    np.testing.assert_equal(again.get_state(), model.get_state())
    other, _ = pipeline.open_training(prepared, **asked, seed=1)
    with pytest.raises(SettingsError, match="Not the model that the run trains"):
        pipeline.train(prepared, **asked, mirror="off", fresh=True, estimator=other)


def test_load_latest_checkpoint_without_run_skips_checkpoints_saved_by_callbacks(tmp_path):
    with CheckpointManager(tmp_path / "checkpoints", run="train-x", during_training=True) as mine:
        mine.save_checkpoint("train_xgboost", {"epoch": 1, "model": np.zeros(3)}, force=True)
    assert CheckpointManager(tmp_path / "checkpoints").load_latest_checkpoint("train_xgboost") is None


@pytest.mark.parametrize(
    ("name", "machine"),
    [("linear", {"threads": 1}), ("lstm", {"threads": 1, "batch": 64, "accumulate": 2})],
)
def test_check_same_model_from_unfinished_training_keeps_threads_and_accumulate(tmp_path, name, machine):
    settings = SMALL[name] | machine
    rng, wanted = np.random.default_rng(0), build_model(name, **settings)
    x = rng.normal(size=(96, 2) if wanted.lookback == 1 else (96, wanted.lookback, 2)).astype(np.float32)
    with CheckpointManager(tmp_path, 0, run="train-x") as manager, pytest.raises(Killed):
        wanted.fit(x, np.arange(96) % 3 - 1, checkpoints=manager.phase(f"train_{name}"), callbacks=[kill_first])
    saved = CheckpointManager(tmp_path, run="train-x").load_latest_checkpoint(f"train_{name}")["state"]
    given = build_model(name, **settings).load_state(saved["model_state"])
    assert given.settings != wanted.settings  # a checkpoint is of no machine
    assert check_given_estimator(wanted, given) is given and given.settings == wanted.settings
    with pytest.raises(SettingsError, match="Not the model that the run trains"):
        check_given_estimator(build_model(name, **settings, seed=1), given)
    if name == "lstm":  # the network's own settings, which are no settings of the training
        with pytest.raises(SettingsError, match="network_spec"):
            check_given_estimator(build_model(name, **settings | {"hidden": 8}), given)
        clock = [build_model(name, **settings, offset_column=1, offset_bars=bars) for bars in (2, 3)]
        with pytest.raises(SettingsError, match="offset_bars"):
            check_given_estimator(*clock)


def kill_first(epoch, metrics):
    raise Killed


def kill_second(epoch, metrics):
    if epoch == 2:
        raise Killed


@pytest.mark.parametrize(
    ("name", "value", "printed"),
    [("symbol", "MGC", "another symbol"), ("horizon", 9, "another horizon"), ("features", ["b", "a"], "another order"),
     ("features", ["a", "c"], "b"), ("features", ["a"], "1 features")],
)  # fmt: skip
def test_load_state_of_other_symbol_horizon_or_features_raises_checkpoint_error(name, value, printed):
    assert "linear" in available_models()
    x, y = np.random.default_rng(1).normal(size=(60, 2)), np.arange(60) % 3 - 1
    mine, theirs = build_model("linear", rounds=2), build_model("linear", rounds=2)
    mine.trained_on = {"symbol": "MES", "horizon": 5, "features": ["a", "b"]}
    theirs.trained_on = {**mine.trained_on, name: value}
    theirs.fit(x[:, : len(theirs.trained_on["features"])], y)
    with pytest.raises(CheckpointError, match=printed):
        mine.load_state(theirs.get_state())
    same = build_model("linear").load_state(theirs.get_state())  # what was for nothing takes it, and is for that then
    assert same.trained_on == theirs.trained_on
