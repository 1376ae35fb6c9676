"""The loop's line of progress, written at every step."""

from ml_factory.training.spec import TrainSpec
from tests.contract.test_training_loop import run
from tests.training.small_run import Kept


def test_fit_progress_line_shows_time_to_next_save(monkeypatch, caplog):
    """The timer of the checkpoints is later than our own pause of a minute, and the other way round."""
    monkeypatch.setattr("ml_factory.training.loop.SECONDS_BETWEEN", 0.0)
    caplog.set_level("INFO", "ml_factory.training")
    run(TrainSpec(epochs=1, batch=5, log_steps=1), checkpoints=Kept(due=False))
    assert "next save in 10 min" in caplog.messages[-1]
    run(TrainSpec(epochs=1, batch=5, log_steps=1, save_seconds=1200.0), checkpoints=Kept())
    assert "next save in 20 min" in caplog.messages[-1]
