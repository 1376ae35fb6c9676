"""What was finished before is found again only where it is the same work, and whole."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ml_factory import code_fingerprint, pipeline, settings
from ml_factory.code_fingerprint import changed_code_files
from ml_factory.data.io import import_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import SettingsError
from ml_factory.settings import QuickLimits, RunSettings, make_run_settings
from ml_factory.storage.workspace import Workspace
from tests.small_data import SMALL_DATA

SPEC = RunSettings("MES", 10, "lightgbm", "train", 0, False, "0" * 64, (("rounds", 20),))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("stale"))
    import_bars(synthetic_bars(days=8, seed=2).reset_index(), workspace, "MES")
    pipeline.prepare(workspace, "MES", (5,), settings=SMALL_DATA)
    return workspace


@pytest.fixture
def copied(tmp_path, monkeypatch) -> Path:
    """The library's sources, copied; run ids are computed from the copy."""
    shutil.copytree(code_fingerprint.PACKAGE, tmp_path / "ml_factory", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_fingerprint, "PACKAGE", tmp_path / "ml_factory")
    return tmp_path / "ml_factory"


USED = {
    ("train", "lightgbm"): (
        "models/tabular.py", "models/tabular_lightgbm.py", "workflows/train.py", "workflows/prepared_dataset.py",
        "targets/weights.py",
        "evaluation/calibration.py", "datasets/scaling.py", "inference/predict.py", "seeding.py",
    ),
    ("train", "lstm"): ("training/loop.py", "models/sequence.py", "datasets/windows.py"),
    ("folds", "lightgbm"): ("workflows/folds.py", "targets/splits.py", "workflows/train.py"),
    ("stack", "stack"): ("workflows/stack.py", "ensemble/stacking.py", "models/sequence.py",
        "models/tabular_xgboost.py"),
}  # fmt: skip
UNUSED = {
    ("train", "lightgbm"): (
        "evaluation/html_report.py", "evaluation/plots.py", "workflows/report.py", "notebook.py",
        "checkpoints/manager.py",
        "models/tabular_xgboost.py", "training/loop.py", "workflows/folds.py", "workflows/evaluation.py",
    ),
    ("train", "lstm"): ("models/tabular_xgboost.py", "models/tft.py"),
}  # fmt: skip


def _spec(task: str, model: str) -> RunSettings:
    bases = (("base_models", ["xgboost", "lstm"]),) if task == "stack" else ()
    return replace(SPEC, task=task, model=model, settings=bases)


def test_run_id_changes_with_each_used_source_and_with_no_other(copied):
    for run in USED:
        spec = _spec(*run)
        for source in UNUSED.get(run, ()) + USED[run]:
            before, text = spec.run_id, (copied / source).read_text()
            (copied / source).write_text(f"{text}CHANGED = 1\n")
            assert (spec.run_id != before) == (source in USED[run]), (run, source)
            if source in USED[run]:
                assert changed_code_files(spec.sources, {}) == sorted(spec.sources) and source in spec.sources
            (copied / source).write_text(text)


def test_run_spec_run_id_ignores_comments_and_docstrings(copied):
    before = SPEC.run_id
    path = copied / "seeding.py"
    text = path.read_text()
    assert text.startswith('"""Seeds')
    path.write_text('"""Other words."""\n# a comment\n\n' + text.split('"""', 2)[2] + "\n\n# the end\n")
    assert SPEC.run_id == before
    path.write_text(text.replace("bits=63", "bits=62"))
    assert SPEC.run_id != before


def test_run_spec_run_id_of_quick_run_changes_with_limits(monkeypatch):
    quick = replace(SPEC, quick=True)
    full_id, quick_id = SPEC.run_id, quick.run_id
    monkeypatch.setattr(settings, "QuickLimits", lambda: replace(QuickLimits(), sequence_rows=17))
    assert quick.run_id != quick_id and SPEC.run_id == full_id


@pytest.mark.parametrize("name", ["seed", "folds"])
def test_train_and_cross_validate_reject_run_arguments_in_model_settings(name, prepared):
    for work in (pipeline.train, pipeline.cross_validate):
        with pytest.raises(SettingsError, match=f"model_settings.*{name}"):
            work(prepared, "MES", 5, "lightgbm", model_settings={name: 2})


def test_run_spec_run_id_treats_numpy_integer_as_integer():
    def run_id(rounds):
        return make_run_settings(
            "MES", 10, "lightgbm", task="train", seed=0, quick=False, data="0", settings={"rounds": rounds}
        ).run_id

    assert run_id(np.int64(20)) == run_id(20) != run_id(21)


def test_train_of_torn_artifact_retrains_with_same_bytes(prepared):
    workspace = prepared
    options = {"mirror": "off", "model_settings": {"rounds": 10, "depth": 2, "threads": 1}}
    first = pipeline.train(workspace, "MES", 5, "lightgbm", **options)
    state = first.artifact / "state.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:1000])
    again = pipeline.train(workspace, "MES", 5, "lightgbm", **options)
    assert not again.reused and again.artifact == first.artifact and state.read_bytes() == whole
    assert again.predictions_hash == first.predictions_hash
    assert pipeline.train(workspace, "MES", 5, "lightgbm", **options).reused
