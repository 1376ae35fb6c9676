"""Runs: several attempts, the one line on what is found, what a kill left undone, and what W&B gives back."""
# ruff: noqa: F811 - fixtures of the contract

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ml_factory import code_fingerprint, pipeline, runs
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.workflows import folds
from ml_factory.workflows import train as train_module
from tests.contract.test_runs import NETWORK, SMALL, UNTHREADED, files_of, further_rank, often, reached, train  # noqa: F401 - fixtures


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """The library's sources in a repository of their own; run ids are computed from them."""
    place = tmp_path / "checkout"
    shutil.copytree(code_fingerprint.PACKAGE, place / "ml_factory", ignore=shutil.ignore_patterns("__pycache__"))
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", place, *words], check=True, capture_output=True)
    monkeypatch.setattr(code_fingerprint, "PACKAGE", place / "ml_factory")
    return place


def test_train_after_code_change_starts_new_run(often, checkout):
    train(often, 4)
    first = next((often.results / "DEMO").glob("train-*/run.json"))
    reported = json.loads(first.read_text())
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert reported["commit"] == commit and set(reported["sources"]) == {"data", "fit"}
    source = checkout / "ml_factory" / "seeding.py"
    before = source.read_text()
    source.write_text(before + "\n\nCHANGED = 1\n")
    with pytest.raises(NotPreparedError, match="certificate is of other code"):
        train(often)
    result, (line,) = train(often, uncertified=True)
    assert "was begun with other code. Opens a new run" in line
    assert result.resumed_from is None and result.run_id != reported["run_id"]
    assert reached(often, reported["run_id"]) == "round 20"  # nothing of it was touched
    with pytest.raises(SettingsError, match=r"cannot be resumed.*begun with other code"):
        train(often, run=reported["run_id"], uncertified=True)
    source.write_text(before)
    result, (line,) = train(often, run=reported["run_id"])
    assert result.resumed_from == 4 and result.run_id == reported["run_id"]


def test_train_resumed_with_other_core_count_and_library_is_marked_inexact_in_all_outputs(often, monkeypatch):
    installed = runs.installed_library_versions
    with monkeypatch.context() as patch:
        patch.setattr(runs, "cores", lambda: 64)
        patch.setattr(runs, "installed_library_versions", lambda names: installed(names) | {"numpy": "9.9"})
        train(often, 4, model_settings=UNTHREADED)
    result, (line,) = train(often, model_settings=UNTHREADED)
    reasons = [f"numpy: began with 9.9, now {np.__version__}", f"threads: began with 64, now {runs.cores()}"]
    reason = ", ".join(reasons)
    assert "unfinished at" in line and f"on another machine ({reason}): continued, not bit-exact" in line
    assert f"continued, not bit-exact: {reason}" in result.summary()
    assert result.origin["value"]["bits"] == "continued, not bit-exact"
    page = result.report_path.read_text()
    assert "Continued, not bit-exact" in page and reason in page
    facts = json.loads((result.artifact / "artifact.json").read_text())["facts"]
    assert facts["inexact"] == reasons and not facts["exact"]


def test_cross_validate_resumed_with_other_threads_is_marked_inexact(prepared, monkeypatch):
    asked = []

    def killed_in_the_second_fold(*given, **options):
        asked.append(given)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return fit(*given, **options)

    fit = folds.fit_on_rows
    with monkeypatch.context() as patch:
        patch.setattr(runs, "cores", lambda: 64)
        patch.setattr(folds, "fit_on_rows", killed_in_the_second_fold)
        with pytest.raises(KeyboardInterrupt):
            pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, model_settings=UNTHREADED)
    result = pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, model_settings=UNTHREADED)
    assert result.resumed_from == 1 and "unfinished at fold 1 of 2" in result.found
    assert not result.exact and any(
        "threads: began with" in reason and "64" in reason for reason in result.inexact_because
    )
    assert "continued, not bit-exact" in result.summary()
    straight = pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=2, seed=1, model_settings=UNTHREADED)
    assert straight.exact and "bit-exact" not in straight.summary()


def test_train_of_network_in_further_rank_fits_on_training_rows_and_writes_nothing(prepared, further_rank, monkeypatch):
    monkeypatch.setattr(train_module, "broadcast_fit_decision", lambda spec, fitting=False: True)
    honest, fitted, before = train_module.build_untrained_model, [], files_of(prepared)

    class Recorded:
        def fit(self, x, y, w, *, validation):
            fitted.append((len(x), len(validation[0])))

    def observed(data, spec):
        model, train_rows, held_out, limits = honest(data, spec)
        wanted.append((len(train_rows), len(held_out)))
        Recorded.lookback = model.lookback
        return Recorded(), train_rows, held_out, limits

    wanted = []
    monkeypatch.setattr(train_module, "build_untrained_model", observed)
    assert pipeline.train(prepared, "DEMO", 5, "gru", quick=True, model_settings=NETWORK) is None
    assert len(fitted) == 1 and 0 < fitted[0][0] <= wanted[0][0] and 0 < fitted[0][1] <= wanted[0][1]
    assert files_of(prepared) == before
