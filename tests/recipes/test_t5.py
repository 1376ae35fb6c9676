"""recipe t5: generation, scores; trained, killed, resumed to the same bits, evaluated, written."""

import runpy
import sys

import pytest

from ml_factory.checkpoints.manager import PhaseCheckpoints
from ml_factory.recipes import run as recipe_run
from ml_factory.recipes import t5
from tests.contract.test_t5 import ROOT
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


def test_guides_command_names_the_file_it_wants_and_trains_with_one(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = ROOT / "recipes" / "run_train_test.py"

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, words)])
        try:
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    code, _, err = call("--workspace", tmp_path)
    assert code == 2 and "--data FILE.tsv" in err and "--fake_data" in err
    seen = []
    monkeypatch.setattr(t5, "run_t5", lambda place, training, **more: seen.append((training, more)) or {})
    assert call("--data", "tweets.tsv", "--model", "t5-base", "--batch_size", "8", "--accumulate=4")[0] == 0
    ((training, given),) = seen
    assert (given["data"], given["model"], training.accumulate) == ("tweets.tsv", "t5-base", 4)
