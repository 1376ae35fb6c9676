"""recipe sdce: what makes another run, and the other hosts of a slice."""

from pathlib import Path

import pytest

from ml_factory.recipes import run as recipe_run
from tests.recipes.text_cases import die_at, trained_sdce, write_text


def test_recipe_sdce_continued_with_another_library_is_marked_inexact(sdce_settings, monkeypatch):
    given, facts = sdce_settings(loss_type="standard", num_epochs=1), recipe_run.machine_and_library_versions
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recipe_run, "machine_and_library_versions", lambda *given: facts(*given) | {"numpy": "9.9"})
        die_at(9, patch)
        trained_sdce(given)
    resumed = trained_sdce(given)
    assert resumed["resumed_step"] and resumed["inexact"] and not resumed["exact"]


def test_recipe_sdce_of_a_text_or_code_that_changed_is_another_run(sdce_settings, monkeypatch):
    given = sdce_settings(loss_type="standard", num_epochs=1)
    runs = [trained_sdce(given)["run_id"]]
    write_text(Path(given.dataset), 2500)
    runs.append(trained_sdce(given)["run_id"])
    monkeypatch.setattr(recipe_run, "source_hash", lambda packages: "of another version")
    assert len({*runs, trained_sdce(given)["run_id"]}) == 3


def test_recipe_sdce_other_host_of_slice_writes_nothing_and_sees_when_the_run_is_finished(
    sdce_settings, monkeypatch, tmp_path
):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        die_at(9, patch)
        trained_sdce(sdce_settings())
    files_before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    monkeypatch.setenv("TPU_PROCESS_ID", "1")
    monkeypatch.setenv("TPU_PROCESS_COUNT", "2")
    seen = []
    real = recipe_run.run_training_loop
    monkeypatch.setattr(recipe_run, "run_training_loop", lambda *a, **k: seen.append(real(*a, **k)) or seen[-1])
    assert trained_sdce(sdce_settings())["lines"] == []
    assert seen[0].resumed_step == 4  # from the first host's checkpoint
    found = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {str(path) for path in found if found[path] != files_before.get(path) and path.suffix != ".lock"} == set()
    with monkeypatch.context() as patch:
        patch.setenv("TPU_PROCESS_ID", "0")
        whole = trained_sdce(sdce_settings())
    monkeypatch.setattr(recipe_run, "run_training_loop", None)  # it would wait for the first host, which has ended
    assert trained_sdce(sdce_settings())["loss"] == whole["loss"]
