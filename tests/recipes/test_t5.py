"""recipe t5: killed after an early stop."""

import pytest

from ml_factory.checkpoints.manager import PhaseCheckpoints
from ml_factory.recipes import run as recipe_run
from tests.recipes.text_cases import t5_settings, trained_t5


def test_early_stop_keeps_the_best_epoch_and_no_kill_after_it_trains_again(tmp_path, monkeypatch):
    given, removed = t5_settings(made_up=60, epochs=12, lr=0.3, patience=1), PhaseCheckpoints.remove_files

    def removed_and_killed(phase: PhaseCheckpoints) -> None:
        removed(phase)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PhaseCheckpoints, "remove_files", removed_and_killed)
        trained_t5(tmp_path, given)
    monkeypatch.setattr(recipe_run, "run_training_loop", None)
    facts = trained_t5(tmp_path, given)
    losses = [one["val_loss"] for one in facts["history"]]
    assert facts["stopped_early"] and losses[facts["best_epoch"] - 1] == min(losses) and len(losses) < 12
